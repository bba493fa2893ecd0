import assert from "node:assert/strict";
import { createDatabase } from "../support.ts";
import {
  type Claim,
  claim,
  cost,
  enqueue,
  job,
  only,
  openTransaction,
  rowText,
  sharedDatabase,
} from "./queue.ts";

const db = sharedDatabase();

Deno.test("a claimed job is leased to the worker, and the attempt is counted", async () => {
  const { id } = only(await db.sql`select enqueue_job('test', '{"n": 1}', context => '{"user": 5}') as id`);
  const claimed = only(await db.sql`select * from claim_jobs('worker 1', 1, 90)`);
  const row = await job(db.sql, id);
  assert.deepEqual({ ...claimed }, {
    id,
    kind: "test",
    payload: { n: 1 },
    attempts: 1,
    max_attempts: 5,
    lease_token: 1,
    context: { user: 5 },
    progress: null,
    concurrency_key: null,
    schedule: null,
    due_at: null,
    created_at: row.created_at,
    lease_expires_at: row.lease_expires_at,
    timeout_ms: 45000,
    suspect: false,
  });
  assert.deepEqual([row.status, row.attempts, row.lease_token, row.locked_by], ["running", 1, 1, "worker 1"]);
  assert.equal(Math.round((row.lease_expires_at - row.locked_at) / 1000), 90);
  assert.deepEqual(await claim(db.sql), []);
});

const lost = "lease expired: worker w neither finished the job nor extended its lease by …";

Deno.test("a job that lost its worker, and has one attempt left or two, is a suspect", async () => {
  await db.sql`insert into job_kinds (kind, max_attempts) values ('twice', 2)`;
  const cases: [
    kind: string,
    attempts: number,
    max: number | null,
    error: string | null,
    suspect: boolean,
  ][] = [
    ["test", 0, 1, null, false],
    ["test", 2, null, lost, false],
    ["test", 3, null, lost, true],
    ["test", 4, null, lost, true],
    ["test", 1, 2, lost, true],
    ["twice", 1, null, lost, true],
    ["test", 6, 9, lost, false],
    ["test", 3, null, "Error: no such luck", false],
  ];
  for (const [kind, attempts, max, error, suspect] of cases) {
    const id = await enqueue(db.sql, kind);
    await db
      .sql`update jobs set attempts = ${attempts}, max_attempts = ${max}, last_error = ${error} where id = ${id}`;
    const claimed = only(await db.sql`select suspect from claim_jobs('w', 1)`);
    assert.equal(claimed.suspect, suspect, `${kind}, ${attempts} of ${max}, ${error}`);
  }
});

Deno.test("a claim gives one suspect by itself or any number of others, and neither waits for ever", async () => {
  await db
    .sql`insert into jobs (kind, attempts, last_error) select 'test', 3, ${lost} from generate_series(1, 5)`;
  await db.sql`insert into jobs (kind) select 'test' from generate_series(1, 300)`;
  await db
    .sql`insert into jobs (kind, attempts, last_error) select 'another', 3, ${lost} from generate_series(1, 5)`;
  const sizes: Record<string, number[]> = { suspects: [], others: [] };
  for (let claims = 0; claims < 500; claims++) {
    const rows = await db.sql`select suspect from claim_jobs('w', 12)`;
    if (rows.length === 0) break;
    const suspects = rows.filter(({ suspect }) => suspect).length;
    assert.ok(suspects === 0 || rows.length === 1, `${suspects} of ${rows.length}`);
    sizes[suspects ? "suspects" : "others"]?.push(rows.length);
  }
  assert.deepEqual([sizes.suspects?.length, sizes.others?.reduce((sum, n) => sum + n, 0)], [10, 300]);
});

Deno.test("jobs behind many suspects of their kind do not wait for them all", async () => {
  await db
    .sql`insert into jobs (kind, attempts, last_error) select 'test', 3, ${lost} from generate_series(1, 200)`;
  await db.sql`insert into jobs (kind) select 'test' from generate_series(1, 20)`;
  let others = 0;
  for (let claims = 0; claims < 30 && others < 20; claims++) {
    const rows = await db.sql`select suspect from claim_jobs('w', 10)`;
    assert.ok(rows.length <= 10);
    others += rows.filter(({ suspect }) => !suspect).length;
  }
  assert.equal(others, 20);
});

Deno.test("a claim leaves out the kinds that it excepts, and takes all others, whatever their number", async () => {
  await db.sql`insert into jobs (kind) select 'kind_' || n from generate_series(1, 100) n`;
  const except = Array.from({ length: 90 }, (_, n) => `kind_${n + 1}`);
  const kinds: string[] = [];
  for (let claims = 0; claims < 20 && kinds.length < 10; claims++) {
    const rows = await db.sql`select kind from claim_jobs('w', 100, except_kinds => ${except})`;
    kinds.push(...rows.map(({ kind }) => kind));
  }
  assert.deepEqual(kinds.toSorted(), Array.from({ length: 10 }, (_, n) => `kind_${n + 91}`).toSorted());
  assert.equal((await db.sql`select from claim_jobs('w', 100, except_kinds => ${except})`).count, 0);
  assert.ok((await db.sql`select from claim_jobs('w', 100, except_kinds => '{}')`).count > 0);
});

Deno.test("max_attempts is the job's own, else its kind's, else 5", async () => {
  await db.sql`insert into job_kinds (kind, max_attempts) values ('known', 8)`;
  await db.sql`insert into jobs (kind, max_attempts) values ('known', 2), ('known', null), ('unknown', null)`;
  const claimed = await claim(db.sql);
  assert.deepEqual(claimed.map(({ kind, max_attempts }) => `${kind} ${max_attempts}`).sort(), [
    "known 2",
    "known 8",
    "unknown 5",
  ]);
});

Deno.test("how long an attempt may run is its kind's setting at the time of the claim", async () => {
  await db.sql`insert into job_kinds (kind, timeout_ms) values ('test', 1000)`;
  await enqueue(db.sql);
  await enqueue(db.sql);
  assert.equal(only(await claim(db.sql, 1)).timeout_ms, 1000);
  await db.sql`update job_kinds set timeout_ms = 2000 where kind = 'test'`;
  assert.equal(only(await claim(db.sql, 1)).timeout_ms, 2000);
});

Deno.test("8 workers and 5,000 jobs: each is claimed exactly once and completed once", async () => {
  await db.sql`insert into jobs (kind) select 'kind_' || n % 3 from generate_series(1, 5000) n`;
  const claimed: string[] = [];
  const completed: string[] = [];
  const work = async (worker: string) => {
    for (;;) {
      const jobs = await claim(db.sql, 20, worker);
      if (jobs.length === 0) return;
      claimed.push(...jobs.map(({ id }) => id));
      const done = await db.sql`
        select complete_jobs(${db.sql.json(jobs.map(({ id, lease_token }) => ({ id, lease_token })))}) as id`;
      completed.push(...done.map(({ id }) => id));
    }
  };
  await Promise.all(Array.from({ length: 8 }, (_, i) => work(`worker ${i}`)));
  assert.deepEqual([claimed.length, new Set(claimed).size], [5000, 5000]);
  assert.deepEqual([completed.length, new Set(completed).size], [5000, 5000]);
  const outcomes = await db.sql`select status, attempts, count(*)::int as n from jobs group by 1, 2`;
  assert.deepEqual(outcomes.map((row) => ({ ...row })), [{ status: "succeeded", attempts: 1, n: 5000 }]);
});

Deno.test("jobs of one kind and priority come in the order enqueued, those of a batch in the order given", async () => {
  await db.sql`insert into jobs (kind, payload) select 'test', to_jsonb(n) from generate_series(1, 1000) n`;
  await db.sql`select enqueue_job('test', '1001')`;
  await db.sql`insert into jobs (kind, payload) values ('test', '1002'), ('test', '1003')`;
  const order: unknown[] = [];
  while (order.length < 1003) {
    const jobs = await db.sql`select payload from claim_jobs('w', 70)`;
    assert.ok(jobs.length > 0);
    order.push(...jobs.map(({ payload }) => payload));
  }
  assert.deepEqual(order, Array.from({ length: 1003 }, (_, i) => i + 1));
});

Deno.test("kinds take turns: 10,000 jobs of one kind do not keep another's first job out of a claim", async () => {
  await db.sql`insert into jobs (kind, priority) select 'bulk', 100 from generate_series(1, 10000)`;
  await db.sql`insert into jobs (kind, priority) select 'some', 0 from generate_series(1, 10)`;
  await enqueue(db.sql, "rare");
  const kinds = (await claim(db.sql, 10)).map(({ kind }) => kind);
  const count = (kind: string) => kinds.filter((each) => each === kind).length;
  assert.equal(kinds.length, 10, "what a kind leaves of its share goes to the others");
  assert.equal(count("rare"), 1);
  assert.ok(count("some") >= 3 && count("bulk") >= 3, kinds.join());
});

Deno.test("with more kinds than one claim looks at, each gets its turn, after a crash too", async () => {
  const fill = () =>
    db.sql`insert into jobs (kind) select 'kind_' || lpad(k::text, 2, '0')
      from generate_series(1, 20), generate_series(1, 80) k`;
  const kindsOfThreeClaims = async () => {
    const kinds = new Set<string>();
    for (let i = 0; i < 3; i++) (await claim(db.sql, 32)).forEach(({ kind }) => kinds.add(kind));
    return kinds.size;
  };
  await fill();
  assert.equal(await kindsOfThreeClaims(), 80);
  await db.sql`truncate private.low_water, private.awake_workers`; // as a crash does with unlogged tables
  assert.equal(await kindsOfThreeClaims(), 80);
});

Deno.test("the higher priority goes first, but one pick in ten starts from the lowest", async () => {
  await db.sql`
    insert into jobs (kind, priority) select 'test', p from unnest(array[-100, 0, 100]) p, generate_series(1, 400)`;
  const sql = db.connect("postgres", { max: 1 });
  await sql`select setseed(0.42)`;
  const picks: number[] = [];
  for (let i = 0; i < 400; i++) {
    const { id } = only(await claim(sql, 1));
    picks.push((await job(sql, id)).priority);
  }
  const lowest = picks.filter((priority) => priority === -100).length;
  assert.ok(lowest >= 15 && lowest <= 75, `${lowest} of 400 picks were of the lowest priority`);
  assert.equal(picks.filter((priority) => priority === 0).length, 0);
});

Deno.test("what a claim gives is in the order in which it is to start", async () => {
  await db.sql`insert into jobs (kind, priority, payload) values
    ('a', 0, '3'), ('a', 5, '1'), ('b', 0, '4'), ('b', 5, '2')`;
  const jobs = await db.sql`select payload from claim_jobs('w')`;
  assert.deepEqual(jobs.map(({ payload }) => payload), [1, 2, 3, 4]);
});

Deno.test("a delayed job is not claimed before its time, and holds no other up", async () => {
  const delayed = only(await db.sql`select enqueue_job('test', delay => '1 hour', priority => 100) as id`).id;
  const due = await enqueue(db.sql);
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id), [due]);
  await db.sql`update jobs set available_at = available_at - interval '1 hour' where id = ${delayed}`;
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id), [delayed]);
});

Deno.test("a worker may take some kinds only", async () => {
  await db.sql`insert into jobs (kind) values ('a'), ('b'), ('c')`;
  const take = async (kinds: (string | null)[]) =>
    (await db.sql`select kind from claim_jobs('w', kinds => ${kinds})`).map(({ kind }) => kind);
  assert.deepEqual(await take([]), []);
  assert.deepEqual(await take(["unknown", null]), []);
  assert.deepEqual((await take(["a", "c", "a"])).sort(), ["a", "c"]);
});

Deno.test("a claim's cost does not depend on what it cannot take, nor on the planner's statistics", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await sql`insert into jobs (kind, priority) select 'test', p from generate_series(-1, 1) p, generate_series(1, 30)`;
  await cost(sql, "select * from claim_jobs('w', 10)"); // what is cached once per session is read here
  const before = await cost(sql, "select * from claim_jobs('w', 10)");

  await sql`
    insert into jobs (kind, priority, available_at)
    select 'test', p, clock_timestamp() + interval '1 day' from generate_series(-1, 1) p, generate_series(1, 7000)`;
  await sql`
    insert into jobs (kind, status, finished_at)
    select 'test', 'succeeded', clock_timestamp() from generate_series(1, 20000)`;
  // The first may plan anew, where autovacuum has analyzed the table meanwhile; what walks the rest does so in each.
  const afterwards = [
    await cost(sql, "select * from claim_jobs('w', 10)"),
    await cost(sql, "select * from claim_jobs('w', 10)"),
  ];
  const after = Math.min(...afterwards.map(({ buffers }) => buffers));
  assert.deepEqual(afterwards.map(({ rows }) => rows), [10, 10]);
  await sql`analyze jobs`;
  await claim(sql); // the first claim after that plans anew
  const analyzed = await cost(sql, "select * from claim_jobs('w', 10)");
  assert.deepEqual([before.rows, analyzed.rows], [10, 10]);
  // Ten rows are found, updated and indexed anew; the index has one level more. Walking the rest reads over 600.
  const buffers = [before.buffers, after, analyzed.buffers];
  assert.ok(Math.max(...buffers) < 300, `buffers before, after, and with fresh statistics: ${buffers}`);

  await sql`delete from jobs where status = 'pending' and available_at <= clock_timestamp()`;
  await sql`vacuum jobs`;
  const empty = await cost(sql, "select * from claim_jobs('w', 10)");
  assert.equal(empty.rows, 0);
  assert.ok(empty.buffers < 150, `${empty.buffers} buffers to find that 21,000 delayed jobs are not due`);
});

Deno.test("a row elsewhere that refers to a job, not yet committed, does not hide it", async () => {
  await using db = await createDatabase();
  await db.sql`create table orders (id int primary key, job_id uuid references jobs on delete set null)`;
  const [first, second] = [await enqueue(db.sql), await enqueue(db.sql)];
  const open = await openTransaction(db);
  await open.sql`insert into orders values (1, ${first})`;
  await open.sql`
    insert into job_failures (job_id, kind, attempt, lease_token, error) values (${second}, 'test', 1, 7, 'x')`;
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id), [first, second]);
  await open.sql`commit`;
});

Deno.test("a job that another session has locked is passed over and not waited for", async () => {
  const [first, second] = [await enqueue(db.sql), await enqueue(db.sql)];
  const open = await openTransaction(db);
  await open.sql`select * from claim_jobs('other', 1)`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 2000 } });
  assert.deepEqual((await claim(hurried)).map(({ id }) => id), [second]);
  await open.sql`rollback`;
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id), [first]);
});

Deno.test("an enqueuing transaction that stays open holds up nobody else's job", async () => {
  const open = await openTransaction(db);
  const unseen = await enqueue(open.sql);
  const seen = await enqueue(db.sql);
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id), [seen]);
  await open.sql`commit`;
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id), [unseen]);
});

Deno.test("an argument that is not usable is refused and named, and nothing is claimed", async () => {
  const id = await enqueue(db.sql);
  const before = await rowText(db.sql, id);
  const cases: [call: string, message: RegExp][] = [
    ["null", /worker is empty/],
    ["''", /worker is empty/],
    ["'w', 0", /max_jobs 0 is not/],
    ["'w', 1001", /max_jobs 1001 is not/],
    ["'w', null", /max_jobs null is not/],
    ["'w', lease_seconds => 0", /lease_seconds 0 is not/],
    ["'w', lease_seconds => 86401", /lease_seconds 86401 is not/],
    ["'w', lease_seconds => null", /lease_seconds null is not/],
  ];
  for (const [call, message] of cases) {
    await assert.rejects(db.sql.unsafe(`select claim_jobs(${call})`), { code: "22023", message }, call);
  }
  assert.equal(await rowText(db.sql, id), before);
});

Deno.test("a promise to be awake is kept by a claim that leaves room, and taken back by any other", async () => {
  const promised = async () =>
    (await db.sql`select from private.awake_workers where awake_until > clock_timestamp()`).count === 1;
  const take = async (rest: string): Promise<Claim[]> =>
    await db.sql.unsafe<Claim[]>(`select * from claim_jobs('w', ${rest})`);
  await db.sql`insert into jobs (kind) select 'test' from generate_series(1, 5)`;
  await take("4, awake_for => '30 seconds'");
  assert.equal(await promised(), false, "full, so it takes no more for now");
  await take("4, awake_for => '30 seconds'");
  assert.equal(await promised(), true);
  await take("4");
  assert.equal(await promised(), false, "no promise given");
});

Deno.test("a promise is written anew only in its second half, so that an idle poll writes nothing", async () => {
  const poll = () => db.sql`select * from claim_jobs('w', 4, awake_for => '30 seconds')`;
  const until = async () => only(await db.sql`select awake_until::text as at from private.awake_workers`).at;
  await poll();
  const first = await until();
  await poll();
  assert.equal(await until(), first);
  await db
    .sql`update private.awake_workers set awake_until = clock_timestamp() + interval '14 seconds' where true`;
  await poll();
  assert.ok(await until() > first);
});

Deno.test("a due job is found at once, however many kinds wait for later", async () => {
  await db.sql`
    insert into jobs (kind, available_at)
    select 'kind_' || n, clock_timestamp() + interval '1 hour' from generate_series(1, 100) n`;
  for (const kind of ["a_first", "kind_500", "z_last"]) {
    const id = await enqueue(db.sql, kind);
    assert.deepEqual((await claim(db.sql)).map((job) => job.id), [id]);
  }
  assert.deepEqual(await claim(db.sql), []);
});

Deno.test("a due job behind more kinds than a claim looks through is found by one of the next claims", async () => {
  await db.sql`
    insert into jobs (kind, available_at)
    select 'kind_' || lpad(n::text, 4, '0'), clock_timestamp() + interval '1 hour' from generate_series(1, 3300) n`;
  const id = await enqueue(db.sql, "z_last");
  const claims = [await claim(db.sql), await claim(db.sql)].flat();
  assert.deepEqual(claims.map((job) => job.id), [id]);
});

Deno.test("a due job is found wherever a round of the kinds begins and ends", async () => {
  await db.sql`
    insert into jobs (kind, available_at)
    select 'kind_' || lpad(n::text, 2, '0'), clock_timestamp() + interval '1 hour' from generate_series(1, 40) n`;
  for (const start of ["", "kind_05", "kind_39"]) {
    for (const kind of ["kind_01", "kind_06", "kind_33", "kind_38", "kind_40"]) {
      await db.sql`update private.turns set at = ${start} where kind = ''`;
      const id = await enqueue(db.sql, kind);
      assert.deepEqual((await claim(db.sql)).map((job) => job.id), [id], `${kind} from ${start}`);
    }
  }
});

Deno.test("jobs with a concurrency key and jobs without one share one order", async () => {
  await db.sql`
    insert into jobs (kind, payload, priority, concurrency_key)
    select 'test', to_jsonb(n), n % 2, case when n % 3 = 0 then 'key ' || n end from generate_series(1, 24) n`;
  const expected = await db.sql`
    select array_agg(payload order by priority desc, available_at, id) as up,
      array_agg(payload order by priority, available_at, id) as down
    from jobs`;
  const { up, down } = only(expected);
  const order: unknown[] = [];
  const sql = db.connect("postgres", { max: 1 });
  await sql`select setseed(0.5)`;
  const lowestFirst: boolean[] = [];
  while (order.length < 24) {
    const jobs = (await sql`select payload from claim_jobs('w', 6)`).map(({ payload }) => payload);
    const left = (all: unknown[]) => new Set(all.filter((each) => !order.includes(each)).slice(0, 6));
    const given = new Set(jobs);
    lowestFirst.push(given.symmetricDifference(left(up)).size > 0);
    if (lowestFirst.at(-1)) assert.deepEqual(given, left(down));
    order.push(...jobs);
  }
  assert.ok(
    lowestFirst.filter((each) => each).length <= 2,
    "one pick in ten starts from the lowest priority",
  );
});

Deno.test("one pick in ten starts from the lowest priority with keys too, of one key and of many", async () => {
  for (const key of ["one", "key #"]) {
    await db.sql`truncate jobs cascade`;
    await db.sql`
      insert into jobs (kind, priority, concurrency_key)
      select 'test', p, replace(${key}, '#', n || '/' || p)
      from unnest(array[-100, 0, 100]) p, generate_series(1, 300) n`;
    const sql = db.connect("postgres", { max: 1 });
    await sql`select setseed(0.42)`;
    const picks: number[] = [];
    for (let i = 0; i < 200; i++) {
      const { id } = only(await claim(sql, 1));
      picks.push((await job(sql, id)).priority);
      await sql`delete from jobs where id = ${id}`;
    }
    const lowest = picks.filter((priority) => priority === -100).length;
    assert.ok(lowest >= 8 && lowest <= 40, `${key}: ${lowest} of 200 picks were of the lowest priority`);
    assert.equal(picks.filter((priority) => priority === 0).length, 0);
  }
});

Deno.test("suspects with concurrency keys come by themselves too, and hold up neither others nor their key for ever", async () => {
  await db.sql`
    insert into jobs (kind, attempts, last_error, concurrency_key)
    select 'test', 3, ${lost}, 'key ' || n % 4 from generate_series(1, 8) n`;
  await db.sql`
    insert into jobs (kind, concurrency_key, payload)
    select 'test', 'key ' || n % 8, to_jsonb(n) from generate_series(1, 80) n`;
  let claimed = 0;
  for (let claims = 0; claims < 500 && claimed < 88; claims++) {
    const rows = await db.sql`select id, suspect, concurrency_key from claim_jobs('w', 5)`;
    const suspects = rows.filter(({ suspect }) => suspect).length;
    assert.ok(suspects === 0 || rows.length === 1, `${suspects} of ${rows.length}`);
    assert.equal(new Set(rows.map((row) => row.concurrency_key)).size, rows.length);
    assert.ok(rows.length > 0, `empty with ${88 - claimed} jobs left`);
    await db.sql`delete from jobs where id = any(${rows.map(({ id }) => id)})`;
    claimed += rows.length;
  }
  assert.equal(claimed, 88);
});

/** Has 12,000 jobs claimed and completed while a transaction is open, so that their index entries stay; and 200 more wait. */
async function fillWithDead(
  priorities: number[] = [0],
): Promise<Awaited<ReturnType<typeof openTransaction>>> {
  const holder = await openTransaction(db);
  await holder.sql`select pg_current_xact_id()`;
  await db.sql`
    insert into jobs (kind, priority) select 'test', p
    from unnest(${priorities}::int[]) p, generate_series(1, 12000 / ${priorities.length}::int)`;
  for (let batch = 0; batch < 12; batch++) {
    const jobs = await claim(db.sql, 1000);
    await db.sql`
      select complete_jobs(${db.sql.json(jobs.map(({ id, lease_token }) => ({ id, lease_token })))})`;
  }
  await db.sql`
    insert into jobs (kind, priority) select 'test', p
    from unnest(${priorities}::int[]) p, generate_series(1, 200)`;
  return holder;
}

const marks = async () => (await db.sql`select from private.low_water`).count;

Deno.test("what has ended while a transaction stays open is walked over once: a mark is left, and gone when it closes", async () => {
  const late = await openTransaction(db);
  await late.sql`insert into jobs (kind, payload) values ('test', '"late"')`;
  const holder = await fillWithDead();
  const sql = db.connect("postgres", { max: 1 });
  await claim(sql);
  await claim(sql);
  assert.equal(await marks(), 1);
  await db.sql`update private.low_water set look_at = clock_timestamp() + interval '1 hour' where true`;
  const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 10)");
  assert.equal(rows, 10);
  assert.ok(buffers < 400, `${buffers} buffers behind 12,000 jobs that have ended`);

  await late.sql`commit`;
  const found: unknown[] = [];
  const payloads = async () =>
    (await sql`select payload from claim_jobs('w', 100)`).map(({ payload }) => payload);
  for (let jobs = await payloads(); jobs.length > 0; jobs = await payloads()) found.push(...jobs);
  assert.equal(found.at(-1), "late", "a claim that would be empty looks before the mark");

  await holder.sql`commit`;
  await db.sql`vacuum jobs`;
  await db.sql`update private.low_water set look_at = clock_timestamp() where true`;
  for (let i = 0; i < 3; i++) {
    await enqueue(sql);
    assert.equal((await claim(sql)).length, 1);
  }
  assert.equal(await marks(), 0);
});

Deno.test("what never was, or was cancelled, of a lower priority is walked over, and claims go on", async () => {
  const lower = JSON.stringify(Array.from({ length: 4000 }, () => ({ kind: "a", priority: -50 })));
  const holder = await openTransaction(db);
  await holder.sql`select count(*) from enqueue_jobs(${lower}::text::jsonb)`;
  await holder.sql`rollback`;
  await db.sql`select count(*) from enqueue_jobs(${lower}::text::jsonb)`;
  await db.sql`select cancel_jobs(array(select id from jobs))`;
  const ids = [await enqueue(db.sql, "a"), await enqueue(db.sql, "other")].sort();
  assert.deepEqual((await claim(db.sql)).map((job) => job.id).sort(), ids);
  assert.deepEqual(await claim(db.sql), []);
});

Deno.test("suspects of a higher priority do not hold up what is below them", async () => {
  await db.sql`
    insert into jobs (kind, attempts, last_error, priority) select 'test', 3, ${lost}, 5 from generate_series(1, 30)`;
  await db.sql`insert into jobs (kind) select 'test' from generate_series(1, 40)`;
  const claims: number[] = [];
  while (claims.reduce((sum, n) => sum + n, 0) < 40 && claims.length < 40) {
    const rows = await db.sql`select suspect from claim_jobs('w', 10)`;
    claims.push(rows.filter(({ suspect }) => !suspect).length);
    assert.ok(rows.length === 1 || rows.every(({ suspect }) => !suspect));
  }
  assert.ok(claims.includes(10), `others in each claim: ${claims}`);
});

Deno.test("a job that comes in before a mark is found when it is time to look there, though others wait", async () => {
  const late = await openTransaction(db);
  await late.sql`insert into jobs (kind, payload) values ('test', '"late"')`;
  const holder = await fillWithDead();
  await claim(db.sql);
  await claim(db.sql);
  assert.equal(await marks(), 1);
  await late.sql`commit`;
  await db.sql`update private.low_water set look_at = clock_timestamp() where true`;
  const [first] = await db.sql`select payload from claim_jobs('w', 10)`;
  assert.equal(first?.payload, "late");
  await holder.sql`commit`;
});

Deno.test("marks keep priorities in their order, one pick in ten from the lowest, and lose no job", async () => {
  const holder = await fillWithDead([-5, 0, 5]);
  const sql = db.connect("postgres", { max: 1 });
  const picks: number[] = [];
  for (let jobs = await claim(sql); jobs.length > 0; jobs = await claim(sql)) {
    const { priority } = await job(sql, jobs[0]?.id ?? "");
    picks.push(priority);
    assert.equal(new Set(jobs.map(({ id }) => id)).size, jobs.length);
  }
  assert.ok((await marks()) > 0);
  assert.equal((await sql`select from jobs where status = 'pending'`).count, 0);
  const first = picks.slice(0, 15);
  assert.ok(first.filter((priority) => priority === 5).length > 8, first.join());
  assert.ok(first.every((priority) => priority !== 0), first.join());
  await holder.sql`commit`;
});
