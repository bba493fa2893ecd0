import assert from "node:assert/strict";
import postgres from "postgres";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import { createDatabase, cronSecret } from "../support.ts";
import {
  type Database,
  emptyNetQueue,
  enqueue,
  enqueueAndClaim,
  expireLeases,
  only,
  openTransaction,
  projectUrl,
  queuedPokes,
  setUpDispatch,
  sharedDatabase,
} from "./queue.ts";
import { addSchedules, makeDue } from "./schedules.ts";

const db = sharedDatabase();

interface Item {
  ok: boolean | null;
  detail: string;
  todo: string | null;
}

async function health(sql: postgres.Sql): Promise<Record<string, Item>> {
  const rows = await sql<({ item: string } & Item)[]>`select * from job_dispatch_health()`;
  return Object.fromEntries(rows.map(({ item, ...rest }) => [item, rest]));
}

async function item(sql: postgres.Sql, name: string): Promise<Item> {
  const found = (await health(sql))[name];
  assert.ok(found, `no item ${name}`);
  return found;
}

/** A run of the tick as pg_cron records it. */
async function recordRun(db: Database, status: string, ago: string | null, message = ""): Promise<void> {
  await db.connect("supabase_admin", { max: 1 })`
    insert into cron.job_run_details (jobid, username, status, return_message, start_time)
    select jobid, 'postgres', ${status}, ${message}, now() - ${ago}::interval
    from cron.job where jobname = 'nightshift_tick'`;
}

interface Answer {
  status?: number;
  content?: string;
  error?: string;
  timedOut?: boolean;
}

/** What job-worker answers when it is asked by job_dispatch_health, and to any other poke. */
const looked: Answer = { status: 200, content: '{"processed":0,"results":[]}' };
const accepted: Answer = { status: 202, content: '{"accepted":true}' };

/** A poke of 20 seconds ago and what pg_net got for it. */
async function recordAnswer(
  sql: postgres.Sql,
  answer: Answer | null,
  reason = "health",
): Promise<void> {
  await sql`delete from private.pokes where true`;
  await sql`insert into private.pokes values (7, ${reason}, clock_timestamp() - interval '20 seconds')`;
  await sql`delete from net._http_response where true`;
  if (answer) {
    const { status = null, content = null, error = null, timedOut = false } = answer;
    await sql`
      insert into net._http_response (id, status_code, content, error_msg, timed_out)
      values (7, ${status}, ${content}, ${error}, ${timedOut})`;
  }
}

Deno.test("when all is set up and runs, every item holds and nothing is to be done", async () => {
  await setUpDispatch(db);
  await recordRun(db, "succeeded", "5 seconds");
  await recordAnswer(db.sql, looked);
  const items = await health(db.sql);
  assert.deepEqual(Object.keys(items), [
    "extensions",
    "project_url",
    "cron_secret",
    "tick",
    "worker",
    "ready jobs",
    "long jobs",
    "leases",
    "schedules",
    "kinds",
    "purge",
  ]);
  for (const [name, { ok, detail, todo }] of Object.entries(items)) {
    assert.deepEqual([ok, todo], [true, null], `${name}: ${detail}`);
  }
});

Deno.test("secrets that are missing or wrong are named, and never shown", async () => {
  for (const name of ["project_url", "cron_secret"]) {
    const { ok, detail, todo } = await item(db.sql, name);
    assert.deepEqual([ok, detail], [false, "not in Vault"]);
    assert.match(todo ?? "", new RegExp(`vault.create_secret\\(.*'${name}'\\)`));
  }
  await setVaultSecrets(db.url("postgres"), { project_url: "example.com", cron_secret: "tiny-secret" });
  assert.equal((await item(db.sql, "project_url")).ok, false);
  assert.deepEqual((await item(db.sql, "cron_secret")).detail, "in Vault, but shorter than 32 characters");
  assert.ok(!JSON.stringify(await health(db.sql)).includes("tiny-secret"));
  await setVaultSecrets(db.url("postgres"), { project_url: projectUrl, cron_secret: cronSecret });
  assert.equal((await item(db.sql, "cron_secret")).ok, true);
  assert.ok(!JSON.stringify(await health(db.sql)).includes(cronSecret));
});

Deno.test("what the tick calls unusable is not called fine here", async () => {
  for (const cron_secret of ["short", " ", `${" ".repeat(40)}`, `short,${cronSecret}`]) {
    await setVaultSecrets(db.url("postgres"), { project_url: projectUrl, cron_secret });
    await assert.rejects(db.sql`select private.tick()`, { code: "55000" });
    assert.equal((await item(db.sql, "cron_secret")).ok, false, JSON.stringify(cron_secret));
  }
});

Deno.test("extensions that are missing are named, and the rest still answers", async () => {
  await using db = await createDatabase();
  const admin = db.connect("supabase_admin", { max: 1 });
  for (const extension of ["pg_cron", "pg_net", "supabase_vault"]) {
    await admin.unsafe(`drop extension ${extension} cascade`);
  }
  const items = await health(db.sql);
  assert.equal(items.extensions?.detail, "missing: pg_cron, pg_net, supabase_vault");
  assert.deepEqual([items.extensions?.ok, items.project_url?.ok, items.tick?.ok], [false, false, false]);
  for (const { todo } of [items.tick, items.worker]) assert.match(todo ?? "", /call the drain function/);
});

Deno.test("a tick that is off, missing, paused, never ran, failed, hangs or stopped is told apart", async () => {
  const cron = db.connect("supabase_admin", { max: 1 });
  assert.match((await item(db.sql, "tick")).detail, /has never run/);
  await recordRun(db, "succeeded", "35 seconds");
  assert.equal((await item(db.sql, "tick")).ok, true);
  await recordRun(db, "succeeded", "41 seconds");
  assert.match((await item(db.sql, "tick")).todo ?? "", /has stopped running jobs/);
  await recordRun(db, "running", "41 seconds");
  assert.match((await item(db.sql, "tick")).todo ?? "", /does not end.*pg_stat_activity/);
  await recordRun(db, "failed", "1 second", "ERROR: cron_secret is not in Vault");
  const failed = await item(db.sql, "tick");
  assert.match(failed.detail, /^last run failed at .*: ERROR: cron_secret is not in Vault/);
  assert.equal(failed.ok, false);
  await recordRun(db, "failed", null, "connection failed");
  assert.match((await item(db.sql, "tick")).detail, /: connection failed$/);

  const todo = "Run select enable_dispatch().";
  const off = "Run select enable_dispatch(), or have something else call the drain function.";
  await cron`select cron.alter_job(jobid, active => false) from cron.job where jobname = 'nightshift_tick'`;
  assert.deepEqual(await item(db.sql, "tick"), { ok: false, detail: "scheduled, but paused", todo });
  await cron`update cron.job set active = true, database = 'postgres' where jobname = 'nightshift_tick'`;
  assert.deepEqual(await item(db.sql, "tick"), { ok: false, detail: "not scheduled", todo });
  await db.sql`select enable_dispatch()`;
  await db.sql`select cron.unschedule('nightshift_tick')`;
  assert.deepEqual(await item(db.sql, "tick"), { ok: false, detail: "not scheduled", todo });
  await db.sql`select enable_dispatch()`;
  assert.match((await item(db.sql, "tick")).detail, /has never run/);
  await db.sql`select disable_dispatch()`;
  assert.deepEqual(await item(db.sql, "tick"), { ok: false, detail: "dispatch is off", todo: off });
});

Deno.test("the worker's last answer is shown, with what to do about it", async () => {
  const answers: [answer: Answer | null, detail: RegExp, todo: RegExp][] = [
    [looked, /^last poke \(health\), at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00: 200$/, /^$/],
    [{ status: 401, content: "Send CRON_SECRET" }, /: 401 Send CRON_SECRET$/, /CRON_SECRET .* differ/],
    [{ status: 401, content: "No API key" }, /: 401 No API key$/, /project_url.*verify_jwt/],
    [{ status: 405 }, /: 405$/, /not job-worker's answer: .*redirects/],
    [{ status: 404, content: "Not found" }, /: 404 Not found$/, /functions deploy job-worker/],
    [{ status: 500, content: "x".repeat(400) }, /: 500 x{300}$/, /log of the function job-worker/],
    [{ error: "Could not resolve host" }, /: Could not resolve host$/, /project_url/],
    [{ timedOut: true }, /: timed out$/, /did not answer within 5 s/],
    [null, /: no answer is kept$/, /pg_net.ttl/],
    [{ status: 200, content: "<h1>It works!</h1>" }, /: 200 <h1>It works!<\/h1>$/, /not job-worker's answer/],
    [accepted, /: 202 /, /not job-worker's answer/],
    [{ status: 204 }, /: 204$/, /not job-worker's answer/],
    [{ status: 302 }, /: 302$/, /not job-worker's answer/],
  ];
  for (const [answer, detail, todo] of answers) {
    await recordAnswer(db.sql, answer);
    const worker = await item(db.sql, "worker");
    assert.match(worker.detail, detail);
    assert.match(worker.todo ?? "", todo);
    assert.equal(worker.ok, worker.todo === null);
  }
});

Deno.test("a server that sends back what it was sent does not bring the secret here", async () => {
  await setUpDispatch(db);
  await recordAnswer(db.sql, { status: 200, content: `{"authorization": "Bearer ${cronSecret}"}` });
  const { detail } = await item(db.sql, "worker");
  assert.match(detail, /: 200 {"authorization": "Bearer …"}/);
  await recordAnswer(db.sql, { status: 500, content: "x".repeat(270) + cronSecret });
  assert.match((await item(db.sql, "worker")).detail, /x…/, "cut after it is taken out");
});

Deno.test("what a worker accepts proves less than what it was last found to do; what it refuses proves enough", async () => {
  const now = async (plain: Answer | null) => {
    await recordAnswer(db.sql, plain, "wake");
    return (await item(db.sql, "worker")).ok;
  };
  assert.equal(await now(accepted), true, "as long as nothing else is known");
  for (
    const [before, plain, ok] of [[looked, accepted, true], [accepted, accepted, false], [
      looked,
      null,
      false,
    ]] as const
  ) {
    await recordAnswer(db.sql, before);
    await db
      .sql`update private.pokes set request_id = 6, poked_at = poked_at - interval '10 seconds' where true`;
    await db.sql`update net._http_response set id = 6 where true`;
    await db.sql`insert into private.pokes values (7, 'wake', clock_timestamp() - interval '20 seconds')`;
    if (plain) {
      await db.sql`insert into net._http_response (id, status_code, content) values (7, 202, ${
        accepted.content ?? ""
      })`;
    }
    assert.equal((await item(db.sql, "worker")).ok, ok);
  }
});

Deno.test("asking tries the worker, every 40 seconds or every ten while it does not work, whoever asks", async () => {
  await setUpDispatch(db);
  const { ok, detail, todo } = await item(db.sql, "worker");
  assert.deepEqual([ok, detail, todo], [null, "poked just now: ask again in a few seconds", null]);
  assert.deepEqual(
    only(await db.sql`select convert_from(body, 'utf8')::jsonb as body from net.http_request_queue`).body,
    { kinds: ["nightshift_health"], wait: true },
  );

  const tries = async (age: string, answer: Answer) => {
    await emptyNetQueue(db.sql);
    await recordAnswer(db.sql, answer);
    await db.sql`update private.pokes set poked_at = clock_timestamp() - ${age}::interval where true`;
    await Promise.all(Array.from({ length: 8 }, () => item(db.sql, "worker")));
    return await queuedPokes(db.sql);
  };
  assert.equal(await tries("39 seconds", looked), 0);
  assert.equal(await tries("41 seconds", looked), 1);
  assert.equal(await tries("9 seconds", { status: 500 }), 0);
  assert.equal(await tries("11 seconds", { status: 500 }), 1);
  // What was known is shown meanwhile.
  assert.match((await item(db.sql, "worker")).detail, /: 500$/);
});

Deno.test("what asking sends takes no job, so neither a wake nor the tick counts on it", async () => {
  await setUpDispatch(db);
  await health(db.sql);
  await enqueue(db.sql);
  assert.equal(await queuedPokes(db.sql), 2);
  await emptyNetQueue(db.sql);
  await db.sql`delete from private.pokes where true`;
  await health(db.sql);
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 2);
});

Deno.test("whatever else is in pg_net's queue is not taken for a poke, and does not slow an enqueue down", async () => {
  await setUpDispatch(db);
  await db.sql`
    select count(net.http_post('http://127.0.0.1:9/?' || repeat('a', 20000) || '/functions/v1/job-worker'))
    from generate_series(1, 2000)`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 1_000 } });
  await enqueue(hurried);
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("a secret that somebody else's server sends back is not shown, though it is one of two", async () => {
  await setUpDispatch(db);
  await setVaultSecrets(db.url("postgres"), { cron_secret: ` ${cronSecret} , ${"o".repeat(40)}` });
  await recordAnswer(db.sql, { status: 200, content: `you sent Bearer ${cronSecret}` });
  const { ok, detail } = await item(db.sql, "worker");
  assert.equal(ok, false);
  assert.match(detail, /: 200 you sent Bearer …/);
});

Deno.test("nothing is tried while dispatch is off, settings are missing or a poke is queued", async () => {
  assert.deepEqual(await item(db.sql, "worker"), {
    ok: null,
    detail: "not known, and cannot be tried: no worker can be started: project_url is not in Vault",
    todo: "Mend the items above, or ask in a transaction that may write.",
  });
  await setUpDispatch(db);
  await enqueue(db.sql);
  await health(db.sql);
  assert.equal(await queuedPokes(db.sql), 1);
  await emptyNetQueue(db.sql);
  await db.sql`select disable_dispatch()`;
  assert.match((await item(db.sql, "worker")).detail, /: dispatch is off$/);
  assert.equal(await queuedPokes(db.sql), 0);
});

Deno.test("a transaction that may not write is answered, and no old answer passes for a new one", async () => {
  await setUpDispatch(db);
  const readOnly = () =>
    db.sql.begin(
      "read only",
      async (sql) => only(await sql<Item[]>`select * from job_dispatch_health() where item = 'worker'`),
    );
  assert.match(
    (await readOnly()).detail,
    /^not known, and cannot be tried: cannot execute .* read-only transaction$/,
  );
  await recordAnswer(db.sql, looked);
  assert.equal((await readOnly()).ok, true);
  await db.sql`update private.pokes set poked_at = poked_at - interval '2 minutes' where true`;
  const { ok, detail } = await readOnly();
  assert.equal(ok, null);
  assert.match(detail, /: 200; cannot be tried again: cannot execute .* read-only transaction$/);
});

Deno.test("locks fail or hold up no item but their own, and that for half a second", async () => {
  await setUpDispatch(db);
  await recordAnswer(db.sql, looked);
  const holder = await openTransaction(db);
  await holder.sql`lock table jobs, private.pokes, net.http_request_queue in access exclusive mode`;
  const startedAt = performance.now();
  const items = await health(db.sql);
  assert.ok(performance.now() - startedAt < 4_000);
  for (const name of ["worker", "ready jobs", "leases"]) {
    assert.equal(items[name]?.ok, null);
    assert.match(items[name]?.detail ?? "", /^cannot be looked at: .*lock timeout/);
  }
  assert.equal(items.cron_secret?.ok, true);
  await holder.sql`rollback`;

  // Only what a poke would write to is locked: what is known is shown.
  await db.sql`update private.pokes set poked_at = poked_at - interval '1 minute' where true`;
  await holder.sql`begin`;
  await holder.sql`lock table private.pokes in exclusive mode`;
  assert.equal((await item(db.sql, "worker")).ok, true);
  await holder.sql`rollback`;
});

Deno.test("a poke that pg_net does not send is told from one whose answer is gone", async () => {
  await setUpDispatch(db);
  await enqueue(db.sql);
  await db.sql`update private.pokes set poked_at = poked_at - interval '14 seconds' where true`;
  assert.equal((await item(db.sql, "worker")).ok, null);
  await db.sql`update private.pokes set poked_at = poked_at - interval '2 seconds' where true`;
  const { ok, detail, todo } = await item(db.sql, "worker");
  assert.equal(ok, false);
  assert.match(detail, /^a poke of .* is not sent yet$/);
  assert.match(todo ?? "", /net.worker_restart/);
});

Deno.test("an answer to somebody else's request is not taken for ours, when pg_net's ids begin anew", async () => {
  await db.sql`insert into private.pokes values (7, 'health', clock_timestamp() - interval '20 seconds')`;
  await db.sql`
    insert into net._http_response (id, status_code, content, created)
    values (7, 200, ${looked.content ?? ""}, clock_timestamp() - interval '2 minutes')`;
  assert.match((await item(db.sql, "worker")).detail, /no answer is kept/);
});

Deno.test("a run of the tick that has not started yet hides nothing", async () => {
  await recordRun(db, "succeeded", "5 seconds");
  await db.connect("supabase_admin", { max: 1 })`
    insert into cron.job_run_details (jobid, username, status)
    select jobid, 'postgres', 'starting' from cron.job where jobname = 'nightshift_tick'`;
  assert.equal((await item(db.sql, "tick")).ok, true);
});

Deno.test("a poke that was just sent hides no answer to the one before", async () => {
  await recordAnswer(db.sql, { status: 401, content: "" });
  await db.sql`insert into private.pokes values (8, 'wake', clock_timestamp())`;
  assert.match((await item(db.sql, "worker")).detail, /: 401/);
});

Deno.test("jobs that have waited for half a minute are a sign that nothing works them", async () => {
  await db.sql`select enqueue_job('test', delay => '1 hour')`;
  assert.deepEqual(await item(db.sql, "ready jobs"), { ok: true, detail: "none", todo: null });
  const id = await enqueue(db.sql);
  assert.equal((await item(db.sql, "ready jobs")).ok, true);
  await db.sql`update jobs set available_at = clock_timestamp() - interval '31 seconds' where id = ${id}`;
  const waiting = await item(db.sql, "ready jobs");
  assert.match(waiting.detail, /^1, the oldest due since /);
  assert.equal(waiting.ok, false);
});

Deno.test("a lease that ran out half a minute ago is a sign that nothing takes jobs back", async () => {
  await enqueueAndClaim(db.sql);
  await expireLeases(db.sql);
  assert.deepEqual(await item(db.sql, "leases"), { ok: true, detail: "none has run out", todo: null });
  await db
    .sql`update jobs set lease_expires_at = clock_timestamp() - interval '31 seconds' where status = 'running'`;
  const { ok, detail, todo } = await item(db.sql, "leases");
  assert.equal(ok, false);
  assert.match(`${detail} ${todo}`, /^one has run out at .*The tick takes such jobs back/);
});

Deno.test("a schedule that is overdue for half a minute, or that fails, is a sign of trouble; one that is paused is none", async () => {
  await addSchedules(db.sql, ["a", "b", "c"]);
  const found = () => item(db.sql, "schedules");
  assert.deepEqual(await found(), { ok: true, detail: "none is overdue", todo: null });
  await makeDue(db.sql, "a", "29 seconds");
  await makeDue(db.sql, "b", "1 hour");
  await db.sql`select pause_schedule('b')`;
  assert.equal((await found()).ok, true);
  await makeDue(db.sql, "a", "31 seconds");
  const overdue = await found();
  assert.equal(overdue.ok, false);
  assert.match(`${overdue.detail} ${overdue.todo}`, /^one is overdue since .*The tick enqueues/);

  await db
    .sql`update schedules set next_run = '2040-01-01', last_error = 'out of luck' where name in ('a', 'c')`;
  const failed = await found();
  assert.deepEqual([failed.ok, failed.detail], [false, "failed: a (out of luck), c (out of luck)"]);
  assert.match(failed.todo ?? "", /resume_schedule/);
  await db.sql`select resume_schedule('a'), pause_schedule('c')`;
  assert.equal((await found()).ok, true);
});

Deno.test("kinds that no worker knew are named, until their dead jobs are run again or deleted", async () => {
  for (
    const [kind, error] of [["resize", "unknown_kind: resize"], ["resize", "unknown_kind: resize"], [
      "crop",
      "oops",
    ]] as const
  ) {
    const job = await enqueueAndClaim(db.sql, kind);
    await db.sql`select fail_job(${job.id}, ${job.lease_token}, ${error}, permanent => true)`;
  }
  const { ok, detail, todo } = await item(db.sql, "kinds");
  assert.deepEqual([ok, detail], [false, "unknown to the worker that had them: resize"]);
  assert.match(todo ?? "", /Deploy the functions/);
  await db.sql`update jobs set status = 'pending', attempts = 0, finished_at = null where kind = 'resize'`;
  assert.equal((await item(db.sql, "kinds")).ok, true);
});

Deno.test("whatever the session's time zone and date style, times are UTC and the verdicts the same", async () => {
  await setUpDispatch(db);
  await recordRun(db, "succeeded", "5 seconds");
  await recordAnswer(db.sql, looked);
  const sql = db.connect("postgres", { max: 1 });
  await sql`set timezone = 'Asia/Kolkata'`;
  await sql`set datestyle = 'SQL, DMY'`;
  const items = await health(sql);
  assert.deepEqual(Object.values(items).filter(({ ok }) => !ok), []);
  for (const name of ["tick", "worker"]) {
    assert.match(items[name]?.detail ?? "", / at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00/);
  }
});

Deno.test("service_role may ask, although it may read none of what is asked", async () => {
  const api = db.connect("authenticator", { max: 1 });
  await api`set role service_role`;
  assert.equal((await api`select * from job_dispatch_health()`).length, 11);
  await assert.rejects(api`select * from private.pokes`, { code: "42501" });
  assert.ok(only(await api`select current_user as role`).role === "service_role");
});

Deno.test("a poke from before pg_net was created anew is not taken for one that is not sent", async () => {
  await setUpDispatch(db);
  await db.sql`
    insert into private.pokes (request_id, reason, poked_at)
    select n, 'wake', clock_timestamp() - interval '1 hour' from generate_series(1, 1000) n`;
  await db.sql`select setval('net.http_request_queue_id_seq', 1, false)`;
  await db.sql`select net.http_post('http://127.0.0.1:9/elsewhere') from generate_series(1, 3)`;
  await enqueue(db.sql);
  assert.ok(!(await item(db.sql, "worker")).detail.includes("not sent yet"));
});

Deno.test("jobs that their limits keep waiting are no sign of trouble, but those that nobody takes although they may start are", async () => {
  const ready = () => item(db.sql, "ready jobs");
  await db.sql`
    insert into job_kinds (kind, paused, concurrency, rate_limit)
    values ('paused', true, null, null), ('full', false, 1, null), ('rated', false, null, 1)`;
  await db.sql`
    insert into jobs (kind, concurrency_key, available_at)
    select kind, case when kind = 'keyed' then 'one' end, clock_timestamp() - interval '10 minutes'
    from unnest(array['paused', 'full', 'rated', 'keyed']) kind, generate_series(1, 20)`;
  assert.equal((await ready()).ok, false, "nobody has ever taken one");
  await db.sql`select * from claim_jobs('w', 100)`;
  assert.deepEqual(await ready(), { ok: true, detail: "none", todo: null });

  // A place that has just become free, and one that has been for long.
  for (const kind of ["full", "keyed"]) {
    const { id, lease_token } = only(
      await db.sql`select id, lease_token from jobs where status = 'running' and kind = ${kind}`,
    );
    await db.sql`select complete_job(${id}, ${lease_token})`;
    const { ok, detail } = await ready();
    assert.equal(ok, true, `${kind}: ${detail}`);
    assert.match(detail, /^1, the oldest due since /);
    await db.sql`update jobs set finished_at = finished_at - interval '31 seconds' where id = ${id}`;
    assert.equal((await ready()).ok, false, kind);
    await db.sql`select * from claim_jobs('w', 100)`;
    assert.equal((await ready()).ok, true, kind);
  }
  await db.sql`update private.starts set at = at - interval '2 minutes' where true`;
  await db
    .sql`update jobs set locked_at = locked_at - interval '31 seconds' where kind = 'rated' and status = 'running'`;
  assert.equal((await ready()).ok, false);
});

Deno.test("jobs that may run for longer than an Edge Function and that nobody takes for a minute are named, and no fault of the others", async () => {
  const { sql } = db;
  await sql`insert into job_kinds (kind, timeout_ms, paused) values ('train', 70001, false), ('halt', 90000, true)`;
  await sql`
    insert into jobs (kind, available_at)
    select kind, clock_timestamp() - interval '59 seconds' from unnest(array['train', 'halt']) kind, generate_series(1, 2)`;
  assert.deepEqual(await item(sql, "long jobs"), { ok: true, detail: "none waits for long", todo: null });
  await sql`update jobs set available_at = available_at - interval '2 seconds' where kind in ('train', 'halt')`;
  const items = await health(sql);
  assert.deepEqual(items["ready jobs"], { ok: true, detail: "none", todo: null });
  assert.deepEqual([items["long jobs"]?.ok, items["long jobs"]?.detail], [false, "nobody takes: train"]);
  assert.match(items["long jobs"]?.todo ?? "", /npm run worker/);
  await sql`select * from claim_jobs('w', 1, kinds => '{train}')`;
  assert.equal((await item(sql, "long jobs")).ok, true, "the one that is left waits for a slot");
});
