import assert from "node:assert/strict";
import { endlessInterval, only, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

Deno.test("a plain insert of a kind is a complete job, due at once", async () => {
  const { id, created_at, updated_at, available_at, ...rest } = only(
    await db.sql`insert into jobs (kind) values ('send_email') returning *`,
  );
  assert.deepEqual(rest, {
    kind: "send_email",
    payload: {},
    status: "pending",
    priority: 0,
    attempts: 0,
    max_attempts: null,
    locked_at: null,
    locked_by: null,
    lease_expires_at: null,
    lease_token: 0,
    dedupe_key: null,
    dedupe: "active",
    concurrency_key: null,
    schedule: null,
    due_at: null,
    context: null,
    progress: null,
    result: null,
    last_error: null,
    finished_at: null,
  });
  const { past } = only(
    await db.sql`
      select greatest(${created_at}, ${updated_at}, ${available_at}) <= clock_timestamp() as past`,
  );
  assert.equal(past, true);
  assert.equal((await db.sql`select from claim_jobs('w') where id = ${id}`).count, 1);
});

Deno.test("an id is a version 7 UUID of the moment of the insert", async () => {
  const rows = await db.sql<{ id: string; ms: string }[]>`
    insert into jobs (kind) select 'test' from generate_series(1, 200)
    returning id, (extract(epoch from created_at) * 1000)::bigint as ms`;
  for (const { id, ms } of rows) {
    assert.match(id, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
    const stamp = parseInt(id.replaceAll("-", "").slice(0, 12), 16);
    assert.ok(Math.abs(stamp - Number(ms)) < 100, `${id} says ${stamp}, created at ${ms}`);
  }
});

Deno.test("ids and times rise within a batch of 1,000, in the order in which it was given", async () => {
  await db.sql`insert into jobs (kind, payload) select 'test', to_jsonb(n) from generate_series(1, 1000) n`;
  const expected = Array.from({ length: 1000 }, (_, i) => i + 1);
  const order = async (column: string) =>
    (await db.sql`select payload from jobs order by ${db.sql(column)}, id`).map((row) => row.payload);
  assert.deepEqual(await order("id"), expected);
  assert.deepEqual(await order("available_at"), expected);
  assert.deepEqual(await order("created_at"), expected);
});

Deno.test("ids and times rise within one transaction, whose now() stands still", async () => {
  await db.sql.begin(async (tx) => {
    for (const n of [1, 2, 3, 4, 5]) await tx`insert into jobs (kind, payload) values ('test', ${n})`;
  });
  const rows = await db.sql`select payload, available_at from jobs order by id`;
  assert.deepEqual(rows.map((row) => row.payload), [1, 2, 3, 4, 5]);
  assert.equal(only(await db.sql`select count(distinct available_at)::int as n from jobs`).n, 5);
});

Deno.test("a status and the timestamps that it implies cannot contradict each other", async () => {
  const contradictions = [
    "status = 'running'",
    "lease_expires_at = now()",
    "status = 'succeeded'",
    "status = 'dead'",
    "status = 'cancelled'",
    "finished_at = now()",
    "status = 'running', lease_expires_at = now(), finished_at = now()",
    "status = 'succeeded', lease_expires_at = now(), finished_at = now()",
    "status = 'done'",
    "status = null",
  ];
  await db.sql`insert into jobs (kind) values ('test')`;
  for (const change of contradictions) {
    const code = change === "status = null" ? "23502" : "23514";
    await assert.rejects(db.sql.unsafe(`update jobs set ${change} where true`), { code }, change);
  }
});

Deno.test("a kind is a lower-case name of at most 63 characters", async () => {
  for (const kind of ["a", "send_email", "k2", "a".repeat(63)]) {
    await db.sql`insert into jobs (kind) values (${kind})`;
    await db.sql`insert into job_kinds (kind) values (${kind})`;
  }
  for (const kind of ["", "A", "sendEmail", "2k", "_a", "a-b", "a b", "a\n", "ä", "a".repeat(64)]) {
    await assert.rejects(db.sql`insert into jobs (kind) values (${kind})`, { code: "23514" }, kind);
    await assert.rejects(db.sql`insert into job_kinds (kind) values (${kind})`, { code: "23514" }, kind);
  }
  await assert.rejects(db.sql`insert into jobs (payload) values ('{}')`, { code: "23502" });
});

Deno.test("numbers out of range are refused", async () => {
  await db.sql`insert into jobs (kind, priority, max_attempts) values ('test', -100, 1), ('test', 100, 1000)`;
  for (
    const [column, value] of [["priority", 101], ["priority", -101], ["max_attempts", 0], ["attempts", -1]]
  ) {
    await assert.rejects(
      db.sql.unsafe(`insert into jobs (kind, ${column}) values ('test', ${value})`),
      { code: "23514" },
      `${column} = ${value}`,
    );
  }
  const settings: Record<string, string[]> = {
    max_attempts: ["0", "1001"],
    timeout_ms: ["0", "86400001"],
    backoff_base: ["'-1 s'", "'2 days'", `'${await endlessInterval(db.sql)}'`],
    backoff_factor: ["0.5", "11", "'NaN'"],
    backoff_cap: ["'-1 s'", "'31 days'"],
    backoff_jitter: ["-0.1", "1.1", "'NaN'"],
  };
  for (const [column, values] of Object.entries(settings)) {
    for (const value of values) {
      await assert.rejects(
        db.sql.unsafe(`insert into job_kinds (kind, ${column}) values ('test', ${value})`),
        { code: "23514" },
        `${column} = ${value}`,
      );
    }
  }
});

Deno.test("no row can be written that would make every claim raise, or that could never be rescued", async () => {
  for (
    const values of [
      "lease_token = 2147483647",
      "attempts = 2147483647",
      "status = 'running', lease_expires_at = 'infinity'",
    ]
  ) {
    await db.sql`insert into jobs (kind) values ('test')`;
    await assert.rejects(
      db.sql.unsafe(`update jobs set ${values} where kind = 'test'`),
      { code: "23514" },
      values,
    );
  }
});
