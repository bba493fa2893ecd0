import assert from "node:assert/strict";
import { createDatabase, until } from "../support.ts";
import { cost, endlessInterval, only, openTransaction, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

/** Jobs of one kind that ended that long ago, each with a failure. */
async function addFinished(
  kind: string,
  status: string,
  ago: string,
  count = 1,
  sql = db.sql,
): Promise<void> {
  await sql`
    with added as (
      insert into jobs (kind, status, finished_at)
      select ${kind}, ${status}, now() - ${ago}::interval from generate_series(1, ${count}::int) returning id
    )
    insert into job_failures (job_id, kind, attempt, lease_token, error) select id, ${kind}, 1, 1, 'x' from added`;
}

async function purge(maxJobs?: number): Promise<number> {
  const { deleted } = only(
    maxJobs === undefined
      ? await db.sql`select purge_jobs() as deleted`
      : await db.sql`select purge_jobs(${maxJobs}) as deleted`,
  );
  return deleted;
}

/** What is left: kind, status and, in days, how long ago it ended. */
async function left(): Promise<string[]> {
  const rows = await db.sql`
    select kind, status, round(extract(epoch from now() - finished_at) / 86400) as days from jobs
    where finished_at is not null order by kind, status, days`;
  return rows.map(({ kind, status, days }) => `${kind} ${status} ${days}`);
}

Deno.test("what has succeeded or was cancelled stays seven days, what died thirty, and their failures go with them", async () => {
  for (const status of ["succeeded", "dead", "cancelled"]) {
    for (const ago of ["1 day", "6 days 23 hours", "8 days", "29 days 23 hours", "31 days"]) {
      await addFinished("test", status, ago);
    }
  }
  await db.sql`
    insert into jobs (kind, status, created_at, available_at, lease_expires_at) values
      ('test', 'pending', now() - interval '1 year', now() - interval '1 year', null),
      ('test', 'running', now() - interval '1 year', now() - interval '1 year', now() - interval '1 year')`;
  assert.equal(await purge(), 7);
  assert.deepEqual(await left(), [
    "test cancelled 1",
    "test cancelled 7",
    "test dead 1",
    "test dead 7",
    "test dead 8",
    "test dead 30",
    "test succeeded 1",
    "test succeeded 7",
  ]);
  assert.equal((await db.sql`select from job_failures`).count, 8);
  assert.equal((await db.sql`select from jobs where finished_at is null`).count, 2);
  assert.equal(await purge(), 0);
});

Deno.test("each kind has its own times, from nothing to for ever, and those that it does not set are the default", async () => {
  await db.sql`
    insert into job_kinds (kind, keep_succeeded, keep_dead, keep_cancelled) values
      ('brief', '0', '1 hour', null), ('endless', ${await endlessInterval(
    db.sql,
  )}, '100000 years', '1 year')`;
  for (const kind of ["brief", "endless", "other"]) {
    for (const status of ["succeeded", "dead", "cancelled"]) {
      for (const ago of ["1 second", "8 days", "300 days", "2000 days"]) await addFinished(kind, status, ago);
    }
  }
  await purge();
  assert.deepEqual(await left(), [
    "brief cancelled 0",
    "brief dead 0",
    ...[0, 8, 300].map((days) => `endless cancelled ${days}`),
    ...[0, 8, 300, 2000].map((days) => `endless dead ${days}`),
    ...[0, 8, 300, 2000].map((days) => `endless succeeded ${days}`),
    "other cancelled 0",
    ...[0, 8].map((days) => `other dead ${days}`),
    "other succeeded 0",
  ]);
});

Deno.test("a call deletes no more than it is asked for, the oldest of a kind first", async () => {
  for (const kind of ["a", "b", "c"]) {
    for (const days of [8, 9, 10]) await addFinished(kind, "succeeded", `${days} days`, 2);
  }
  assert.equal(await purge(4), 4);
  assert.equal((await left()).length, 14);
  for (const kind of ["a", "b", "c"]) {
    const days = (await left()).filter((line) => line.startsWith(kind)).map((line) =>
      Number(line.split(" ")[2])
    );
    assert.deepEqual(days, [8, 8, 9, 9, 10, 10].slice(0, days.length));
  }
  assert.equal(await purge(0), 0);
  assert.equal(await purge(-1), 0);
  assert.equal(await purge(100), 14);
});

Deno.test("a kind with more than a call deletes does not keep the others from their turn", async () => {
  await addFinished("a", "succeeded", "8 days", 2000);
  await addFinished("b", "succeeded", "8 days", 10);
  await until("all of the other kind is gone", async () => {
    assert.ok(await purge(20) > 0);
    return !(await left()).some((line) => line.startsWith("b"));
  });
  assert.ok((await left()).length > 0, "before the first kind is");
});

Deno.test("a job that somebody keeps locked, or refers to in an open transaction, is left for the next time", async () => {
  await addFinished("test", "succeeded", "8 days", 5);
  const ids = (await db.sql`select id from jobs`).map(({ id }) => id);
  const holder = await openTransaction(db);
  await holder.sql`select from jobs where id = ${ids[0]} for no key update`;
  await holder.sql`
    insert into job_failures (job_id, kind, attempt, lease_token, error) values (${
    ids[1]
  }, 'test', 2, 2, 'x')`;
  assert.equal(await purge(), 3);
  await holder.sql`rollback`;
  assert.equal(await purge(), 2);
});

Deno.test("a job that is put back while it is being purged stays", async () => {
  await addFinished("test", "dead", "31 days", 3);
  const [{ id }] = await db.sql`select id from jobs limit 1`;
  const retrying = await openTransaction(db);
  assert.equal((await retrying.sql`select retry_jobs(${[id]})`).length, 1);
  assert.equal(await purge(), 2);
  await retrying.sql`commit`;
  assert.equal(await purge(), 0);
  assert.equal(only(await db.sql`select status from jobs`).status, "pending");
});

Deno.test("jobs that a table of the app refers to stop nobody else's, and the health names the table", async () => {
  await using db = await createDatabase();
  const { sql } = db;
  const item = async () =>
    only(await sql`select ok, detail, todo from job_dispatch_health() where item = 'purge'`);
  await sql`create table orders (id int primary key, job uuid references jobs)`;
  await addFinished("referred", "succeeded", "7 days 30 minutes", 3, sql);
  await addFinished("other", "succeeded", "8 days", 3, sql);
  await addFinished("referred", "dead", "31 days", 3, sql);
  await sql`insert into orders select 1, id from jobs where kind = 'referred' and status = 'succeeded' limit 1`;
  assert.match(
    (await item()).detail,
    /: (other \(succeeded\), referred \(dead\)|referred \(dead\), other \(succeeded\))$/,
  );
  assert.equal(only(await sql`select purge_jobs() as deleted`).deleted, 6);
  assert.deepEqual({ ...await item() }, { ok: true, detail: "none is late", todo: null });
  await sql`update jobs set finished_at = finished_at - interval '1 hour' where kind = 'referred'`;
  const { ok, detail, todo } = await item();
  assert.deepEqual([ok, detail], [false, "should be deleted since an hour or more: referred (succeeded)"]);
  assert.match(todo, /on delete cascade or set null: public.orders\./);

  await sql`alter table orders drop constraint orders_job_fkey, add foreign key (job) references jobs on delete set null`;
  assert.doesNotMatch((await item()).todo, /orders/);
  assert.equal(only(await sql`select purge_jobs() as deleted`).deleted, 3);
  assert.equal((await item()).ok, true);
});

Deno.test("a trigger of the app that raises, or a table that is locked, costs the tick a second at most", async () => {
  await using db = await createDatabase();
  const { sql } = db;
  await sql.unsafe(`
    create table notes (job uuid references jobs on delete cascade);
    create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not this one'; end $$;
    create trigger refuse before delete on jobs for each row when (old.kind = 'refused') execute function refuse();
  `).simple();
  for (const kind of ["a", "b", "c", "refused"]) await addFinished(kind, "succeeded", "8 days", 2, sql);
  const holder = await openTransaction(db);
  await holder.sql`lock table notes`;
  const started = performance.now();
  assert.equal(only(await sql`select purge_jobs() as deleted`).deleted, 0);
  assert.ok(performance.now() - started < 2_500);
  await holder.sql`rollback`;
  assert.equal(only(await sql`select purge_jobs() as deleted`).deleted, 6);
  assert.equal((await sql`select from jobs where kind = 'refused'`).count, 2);
});

Deno.test("starts that no rate can count any more go, those of a kind that is not claimed too", async () => {
  await db.sql`insert into job_kinds (kind) values ('test')`;
  await db.sql`
    insert into private.starts values ('test', now() - interval '32 days', 1), ('test', now() - interval '30 days', 1)`;
  await purge();
  assert.equal((await db.sql`select from private.starts`).count, 1);
});

Deno.test("the tick purges, also while it can start no worker, and then says so when nothing is left", async () => {
  await addFinished("test", "succeeded", "8 days");
  await db.sql`select private.tick()`;
  assert.deepEqual(await left(), []);
  await assert.rejects(db.sql`select private.tick()`, { code: "55000" });
});

Deno.test("with nothing to delete it reads a few pages for each kind, however many jobs there are", async () => {
  const sql = db.connect("postgres", { max: 1 }); // the first call of another reads the catalog
  const buffers = async () => {
    await db.sql`vacuum analyze jobs`;
    await cost(sql, "select purge_jobs()");
    return (await cost(sql, "select purge_jobs()")).buffers;
  };
  for (let i = 0; i < 20; i++) await addFinished(`kind_${i}`, "succeeded", "1 day");
  const few = await buffers();
  for (let i = 0; i < 20; i++) await addFinished(`kind_${i}`, "succeeded", "1 day", 1000);
  const many = await buffers();
  assert.ok(few < 20 * 40 && many < 2 * few, `${few} buffers, with a thousand times as many jobs ${many}`);
});
