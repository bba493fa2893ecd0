import assert from "node:assert/strict";
import postgres from "postgres";
import {
  claim,
  endlessInterval,
  job,
  only,
  openTransaction,
  sharedDatabase,
  untilBlocking,
} from "./queue.ts";

const db = sharedDatabase();

type Entry = Record<string, postgres.JSONValue>;

async function enqueueAll(
  jobs: postgres.JSONValue,
  sql: postgres.Sql = db.sql,
): Promise<{ id: string; created: boolean }[]> {
  const rows = await sql<{ id: string; created: boolean }[]>`select * from enqueue_jobs(${sql.json(jobs)})`;
  return rows.map(({ id, created }) => ({ id, created }));
}

const keyed = (n: number, rest: Entry = {}): Entry => ({
  kind: "test",
  payload: { n },
  dedupe_key: "k",
  ...rest,
});

Deno.test("5,000 jobs come back in the order given, and start in it", async () => {
  const count = 5_000;
  const answers = await enqueueAll(
    Array.from({ length: count }, (_, n) => ({ kind: "test", payload: { n } })),
  );
  assert.equal(answers.length, count);
  assert.ok(answers.every(({ created }) => created));
  const ids = answers.map(({ id }) => id);
  assert.deepEqual(ids, [...ids].sort(), "ids rise");
  const rows = await db.sql`
    select (j.payload ->> 'n')::int as n from unnest(${ids}::uuid[]) with ordinality u(id, nth)
    join jobs j using (id) order by u.nth`;
  assert.deepEqual(rows.map(({ n }) => n), Array.from({ length: count }, (_, n) => n));
  const started: string[] = [];
  while (started.length < count) started.push(...(await claim(db.sql, 500)).map(({ id }) => id));
  assert.deepEqual(started, ids);
});

Deno.test("no jobs are no error", async () => {
  assert.deepEqual(await enqueueAll([]), []);
  assert.deepEqual(only(await db.sql`select enqueue_jobs_as_json('[]') as answer`).answer, []);
});

Deno.test("an entry has the arguments of enqueue_job, and their defaults", async () => {
  const full = {
    kind: "full",
    payload: { a: [1] },
    priority: -3,
    max_attempts: 7,
    dedupe_key: "k",
    dedupe: "once",
    concurrency_key: "c",
    context: { user: "ada" },
  };
  const [one, other, late, past] = await enqueueAll([
    { ...full, delay: "90 seconds" },
    { kind: "bare" },
    { kind: "late", available_at: "2120-01-01T00:00:00Z" },
    { kind: "past", available_at: "2020-01-01T00:00:00Z", priority: null, payload: null },
  ]);
  assert.ok(one && other && late && past);
  const row = await job(db.sql, one.id);
  assert.deepEqual(Object.fromEntries(Object.keys(full).map((name) => [name, row[name]])), full);
  assert.ok(Math.abs(row.available_at - row.created_at - 90_000) < 1_000);
  const bare = await job(db.sql, other.id);
  assert.deepEqual(
    [bare.payload, bare.priority, bare.max_attempts, bare.dedupe, bare.context],
    [{}, 0, null, "active", null],
  );
  assert.equal((await job(db.sql, late.id)).available_at.toISOString(), "2120-01-01T00:00:00.000Z");
  const { payload, available_at, created_at } = await job(db.sql, past.id);
  assert.deepEqual(payload, {});
  assert.ok(available_at >= created_at - 1_000, "a time in the past becomes now");
});

Deno.test("one entry that is not usable is named, and nothing of the batch is enqueued", async () => {
  const endless = await endlessInterval(db.sql);
  const cases: [entry: postgres.JSONValue, message: RegExp][] = [
    [{ kind: "test", payload: {}, dely: "1 s" }, /it has no field 'dely'/],
    [{}, /kind null is not/],
    [{ kind: "Send Email" }, /kind 'Send Email' is not/],
    [{ kind: "x".repeat(64) }, /kind 'x{64}' is not/],
    ["test", /it is string, not an object/],
    [7, /it is number/],
    [null, /it is null/],
    [[], /it is array/],
    [{ kind: "test", delay: "1 s", available_at: "2120-01-01" }, /both delay and available_at/],
    [{ kind: "test", delay: "-1 s" }, /delay -00:00:01 is not/],
    [{ kind: "test", delay: "11 years" }, /delay 11 years is not/],
    [{ kind: "test", delay: endless }, new RegExp(`delay ${endless} is not`)],
    [{ kind: "test", delay: "soon" }, /"soon"/],
    [{ kind: "test", available_at: "infinity" }, /available_at is infinity/],
    [{ kind: "test", available_at: "yesterday-ish" }, /"yesterday-ish"/],
    [{ kind: "test", priority: 101 }, /priority 101 is not/],
    [{ kind: "test", priority: "high" }, /"high"/],
    [{ kind: "test", priority: 1e12 }, /1000000000000/],
    [{ kind: "test", max_attempts: 0 }, /max_attempts 0 is not/],
    [{ kind: "test", dedupe_key: "" }, /dedupe_key has 0 characters/],
    [{ kind: "test", dedupe_key: "x".repeat(513) }, /dedupe_key has 513 characters/],
    [{ kind: "test", dedupe_key: "k", dedupe: "always" }, /dedupe 'always' is not/],
    [{ kind: "test", concurrency_key: "x".repeat(513) }, /concurrency_key has 513 characters/],
    [
      { kind: "test", payload: { x: "é".repeat(2_000_000) } },
      /payload or context has more than 4000000 bytes/,
    ],
    [{ kind: "test", context: "x".repeat(4_000_000) }, /payload or context has more than 4000000 bytes/],
    [{ kind: "test", dedupe: "once" }, /dedupe is once, but there is no dedupe_key/],
  ];
  const good = { kind: "test", dedupe_key: "good" };
  for (const [entry, message] of cases) {
    const what = JSON.stringify(entry).slice(0, 100);
    const error = await enqueueAll([good, { kind: "test" }, entry, good]).then(() => null, (error) => error);
    assert.ok(error instanceof postgres.PostgresError, what);
    assert.equal(error.code, "22023", `${what}: ${error.message}`);
    assert.match(error.message, /^enqueue_jobs: entry 2: /, what);
    assert.match(error.message, message, what);
  }
  assert.equal((await db.sql`select from jobs`).count, 0);
});

Deno.test("what is no array is refused", async () => {
  for (const jobs of [{ kind: "test" }, "test", null]) {
    await assert.rejects(enqueueAll(jobs), { code: "22023", message: /^enqueue_jobs: jobs is / });
  }
  await assert.rejects(async () => await db.sql`select * from enqueue_jobs(null)`, {
    code: "22023",
    message: /jobs is null, not an array/,
  });
});

Deno.test("a batch that is rolled back leaves nothing", async () => {
  await assert.rejects(db.sql.begin(async (sql) => {
    await sql`select * from enqueue_jobs('[{"kind": "test"}, {"kind": "test", "dedupe_key": "k"}]')`;
    throw new Error("the caller's own");
  }));
  assert.equal((await db.sql`select from jobs`).count, 0);
});

Deno.test("the same key several times in one batch is one job: of replace the last wins, else the first", async () => {
  for (const [dedupe, n] of [["active", 0], ["waiting", 0], ["once", 0], ["replace", 3]] as const) {
    await db.sql`truncate jobs cascade`;
    const answers = await enqueueAll([
      ...[0, 1].map((n) => keyed(n, { dedupe })),
      { kind: "other", dedupe_key: "k", dedupe },
      ...[2, 3].map((n) => keyed(n, { dedupe, priority: n })),
    ]);
    assert.deepEqual(answers.map(({ created }) => created), [true, false, true, false, false], dedupe);
    const [first, second, , fourth, fifth] = answers.map(({ id }) => id);
    assert.deepEqual([second, fourth, fifth], [first, first, first], dedupe);
    assert.equal((await db.sql`select from jobs`).count, 2);
    const row = only(await db.sql`select payload, priority from jobs where kind = 'test'`);
    assert.deepEqual({ ...row }, { payload: { n }, priority: n }, dedupe);
  }
});

Deno.test("thousands of entries with one key cost no more than as many keys, and of replace the last wins", async () => {
  for (const [dedupe, n] of [["replace", 2_999], ["waiting", 0]] as const) {
    await db.sql`truncate jobs cascade`;
    const startedAt = performance.now();
    const answers = await enqueueAll(Array.from({ length: 3_000 }, (_, n) => keyed(n, { dedupe })));
    const tookMs = performance.now() - startedAt;
    assert.deepEqual(answers.map(({ created }) => created), answers.map((_, n) => n === 0), dedupe);
    assert.equal(new Set(answers.map(({ id }) => id)).size, 1, dedupe);
    assert.deepEqual(only(await db.sql`select payload from jobs`).payload, { n }, dedupe);
    assert.ok(tookMs < 3_000, `${dedupe}: ${tookMs} ms, of the 8 s that the API gives`);
  }
});

Deno.test("what a batch says of one key more than once, in whatever modes, is one job with the last replacement", async () => {
  const some = ["active", "replace", "waiting", "replace", "once"].map((dedupe, n) => keyed(n, { dedupe }));
  for (const batch of [some, some.slice(1), some.slice(0, 4)]) {
    for (const holder of ["none", "waiting", "running"]) {
      await db.sql`truncate jobs cascade`;
      if (holder !== "none") await enqueueAll([keyed(-1)]);
      if (holder === "running") await claim(db.sql);
      const answers = await enqueueAll(batch);
      const what = `${batch.length} entries, holder ${holder}`;
      assert.equal(answers.filter(({ created }) => created).length, holder === "none" ? 1 : 0, what);
      const row = only(await db.sql`select id, payload from jobs`);
      assert.ok(answers.every(({ id }) => id === row.id), what);
      assert.deepEqual(row.payload, { n: holder === "running" ? -1 : 3 }, what);
    }
  }
});

Deno.test("of a large batch only what is new is created, each answer in its place", async () => {
  const entries = (from: number) =>
    Array.from({ length: 1_000 }, (_, n) => ({ kind: "test", dedupe_key: `${from + n}` }));
  const before = await enqueueAll(entries(0));
  const after = await enqueueAll(entries(500).reverse());
  assert.deepEqual(
    after.filter(({ created }) => !created),
    [...before.slice(500)].reverse().map(({ id }) => ({
      id,
      created: false,
    })),
  );
  assert.equal((await db.sql`select from jobs`).count, 1_500);
});

Deno.test("batches with the same keys in opposite orders never deadlock, and each key is enqueued once", async () => {
  for (let round = 0; round < 12; round++) {
    const modes = ["active", "waiting", "replace", "once"];
    const batch = Array.from({ length: 60 }, (_, n) => ({
      kind: `kind_${n % 3}`,
      dedupe_key: `${round} ${n % 50}`,
      dedupe: modes[(n % 50) % 4] ?? "",
    }));
    const answers = await Promise.all([
      enqueueAll(batch),
      enqueueAll([...batch].reverse()),
      enqueueAll([...batch.slice(30), ...batch.slice(0, 30)]),
      enqueueAll([...batch].reverse()),
    ]);
    const created = answers.flat().filter(({ created }) => created);
    assert.equal(
      created.length,
      new Set(batch.map((e) => `${e.kind} ${e.dedupe_key}`)).size,
      `round ${round}`,
    );
    assert.equal(new Set(answers.flat().map(({ id }) => id)).size, created.length);
  }
});

Deno.test("a batch waits for an open enqueue of one of its keys", async () => {
  const open = await openTransaction(db);
  const held = only(await open.sql`select enqueue_job('test', dedupe_key => 'k') as id`).id;
  const batch = enqueueAll([{ kind: "test" }, keyed(1)]);
  await untilBlocking(db, open.pid);
  await open.sql`commit`;
  const [, answer] = await batch;
  assert.deepEqual(answer, { id: held, created: false });
});
