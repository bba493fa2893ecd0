import assert from "node:assert/strict";
import postgres from "postgres";
import { claim, cost, enqueue, enqueueAndClaim, only, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

/** The statistics of one kind. */
async function stats(kind = "test"): Promise<postgres.Row> {
  return only(await db.sql`select * from job_stats(${[kind]})`);
}

/** Finished jobs of one kind that ended that long ago, having run for the given time. */
async function addFinished(count: number, status: string, ago: string, took = "1 second"): Promise<void> {
  await db.sql`
    insert into jobs (kind, status, attempts, locked_at, finished_at)
    select 'test', ${status}, 1, now() - ${ago}::interval - ${took}::interval, now() - ${ago}::interval
    from generate_series(1, ${count}::int)`;
}

Deno.test("a pending job is ready when it is due, else delayed before its first attempt and retrying after it", async () => {
  await db.sql`
    insert into jobs (kind, attempts, available_at, concurrency_key) values
      ('test', 0, now(), null), ('test', 0, now(), 'a'), ('test', 2, now() - interval '90 s', null),
      ('test', 0, now() + interval '1 hour', null), ('test', 0, 'infinity', 'a'),
      ('test', 1, now() + interval '1 hour', null)`;
  await enqueueAndClaim(db.sql, "other");
  const { ready, delayed, retrying, running, dead, oldest_ready_age } = await stats();
  assert.deepEqual([ready, delayed, retrying, running, dead], ["3", "2", "1", "0", "0"]);
  assert.match(oldest_ready_age, /^00:01:3/);
  assert.equal((await stats("other")).running, "1");
  assert.equal((await stats("other")).oldest_ready_age, null);
});

Deno.test("the counts of random jobs are those that counting gives, in the function and in the view", async () => {
  const seed = Math.random();
  const sql = db.connect("postgres", { max: 1 });
  await sql`select setseed(${seed})`;
  await sql`
    insert into jobs (kind, priority, status, attempts, available_at, concurrency_key, lease_expires_at, locked_at, finished_at)
    select 'kind_' || floor(random() * 5), floor(random() * 5) - 2, s.status, floor(random() * 3),
      now() + (floor(random() * 3) - 1) * interval '1 hour', case when random() < 0.3 then 'k' || floor(random() * 9) end,
      case when s.status = 'running' then now() end, now() - interval '3 hours',
      case when s.status not in ('pending', 'running') then now() - random() * interval '2 hours' end
    from (
      select (array['pending', 'pending', 'pending', 'running', 'succeeded', 'dead', 'cancelled'])[ceil(random() * 7)] as status
      from generate_series(1, 3000)
    ) s`;
  await sql`
    insert into job_failures (job_id, kind, attempt, lease_token, error, failed_at)
    select id, kind, 1, 1, 'x', now() - random() * interval '2 hours' from jobs where random() < 0.5`;
  // What is an hour old while it is counted may be counted or not.
  await sql`
    update job_failures set failed_at = failed_at - interval '3 minutes'
    where failed_at between now() - interval '62 minutes' and now() - interval '59 minutes'`;
  await sql`
    update jobs set finished_at = finished_at - interval '3 minutes'
    where finished_at between now() - interval '62 minutes' and now() - interval '59 minutes'`;
  const counted = await sql`
    select kind,
      count(*) filter (where status = 'pending' and available_at <= now())::text as ready,
      count(*) filter (where status = 'pending' and available_at > now() and attempts = 0)::text as delayed,
      count(*) filter (where status = 'pending' and available_at > now() and attempts > 0)::text as retrying,
      count(*) filter (where status = 'running')::text as running,
      count(*) filter (where status = 'dead')::text as dead,
      count(*) filter (where status = 'succeeded' and finished_at > now() - interval '1 hour')::text as succeeded_last_hour,
      (
        select count(*) from job_failures f where f.kind = j.kind and f.failed_at > now() - interval '1 hour'
      )::text as failed_last_hour
    from jobs j group by kind order by kind`;
  const columns = sql`kind, ready, delayed, retrying, running, dead, succeeded_last_hour, failed_last_hour`;
  assert.deepEqual(await sql`select ${columns} from job_stats()`, counted, `seed ${seed}`);
  assert.deepEqual(await sql`select ${columns} from job_health`, counted, `seed ${seed}`);
});

Deno.test("counts are exact to 10,000, and then 10000+", async (t) => {
  const add = (count: number, columns: string, values: string) =>
    db.sql.unsafe(
      `insert into jobs (kind, ${columns}) select 'test', ${values} from generate_series(1, ${count}) i`,
    );
  const counts: Record<string, [columns: string, values: string]> = {
    ready: ["priority", "i % 3"],
    delayed: ["available_at", "now() + interval '1 day'"],
    retrying: ["attempts, available_at", "1, now() + interval '1 day'"],
    running: ["status, lease_expires_at", "'running', now()"],
    dead: ["status, finished_at", "'dead', now()"],
    succeeded_last_hour: ["status, finished_at", "'succeeded', now()"],
  };
  for (const [count, [columns, values]] of Object.entries(counts)) {
    await t.step(count, async () => {
      await add(10_000, columns, values);
      assert.equal((await stats())[count], "10000");
      await add(1, columns, values);
      assert.equal((await stats())[count], "10000+");
    });
  }

  await t.step("failed_last_hour, of one job as of many", async () => {
    const id = await enqueue(db.sql, "failing");
    const fail = (from: number, to: number) =>
      db.sql`
        insert into job_failures (job_id, kind, attempt, lease_token, error)
        select ${id}, 'failing', i, i, 'x' from generate_series(${from}::int, ${to}::int) i`;
    await fail(1, 10_000);
    assert.equal((await stats("failing")).failed_last_hour, "10000");
    await fail(10_001, 10_001);
    assert.equal((await stats("failing")).failed_last_hour, "10000+");
  });

  await t.step("ready jobs with and without a concurrency key are counted together", async () => {
    await db.sql`
      insert into jobs (kind, concurrency_key)
      select 'keyed', case when i % 2 = 0 then 'a' end from generate_series(1, 10000) i`;
    assert.equal((await stats("keyed")).ready, "10000");
    await enqueue(db.sql, "keyed");
    assert.equal((await stats("keyed")).ready, "10000+");
  });

  await t.step("few beside many are exact", async () => {
    await db
      .sql`update jobs set kind = 'few' where id in (select id from jobs where status = 'pending' and attempts > 0 limit 7)`;
    await db
      .sql`update jobs set attempts = 0 where kind = 'few' and id in (select id from jobs where kind = 'few' limit 3)`;
    await db
      .sql`insert into jobs (kind, attempts, available_at) select 'few', 1, 'infinity' from generate_series(1, 20000)`;
    const { delayed, retrying } = await stats("few");
    assert.deepEqual([delayed, retrying], ["3", "10000+"]);
  });

  await t.step(
    "the oldest ready job counts, whatever its priority and however many are before it",
    async () => {
      await db
        .sql`insert into jobs (kind, priority, available_at) values ('test', -5, now() - interval '2 hours')`;
      assert.match((await stats()).oldest_ready_age, /^02:0/);
    },
  );
});

Deno.test("what succeeded and what failed in the last hour is counted: attempts, also of jobs that succeeded in the end", async () => {
  const first = await enqueueAndClaim(db.sql);
  await db.sql`select fail_job(${first.id}, ${first.lease_token}, 'x', retry_in => '0 s')`;
  const again = only(await claim(db.sql));
  await db.sql`select complete_job(${again.id}, ${again.lease_token})`;
  await addFinished(3, "succeeded", "59 minutes");
  await addFinished(3, "succeeded", "61 minutes");
  await addFinished(3, "dead", "1 minute");
  await db.sql`
    insert into job_failures (job_id, kind, attempt, lease_token, error, failed_at)
    select id, kind, 1, 1, 'x', finished_at from jobs where finished_at < now() - interval '1 hour'`;
  const { succeeded_last_hour, failed_last_hour, dead } = await stats();
  assert.deepEqual([succeeded_last_hour, failed_last_hour, dead], ["4", "1", "3"]);
});

Deno.test("run times are those of the newest thousand that succeeded", async () => {
  assert.equal((await stats()).median_run_time, null);
  await addFinished(3000, "succeeded", "2 hours", "1 hour");
  await addFinished(3000, "dead", "0 s", "1 hour");
  await db.sql`
    insert into jobs (kind, status, locked_at, finished_at)
    select 'test', 'succeeded', now() - i * interval '1 ms', now() from generate_series(1, 1000) i`;
  const { median_run_time, p95_run_time } = await stats();
  assert.deepEqual([median_run_time, p95_run_time], ["00:00:00.5005", "00:00:00.95005"]);
});

Deno.test("a kind is limited while jobs are due and its limits let none of them start", async (t) => {
  const settings = async (kind: string) => {
    const { paused, limited } = await stats(kind);
    return { paused, limited };
  };
  const free = { paused: false, limited: false };
  const held = { paused: false, limited: true };
  for (const limit of ["concurrency", "rate_limit", "key_concurrency"]) {
    await t.step(limit, async () => {
      await db.sql`insert into job_kinds ${db.sql({ kind: limit, [limit]: 1 })}`;
      const add = () => db.sql`insert into jobs (kind, concurrency_key) values (${limit}, 'a')`;
      await add();
      assert.deepEqual(await settings(limit), free);
      const { id, lease_token } = only(await claim(db.sql));
      assert.deepEqual(await settings(limit), free, "nothing is due");
      await add();
      assert.deepEqual(await settings(limit), held);
      await db.sql`select complete_job(${id}, ${lease_token})`;
      assert.deepEqual(await settings(limit), limit === "rate_limit" ? held : free);
      await db.sql`delete from jobs where kind = ${limit}`;
    });
  }
  await t.step("not while a job with another key, or with none, may start", async () => {
    await db.sql`insert into jobs (kind, concurrency_key) select 'keyed', 'a' from generate_series(1, 1000)`;
    assert.equal((await claim(db.sql)).length, 1);
    assert.deepEqual(await settings("keyed"), held);
    await db.sql`insert into jobs (kind, concurrency_key) values ('keyed', 'b')`;
    assert.deepEqual(await settings("keyed"), free);
    await db.sql`update jobs set concurrency_key = null where concurrency_key = 'b'`;
    assert.deepEqual(await settings("keyed"), free);
  });
  await t.step("paused is said apart", async () => {
    await db.sql`insert into job_kinds (kind, paused) values ('resting', true)`;
    await enqueue(db.sql, "resting");
    assert.deepEqual(await settings("resting"), { paused: true, limited: false });
  });
});

Deno.test("there is a row for each kind that has settings or jobs in any state, or for those that are asked for", async () => {
  await db.sql`insert into job_kinds (kind) values ('with_settings')`;
  await db.sql`
    insert into jobs (kind, status, concurrency_key, lease_expires_at, finished_at) values
      ('pending', 'pending', null, null, null), ('keyed', 'pending', 'a', null, null),
      ('running', 'running', null, now(), null), ('dead', 'dead', null, null, now()),
      ('cancelled', 'cancelled', null, null, now())`;
  const kinds = async (query: postgres.PendingQuery<postgres.Row[]>) => (await query).map(({ kind }) => kind);
  const all = ["cancelled", "dead", "keyed", "pending", "running", "with_settings"];
  assert.deepEqual(await kinds(db.sql`select * from job_stats()`), all);
  assert.deepEqual(await kinds(db.sql`select * from job_health`), all);
  assert.deepEqual(await kinds(db.sql`select * from job_stats('{pending,dead,pending,null}')`), [
    "dead",
    "pending",
  ]);
  assert.deepEqual(await kinds(db.sql`select * from job_stats('{}')`), []);
  const { ready, dead, limited } = await stats("never_heard_of");
  assert.deepEqual([ready, dead, limited], ["0", "0", false]);
});

Deno.test("it may be asked in a transaction that writes nothing, such as a GET over REST", async () => {
  await enqueue(db.sql);
  const rows = await db.sql.begin("read only", (tx) => tx`select ready from job_stats()`);
  assert.equal(only(rows).ready, "1");
});

Deno.test("what it reads does not grow with what there is", async () => {
  const fill = async () => {
    await db.sql`
      insert into jobs (kind, attempts, available_at)
      select 'test', i % 2, now() + (i % 3) * interval '1 hour' from generate_series(1, 35000) i`;
    await addFinished(12_000, "succeeded", "0 s");
    await addFinished(12_000, "dead", "0 s");
  };
  const sql = db.connect("postgres", { max: 1 }); // the first call of another reads the catalog
  const buffers = async () => {
    await db.sql`vacuum analyze jobs`;
    await cost(sql, "select * from job_stats()");
    return (await cost(sql, "select * from job_stats()")).buffers;
  };
  await fill();
  const few = await buffers();
  await fill();
  await fill();
  const many = await buffers();
  assert.ok(many < 1.5 * few, `${few} buffers, with three times as many jobs ${many}`);
});
