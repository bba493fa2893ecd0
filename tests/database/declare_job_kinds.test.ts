import assert from "node:assert/strict";
import postgres from "postgres";
import { cost, only, openTransaction, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

interface Declaration {
  max_attempts?: number | null;
  timeout_ms?: number | null;
  backoff_base?: string;
  backoff_factor?: number;
  backoff_cap?: string;
  backoff_jitter?: number;
}

/** Declares the kind `test` and gives back what holds for it. */
async function declare(sql: postgres.Sql, declaration: Declaration) {
  const declarations = [{ kind: "test", ...declaration }];
  const { kind, ...settings } = only(await sql`select * from declare_job_kinds(${sql.json(declarations)})`);
  assert.equal(kind, "test");
  return settings;
}

Deno.test("what the code declares holds, and what it leaves out is the default", async () => {
  assert.deepEqual(await declare(db.sql, {}), { max_attempts: 5, timeout_ms: 45_000 });
  assert.deepEqual(await declare(db.sql, { max_attempts: 8 }), { max_attempts: 8, timeout_ms: 45_000 });
  const all = {
    max_attempts: 2,
    timeout_ms: 10,
    backoff_base: "90 s",
    backoff_factor: 1.5,
    backoff_jitter: 0,
    concurrency: 3,
    key_concurrency: 2,
    rate_limit: 100,
    rate_period: "00:01:00",
    keep_succeeded: "00:00:00",
    keep_dead: "365 days",
    keep_cancelled: "1 day",
  };
  assert.deepEqual(await declare(db.sql, { ...all, backoff_cap: "1 day" }), {
    max_attempts: 2,
    timeout_ms: 10,
  });
  const { kind: _, declared: __, ...stored } = only(await db.sql`select * from job_kinds`);
  assert.deepEqual(stored, { ...all, backoff_base: "00:01:30", backoff_cap: "1 day", paused: false });
});

Deno.test("several kinds are declared at once, each with its own", async () => {
  await db.sql`insert into job_kinds (kind, max_attempts) values ('elsewhere', 3)`;
  const declarations = [{ kind: "b", timeout_ms: 7 }, { kind: "a", max_attempts: 1 }];
  const rows = await db.sql`select * from declare_job_kinds(${db.sql.json(declarations)}) order by kind`;
  assert.deepEqual(rows.map((row) => ({ ...row })), [
    { kind: "a", max_attempts: 1, timeout_ms: 45_000 },
    { kind: "b", max_attempts: 5, timeout_ms: 7 },
  ]);
  assert.equal((await db.sql`select * from declare_job_kinds('[]')`).count, 0);
});

Deno.test("a declaration that changes in the code changes here, and one that goes leaves the default", async () => {
  await declare(db.sql, { max_attempts: 8, timeout_ms: 1000 });
  assert.deepEqual(await declare(db.sql, { max_attempts: 9 }), { max_attempts: 9, timeout_ms: 45_000 });
  assert.deepEqual(await declare(db.sql, {}), { max_attempts: 5, timeout_ms: 45_000 });
});

Deno.test("a value that an operator set stays, whatever the code declares before or after", async () => {
  await db.sql`insert into job_kinds (kind, max_attempts) values ('test', 20)`;
  assert.deepEqual(await declare(db.sql, { max_attempts: 8, timeout_ms: 1000 }), {
    max_attempts: 20,
    timeout_ms: 1000,
  });
  await db.sql`update job_kinds set timeout_ms = 77 where kind = 'test'`;
  for (const timeout_ms of [1000, 2000, null]) {
    assert.deepEqual(await declare(db.sql, { max_attempts: 9, timeout_ms }), {
      max_attempts: 20,
      timeout_ms: 77,
    });
  }
});

Deno.test("an operator's null means the default, and not the declared value", async () => {
  await declare(db.sql, { max_attempts: 8, timeout_ms: 1000 });
  await db.sql`update job_kinds set max_attempts = null where kind = 'test'`;
  assert.deepEqual(await declare(db.sql, { max_attempts: 9, timeout_ms: 1000 }), {
    max_attempts: 5,
    timeout_ms: 1000,
  });
});

Deno.test("an operator who sets the declared value again has given the kind back to the code", async () => {
  await declare(db.sql, { max_attempts: 8 });
  await db.sql`update job_kinds set max_attempts = 20 where kind = 'test'`;
  await db.sql`update job_kinds set max_attempts = 8 where kind = 'test'`;
  assert.equal((await declare(db.sql, { max_attempts: 9 })).max_attempts, 9);
});

Deno.test("a declaration that is out of range is refused, and changes nothing", async () => {
  await declare(db.sql, { max_attempts: 8 });
  await assert.rejects(declare(db.sql, { max_attempts: 0 }), { code: "23514" });
  assert.equal(only(await db.sql`select max_attempts from job_kinds`).max_attempts, 8);
});

Deno.test("workers that start at once declare the same kinds without waiting in circles", async () => {
  const kinds = ["a", "b", "c", "d"].map((kind) => ({ kind, max_attempts: 3 }));
  const declarations = Array.from({ length: 10 }, (_, i) => db.sql.json(i % 2 ? kinds : kinds.toReversed()));
  const answers = await Promise.all(
    declarations.map((each) => db.sql`select * from declare_job_kinds(${each})`),
  );
  assert.deepEqual(answers.map((rows) => rows.length), Array(10).fill(4));
});

Deno.test("an operator's open transaction holds up no worker that declares what it did before", async () => {
  await declare(db.sql, { max_attempts: 8 });
  const operator = await openTransaction(db);
  await operator.sql`update job_kinds set max_attempts = 20 where kind = 'test'`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 2000 } });
  assert.equal((await declare(hurried, { max_attempts: 8 })).max_attempts, 8);
  await operator.sql`commit`;
  assert.equal((await declare(hurried, { max_attempts: 8 })).max_attempts, 20);
});

Deno.test("jobs of the last day that died because their kind was unknown go back, uncounted and in their old order", async () => {
  const died = async (kind: string, error: string, ago: string) => {
    const { id } = only(await db.sql`select enqueue_job(${kind}) as id`);
    const { lease_token } = only(
      await db.sql`select lease_token from claim_jobs('old code', kinds => ${[kind]})`,
    );
    await db.sql`select fail_job(${id}, ${lease_token}, ${error}, permanent => true)`;
    await db.sql`update jobs set finished_at = finished_at - ${ago}::interval where id = ${id}`;
    return id;
  };
  const back = [
    await died("test", "unknown_kind: test", "0"),
    await died("test", "unknown_kind: test", "23 hours"),
  ];
  const left = [
    await died("test", "unknown_kind: test", "25 hours"),
    await died("test", "Error: unknown_kind: test", "0"),
    await died("test", "unknown_kind: another", "0"),
    await died("another", "unknown_kind: another", "0"),
  ];
  await declare(db.sql, {});
  const rows = await db.sql`select id, status, attempts, finished_at, last_error from jobs order by id`;
  assert.deepEqual(rows.filter(({ status }) => status === "dead").map(({ id }) => id), left);
  for (const row of rows.filter(({ status }) => status === "pending")) {
    assert.deepEqual([row.attempts, row.finished_at, row.last_error], [0, null, "unknown_kind: test"]);
  }
  assert.deepEqual((await db.sql`select id from claim_jobs('new code')`).map(({ id }) => id), back);
  assert.equal((await db.sql`select from job_failures where error = 'unknown_kind: test'`).count, 3);
});

Deno.test("what a declaration costs does not depend on how many jobs there are, finished or dead", async () => {
  await db.sql`
    insert into jobs (kind, status, finished_at, last_error)
    select 'test', case when n % 2 = 0 then 'dead' else 'succeeded' end, clock_timestamp(), 'Error: x'
    from generate_series(1, 20000) n`;
  // On one connection: the first call of another reads the catalog.
  const sql = db.connect("postgres", { max: 1 });
  await declare(sql, {});
  const { buffers } = await cost(sql, `select * from declare_job_kinds('[{"kind": "test"}]')`);
  assert.ok(buffers < 200, `${buffers} buffers`);
});

Deno.test("an operator's open transaction holds up no worker that declares something new: the next one does", async () => {
  await declare(db.sql, { max_attempts: 8 });
  const operator = await openTransaction(db);
  await operator.sql`update job_kinds set backoff_jitter = 0.3 where kind = 'test'`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 3000 } });
  assert.equal((await declare(hurried, { max_attempts: 9 })).max_attempts, 8);
  await operator.sql`commit`;
  assert.equal((await declare(hurried, { max_attempts: 9 })).max_attempts, 9);
});

Deno.test("what a declaration costs does not depend on how many jobs of other kinds are unknown", async () => {
  await db.sql`
    insert into jobs (kind, status, finished_at, last_error)
    select k, 'dead', clock_timestamp(), 'unknown_kind: ' || k
    from (select case when n % 2 = 0 then 'another' else 'zebra' end as k from generate_series(1, 10000) n) j`;
  // On one connection: the first call of another reads the catalog.
  const sql = db.connect("postgres", { max: 1 });
  await declare(sql, {});
  const { buffers } = await cost(sql, `select * from declare_job_kinds('[{"kind": "test"}]')`);
  assert.ok(buffers < 200, `${buffers} buffers`);
});
