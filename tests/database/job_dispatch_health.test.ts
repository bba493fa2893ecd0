import assert from "node:assert/strict";
import postgres from "postgres";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import { createDatabase, cronSecret } from "../support.ts";
import { type Database, enqueue, only, projectUrl, setUpDispatch, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

interface Item {
  ok: boolean;
  detail: string;
  todo: string | null;
}

async function health(sql: postgres.Sql): Promise<Record<string, Item>> {
  const rows = await sql<({ item: string } & Item)[]>`select * from job_dispatch_health()`;
  return Object.fromEntries(rows.map(({ item, ...rest }) => [item, rest]));
}

async function item(sql: postgres.Sql, name: string): Promise<Item> {
  const found = (await health(sql))[name];
  assert.ok(found, `no item ${name}`);
  return found;
}

/** A run of the tick as pg_cron records it. */
async function recordRun(db: Database, status: string, ago: string, message = ""): Promise<void> {
  await db.connect("supabase_admin", { max: 1 })`
    insert into cron.job_run_details (jobid, username, status, return_message, start_time)
    select jobid, 'postgres', ${status}, ${message}, now() - ${ago}::interval
    from cron.job where jobname = 'nightshift_tick'`;
}

/** A poke and what pg_net got for it. */
async function recordAnswer(
  sql: postgres.Sql,
  answer: { status?: number; content?: string; error?: string; timedOut?: boolean } | null,
): Promise<void> {
  await sql`delete from private.pokes where true`;
  await sql`insert into private.pokes values (7, 'wake', clock_timestamp() - interval '1 minute')`;
  await sql`delete from net._http_response where true`;
  if (answer) {
    const { status = null, content = null, error = null, timedOut = false } = answer;
    await sql`
      insert into net._http_response (id, status_code, content, error_msg, timed_out)
      values (7, ${status}, ${content}, ${error}, ${timedOut})`;
  }
}

Deno.test("when all is set up and runs, every item holds and nothing is to be done", async () => {
  await setUpDispatch(db);
  await recordRun(db, "succeeded", "5 seconds");
  await recordAnswer(db.sql, { status: 202 });
  const items = await health(db.sql);
  assert.deepEqual(Object.keys(items), [
    "extensions",
    "project_url",
    "cron_secret",
    "tick",
    "worker",
    "ready jobs",
  ]);
  for (const [name, { ok, detail, todo }] of Object.entries(items)) {
    assert.deepEqual([ok, todo], [true, null], `${name}: ${detail}`);
  }
});

Deno.test("secrets that are missing or wrong are named, and never shown", async () => {
  for (const name of ["project_url", "cron_secret"]) {
    const { ok, detail, todo } = await item(db.sql, name);
    assert.deepEqual([ok, detail], [false, "not in Vault"]);
    assert.match(todo ?? "", new RegExp(`vault.create_secret\\(.*'${name}'\\)`));
  }
  await setVaultSecrets(db.url("postgres"), { project_url: "example.com", cron_secret: "tiny-secret" });
  assert.equal((await item(db.sql, "project_url")).ok, false);
  assert.deepEqual((await item(db.sql, "cron_secret")).detail, "in Vault, but shorter than 32 characters");
  assert.ok(!JSON.stringify(await health(db.sql)).includes("tiny-secret"));
  await setVaultSecrets(db.url("postgres"), { project_url: projectUrl, cron_secret: cronSecret });
  assert.equal((await item(db.sql, "cron_secret")).ok, true);
  assert.ok(!JSON.stringify(await health(db.sql)).includes(cronSecret));
});

Deno.test("what the tick calls unusable is not called fine here", async () => {
  for (const cron_secret of ["short", " ", `${" ".repeat(40)}`, `short,${cronSecret}`]) {
    await setVaultSecrets(db.url("postgres"), { project_url: projectUrl, cron_secret });
    await assert.rejects(db.sql`select private.tick()`, { code: "55000" });
    assert.equal((await item(db.sql, "cron_secret")).ok, false, JSON.stringify(cron_secret));
  }
});

Deno.test("extensions that are missing are named, and the rest still answers", async () => {
  await using db = await createDatabase();
  const admin = db.connect("supabase_admin", { max: 1 });
  for (const extension of ["pg_cron", "pg_net", "supabase_vault"]) {
    await admin.unsafe(`drop extension ${extension} cascade`);
  }
  const items = await health(db.sql);
  assert.equal(items.extensions?.detail, "missing: pg_cron, pg_net, supabase_vault");
  assert.deepEqual([items.extensions?.ok, items.project_url?.ok, items.tick?.ok], [false, false, false]);
});

Deno.test("a tick that is off, never ran, failed or stopped is told apart", async () => {
  assert.match((await item(db.sql, "tick")).detail, /has never run/);
  await recordRun(db, "succeeded", "2 minutes");
  assert.match((await item(db.sql, "tick")).todo ?? "", /has stopped running jobs/);
  await recordRun(db, "failed", "1 second", "ERROR: cron_secret is not in Vault");
  const failed = await item(db.sql, "tick");
  assert.match(failed.detail, /^last run failed at .*: ERROR: cron_secret is not in Vault/);
  assert.equal(failed.ok, false);
  await db.sql`select disable_dispatch()`;
  assert.deepEqual(await item(db.sql, "tick"), {
    ok: false,
    detail: "not scheduled",
    todo: "Run select enable_dispatch().",
  });
});

Deno.test("the worker's last answer is shown, with what to do about it", async () => {
  assert.equal((await item(db.sql, "worker")).detail, "not poked in the last 6 hours");
  const answers: [answer: Parameters<typeof recordAnswer>[1], detail: RegExp, todo: RegExp][] = [
    [{ status: 202, content: "{}" }, /: 202$/, /^$/],
    [{ status: 401, content: "Send CRON_SECRET" }, /: 401 Send CRON_SECRET$/, /CRON_SECRET .* differ/],
    [{ status: 401, content: "No API key" }, /: 401 No API key$/, /project_url.*verify_jwt/],
    [{ status: 405 }, /: 405$/, /log of the function job-worker/],
    [{ status: 404, content: "Not found" }, /: 404 Not found$/, /functions deploy job-worker/],
    [{ status: 500, content: "x".repeat(400) }, /: 500 x{300}$/, /log of the function job-worker/],
    [{ error: "Could not resolve host" }, /: Could not resolve host$/, /project_url/],
    [{ timedOut: true }, /: timed out$/, /did not answer within 5 s/],
    [null, /: no answer is kept$/, /next poke/],
  ];
  for (const [answer, detail, todo] of answers) {
    await recordAnswer(db.sql, answer);
    const worker = await item(db.sql, "worker");
    assert.match(worker.detail, detail);
    assert.match(worker.todo ?? "", todo);
    assert.equal(worker.ok, worker.todo === null);
  }
});

Deno.test("a poke that pg_net does not send is told from one whose answer is gone", async () => {
  await setUpDispatch(db);
  await enqueue(db.sql);
  await db.sql`update private.pokes set poked_at = poked_at - interval '1 minute' where true`;
  const { detail, todo } = await item(db.sql, "worker");
  assert.match(detail, /: not sent yet$/);
  assert.match(todo ?? "", /net.worker_restart/);
});

Deno.test("a run of the tick that has not started yet hides nothing", async () => {
  await recordRun(db, "succeeded", "5 seconds");
  await db.connect("supabase_admin", { max: 1 })`
    insert into cron.job_run_details (jobid, username, status)
    select jobid, 'postgres', 'starting' from cron.job where jobname = 'nightshift_tick'`;
  assert.equal((await item(db.sql, "tick")).ok, true);
});

Deno.test("a poke that was just sent hides no answer to the one before", async () => {
  await recordAnswer(db.sql, { status: 401, content: "" });
  await db.sql`insert into private.pokes values (8, 'wake', clock_timestamp())`;
  assert.match((await item(db.sql, "worker")).detail, /: 401/);
});

Deno.test("jobs that have waited for more than a minute are a sign that nothing works them", async () => {
  await db.sql`select enqueue_job('test', delay => '1 hour')`;
  assert.deepEqual(await item(db.sql, "ready jobs"), { ok: true, detail: "none", todo: null });
  const id = await enqueue(db.sql);
  assert.equal((await item(db.sql, "ready jobs")).ok, true);
  await db.sql`update jobs set available_at = clock_timestamp() - interval '2 minutes' where id = ${id}`;
  const waiting = await item(db.sql, "ready jobs");
  assert.match(waiting.detail, /^1, the oldest due since /);
  assert.equal(waiting.ok, false);
});

Deno.test("service_role may ask, although it may read none of what is asked", async () => {
  const api = db.connect("authenticator", { max: 1 });
  await api`set role service_role`;
  assert.equal((await api`select * from job_dispatch_health()`).length, 6);
  await assert.rejects(api`select * from private.pokes`, { code: "42501" });
  assert.ok(only(await api`select current_user as role`).role === "service_role");
});
