import assert from "node:assert/strict";
import { until } from "../support.ts";
import {
  claim,
  cost,
  enqueue,
  enqueueAndClaim,
  job,
  only,
  openTransaction,
  rowText,
  sharedDatabase,
  untilBlocking,
} from "./queue.ts";
import { testFence } from "./settle.ts";

const db = sharedDatabase();

testFence(
  db,
  "complete_jobs",
  async (sql, id, lease_token) =>
    (await sql`select complete_jobs(${sql.json([{ id, lease_token }])})`).count === 1,
);

testFence(
  db,
  "complete_job",
  async (sql, id, lease_token) => only(await sql`select complete_job(${id}, ${lease_token}) as held`).held,
);

Deno.test("a completed job has succeeded, with its result, and keeps who ran it and when", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  const before = await job(db.sql, id);
  await db.sql`select complete_job(${id}, ${lease_token}, '{"sent": true}')`;
  const after = await job(db.sql, id);
  assert.deepEqual([after.status, after.result, after.attempts], ["succeeded", { sent: true }, 1]);
  assert.deepEqual([after.locked_by, after.locked_at], [before.locked_by, before.locked_at]);
  assert.equal(after.lease_expires_at, null);
  assert.ok(after.finished_at >= after.locked_at);
  assert.ok(after.lease_token > lease_token);
});

Deno.test("a completion may be repeated when its answer was lost: it changes nothing more", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await db.sql`select complete_job(${id}, ${lease_token}, '1')`;
  const before = await rowText(db.sql, id);
  assert.equal(only(await db.sql`select complete_job(${id}, ${lease_token}, '2') as held`).held, false);
  assert.equal(await rowText(db.sql, id), before);
});

Deno.test("of a batch, the jobs that are still held are completed and named, and no others", async () => {
  const held = [await enqueueAndClaim(db.sql), await enqueueAndClaim(db.sql)];
  const lost = await enqueueAndClaim(db.sql);
  const batch = [
    ...held.map(({ id, lease_token }, i) => ({ id, lease_token, result: { i } })),
    { id: lost.id, lease_token: lost.lease_token - 1, result: "lost" },
    { id: crypto.randomUUID(), lease_token: 1 },
  ];
  const done = await db.sql`select complete_jobs(${db.sql.json(batch)}) as id`;
  assert.deepEqual(done.map(({ id }) => id).sort(), held.map(({ id }) => id).sort());
  const results = await db.sql`select result from jobs where status = 'succeeded' order by id`;
  assert.deepEqual(results.map(({ result }) => result), [{ i: 0 }, { i: 1 }]);
  assert.equal((await job(db.sql, lost.id)).status, "running");
  assert.equal((await db.sql`select complete_jobs('[]')`).count, 0);
});

Deno.test("a job that is completed after an earlier failure keeps that failure's message", async () => {
  const first = await enqueueAndClaim(db.sql);
  await db.sql`select fail_job(${first.id}, ${first.lease_token}, 'no answer', '0 seconds')`;
  const second = only(await claim(db.sql));
  await db.sql`select complete_job(${second.id}, ${second.lease_token})`;
  const { status, attempts, last_error } = await job(db.sql, first.id);
  assert.deepEqual([status, attempts, last_error], ["succeeded", 2, "no answer"]);
});

Deno.test("of two sessions that settle a job at once, one wins and the other is told", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  const open = await openTransaction(db);
  assert.equal(only(await open.sql`select complete_job(${id}, ${lease_token}) as held`).held, true);
  const loser = db.sql`select fail_job(${id}, ${lease_token}, 'too late') as status`.execute();
  await untilBlocking(db, open.pid);
  await open.sql`commit`;
  assert.equal(only(await loser).status, null);
  assert.equal((await job(db.sql, id)).status, "succeeded");
  assert.equal((await db.sql`select from job_failures`).count, 0);
});

Deno.test("two calls over the same jobs in opposite order do not deadlock", async () => {
  const ids: string[] = [];
  for (let i = 0; i < 5; i++) ids.push(await enqueue(db.sql));
  const held = await claim(db.sql);
  const batch = held.map(({ id, lease_token }) => ({ id, lease_token }));
  const [first] = batch;
  assert.ok(first);
  // The third session holds the job with the lowest id; both calls wait for it before they lock anything else.
  const open = await openTransaction(db);
  await open.sql`select from jobs where id = ${first.id} for update`;
  const calls = [batch, batch.toReversed()].map((order) =>
    db.sql`select complete_jobs(${db.sql.json(order)})`.execute()
  );
  await until("both calls to wait", async () =>
    (await db.sql`
      select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`).count ===
      2);
  const free = await db.sql`select id from jobs for update skip locked`;
  assert.deepEqual(free.map(({ id }) => id).sort(), ids.slice(1).sort());
  await open.sql`rollback`;
  const counts = (await Promise.all(calls)).map((rows) => rows.count).sort();
  assert.deepEqual(counts, [0, 5]);
});

Deno.test("settling costs what is settled, whatever else runs or has ended, and whatever the statistics say", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await sql`
    insert into jobs (kind, status, lease_token, lease_expires_at)
    select 'other', 'running', 1, clock_timestamp() + interval '1 hour' from generate_series(1, 5000)`;
  await sql`
    insert into jobs (kind, status, finished_at)
    select 'other', 'succeeded', clock_timestamp() from generate_series(1, 20000)`;
  for (const statistics of ["none", "fresh"]) {
    if (statistics === "fresh") await sql`analyze jobs`;
    for (const name of ["extend_jobs", "release_jobs", "fail_jobs", "complete_jobs"]) {
      const settle = async () => {
        await sql`insert into jobs (kind) select 'test' from generate_series(1, 10)`;
        const batch = (await claim(sql)).map(({ id, lease_token }) => ({ id, lease_token, error: "x" }));
        return await cost(sql, `select * from ${name}('${JSON.stringify(batch)}')`);
      };
      await settle(); // what is cached once per session is read here
      const { rows, buffers } = await settle();
      assert.equal(rows, 10);
      assert.ok(buffers < 400, `${name}, statistics ${statistics}: ${buffers} buffers for ten jobs`);
      await sql`update jobs set status = 'cancelled', lease_expires_at = null, finished_at = now() where kind = 'test'`;
    }
  }
});

Deno.test("a result of more than 4 MB is cut, and says so; a smaller one is kept", async () => {
  const big = await enqueueAndClaim(db.sql);
  const small = await enqueueAndClaim(db.sql);
  await db.sql`
    select complete_jobs(jsonb_build_array(
      jsonb_build_object('id', ${big.id}::text, 'lease_token', ${big.lease_token}::int, 'result', repeat('x', 5000000)),
      jsonb_build_object('id', ${small.id}::text, 'lease_token', ${small.lease_token}::int, 'result', repeat('x', 3000000))
    ))`;
  assert.deepEqual((await job(db.sql, big.id)).result, {
    cut: `"${"x".repeat(9_999)}`,
    characters: 5_000_002,
  });
  assert.equal((await job(db.sql, small.id)).result.length, 3_000_000);
});
