import assert from "node:assert/strict";
import { claim, endlessInterval, enqueue, enqueueAndClaim, job, only, sharedDatabase } from "./queue.ts";
import { testFence } from "./settle.ts";

const db = sharedDatabase();

testFence(
  db,
  "fail_jobs",
  async (sql, id, lease_token) =>
    (await sql`select * from fail_jobs(${sql.json([{ id, lease_token, error: "x" }])})`).count === 1,
);

testFence(
  db,
  "fail_job",
  async (sql, id, lease_token) =>
    only(await sql`select fail_job(${id}, ${lease_token}, 'x') as status`).status !== null,
);

Deno.test("after attempt n the wait is drawn from the last fifth below 30 s × 2^n, at most an hour", async () => {
  await db.sql`insert into jobs (kind, max_attempts) select 'test', 20 from generate_series(1, 50)`;
  for (let attempt = 1; attempt <= 12; attempt++) {
    await db.sql`update jobs set available_at = clock_timestamp() where true`;
    const jobs = await claim(db.sql, 50);
    assert.deepEqual(new Set(jobs.map(({ attempts }) => attempts)), new Set([attempt]));
    const failures = jobs.map(({ id, lease_token }) => ({ id, lease_token, error: "x" }));
    const waits = await db.sql<{ seconds: number }[]>`
      select extract(epoch from f.available_at - j.updated_at)::float as seconds
      from fail_jobs(${db.sql.json(failures)}) f join jobs j using (id)`;
    const full = Math.min(30 * 2 ** attempt, 3600);
    const shares = waits.map(({ seconds }) => seconds / full);
    assert.equal(shares.length, 50);
    // available_at and updated_at are two readings of the clock, some microseconds apart.
    assert.ok(Math.min(...shares) > 0.799 && Math.max(...shares) < 1.001, `attempt ${attempt}: ${shares}`);
    assert.ok(Math.max(...shares) - Math.min(...shares) > 0.1, "spread over the fifth, not all at once");
  }
});

Deno.test("the kind's settings make the wait, and hold from the next failure on", async () => {
  const waitOf = async () => {
    const { id, lease_token } = await enqueueAndClaim(db.sql);
    await db.sql`select fail_job(${id}, ${lease_token}, 'x')`;
    const { available_at, updated_at } = await job(db.sql, id);
    // Two readings of the clock: the first may be a millisecond behind, which would be -0.
    return Math.max(0, Math.round((available_at - updated_at) / 1000));
  };
  await db.sql`
    insert into job_kinds (kind, backoff_base, backoff_factor, backoff_cap, backoff_jitter)
    values ('test', '7 seconds', 3, '1 day', 0)`;
  assert.equal(await waitOf(), 21);
  await db.sql`update job_kinds set backoff_cap = '5 seconds' where kind = 'test'`;
  assert.equal(await waitOf(), 5);
  await db.sql`update job_kinds set backoff_base = '0', backoff_jitter = 1 where kind = 'test'`;
  assert.equal(await waitOf(), 0);
});

Deno.test("no setting, however extreme, makes a failure fail", async () => {
  await db.sql`
    insert into job_kinds (kind, max_attempts, backoff_base, backoff_factor, backoff_cap, backoff_jitter) values
      ('steep', 1000, '1 day', 10, '30 days', 1), ('steady', 1000, '1 day', 10, '30 days', 0),
      ('none', 1000, '0', 1, '0', 1)`;
  for (const kind of ["steep", "steady", "none"]) {
    for (const attempts of [0, 500, 998]) {
      await db.sql`insert into jobs (kind, attempts) values (${kind}, ${attempts})`;
    }
  }
  const failures = (await claim(db.sql)).map(({ id, lease_token }) => ({ id, lease_token, error: "x" }));
  const failed = await db.sql`
    select f.status, f.available_at <= clock_timestamp() + interval '30 days' as capped
    from fail_jobs(${db.sql.json(failures)}) f`;
  assert.equal(failed.length, 9);
  assert.ok(failed.every(({ status, capped }) => status === "pending" && capped));
});

Deno.test("retry_in replaces the backoff, between none at all and 30 days", async () => {
  const waitOf = async (retryIn: string | number) => {
    const { id, lease_token } = await enqueueAndClaim(db.sql);
    const failures = [{ id, lease_token, error: "x", retry_in: retryIn }];
    const { seconds } = only(
      await db.sql`
        select extract(epoch from f.available_at - j.updated_at)::float as seconds
        from fail_jobs(${db.sql.json(failures)}) f join jobs j using (id)`,
    );
    await db.sql`delete from jobs where id = ${id}`;
    return Math.round(seconds);
  };
  const day = 24 * 3600;
  assert.equal(await waitOf(120), 120);
  assert.equal(await waitOf("2 hours"), 7200);
  assert.equal(await waitOf(0), 0);
  assert.equal(await waitOf("-1 hour"), 0);
  assert.equal(await waitOf("1000 years"), 30 * day);
  assert.equal(await waitOf(await endlessInterval(db.sql)), 30 * day);
});

Deno.test("a job fails until its last attempt, and then is dead", async () => {
  await db.sql`insert into jobs (kind) values ('test')`;
  const statuses: string[] = [];
  for (let attempt = 1; attempt <= 5; attempt++) {
    const { id, lease_token } = only(await claim(db.sql));
    statuses.push(
      only(await db.sql`select fail_job(${id}, ${lease_token}, ${`error ${attempt}`}, '0 seconds') as status`)
        .status,
    );
  }
  assert.deepEqual(statuses, ["pending", "pending", "pending", "pending", "dead"]);
  const row = only(await db.sql`select * from jobs`);
  assert.deepEqual([row.status, row.attempts, row.last_error], ["dead", 5, "error 5"]);
  assert.ok(row.finished_at);
  assert.deepEqual(await claim(db.sql), []);

  const failures = await db.sql`select * from job_failures order by attempt`;
  assert.deepEqual(failures.map(({ attempt, error }) => `${attempt} ${error}`), [
    "1 error 1",
    "2 error 2",
    "3 error 3",
    "4 error 4",
    "5 error 5",
  ]);
  assert.deepEqual(failures.map(({ retry_at }) => retry_at !== null), [true, true, true, true, false]);
});

Deno.test("a permanent failure is dead at its first attempt", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  const { status } = only(
    await db.sql`select fail_job(${id}, ${lease_token}, 'no such user', permanent => true) as status`,
  );
  assert.equal(status, "dead");
  const row = await job(db.sql, id);
  assert.deepEqual([row.status, row.attempts, row.last_error], ["dead", 1, "no such user"]);
});

Deno.test("a failed attempt leaves a row that says what, when, by whom and what comes next", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  const answer = only(
    await db.sql`select * from fail_jobs(${db.sql.json([{ id, lease_token, error: "boom" }])})`,
  );
  const row = await job(db.sql, id);
  assert.deepEqual({ ...answer }, { id, status: "pending", available_at: row.available_at });
  assert.deepEqual([row.status, row.last_error, row.lease_expires_at], ["pending", "boom", null]);
  const { failed_at, ...failure } = only(await db.sql`select * from job_failures`);
  assert.deepEqual(failure, {
    job_id: id,
    kind: "test",
    attempt: 1,
    lease_token,
    worker: "w",
    error: "boom",
    retry_at: row.available_at,
    unreported: false,
  });
  assert.ok(failed_at < row.available_at);
  await db.sql`delete from jobs where id = ${id}`;
  assert.equal((await db.sql`select from job_failures`).count, 0, "removed with its job");
});

Deno.test("a failure without a message says so", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await db.sql`select fail_job(${id}, ${lease_token}, null)`;
  assert.equal((await job(db.sql, id)).last_error, "failed without a message");
});

Deno.test("of a batch, the jobs that are still held fail, each in its own way", async () => {
  for (let i = 0; i < 3; i++) await enqueue(db.sql);
  const [a, b, c] = await claim(db.sql);
  assert.ok(a && b && c);
  const batch = [
    { id: a.id, lease_token: a.lease_token, error: "a", permanent: true },
    { id: b.id, lease_token: b.lease_token, error: "b", retry_in: 60 },
    { id: b.id, lease_token: b.lease_token, error: "b", retry_in: 60 },
    { id: c.id, lease_token: c.lease_token + 1, error: "c" },
  ];
  const failed = await db.sql`select id, status from fail_jobs(${db.sql.json(batch)}) order by id`;
  assert.deepEqual(failed.map((row) => ({ ...row })), [
    { id: a.id, status: "dead" },
    { id: b.id, status: "pending" },
  ]);
  assert.equal((await job(db.sql, c.id)).status, "running");
  assert.equal((await db.sql`select from job_failures`).count, 2);
  assert.equal((await db.sql`select * from fail_jobs('[]')`).count, 0);
});

Deno.test("an error of more than 10,000 characters is cut, and says so", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await db.sql`select fail_job(${id}, ${lease_token}, repeat('é', 1000000))`;
  const expected = `${"é".repeat(10_000)}… (cut, 1000000 characters in all)`;
  assert.equal((await job(db.sql, id)).last_error, expected);
  assert.equal(only(await db.sql`select error from job_failures where job_id = ${id}`).error, expected);
});
