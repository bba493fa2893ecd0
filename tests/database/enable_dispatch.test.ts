import assert from "node:assert/strict";
import postgres from "postgres";
import { createDatabase } from "../support.ts";

const scheduled = async (sql: postgres.Sql) =>
  (await sql`select jobname, schedule, command, active from cron.job order by jobname`).map((row) => ({
    ...row,
  }));

const both = [
  {
    jobname: "nightshift_prune",
    schedule: "17 * * * *",
    command: "select private.prune_cron_history()",
    active: true,
  },
  { jobname: "nightshift_tick", schedule: "10 seconds", command: "select private.tick()", active: true },
];

Deno.test("the migrations turn the tick on, and turning it on again changes nothing", async () => {
  await using db = await createDatabase();
  assert.deepEqual(await scheduled(db.sql), both);
  await db.sql`select enable_dispatch()`;
  assert.deepEqual(await scheduled(db.sql), both);
});

Deno.test("disable_dispatch takes this template's schedules away, may be repeated, and can be undone", async () => {
  await using db = await createDatabase();
  await db.sql`select cron.schedule('reports', '0 4 * * *', 'select 1')`;
  await db.sql`select disable_dispatch()`;
  await db.sql`select disable_dispatch()`;
  assert.deepEqual((await scheduled(db.sql)).map((row) => row.jobname), ["reports"]);
  await db.sql`select enable_dispatch()`;
  assert.deepEqual((await scheduled(db.sql)).filter((row) => row.jobname !== "reports"), both);
});

Deno.test("what is scheduled runs as postgres, whoever of the API turned it on", async () => {
  await using db = await createDatabase();
  const api = db.connect("authenticator", { max: 1 });
  await api`set role service_role`;
  await api`select disable_dispatch()`;
  await api`select enable_dispatch()`;
  const users = await db.connect("supabase_admin", { max: 1 })`select distinct username from cron.job`;
  assert.deepEqual(users.map(({ username }) => username), ["postgres"]);
});

Deno.test("without pg_cron enable_dispatch says what to do, and disable_dispatch still turns the wake off", async () => {
  await using db = await createDatabase();
  await db.sql`drop extension pg_cron`;
  await assert.rejects(db.sql`select enable_dispatch()`, {
    code: "55000",
    message: /pg_cron is not installed/,
    hint: /create extension pg_cron/,
  });
  await db.sql`select disable_dispatch()`;
});

Deno.test("while dispatch is off a worker that it started gets nothing more; a drain does", async () => {
  await using db = await createDatabase();
  await db.sql`insert into jobs (kind) select 'test' from generate_series(1, 3)`;
  await db.sql`select * from claim_jobs('poked', 1, awake_for => '1 minute')`;
  await db.sql`select disable_dispatch()`;
  assert.equal((await db.sql`select * from claim_jobs('poked', 1, awake_for => '1 minute')`).count, 0);
  assert.equal((await db.sql`select * from claim_jobs('poked', 1, awake_for => '0')`).count, 0);
  assert.equal((await db.sql`select * from private.awake_workers`).count, 0);
  assert.equal((await db.sql`select * from claim_jobs('drain', 1)`).count, 1);
  await db.sql`select enable_dispatch()`;
  assert.equal((await db.sql`select * from claim_jobs('poked', 1, awake_for => '1 minute')`).count, 1);
});

Deno.test("a tick that somebody has paused runs again after enable_dispatch", async () => {
  await using db = await createDatabase();
  await db.sql`select cron.alter_job(jobid, active := false) from cron.job where jobname = 'nightshift_tick'`;
  await db.sql`select enable_dispatch()`;
  assert.deepEqual(await scheduled(db.sql), both);
});
