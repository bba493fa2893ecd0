import assert from "node:assert/strict";
import postgres from "postgres";
import { seeded, until } from "../support.ts";
import {
  claim,
  cost,
  enqueue,
  expireLeases,
  only,
  openTransaction,
  sharedDatabase,
  untilBlocking,
} from "./queue.ts";

/** The limits in job_kinds: concurrency, key_concurrency, rate_limit per rate_period, paused. */

const db = sharedDatabase();

interface Settings {
  concurrency?: number | null;
  key_concurrency?: number | null;
  rate_limit?: number | null;
  rate_period?: string | null;
  paused?: boolean;
}

async function set(kind: string, settings: Settings): Promise<void> {
  await db.sql`
    insert into job_kinds ${db.sql({ kind, ...settings })}
    on conflict (kind) do update set ${db.sql(settings)}`;
}

/** Adds that many jobs of a kind, with that concurrency key; # in it stands for the number of the job. */
async function add(count: number, kind = "test", key: string | null = null): Promise<void> {
  await db.sql`
    insert into jobs (kind, concurrency_key, payload)
    select ${kind}, replace(${key}::text, '#', n::text), to_jsonb(n) from generate_series(1, ${count}::int) n`;
}

const complete = (sql: postgres.Sql, jobs: { id: string; lease_token: number }[]) =>
  sql`select complete_jobs(${sql.json(jobs.map(({ id, lease_token }) => ({ id, lease_token })))})`;

const running = async () => (await db.sql`select from jobs where status = 'running'`).count;

/** Claims until the answer is empty and gives back how many jobs there were. */
async function claimAll(sql = db.sql, maxJobs = 100): Promise<number> {
  for (let total = 0;;) {
    const jobs = await claim(sql, maxJobs);
    if (jobs.length === 0) return total;
    total += jobs.length;
  }
}

interface Held {
  id: string;
  lease_token: number;
  concurrency_key: string | null;
  at: number;
}

/**
 * 16 workers claim and complete until no job is left. `held` is called with all jobs that are held for certain: from after
 * the answer to a claim until before the call that completes them. Gives back every claim, in their order, with its time in ms.
 */
async function work(
  held: (jobs: Held[]) => void,
  options: { ms?: number; maxJobs?: number } = {},
): Promise<Held[]> {
  const { ms = 5, maxJobs = 4 } = options;
  const workers = db.connect("postgres", { max: 16 });
  const now = new Set<Held>();
  const claims: Held[] = [];
  let over = false;
  const one = async () => {
    while (!over) {
      // `at` is locked_at, to the microsecond.
      const jobs = await workers<Held[]>`
        select id, lease_token, concurrency_key, extract(epoch from lease_expires_at)::float8 * 1000 - 60000 as at
        from claim_jobs('w', ${maxJobs})`;
      if (jobs.length === 0) {
        over = (await workers`select from jobs where status in ('pending', 'running') limit 1`).count === 0;
        await new Promise((resolve) => setTimeout(resolve, ms));
        continue;
      }
      jobs.forEach((each) => now.add(each));
      claims.push(...jobs);
      held([...now]);
      await new Promise((resolve) => setTimeout(resolve, Math.random() * ms));
      jobs.forEach((each) => now.delete(each));
      await complete(workers, jobs);
    }
  };
  await Promise.all(Array.from({ length: 16 }, one));
  return claims;
}

function assertRate(times: number[], limit: number, periodMs: number): void {
  const sorted = times.toSorted((a, b) => a - b);
  sorted.forEach((time, i) => {
    const next = sorted[i + limit];
    assert.ok(
      next === undefined || next - time >= periodMs - 0.01, // of the numbers that stand for the times
      `${limit + 1} claims within ${(next ?? 0) - time} ms`,
    );
  });
}

Deno.test("16 workers never run more of a kind than its concurrency, and use all of it", async () => {
  await set("test", { concurrency: 3 });
  await add(150);
  await add(50, "other");
  let most = 0;
  const counts = new Set<number>();
  const observer = db.connect("postgres", { max: 1 });
  let over = false;
  const observing = (async () => {
    while (!over) {
      const rows = await observer`select from jobs where status = 'running' and kind = 'test'`;
      counts.add(rows.count);
    }
  })();
  const kinds = new Map((await db.sql`select id, kind from jobs`).map(({ id, kind }) => [id, kind]));
  const claims = await work((jobs) => {
    most = Math.max(most, jobs.filter(({ id }) => kinds.get(id) === "test").length);
  });
  over = true;
  await observing;
  assert.equal(claims.length, 200);
  assert.equal(most, 3);
  assert.ok(Math.max(...counts) <= 3, `${Math.max(...counts)} ran at once`);
});

Deno.test("one of a concurrency key runs at once, without any settings, and in the order enqueued", async () => {
  await db.sql`
    insert into jobs (kind, concurrency_key, payload)
    select 'test', 'key ' || n % 10, to_jsonb(n) from generate_series(1, 200) n`;
  let most = 0;
  const claims = await work((jobs) => {
    most = Math.max(most, jobs.length);
    const keys = jobs.map(({ concurrency_key }) => concurrency_key);
    assert.equal(new Set(keys).size, keys.length, `at once: ${keys.toSorted()}`);
  });
  assert.equal(claims.length, 200);
  assert.ok(most > 3, "keys do not wait for each other");
  const payloads = new Map(
    (await db.sql`select id, payload from jobs`).map(({ id, payload }) => [id, payload]),
  );
  for (const jobs of Map.groupBy(claims, ({ concurrency_key }) => concurrency_key).values()) {
    const order = jobs.map(({ id }) => payloads.get(id));
    assert.deepEqual(order, order.toSorted((a, b) => a - b));
  }
});

Deno.test("key_concurrency is how many of one key run at once, and concurrency how many of all", async () => {
  await set("test", { key_concurrency: 2, concurrency: 5 });
  await db.sql`
    insert into jobs (kind, concurrency_key)
    select 'test', case when n % 6 > 0 then 'key ' || n % 6 end from generate_series(1, 150) n`;
  let most = 0;
  const claims = await work((jobs) => {
    most = Math.max(most, jobs.length);
    const byKey = Map.groupBy(jobs, ({ concurrency_key }) => concurrency_key);
    byKey.delete(null);
    for (const [key, { length }] of byKey) assert.ok(length <= 2, `${length} of ${key}`);
  });
  assert.equal(claims.length, 150);
  assert.equal(most, 5);
});

Deno.test("no window of rate_period holds more claims than rate_limit, counting retries, and none is wasted", async () => {
  await set("test", { rate_limit: 5, rate_period: "200 ms" });
  await add(30);
  const [first = assert.fail()] = await db.sql<Held[]>`
    select id, lease_token, extract(epoch from lease_expires_at)::float8 * 1000 - 60000 as at from claim_jobs('w', 1)`;
  await db.sql`select fail_job(${first.id}, ${first.lease_token}, 'x', interval '0')`;
  const times = [first, ...await work(() => {}, { maxJobs: 10 })].map(({ at }) => at);
  assert.equal(times.length, 31);
  assertRate(times, 5, 200);
  const took = Math.max(...times) - Math.min(...times);
  assert.ok(took >= 1200 && took < 3000, `31 claims took ${took} ms; 1200 would do`);
});

Deno.test("a claim that others overtake by more than a rate_period keeps within the rate, and the next one has its jobs", async () => {
  await set("test", { rate_limit: 2, rate_period: "100 ms" });
  await add(4);
  const { sql, pid } = await openTransaction(db);
  await sql`lock table private.low_water in access exclusive mode`;
  const late = claim(db.sql); // has its time, and waits for the lock
  await untilBlocking(db, pid);
  assert.equal((await claim(sql)).length, 2);
  await sql`select pg_sleep(0.15)`; // The first claim must be older than a rate_period: nothing to wait for but the clock.
  assert.equal((await claim(sql, 1)).length, 1);
  await sql`commit`;
  assert.deepEqual(await late, [], "what it could have counted by its time is forgotten");
  await until("a claim that has the last one", async () => (await claim(db.sql)).length);
  const times = await db.sql<
    { at: number }[]
  >`select extract(epoch from locked_at)::float8 * 1000 as at from jobs`;
  assertRate(times.map(({ at }) => at), 2, 100);
});

Deno.test("a rate_limit without a period is per minute, and released jobs count as well", async () => {
  await set("test", { rate_limit: 2 });
  await add(3);
  const jobs = await claim(db.sql);
  assert.equal(jobs.length, 2);
  await db.sql`select release_jobs(${db.sql.json(jobs.map(({ id, lease_token }) => ({ id, lease_token })))})`;
  assert.deepEqual(await claim(db.sql), []);
  await db.sql`update private.starts set at = at - interval '58 seconds' where true`;
  assert.deepEqual(await claim(db.sql), []);
  await db.sql`update private.starts set at = at - interval '2.1 seconds' where true`;
  assert.equal((await claim(db.sql)).length, 2);
});

Deno.test("a worker that is lost gives its places back, and a job that waits for its retry has none", async () => {
  await set("test", { concurrency: 2 });
  await add(6);
  await add(3, "keyed", "one");
  assert.equal(await claimAll(), 3);
  await expireLeases(db.sql);
  assert.deepEqual(await claim(db.sql), [], "until they are rescued they run");
  await db.sql`select rescue_expired_jobs()`;
  await db.sql`update jobs set available_at = clock_timestamp() + interval '1 hour' where attempts > 0`;
  assert.equal(await claimAll(), 3, "those that wait for their retry hold nothing");

  const jobs = await db.sql`select id, lease_token from jobs where status = 'running'`;
  for (const { id, lease_token } of jobs) {
    await db.sql`select fail_job(${id}, ${lease_token}, 'x', interval '1 hour')`;
  }
  assert.equal(await claimAll(), 3);
  await db.sql`select cancel_jobs(array(select id from jobs where status = 'running'))`;
  await db.sql`update jobs set available_at = clock_timestamp() where status = 'pending'`;
  assert.equal(await claimAll(), 3, "cancelled jobs hold nothing either");
});

Deno.test("settings hold from the next claim on: a limit, a higher one, a lower one, none, paused and not", async () => {
  await add(50);
  const after = async (settings: Settings) => {
    await set("test", settings);
    return (await claim(db.sql, 5)).length;
  };
  assert.equal(await after({ concurrency: 2 }), 2);
  assert.equal(await after({ concurrency: 4 }), 2);
  assert.equal(await after({ concurrency: 1 }), 0);
  assert.equal(await running(), 4, "what runs goes on");
  assert.equal(await after({ concurrency: null }), 5);
  assert.equal(await after({ paused: true }), 0);
  assert.equal(await after({ paused: false }), 5);
  assert.equal(await after({ rate_limit: 3 }), 3 - 3 + 3, "the rate counts from when it is set");
  assert.equal(await after({ rate_limit: 5 }), 2);
  assert.equal(await after({ rate_limit: null }), 5);
  await add(9, "keyed", "one");
  await set("test", { paused: true });
  assert.equal((await claim(db.sql)).length, 1);
  await set("keyed", { key_concurrency: 3 });
  assert.equal((await claim(db.sql)).length, 2);
});

Deno.test("a claim that stays open holds its limited kind up and nothing else, and nobody waits for it", async () => {
  await set("limited", { concurrency: 10 });
  await add(20, "limited");
  await add(20, "keyed", "key #");
  await add(2, "plain");
  const holder = await openTransaction(db);
  await holder.sql`select * from claim_jobs('w', 2, kinds => array['limited', 'keyed'])`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 500 } });
  assert.deepEqual((await claim(hurried)).map(({ kind }) => kind), ["plain", "plain"]);
  await enqueue(hurried, "plain");
  assert.deepEqual((await claim(hurried)).map(({ kind }) => kind), ["plain"]);
  await holder.sql`rollback`;
  assert.equal(await claimAll(hurried), 10 + 20, "what was claimed in vain has used no place");
});

Deno.test("an operator's open transaction on job_kinds holds no claim up, and counts from its end on", async () => {
  await set("limited", { concurrency: 2 });
  await add(9, "limited");
  await add(9, "keyed", "one");
  const operator = await openTransaction(db);
  await operator.sql`update job_kinds set concurrency = 4 where true`;
  await operator.sql`insert into job_kinds (kind, key_concurrency) values ('keyed', 5)`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 500 } });
  assert.equal(await claimAll(hurried), 3);
  await operator.sql`commit`;
  assert.equal(await claimAll(hurried), 2 + 4);
});

Deno.test("in a transaction that is not read committed limits cannot be counted, which the claim says", async () => {
  await set("limited", { concurrency: 2 });
  await set("rated", { rate_limit: 2 });
  await add(1, "limited");
  await add(1, "rated");
  await add(1, "keyed", "one");
  await add(1, "plain");
  for (const isolation of ["isolation level repeatable read", "isolation level serializable"]) {
    for (const kind of ["limited", "rated", "keyed"]) {
      const claiming = db.sql.begin(
        isolation,
        (sql) => sql`select * from claim_jobs('w', 5, kinds => ${[kind]})`,
      );
      await assert.rejects(claiming, {
        code: "25000",
        message: new RegExp(`^claim_jobs: ${kind} has limits`),
      });
    }
  }
  const plain = await db.sql.begin(
    "isolation level repeatable read",
    (sql) => sql`select * from claim_jobs('w', 5, kinds => array['plain'])`,
  );
  assert.equal(plain.length, 1);
});

Deno.test("of 300 kinds, many paused and saturated, all that may run are found, first those behind 40 paused ones", async () => {
  await db.sql`
    insert into jobs (kind, payload) select 'kind_' || lpad(k::text, 3, '0'), to_jsonb(n)
    from generate_series(1, 300) k, generate_series(1, 3) n`;
  await db.sql`
    insert into job_kinds (kind, paused, concurrency)
    select 'kind_' || lpad(k::text, 3, '0'), k <= 40 or k % 7 = 0, case when k % 3 = 0 then 1 end
    from generate_series(1, 300) k`;
  const expected = only(
    await db.sql<{ n: number }[]>`
      select sum(least(3, concurrency))::int as n from (
        select coalesce(concurrency, 3) as concurrency from job_kinds where not paused
      ) k`,
  ).n;
  assert.ok((await claim(db.sql, 1)).length === 1);
  const seen = new Set<string>();
  let total = 1;
  for (let empty = false; !empty;) {
    const jobs = await claim(db.sql, 10);
    jobs.forEach(({ kind }) => seen.add(kind));
    total += jobs.length;
    empty = jobs.length === 0;
  }
  assert.equal(total, expected);
  await set("kind_300", { concurrency: 2 });
  assert.deepEqual((await claim(db.sql)).map(({ kind }) => kind), ["kind_300"]);
  await db.sql`update job_kinds set paused = false where kind = 'kind_001'`;
  assert.equal((await claim(db.sql)).length, 3);
});

Deno.test("20,000 jobs of 20,000 keys are claimed in their order, at a cost that does not grow with them", async () => {
  await add(20_000, "test", "key #");
  const sql = db.connect("postgres", { max: 1 });
  await claim(sql);
  const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 100)");
  assert.equal(rows, 100);
  assert.ok(buffers < 8000, `${buffers} buffers`);
  const payloads = (await db.sql`select payload from jobs where status = 'running'`).map(({ payload }) =>
    payload
  );
  assert.ok(payloads.length === 110);
});

Deno.test("a key with 5,000 jobs hides none of another key, nor costs much to step over", async () => {
  await add(5_000, "test", "busy");
  await add(30, "test", "key #");
  const sql = db.connect("postgres", { max: 1 });
  assert.equal((await claim(sql, 10)).length, 10);
  assert.equal((await claim(sql, 100)).length, 21, "of busy runs one");
  const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 10)");
  assert.equal(rows, 0);
  assert.ok(buffers < 4000, `${buffers} buffers`);
  await add(1, "test", "late");
  assert.equal((await claim(sql, 10)).length, 1);
});

Deno.test("20,000 delayed jobs with keys cost a claim nothing", async () => {
  await db.sql`
    insert into jobs (kind, concurrency_key, priority, available_at)
    select 'test', 'key ' || n, n % 3, clock_timestamp() + interval '1 hour' from generate_series(1, 20000) n`;
  await add(1, "test", "due");
  const sql = db.connect("postgres", { max: 1 });
  assert.equal((await claim(sql)).length, 1);
  const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 10)");
  assert.equal(rows, 0);
  assert.ok(buffers < 300, `${buffers} buffers`);
});

Deno.test("where few keys have many jobs and many keys wait for later, an empty claim costs the lesser of the two", async () => {
  const sql = db.connect("postgres", { max: 1 });
  const later = (kind: string) =>
    db.sql`
      insert into jobs (kind, concurrency_key, available_at)
      select ${kind}, 'key ' || n, clock_timestamp() + interval '1 hour' from generate_series(1, 20000) n`;
  await add(600, "few_due", "busy");
  await later("few_due");
  await add(20_000, "few_keys", "busy");
  assert.equal((await claim(sql)).length, 2);
  for (const kind of ["few_due", "few_keys"]) {
    const { rows, buffers } = await cost(sql, `select * from claim_jobs('w', 10, kinds => array['${kind}'])`);
    assert.equal(rows, 0);
    assert.ok(buffers < 6000, `${kind}: ${buffers} buffers`);
  }
});

Deno.test("a kind with very many due jobs of one key and very many keys of later costs others little, and hides none of its own", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await add(12_000, "large", "busy");
  await db.sql`
    insert into jobs (kind, concurrency_key, available_at)
    select 'large', 'key ' || lpad(n::text, 5, '0'), clock_timestamp() + interval '1 hour' from generate_series(1, 12000) n`;
  assert.equal((await claim(sql)).length, 1);
  await enqueue(db.sql, "other");
  const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 10)");
  assert.equal(rows, 1);
  assert.ok(buffers < 60_000, `${buffers} buffers`);
  await add(1, "large", "key 11999");
  assert.equal((await claim(sql)).length, 1, "when there is nothing else, all keys are looked at");
  assert.equal((await claim(sql)).length, 0);
});

Deno.test("what runs is counted by its key, also with statistics from a time when nothing ran", async () => {
  await add(3_000, "test", "key #");
  await db.sql`analyze jobs`;
  const sql = db.connect("postgres", { max: 1 });
  await claim(sql, 1000);
  await claim(sql, 1000);
  const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 50)");
  assert.equal(rows, 50);
  assert.ok(buffers < 4000, `${buffers} buffers`);
});

Deno.test("with keys, a claim gives exactly the first in order whose keys have a place, from either end", async () => {
  interface Row {
    id: string;
    concurrency_key: string;
    priority: number;
    status: string;
  }
  for (const seed of Array.from({ length: 10 }, () => Math.random())) {
    const random = seeded(seed * 2 ** 32);
    const priorities = random() < 0.5 ? 1 : 3;
    const places = priorities === 1 ? 1 + Math.floor(random() * 3) : 1;
    await db.sql`truncate jobs, job_kinds, private.turns cascade`;
    await set("test", { key_concurrency: places });
    await db.sql.begin(async (sql) => {
      await sql`select setseed(${seed})`;
      await sql`
        insert into jobs (kind, concurrency_key, priority, available_at)
        select 'test', 'key ' || floor(power(random(), 4) * ${
        Math.ceil(random() * 400)
      }), floor(random() * ${priorities}),
          clock_timestamp() + case when random() < 0.3 then interval '1 hour' else '0' end
        from generate_series(1, 400)`;
    });
    for (let round = 0; round < 8; round++) {
      const jobs = await db.sql<Row[]>`
        select id, concurrency_key, priority, status from jobs
        where status in ('pending', 'running') and available_at <= clock_timestamp() order by available_at, id`;
      const maxJobs = Math.ceil(random() * 40);
      const first = (direction: number) => {
        const counts = new Map<string, number>();
        const start = (key: string) => counts.set(key, (counts.get(key) ?? 0) + 1).get(key) ?? 0;
        jobs.filter(({ status }) => status === "running").forEach((job) => start(job.concurrency_key));
        return jobs.filter(({ status }) => status === "pending")
          .toSorted((a, b) => direction * (a.priority - b.priority))
          .filter((job) => start(job.concurrency_key) <= places).slice(0, maxJobs).map(({ id }) => id)
          .toSorted();
      };
      const claimed = (await claim(db.sql, maxJobs)).map(({ id }) => id).toSorted();
      const expected = [first(-1), first(1)];
      assert.ok(
        expected.some((ids) => ids.join() === claimed.join()),
        `seed ${seed}, round ${round}: ${claimed.length} jobs, expected ${
          expected.map(({ length }) => length)
        }`,
      );
      await db.sql`
        update jobs set status = 'cancelled', lease_expires_at = null, finished_at = clock_timestamp()
        where status = 'running' and id = any (${
        jobs.map(({ id }) => id).filter(() => random() < 0.5)
      }::uuid[])`;
    }
  }
});

Deno.test("a paused or saturated kind with 20,000 jobs costs the others nothing", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await set("paused", { paused: true });
  await set("saturated", { concurrency: 1 });
  await set("rated", { rate_limit: 1 });
  const buffersOf = async () => {
    await add(30, "plain");
    await claim(sql, 10);
    const { rows, buffers } = await cost(sql, "select * from claim_jobs('w', 10)");
    assert.equal(rows, 10);
    return buffers;
  };
  for (const kind of ["paused", "saturated", "rated"]) await add(2, kind);
  await claimAll(sql);
  const before = await buffersOf();
  for (const kind of ["paused", "saturated", "rated"]) await add(7_000, kind);
  const after = await buffersOf();
  assert.ok(after < 2 * before, `${before} buffers before, ${after} after`);
});

Deno.test("kinds share a claim fairly with limits too, and what a limited kind cannot use goes to the others", async () => {
  await set("limited", { concurrency: 3 });
  await set("rated", { rate_limit: 5 });
  await add(2_000, "limited");
  await add(2_000, "rated");
  await add(2_000, "one_key", "one");
  await add(2_000, "many_keys", "key #");
  await add(2_000, "plain");
  const kinds = (await claim(db.sql, 100)).map(({ kind }) => kind);
  const count = (kind: string) => kinds.filter((each) => each === kind).length;
  assert.deepEqual(["limited", "rated", "one_key"].map(count), [3, 5, 1]);
  assert.equal(kinds.length, 100);
  assert.ok(count("many_keys") >= 20 && count("plain") >= 20, `${count("many_keys")} and ${count("plain")}`);
  await add(1, "late");
  assert.equal((await claim(db.sql, 10)).filter(({ kind }) => kind === "late").length, 1);
});

Deno.test("a claim answers empty only when the limits let nothing start, whatever kinds, keys and priorities wait", async () => {
  for (const seed of Array.from({ length: 4 }, () => Math.random())) {
    await db.sql`truncate jobs, job_kinds, private.turns, private.starts cascade`;
    await db.sql`insert into private.turns values ('')`;
    await db.sql.begin(async (sql) => {
      await sql`select setseed(${seed})`;
      await sql`
        insert into job_kinds (kind, paused, concurrency, key_concurrency, rate_limit)
        select 'kind_' || k, random() < 0.1, case when random() < 0.4 then ceil(random() * 8) end,
          case when random() < 0.4 then ceil(random() * 4) end, case when random() < 0.3 then ceil(random() * 8) end
        from generate_series(1, 40) k`;
      await sql`
        insert into jobs (kind, concurrency_key, priority, available_at)
        select 'kind_' || ceil(power(random(), 3) * 45), case when random() < 0.7 then 'key ' || floor(power(random(), 4) * 200) end,
          floor(random() * 3), clock_timestamp() + case when random() < 0.2 then interval '1 hour' else '0' end
        from generate_series(1, 3000)`;
    });
    const allowed = await db.sql<{ kind: string; n: number }[]>`
      select kind, least(sum(n), k.concurrency, k.rate_limit)::int as n
      from (
        select j.kind, case when j.concurrency_key is null then count(*)
          else least(count(*), coalesce(max(k.key_concurrency), 1)) end as n
        from jobs j left join job_kinds k using (kind)
        where j.available_at <= clock_timestamp() and k.paused is not true
        group by j.kind, j.concurrency_key
      ) by_key left join job_kinds k using (kind)
      group by kind, k.concurrency, k.rate_limit order by kind`;
    await claimAll(db.sql, 20 + Math.floor(seed * 80));
    const started = await db.sql`
      select kind, count(*)::int as n from jobs where status = 'running' group by kind order by kind`;
    assert.deepEqual([...started], [...allowed], `seed ${seed}`);
  }
});

Deno.test("places are exact when 16 workers crash, fail, release and complete while an operator changes the limits", async () => {
  const highest = { concurrency: 6, key_concurrency: 2 };
  await set("test", highest);
  await db.sql`
    insert into jobs (kind, concurrency_key, max_attempts)
    select 'test', case when n % 2 = 0 then 'key ' || n % 7 end, 1000 from generate_series(1, 150) n`;
  const workers = db.connect("postgres", { max: 16 });
  let over = false;
  const one = async () => {
    while (!over) {
      const jobs = await claim(workers, 1 + Math.floor(Math.random() * 4));
      for (const { id, lease_token } of jobs) {
        const dice = Math.random();
        if (dice < 0.1) await workers`select fail_job(${id}, ${lease_token}, 'x', interval '10 ms')`;
        else if (dice < 0.2) await workers`select release_jobs(${workers.json([{ id, lease_token }])})`;
        else if (dice < 0.3) {
          await workers`update jobs set lease_expires_at = locked_at where id = ${id} and status = 'running'`;
        } else await complete(workers, [{ id, lease_token }]);
      }
      over = over ||
        (await workers`select from jobs where status in ('pending', 'running') limit 1`).count === 0;
    }
  };
  const operator = async () => {
    while (!over) {
      await db.sql`select rescue_expired_jobs()`;
      const concurrency = 1 + Math.floor(Math.random() * highest.concurrency);
      await set("test", {
        concurrency,
        key_concurrency: 1 + Math.floor(Math.random() * highest.key_concurrency),
      });
    }
  };
  let most = { all: 0, of_a_key: 0 };
  const observer = async () => {
    while (!over) {
      const counted = only(
        await db.sql<{ all: number; of_a_key: number }[]>`
          select coalesce(sum(n), 0)::int as all, coalesce(max(n) filter (where concurrency_key is not null), 0)::int as of_a_key
          from (select concurrency_key, count(*) as n from jobs where status = 'running' group by 1) r`,
      );
      most = { all: Math.max(most.all, counted.all), of_a_key: Math.max(most.of_a_key, counted.of_a_key) };
    }
  };
  await Promise.all([operator(), observer(), ...Array.from({ length: 16 }, one)]);
  assert.ok(most.all <= highest.concurrency, `${most.all} ran at once`);
  assert.ok(most.of_a_key <= highest.key_concurrency, `${most.of_a_key} of a key ran at once`);
  assert.equal((await db.sql`select from jobs where status = 'succeeded'`).count, 150);
});
