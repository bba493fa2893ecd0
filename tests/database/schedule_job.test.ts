import assert from "node:assert/strict";
import postgres from "postgres";
import { cost, job, only, openTransaction, sharedDatabase, untilBlocking } from "./queue.ts";
import { addSchedules, allSchedules, makeDue, schedule } from "./schedules.ts";

const db = sharedDatabase();

const scheduleJob = async (sql: postgres.Sql, args: string) =>
  only(await sql.unsafe<{ next: Date }[]>(`select schedule_job(${args}) as next`)).next;

Deno.test("a schedule is all that is given, and its next run is returned", async () => {
  const next = await scheduleJob(
    db.sql,
    `'report', '0 9 * * *', 'send_email', '{"to": "a"}', 'Europe/Berlin', null, 'acme', '{"user_id": "u"}', 5, 3, 'skip'`,
  );
  const { created_at, updated_at, ...rest } = await schedule(db.sql, "report");
  assert.ok(created_at && updated_at);
  assert.deepEqual(rest, {
    name: "report",
    cron: "0 9 * * *",
    time_zone: "Europe/Berlin",
    kind: "send_email",
    payload: { to: "a" },
    priority: 5,
    max_attempts: 3,
    context: { user_id: "u" },
    overlap: "skip",
    tenant: "acme",
    paused: false,
    next_run: next,
    last_run: null,
    last_job_id: null,
    last_error: null,
  });
  const { local } = only(
    await db.sql`select to_char(${next}::timestamptz at time zone 'Europe/Berlin', 'HH24:MI') as local`,
  );
  assert.equal(local, "09:00");
  assert.ok(next > new Date());
});

Deno.test("what is left out has its default", async () => {
  await scheduleJob(db.sql, "'tidy', '@hourly', 'tidy'");
  const { time_zone, payload, priority, max_attempts, context, overlap, tenant } = await schedule(
    db.sql,
    "tidy",
  );
  assert.deepEqual({ time_zone, payload, priority, max_attempts, context, overlap, tenant }, {
    time_zone: "UTC",
    payload: {},
    priority: 0,
    max_attempts: null,
    context: null,
    overlap: "allow",
    tenant: null,
  });
});

Deno.test("the same cron and zone keep the next run, others make a new one, and a given one is taken", async () => {
  const given = new Date("2040-01-01T00:00:00Z");
  const first = await scheduleJob(db.sql, `'a', '@hourly', 'test', next_run => '2040-01-01'`);
  assert.deepEqual(first, given);
  const same = await scheduleJob(db.sql, `'a', '@hourly', 'other', '{"n": 1}', priority => 1`);
  assert.deepEqual(same, given);
  const { kind, payload, priority } = await schedule(db.sql, "a");
  assert.deepEqual([kind, payload, priority], ["other", { n: 1 }, 1]);
  assert.ok(await scheduleJob(db.sql, `'a', '0 9 * * *', 'test'`) < given);
  await db.sql`update schedules set next_run = ${given} where name = 'a'`;
  assert.ok(await scheduleJob(db.sql, `'a', '0 9 * * *', 'test', time_zone => 'Asia/Tokyo'`) < given);
  const past = await scheduleJob(
    db.sql,
    `'a', '0 9 * * *', 'test', time_zone => 'Asia/Tokyo', next_run => '2020-01-01'`,
  );
  assert.deepEqual(past, new Date("2020-01-01T00:00:00Z"));
});

const refusals: [args: string, message: RegExp][] = [
  ["null, '@hourly', 'test'", /^schedule_job: name null does not have 1 to 200 characters/],
  ["'', '@hourly', 'test'", /^schedule_job: name '' does not have/],
  ["repeat('a', 201), '@hourly', 'test'", /^schedule_job: name 'a+' does not have/],
  [String.raw`E'a\nb', '@hourly', 'test'`, /none of them a control character/],
  ["'a', 'each hour', 'test'", /^schedule_job: 'each hour' does not have 5 fields/],
  ["'a', '61 * * * *', 'test'", /^schedule_job: minute: 61 is not within 0-59/],
  ["'a', null, 'test'", /^schedule_job: cron is null/],
  ["'a', '@hourly', 'test', time_zone => 'Nowhere'", /^schedule_job: .*Nowhere/],
  ["'a', '@hourly', 'Test'", /^schedule_job: kind 'Test' is not a kind's name/],
  ["'a', '@hourly', null", /^schedule_job: kind null/],
  ["'a', '@hourly', 'test', null", /^schedule_job: payload is null/],
  ["'a', '@hourly', 'test', priority => 101", /^schedule_job: priority 101 is not between -100 and 100/],
  ["'a', '@hourly', 'test', priority => null", /^schedule_job: priority null/],
  ["'a', '@hourly', 'test', max_attempts => 0", /^schedule_job: max_attempts 0 is not between 1 and 1000/],
  ["'a', '@hourly', 'test', overlap => 'wait'", /^schedule_job: overlap 'wait' is not allow or skip/],
  ["'a', '@hourly', 'test', overlap => null", /^schedule_job: overlap null is not/],
  ["'a', '@hourly', 'test', tenant => ''", /^schedule_job: tenant does not have 1 to 512 bytes/],
  ["'a', '@hourly', 'test', tenant => repeat('ä', 257)", /^schedule_job: tenant/],
  ["'a', '@hourly', 'test', next_run => 'infinity'", /^schedule_job: next_run is infinity/],
  ["'a', '@hourly', 'test', next_run => '4713-01-01 BC'", /^schedule_job: next_run is 4713.* BC/],
  ["'a', '@hourly', 'test', to_jsonb(repeat('x', 4000000))", /^schedule_job: payload or context has more/],
  ["'a', '@hourly', 'test', context => to_jsonb(repeat('x', 4000000))", /payload or context has more/],
];

Deno.test("what is not usable is named, and nothing is written", async () => {
  for (const [args, message] of refusals) {
    await assert.rejects(scheduleJob(db.sql, args), { code: "22023", message }, args);
  }
  assert.deepEqual(await allSchedules(db.sql), []);
});

Deno.test("the user of the request is the context, unless one is given", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await sql`select set_config('request.jwt.claims', '{"sub": "u1", "tenant_id": "t1", "exp": 1}', false)`;
  await scheduleJob(sql, "'a', '@hourly', 'test'");
  assert.deepEqual((await schedule(sql, "a")).context, {
    user_id: "u1",
    tenant_id: "t1",
    claims: { sub: "u1", tenant_id: "t1" },
  });
  await scheduleJob(sql, `'a', '@hourly', 'test', context => '{"by": "me"}'`);
  assert.deepEqual((await schedule(sql, "a")).context, { by: "me" });
});

Deno.test("a run has its schedule's context, or none, and not that of whose request enqueues it", async () => {
  await addSchedules(db.sql, ["a", "b"]);
  await db.sql`update schedules set context = '{"by": "me"}' where name = 'b'`;
  await db.sql`update schedules set next_run = clock_timestamp() where true`;
  const sql = db.connect("postgres", { max: 1 });
  await sql`select set_config('request.jwt.claims', '{"sub": "u1"}', false)`;
  const { n, claims } = only(
    await sql`select enqueue_due_schedules() as n, current_setting('request.jwt.claims') as claims`,
  );
  assert.deepEqual([n, claims], [2, '{"sub": "u1"}']);
  const runs = await db.sql`select context from jobs order by schedule`;
  assert.deepEqual(runs.map(({ context }) => context), [null, { by: "me" }]);
});

Deno.test("unschedule_job deletes one and says whether it was there", async () => {
  await addSchedules(db.sql, ["a", "b"]);
  assert.equal(only(await db.sql`select unschedule_job('a') as was`).was, true);
  assert.equal(only(await db.sql`select unschedule_job('a') as was`).was, false);
  assert.deepEqual(await allSchedules(db.sql), ["b"]);
});

Deno.test("unschedule_jobs deletes by prefix, letter by letter, by tenant or by both, and never all", async () => {
  await addSchedules(db.sql, ["a%1", "a_2", "ab3", "b"]);
  await db.sql`update schedules set tenant = 't' where name in ('ab3', 'b')`;
  for (const args of ["", "''", "null", "null, null", "'', ''", "'a', ''"]) {
    await assert.rejects(db.sql.unsafe(`select unschedule_jobs(${args})`), {
      code: "22023",
      message: args.endsWith(", ''") ? /tenant is empty/ : /neither prefix nor tenant/,
    });
  }
  const unschedule = async (args: string) =>
    only(await db.sql.unsafe(`select unschedule_jobs(${args}) as n`)).n;
  assert.equal(await unschedule("'a_'"), 1);
  assert.equal(await unschedule("'a%'"), 1);
  assert.deepEqual(await allSchedules(db.sql), ["ab3", "b"]);
  assert.equal(await unschedule("'b', 'other'"), 0);
  assert.equal(await unschedule("'b', 't'"), 1);
  assert.equal(await unschedule("tenant => 't'"), 1);
  assert.deepEqual(await allSchedules(db.sql), []);
});

Deno.test("a paused schedule does not run; resumed, it runs from now on and makes up for nothing", async () => {
  await addSchedules(db.sql, ["a"]);
  const pause = async (name: string) => only(await db.sql`select pause_schedule(${name}) as was`).was;
  const resume = async (name: string) => only(await db.sql`select resume_schedule(${name}) as next`).next;
  assert.deepEqual([await pause("b"), await resume("b")], [false, null]);
  assert.equal(await pause("a"), true);
  await makeDue(db.sql, "a");
  assert.equal(only(await db.sql`select enqueue_due_schedules() as n`).n, 0);
  await scheduleJob(db.sql, "'a', '@hourly', 'test'");
  assert.equal((await schedule(db.sql, "a")).paused, true, "a schedule that is put anew stays paused");

  assert.ok(await resume("a") > new Date());
  assert.equal((await schedule(db.sql, "a")).paused, false);
  assert.equal(only(await db.sql`select enqueue_due_schedules() as n`).n, 0);
  // One that is not paused keeps the run that is due.
  const due = await makeDue(db.sql, "a");
  assert.deepEqual(await resume("a"), due);
  // And one that was paused for a moment keeps its next run.
  await db.sql`update schedules set next_run = '2040-01-01' where name = 'a'`;
  await pause("a");
  assert.deepEqual(await resume("a"), new Date("2040-01-01T00:00:00Z"));
});

Deno.test("list_schedules gives them by name, with their last run and its job, page by page", async () => {
  await addSchedules(db.sql, ["a%", "a1", "a2", "b"]);
  await db.sql`update schedules set tenant = 't' where name in ('a2', 'b')`;
  const list = async (args: string) =>
    (await db.sql.unsafe(`select * from list_schedules(${args})`)).map(({ name }) => name);
  assert.deepEqual(await list(""), ["a%", "a1", "a2", "b"]);
  assert.deepEqual(await list("'a'"), ["a%", "a1", "a2"]);
  assert.deepEqual(await list("'a%'"), ["a%"]);
  assert.deepEqual(await list("tenant => 't'"), ["a2", "b"]);
  assert.deepEqual(await list("'a', 't'"), ["a2"]);
  assert.deepEqual(await list("max_rows => 2"), ["a%", "a1"]);
  assert.deepEqual(await list("max_rows => 2, after => 'a1'"), ["a2", "b"]);
  await assert.rejects(list("tenant => ''"), { code: "22023", message: /tenant is empty/ });
  for (const n of ["0", "1001", "null"]) {
    await assert.rejects(list(`max_rows => ${n}`), { code: "22023", message: /max_rows/ });
  }

  const due = await makeDue(db.sql, "b");
  await db.sql`select enqueue_due_schedules()`;
  const last = async () => only(await db.sql`select * from list_schedules('b')`);
  const { last_run, last_job_id, last_status, next_run } = await last();
  assert.deepEqual([last_run, last_status], [due, "pending"]);
  assert.deepEqual((await job(db.sql, last_job_id)).schedule, "b");
  assert.ok(next_run > new Date());
  await db.sql`delete from jobs where id = ${last_job_id}`;
  assert.deepEqual([(await last()).last_job_id, (await last()).last_status], [last_job_id, null]);
});

Deno.test("a page of a tenant's or of a prefix costs what it shows, among 10,000 schedules of others", async () => {
  await db.sql`
    insert into schedules (name, cron, kind, next_run, tenant)
    select 'n' || n, '@hourly', 'test', '2040-01-01', 't' || n % 1000 from generate_series(1, 10000) n`;
  await db.sql`analyze schedules`;
  for (const args of ["'n77'", "tenant => 't7'", "'n1', 't7'", "max_rows => 20, after => 'n5'"]) {
    const sql = db.connect("postgres", { max: 1 });
    await cost(sql, `select * from list_schedules(${args})`); // what is cached once per session is read here
    const { rows, buffers } = await cost(sql, `select * from list_schedules(${args})`);
    assert.ok(rows > 0 && buffers < 20 + 5 * rows, `${args}: ${buffers} buffers for ${rows} rows`);
  }
  // Deleting reads its own, too.
  const sql = db.connect("postgres", { max: 1 });
  await sql`select unschedule_jobs('n9998')`;
  assert.ok((await cost(sql, "select unschedule_jobs('n9997')")).buffers < 200);
});

Deno.test("a user's own reminders keep their schedules in step by a trigger, though the user may touch no schedule", async () => {
  await db.sql.unsafe(`
    create table public.reminders (
      id uuid primary key default gen_random_uuid(), owner uuid not null default auth.uid(),
      cron text not null, time_zone text not null, message text not null
    );
    alter table public.reminders enable row level security;
    grant select, insert, update, delete on public.reminders to authenticated;
    create policy own on public.reminders to authenticated using (owner = auth.uid()) with check (owner = auth.uid());
    create function public.schedule_reminder() returns trigger
    language plpgsql security definer set search_path = '' as $$
    begin
      if tg_op = 'DELETE' then
        perform public.unschedule_job('reminder:' || old.id);
      else
        perform public.schedule_job('reminder:' || new.id, new.cron, 'send_email', jsonb_build_object('reminder', new.id),
          time_zone => new.time_zone, tenant => new.owner::text);
      end if;
      return null;
    end $$;
    create trigger schedule_reminder after insert or update or delete on public.reminders
      for each row execute function public.schedule_reminder();
  `).simple();
  const api = db.connect("authenticator", { max: 1 });
  const user = "00000000-0000-0000-0000-000000000001";
  await api`set role authenticated`;
  await api`select set_config('request.jwt.claims', ${JSON.stringify({ sub: user, exp: 1 })}, false)`;

  const { id } = only(
    await api`insert into reminders (cron, time_zone, message) values ('0 9 * * *', 'Asia/Tokyo', 'x') returning id`,
  );
  const name = `reminder:${id}`;
  const made = await schedule(db.sql, name);
  assert.deepEqual([made.tenant, made.context.user_id, made.payload], [user, user, { reminder: id }]);
  await api`update reminders set message = 'y' where id = ${id}`;
  assert.deepEqual((await schedule(db.sql, name)).next_run, made.next_run);
  await api`update reminders set cron = '30 minutes' where id = ${id}`;
  assert.equal((await schedule(db.sql, name)).cron, "30 minutes");
  await assert.rejects(api`update reminders set cron = 'often' where id = ${id}`, {
    code: "22023",
    message: /^schedule_job: /,
  });
  assert.equal(only(await api`select cron from reminders`).cron, "30 minutes");
  await assert.rejects(api`select * from schedules`, { code: "42501" });
  await assert.rejects(api`select schedule_job('x', '@hourly', 'test')`, { code: "42501" });

  await makeDue(db.sql, name);
  await db.sql`select enqueue_due_schedules()`;
  const run = only(await db.sql`select kind, payload, context, schedule from jobs`);
  assert.deepEqual([run.kind, run.schedule, run.context.user_id], ["send_email", name, user]);
  await api`delete from reminders where id = ${id}`;
  assert.deepEqual(await allSchedules(db.sql), []);
  await db.sql`drop table reminders cascade`;
});

Deno.test("two who schedule one name at once leave one schedule, the later one's", async () => {
  const first = await openTransaction(db);
  await first.sql`select schedule_job('a', '@hourly', 'first', overlap => 'skip')`;
  const second = scheduleJob(db.sql, "'a', '@hourly', 'second'");
  await untilBlocking(db, first.pid);
  await first.sql`commit`;
  await second;
  const { kind, overlap } = await schedule(db.sql, "a");
  assert.deepEqual([kind, overlap], ["second", "allow"]);
});
