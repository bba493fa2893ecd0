import assert from "node:assert/strict";
import postgres from "postgres";
import { createDatabase, until } from "../support.ts";
import { claim, cost, only, openTransaction, setUpDispatch, sharedDatabase, untilBlocking } from "./queue.ts";
import { addSchedules, makeDue, schedule } from "./schedules.ts";

const db = sharedDatabase();

const enqueueDue = async (sql: postgres.Sql) =>
  only(await sql<{ n: number }[]>`select enqueue_due_schedules() as n`).n;

/** Schedules of every hour that have been due for a minute. */
const addDue = (count: number, more = "") =>
  db.sql.unsafe(`
    insert into schedules (name, cron, kind, next_run ${more && ", overlap"})
    select 's' || n, '@hourly', 'test', clock_timestamp() - interval '1 minute' ${more}
    from generate_series(1, ${count}) n`);

/** How many jobs each schedule has that has any, and how many schedules are due. */
async function outcome(sql: postgres.Sql): Promise<{ jobs: number; schedules: number; due: number }> {
  const { jobs, schedules } = only(
    await sql`select count(*)::int as jobs, count(distinct schedule)::int as schedules from jobs`,
  );
  const { due } = only(
    await sql`select count(*)::int as due from schedules where not paused and next_run < clock_timestamp()`,
  );
  return { jobs, schedules, due };
}

Deno.test("a due run becomes a job that knows its schedule and when it was due, and is over", async () => {
  await db.sql`
    select schedule_job('s', '0 9 * * *', 'test', '{"n": 1}', 'Asia/Tokyo', context => '{"user_id": "u"}', priority => 5,
      max_attempts => 3)`;
  assert.equal(await enqueueDue(db.sql), 0);
  const due = await makeDue(db.sql, "s");
  assert.equal(await enqueueDue(db.sql), 1);
  assert.equal(await enqueueDue(db.sql), 0);
  const made = only(await db.sql`select * from jobs`);
  assert.deepEqual(
    [made.kind, made.payload, made.context, made.priority, made.max_attempts, made.schedule, made.due_at],
    ["test", { n: 1 }, { user_id: "u" }, 5, 3, "s", due],
  );
  const { next_run, last_run, last_job_id } = await schedule(db.sql, "s");
  assert.deepEqual([last_run, last_job_id], [due, made.id]);
  const { expected } = only(await db.sql`select next_cron_run('0 9 * * *', 'Asia/Tokyo') as expected`);
  assert.deepEqual(next_run, expected);
  const claimed = only(await db.sql`select * from claim_jobs('w')`);
  assert.deepEqual([claimed.schedule, claimed.due_at], ["s", due]);
});

Deno.test("an hour missed is one run, due at the first that was missed", async () => {
  await db.sql`select schedule_job('s', '* * * * *', 'test')`;
  const due = await makeDue(db.sql, "s", "1 hour");
  assert.equal(await enqueueDue(db.sql), 1);
  assert.deepEqual(only(await db.sql`select due_at from jobs`).due_at, due);
  const { next_run } = await schedule(db.sql, "s");
  assert.ok(next_run > new Date() && next_run.getTime() <= Date.now() + 60_000);
});

Deno.test("an interval goes on from when it was due, whatever was missed and whatever the session's zone", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await sql`set timezone = 'America/New_York'`;
  for (const [cron, seconds] of [["45 seconds", 45], ["7 hours", 25_200], ["3 days", 259_200]] as const) {
    for (const ago of ["1 second", "1 hour", "200 days", "200 years"]) {
      await sql`select schedule_job('s', ${cron}, 'test')`;
      await sql`update schedules set next_run = clock_timestamp() - ${ago}::interval where name = 's'`;
      assert.equal(await enqueueDue(sql), 1);
      const { phase, ahead } = only(
        await sql`
          select mod(extract(epoch from s.next_run) - extract(epoch from j.due_at), ${seconds})::float as phase,
            extract(epoch from s.next_run - clock_timestamp())::float as ahead
          from schedules s join jobs j on j.id = s.last_job_id`,
      );
      assert.equal(phase, 0, `${cron}, ${ago} ago`);
      assert.ok(ahead > -1 && ahead <= seconds, `${cron}, ${ago} ago: ${ahead}`);
    }
  }
});

Deno.test("with overlap skip a run is left out while the job of the one before waits or runs", async () => {
  await db.sql`select schedule_job('s', '@hourly', 'test', overlap => 'skip')`;
  const first = await makeDue(db.sql, "s");
  assert.equal(await enqueueDue(db.sql), 1);
  const { last_job_id } = await schedule(db.sql, "s");
  const leftOut = async () => {
    await makeDue(db.sql, "s");
    assert.equal(await enqueueDue(db.sql), 0);
    const row = await schedule(db.sql, "s");
    assert.deepEqual([row.last_run, row.last_job_id], [first, last_job_id]);
    assert.ok(row.next_run > new Date());
  };
  await leftOut();
  const { lease_token } = only(await claim(db.sql));
  await leftOut();
  await db.sql`select fail_job(${last_job_id}, ${lease_token}, 'x')`; // it waits for its retry
  await leftOut();
  for (const ended of ["cancelled", "deleted"]) {
    const last = (await schedule(db.sql, "s")).last_job_id;
    if (ended === "cancelled") await db.sql`select cancel_jobs(array[${last}::uuid])`;
    else await db.sql`delete from jobs where id = ${last}`;
    await makeDue(db.sql, "s");
    assert.equal(await enqueueDue(db.sql), 1, ended);
  }
  await db.sql`update schedules set overlap = 'allow' where name = 's'`;
  await makeDue(db.sql, "s");
  assert.equal(await enqueueDue(db.sql), 1);
});

Deno.test("16 who call at once over 1,000 due schedules enqueue 1,000 jobs, one each", async () => {
  await addDue(1000);
  const clients = Array.from({ length: 16 }, () => db.connect("postgres", { max: 1 }));
  await Promise.all(clients.map((sql) => sql`select 1`));
  const counts = await Promise.all(clients.map(enqueueDue));
  assert.equal(counts.reduce((a, b) => a + b), 1000);
  assert.deepEqual(await outcome(db.sql), { jobs: 1000, schedules: 1000, due: 0 });
});

Deno.test("who is killed or rolls back leaves the runs to the others, and none is enqueued twice", async () => {
  await addDue(300);
  const killed = await openTransaction(db);
  const undone = await openTransaction(db);
  await makeDue(db.sql, "s1", "2 minutes");
  // The first takes what there is; the second finds nothing, but what comes then.
  assert.equal(await enqueueDue(killed.sql), 300);
  assert.equal(await enqueueDue(undone.sql), 0);
  await addSchedules(db.sql, ["t"]);
  await makeDue(db.sql, "t");
  assert.equal(await enqueueDue(undone.sql), 1);
  assert.equal(await enqueueDue(db.sql), 0, "they are locked, and nobody waits");
  await db.sql`select pg_terminate_backend(${killed.pid})`;
  await undone.sql`rollback`;
  const total = await until("300 and one", async () => {
    await enqueueDue(db.sql);
    const { jobs } = await outcome(db.sql);
    return jobs === 301;
  });
  assert.ok(total);
  assert.deepEqual(await outcome(db.sql), { jobs: 301, schedules: 301, due: 0 });
});

Deno.test("beside those who schedule, pause, resume and unschedule the same names, each run is enqueued once", async () => {
  const seed = Math.floor(Math.random() * 1e9);
  console.log(`seed ${seed}`);
  const names = Array.from({ length: 40 }, (_, n) => `s${n}`);
  await addSchedules(db.sql, names);
  // Every move of a next run into the past is noted; a run is told by when it was due.
  await db
    .sql`create table runs (name text, due timestamptz default clock_timestamp() - interval '1 minute')`;
  let stop = false;
  const due = async (sql: postgres.Sql) => {
    while (!stop) {
      await sql`
        with picked as (select name from schedules where next_run > clock_timestamp() order by random() limit 20 for update skip locked),
        noted as (insert into runs (name) select name from picked returning *)
        update schedules s set next_run = n.due from noted n where s.name = n.name`;
    }
  };
  const calls = [
    "schedule_job(name, '@hourly', 'test')",
    "pause_schedule(name)",
    "resume_schedule(name)",
    "unschedule_job(name)",
  ];
  const disturb = async (sql: postgres.Sql, nth: number) => {
    for (let i = 0; !stop; i++) {
      const name = names[(seed + i * 7 + nth * 13) % names.length] ?? "";
      const call = calls[(seed + i + nth) % calls.length] ?? "";
      await sql.unsafe(`select ${call} from (select '${name}' as name) n`);
    }
  };
  const enqueuer = async (sql: postgres.Sql) => {
    while (!stop) await enqueueDue(sql);
  };
  const connect = () => db.connect("postgres", { max: 1 });
  const all = [
    ...Array.from({ length: 8 }, () => enqueuer(connect())),
    ...Array.from({ length: 4 }, (_, n) => disturb(connect(), n)),
    ...Array.from({ length: 2 }, () => due(connect())),
  ];
  setTimeout(() => stop = true, 700);
  await Promise.all(all);
  const { jobs, twice, unknown } = only(
    await db.sql`
      select count(*)::int as jobs, count(*)::int - count(distinct (schedule, due_at))::int as twice,
        (count(*) filter (where not exists (select from runs r where r.name = j.schedule and r.due = j.due_at)))::int as unknown
      from jobs j`,
  );
  await db.sql`drop table runs`;
  assert.ok(jobs > 50, `${jobs} jobs`);
  assert.deepEqual({ twice, unknown }, { twice: 0, unknown: 0 });
});

Deno.test("a pause or a change waits for a call that has the schedule, and the next run stands", async () => {
  await addDue(1);
  const caller = await openTransaction(db);
  assert.equal(await enqueueDue(caller.sql), 1);
  const changed = db.sql`select schedule_job('s1', '@hourly', 'other') as next`;
  const change = changed.execute();
  await untilBlocking(db, caller.pid);
  await caller.sql`commit`;
  assert.ok(only(await change).next > new Date(), "not the run that has been enqueued");
  assert.equal(await enqueueDue(db.sql), 0);
});

Deno.test("what fails stops no other: it says why, and goes on with its next run", async () => {
  await using db = await createDatabase();
  await addSchedules(db.sql, ["bad", "gone", "good 1", "good 2"]);
  await db.sql`update schedules set next_run = clock_timestamp() - interval '1 minute' where true`;
  await db.sql`update schedules set payload = '{"bad": true}' where name = 'bad'`;
  await db.sql`update schedules set time_zone = 'Atlantis/Capital', cron = '0 9 * * *' where name = 'gone'`;
  await db.sql.unsafe(`
    create function public.refuse() returns trigger language plpgsql as $$
    begin
      assert not new.payload ? 'bad', 'the app has had enough';
      return new;
    end $$;
    create trigger refuse before insert on jobs for each row execute function public.refuse()`).simple();
  const warnings: string[] = [];
  const sql = db.connect("postgres", { max: 1, onnotice: ({ message }) => warnings.push(message ?? "") });
  const { enqueued, failed } = only(await sql`select enqueue_due_schedules_as_json() as answer`).answer;
  assert.equal(enqueued, 3);
  const why = new Map(failed.map(({ schedule, error }: Record<string, string>) => [schedule, error]));
  assert.deepEqual([...why.keys()].sort(), ["bad", "gone"]);
  assert.equal(why.get("bad"), "the app has had enough");
  assert.deepEqual((await db.sql`select schedule from jobs order by 1`).map(({ schedule }) => schedule), [
    "gone",
    "good 1",
    "good 2",
  ]);
  const bad = await schedule(db.sql, "bad");
  assert.deepEqual([bad.last_error, bad.paused, bad.last_job_id], ["the app has had enough", false, null]);
  assert.ok(bad.next_run > new Date());
  const gone = await schedule(db.sql, "gone");
  assert.equal(gone.paused, true);
  assert.match(gone.last_error, /^paused, since there is no next run: .*Atlantis/);
  const named = new Set(warnings.map((each) => each.replace(/(?<=schedule bad|Capital).*/, "")));
  assert.deepEqual([...named].sort(), [
    "enqueue_due_schedules: schedule bad",
    "enqueue_due_schedules: schedules with cron '0 9 * * *' in Atlantis/Capital",
  ]);

  // What ends it: the next run that can be enqueued, or a schedule that is usable.
  await db.sql`drop trigger refuse on jobs`;
  await makeDue(db.sql, "bad");
  assert.equal(await enqueueDue(db.sql), 1);
  assert.equal((await schedule(db.sql, "bad")).last_error, null);
  await assert.rejects(db.sql`select resume_schedule('gone')`, { code: "22023", message: /Atlantis/ });
  await db.sql`select schedule_job('gone', '0 9 * * *', 'test', time_zone => 'Europe/Berlin')`;
  const { paused, last_error, next_run } = await schedule(db.sql, "gone");
  assert.deepEqual([paused, last_error], [false, null]);
  assert.ok(next_run > new Date());
});

Deno.test("a trigger on jobs may remove the schedule whose run it sees, and the run stands", async () => {
  await using db = await createDatabase();
  await addSchedules(db.sql, ["once"]);
  await makeDue(db.sql, "once");
  await db.sql.unsafe(`
    create function public.once() returns trigger language plpgsql as $$
    begin
      perform public.unschedule_job(new.schedule);
      return new;
    end $$;
    create trigger once before insert on jobs for each row execute function public.once()`).simple();
  assert.equal(await enqueueDue(db.sql), 1);
  assert.deepEqual(await outcome(db.sql), { jobs: 1, schedules: 1, due: 0 });
  assert.equal((await db.sql`select from schedules`).count, 0);
});

Deno.test("with a slow trigger on jobs a call gets through a part, within the time that REST has", async () => {
  await using db = await createDatabase();
  await addSchedules(db.sql, Array.from({ length: 100 }, (_, n) => `s${n}`));
  await db.sql`update schedules set next_run = clock_timestamp() - interval '1 minute' where true`;
  await db.sql.unsafe(`
    create function public.dawdle() returns trigger language plpgsql as $$
    begin
      perform pg_sleep(1);
      return new;
    end $$;
    create trigger dawdle before insert on jobs for each row execute function public.dawdle()`).simple();
  const sql = db.connect("postgres", { max: 1 });
  await sql`set statement_timeout = '8s'`;
  assert.ok(await enqueueDue(sql) >= 1);
});

/** A database of its own with three schedules due, in which a trigger of the app's does something at that of `bad`. */
async function withTrigger(trigger: string, body: string) {
  const db = await createDatabase();
  await addSchedules(db.sql, ["a", "bad", "z"]);
  await db.sql`update schedules set next_run = clock_timestamp() - interval '1 minute' where true`;
  await db.sql.unsafe(`
    create function public.app() returns trigger language plpgsql as $$ begin ${body} return new; end $$;
    create ${trigger} for each row execute function public.app()`).simple();
  return db;
}

Deno.test("a deferred trigger that raises stops no other, in enqueue_due_schedules, rescue_expired_jobs and purge_jobs", async () => {
  await using db = await withTrigger(
    "constraint trigger app after insert or update or delete on jobs deferrable initially deferred",
    "if (coalesce(new, old)).schedule = 'bad' then raise exception 'not now'; end if;",
  );
  assert.equal(await enqueueDue(db.sql), 2);
  assert.equal((await schedule(db.sql, "bad")).last_error, "not now");
  // The same of a job that is there, when it is rescued and when it is purged.
  await db.sql`alter table jobs disable trigger app`;
  await db.sql`insert into jobs (kind, schedule) values ('test', 'bad')`;
  await db.sql`select from claim_jobs('gone')`;
  await db
    .sql`update jobs set lease_expires_at = clock_timestamp() - interval '1 second' where status = 'running'`;
  await db.sql`alter table jobs enable trigger app`;
  assert.equal(only(await db.sql`select rescue_expired_jobs() as n`).n, 2);
  await db.sql`alter table jobs disable trigger app`;
  await db.sql`
    update jobs set status = 'succeeded', finished_at = clock_timestamp() - interval '1 year', lease_expires_at = null,
      kind = case when schedule = 'bad' then 'other' else kind end
    where true`;
  await db.sql`alter table jobs enable trigger app`;
  assert.equal(only(await db.sql`select purge_jobs() as n`).n, 2);
});

Deno.test("a trigger that takes longer than a statement may costs its own schedule that run, and what is done by then is kept", async () => {
  await using db = await withTrigger(
    "trigger app before insert on jobs",
    "if new.schedule = 'bad' then perform pg_sleep(60); end if;",
  );
  const sql = db.connect("postgres", { max: 1 });
  await sql`set statement_timeout = '1200ms'`;
  const errors = [];
  for (let calls = 0; (await outcome(db.sql)).due > 0; calls++) {
    assert.ok(calls < 5, "each call gets on");
    errors.push(
      ...only(await sql`select enqueue_due_schedules_as_json() as answer`).answer.failed,
    );
  }
  const error = "canceling statement due to statement timeout";
  assert.deepEqual(errors, [{ schedule: "bad", error }]);
  assert.deepEqual(await outcome(db.sql), { jobs: 2, schedules: 2, due: 0 });
  // But whoever cancels it has it canceled.
  await makeDue(db.sql, "bad");
  const { pid } = only(await sql`select pg_backend_pid() as pid`);
  const canceled = assert.rejects(sql`select enqueue_due_schedules()`, { code: "57014" });
  await until("it to sleep", async () => {
    const { count } = await db
      .sql`select from pg_stat_activity where pid = ${pid} and wait_event = 'PgSleep'`;
    return count === 1;
  });
  await db.sql`select pg_cancel_backend(${pid})`;
  await canceled;
  assert.equal((await outcome(db.sql)).due, 1);
});

Deno.test("a schedule that cannot even be moved on stays due, and stops no other", async () => {
  await using db = await withTrigger(
    "trigger app before update on schedules",
    "if new.name = 'bad' then raise exception 'not this one'; end if;",
  );
  const { enqueued, failed } = only(
    await db.sql`select enqueue_due_schedules_as_json() as answer`,
  ).answer;
  assert.deepEqual([enqueued, failed], [2, [{ schedule: "bad", error: "not this one" }]]);
  assert.deepEqual(await outcome(db.sql), { jobs: 2, schedules: 2, due: 1 });
});

Deno.test("a run that meets a lock stays due for the next call, and holds the others up for a second", async () => {
  await using db = await createDatabase();
  await addSchedules(db.sql, ["a", "locked", "z"]);
  await db.sql`update schedules set next_run = clock_timestamp() - interval '1 minute' where true`;
  await db.sql.unsafe(`
    create table public.counters (name text primary key, n int);
    insert into public.counters select name, 0 from schedules;
    create function public.count_job() returns trigger language plpgsql as $$
    begin
      update public.counters c set n = n + 1 where c.name = new.schedule;
      return new;
    end $$;
    create trigger count_job before insert on jobs for each row execute function public.count_job()`)
    .simple();
  const holder = await openTransaction(db);
  await holder.sql`select from counters where name = 'locked' for update`;
  assert.equal(await enqueueDue(db.sql), 2);
  await holder.sql`rollback`;
  assert.deepEqual((await schedule(db.sql, "locked")).last_error, null);
  assert.equal(await enqueueDue(db.sql), 1);
});

Deno.test("its cost is that of what is due, among 100,000 schedules", async () => {
  await using db = await createDatabase();
  await db.sql`
    insert into schedules (name, cron, kind, next_run)
    select 's' || n, '@hourly', 'test', clock_timestamp() + interval '1 hour' from generate_series(1, 100000) n`;
  const sql = db.connect("postgres", { max: 1 });
  const run = async (due: number) => {
    await sql`update schedules set next_run = clock_timestamp() - interval '1 second' where name in (
      select 's' || n * 900 from generate_series(1, ${due}::int) n)`;
    return (await cost(sql, "select enqueue_due_schedules()")).buffers;
  };
  await run(1);
  const [none, hundred] = [await run(0), await run(100)];
  assert.ok(none < 30, `${none} buffers to find nothing`);
  await setUpDispatch(db);
  await cost(sql, "select private.tick()"); // what is cached once per session is read here
  const { buffers } = await cost(sql, "select private.tick()");
  assert.ok(buffers < 300, `${buffers} buffers for a tick that finds nothing`);
  assert.ok(hundred < 100 * 60, `${hundred} buffers for 100 runs`);
  await sql`analyze schedules`;
  await sql`discard plans`;
  assert.ok((await run(100)) < 100 * 60);
});

Deno.test("a batch is one statement, and grows as long as it is quick", async () => {
  await addDue(500);
  await db.sql`select disable_dispatch()`;
  await db.sql`create table statements (n bigint)`;
  await db.sql.unsafe(`
    create function public.count_statement() returns trigger language plpgsql as $$
    begin insert into public.statements select count(*) from inserted; return null; end $$;
    create trigger count_statement after insert on jobs referencing new table as inserted
      for each statement execute function public.count_statement()`).simple();
  try {
    assert.equal(await enqueueDue(db.sql), 500);
    const batches = (await db.sql`select n from statements`).map(({ n }) => Number(n));
    assert.equal(batches[0], 1);
    assert.ok(Math.max(...batches) >= 10 && Math.max(...batches) <= 100, batches.join(" "));
  } finally {
    await db.sql`drop trigger count_statement on jobs`;
    await db.sql`drop table statements`;
    await db.sql`drop function count_statement`;
  }
});
