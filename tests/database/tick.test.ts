import assert from "node:assert/strict";
import { createDatabase, cronSecret } from "../support.ts";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import {
  claim,
  cost,
  emptyNetQueue,
  enqueue,
  enqueueAndClaim,
  expireLeases,
  job,
  only,
  projectUrl,
  queuedPokes,
  setUpDispatch,
  sharedDatabase,
} from "./queue.ts";
import { addSchedules, makeDue, schedule } from "./schedules.ts";

const db = sharedDatabase();

Deno.test("a tick that finds nothing ready pokes nobody", async () => {
  await setUpDispatch(db);
  await db.sql`select private.tick()`;
  await db.sql`select enqueue_job('test', delay => '1 hour')`;
  await db.sql`insert into job_kinds (kind, timeout_ms) values ('long', 70001)`; // no Edge Function takes it
  await enqueue(db.sql, "long");
  const done = await enqueueAndClaim(db.sql, "done");
  await db.sql`select complete_job(${done.id}, ${done.lease_token})`;
  await emptyNetQueue(db.sql);
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 0);
});

Deno.test("it pokes one worker for each 100 ready jobs, five at most, less those at work or on their way", async () => {
  await setUpDispatch(db);
  const tick = async () => {
    await emptyNetQueue(db.sql);
    await db.sql`select private.tick()`;
    return await queuedPokes(db.sql);
  };
  const add = async (n: number, kind: string, priority: number) => {
    await db
      .sql`insert into jobs (kind, priority) select ${kind}, ${priority} from generate_series(1, ${n}::int)`;
  };
  await add(1, "a", 0);
  assert.equal(await tick(), 1);
  await add(99, "b", 5);
  assert.equal(await tick(), 1);
  await add(1, "a", -5);
  assert.equal(await tick(), 2, "101 jobs, over two kinds and three priorities");
  await add(299, "b", 7);
  assert.equal(await tick(), 4);
  await add(10_000, "c", 0);
  assert.equal(await tick(), 5);
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 5, "pokes that nothing sends do not pile up");

  await claim(db.sql, 1, "busy");
  assert.equal(await tick(), 4, "one runs a job");
  await db.sql`
    insert into private.awake_workers values ('awake', clock_timestamp() + interval '1 minute'),
      ('busy', clock_timestamp() + interval '1 minute'), ('gone', clock_timestamp())`;
  assert.equal(await tick(), 3, "another has promised to look; nobody counts twice");
  for (const worker of ["w3", "w4", "w5", "w6"]) await claim(db.sql, 1, worker);
  // Ready since now, or a slow machine makes it a second, for which there is one worker more.
  await db.sql`update jobs set available_at = clock_timestamp() where status = 'pending'`;
  assert.equal(await tick(), 0);
});

Deno.test("pokes of the tick are noted as such", async () => {
  await setUpDispatch(db);
  await enqueue(db.sql);
  await emptyNetQueue(db.sql);
  await db.sql`select private.tick()`;
  const { reason } = only(
    await db.sql`select p.reason from private.pokes p join net.http_request_queue q on q.id = p.request_id`,
  );
  assert.equal(reason, "tick");
});

Deno.test("it gives the jobs of a worker that died to another at once", async () => {
  await setUpDispatch(db);
  const { id } = await enqueueAndClaim(db.sql);
  await emptyNetQueue(db.sql);
  await expireLeases(db.sql);
  await db.sql`select private.tick()`;
  assert.equal((await job(db.sql, id)).status, "pending");
  assert.equal(await queuedPokes(db.sql), 1);
});

const unusable: [message: RegExp, secrets: Record<string, string>][] = [
  [/: project_url is not in Vault/, { cron_secret: cronSecret }],
  [/: project_url in Vault does not start with http/, {
    project_url: "example.com",
    cron_secret: cronSecret,
  }],
  [/: cron_secret is not in Vault/, { project_url: projectUrl }],
  [/: cron_secret in Vault is shorter than 32 characters/, { project_url: projectUrl, cron_secret: "short" }],
  [/: cron_secret in Vault is shorter/, { project_url: projectUrl, cron_secret: `short,${cronSecret}` }],
];
Deno.test("what is not set up is named, and the hint points to job_dispatch_health", async () => {
  for (const [message, secrets] of unusable) {
    await db.sql`delete from vault.secrets where true`;
    await setVaultSecrets(db.url("postgres"), secrets);
    const hint = /job_dispatch_health\(\)/;
    await assert.rejects(db.sql`select private.tick()`, { code: "55000", message, hint });
  }
});

Deno.test("an extension that is missing is named", async (t) => {
  for (const extension of ["pg_net", "supabase_vault"]) {
    await t.step(extension, async () => {
      await using db = await createDatabase();
      await setUpDispatch(db);
      await db.connect("supabase_admin", { max: 1 }).unsafe(`drop extension ${extension} cascade`);
      await assert.rejects(db.sql`select private.tick()`, {
        code: "55000",
        message: /extensions pg_net and supabase_vault/,
      });
    });
  }
});

Deno.test("it removes pokes older than six hours and promises that ran out a minute ago", async () => {
  await setUpDispatch(db);
  await db.sql`
    insert into private.pokes values (-1, 'old', clock_timestamp() - interval '361 minutes'),
      (-2, 'new', clock_timestamp() - interval '359 minutes')`;
  await db.sql`
    insert into private.awake_workers values ('old', clock_timestamp() - interval '61 seconds'),
      ('new', clock_timestamp() - interval '30 seconds')`;
  await db.sql`select private.tick()`;
  assert.deepEqual(
    (await db.sql`select reason from private.pokes where request_id < 0`).map(({ reason }) => reason),
    ["new"],
  );
  assert.deepEqual((await db.sql`select worker from private.awake_workers`).map(({ worker }) => worker), [
    "new",
  ]);
});

Deno.test("its cost does not depend on jobs that are not due", async () => {
  const sql = db.connect("postgres", { max: 1 });
  const fill = (jobs: number) =>
    sql`insert into jobs (kind, available_at)
      select 'test', clock_timestamp() + interval '1 day' from generate_series(1, ${jobs}::int)`;
  await fill(1);
  await cost(sql, "select private.ready_jobs(500)"); // what is cached once per session is read here
  const before = await cost(sql, "select private.ready_jobs(500)");
  await fill(20_000);
  const { buffers } = await cost(sql, "select private.ready_jobs(500)");
  const found = `${buffers} buffers to find that none of 20,000 jobs is due, ${before.buffers} for one`;
  assert.ok(buffers < 3 * before.buffers, found);
});

Deno.test("prune_cron_history removes this template's rows of more than a day ago, and nobody else's", async () => {
  await using db = await createDatabase();
  const [id] = await db.sql`select cron.schedule('reports', '0 4 * * *', 'select 1')`;
  // A run keeps the id that its job had before it was scheduled anew.
  await db.sql`select disable_dispatch()`;
  await db.sql`select enable_dispatch()`;
  await db.connect("supabase_admin", { max: 1 })`
    insert into cron.job_run_details (jobid, username, command, return_message, start_time)
    select ${id?.schedule}, 'postgres', command, age, now() - age::interval
    from unnest(array['select private.tick()', 'select private.prune_cron_history()', 'select 1']) command,
      unnest(array['25 hours', '23 hours']) age`;
  // It failed before it began, for want of a connection.
  await db.connect("supabase_admin", { max: 1 })`
    insert into cron.job_run_details (runid, username, status, command)
    values (0, 'postgres', 'failed', 'select private.tick()')`;
  await db.sql`select private.prune_cron_history()`;
  const left = await db.sql`select command, return_message from cron.job_run_details order by 1, 2`;
  assert.deepEqual(left.map((row) => `${row.command} ${row.return_message}`), [
    "select 1 23 hours",
    "select 1 25 hours",
    "select private.prune_cron_history() 23 hours",
    "select private.tick() 23 hours",
  ]);
});

Deno.test("what a tick has rescued stays rescued though dispatch is not set up; the next one says what is missing", async () => {
  await using db = await createDatabase();
  await db.sql`insert into jobs (kind) values ('test')`;
  await db.sql`select * from claim_jobs('w', 1)`;
  await db
    .sql`update jobs set lease_expires_at = clock_timestamp() - interval '1 second' where status = 'running'`;
  await db.sql`select private.tick()`;
  assert.equal((await db.sql`select from jobs where status = 'pending' and attempts = 1`).count, 1);
  await assert.rejects(db.sql`select private.tick()`, {
    code: "55000",
    message: /project_url is not in Vault/,
  });
});

Deno.test("a run that a tick has left out stays so though dispatch is not set up, and is not made up for later", async () => {
  await addSchedules(db.sql, ["a"]);
  await db.sql`update schedules set overlap = 'skip' where true`;
  for (const jobs of [1, 1]) {
    await makeDue(db.sql, "a");
    await db.sql`select private.tick()`;
    assert.equal((await db.sql`select from jobs`).count, jobs);
    assert.ok((await schedule(db.sql, "a")).next_run > new Date());
  }
  await assert.rejects(db.sql`select private.tick()`, { code: "55000" });
});

Deno.test("a job that nobody at work takes gets a worker of its own after a second", async () => {
  await using db = await createDatabase();
  await setUpDispatch(db);
  await db.sql`insert into jobs (kind) select 'test' from generate_series(1, 5)`;
  await db.sql`select * from claim_jobs('died', 1)`;
  await db.sql`delete from net.http_request_queue where true`;
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 0, "the one at work is expected to take them");
  await db
    .sql`update jobs set available_at = available_at - interval '1100 milliseconds' where status = 'pending'`;
  await db.sql`select private.tick()`;
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("what is rescued gets a worker at once, although the one that was lost seems to be at work on another job", async () => {
  await using db = await createDatabase();
  await setUpDispatch(db);
  const ids = [await enqueue(db.sql), await enqueue(db.sql)];
  await db.sql`select * from claim_jobs('dead', 2)`;
  await emptyNetQueue(db.sql);
  await db.sql`update jobs set lease_expires_at = clock_timestamp() - interval '1 second' where id = ${
    ids[0] ?? null
  }`;
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("it enqueues due schedules, and a worker is poked for their jobs", async () => {
  await setUpDispatch(db);
  await addSchedules(db.sql, ["a", "b"]);
  await makeDue(db.sql, "a");
  await db.sql`select private.tick()`;
  assert.equal(only(await db.sql`select schedule from jobs`).schedule, "a");
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("what fails of a tick undoes nothing of the rest, and is a warning", async () => {
  for (
    const broken of [
      "rescue_expired_jobs(max_jobs int)",
      "enqueue_due_schedules_as_json()",
      "purge_jobs(max_jobs int)",
    ]
  ) {
    await using db = await createDatabase();
    await setUpDispatch(db);
    await db.sql`insert into private.pokes values (-1, 'schedules')`;
    await addSchedules(db.sql, ["a"]);
    await db.sql`insert into jobs (kind) values ('lost'), ('old')`;
    await db.sql`select * from claim_jobs('w', 1, kinds => '{lost}')`;
    await db.sql`
      update jobs set status = 'succeeded', finished_at = clock_timestamp() - interval '10 days' where kind = 'old'`;
    await expireLeases(db.sql);
    await makeDue(db.sql, "a");
    await emptyNetQueue(db.sql);
    const { definition } = only(
      await db.sql`select pg_get_functiondef(${broken.split("(")[0] ?? ""}::regproc) as definition`,
    );
    const broke = definition.replace(
      /\$function\$[^]*\$function\$/,
      "$f$ begin raise exception 'it broke'; end $f$",
    );
    await db.sql.unsafe(broke);
    const warnings: string[] = [];
    const sql = db.connect("postgres", { max: 1, onnotice: ({ message }) => warnings.push(message ?? "") });
    await sql`select private.tick()`;
    const step = broken.startsWith("enqueue") ? "schedules" : broken.split("_")[0];
    assert.deepEqual(warnings, [`tick: ${step}: it broke`]);
    const done = only(
      await db.sql`
        select count(*) filter (where schedule = 'a') = 1 as enqueued,
          count(*) filter (where kind = 'lost' and status = 'pending') = 1 as rescued,
          count(*) filter (where kind = 'old') = 0 as purged
        from jobs`,
    );
    assert.deepEqual({ ...done }, {
      rescued: !broken.startsWith("rescue"),
      enqueued: !broken.startsWith("enqueue"),
      purged: !broken.startsWith("purge"),
    });
    assert.equal(await queuedPokes(db.sql), 1);
  }
});

Deno.test("in an idle project it pokes a worker every ten minutes, since a deploy may have brought other schedules", async () => {
  await setUpDispatch(db);
  const tick = async (ago: string) => {
    await db.sql`delete from private.pokes where true`;
    await db.sql`insert into private.pokes values (-1, 'wake', clock_timestamp() - ${ago}::interval)`;
    await db.sql`select private.tick()`;
    return (await db.sql`select reason from private.pokes where request_id > 0`).map(({ reason }) => reason);
  };
  assert.deepEqual(await tick("59 seconds"), []);
  assert.deepEqual(await tick("61 seconds"), ["schedules"], "every minute, until the first have come");
  await db.sql`update private.pokes set poked_at = poked_at - interval '2 minutes' where true`;
  await db.sql`select private.tick()`;
  assert.equal(await queuedPokes(db.sql), 1, "none beside one that is still queued");
  await db.sql`select ensure_app_schedules('1', '[]')`;
  assert.deepEqual(await tick("599 seconds"), []);
  assert.deepEqual(await tick("601 seconds"), ["schedules"]);
  await enqueue(db.sql);
  assert.deepEqual(await tick("601 seconds"), ["tick"], "whatever a worker is poked for");
  await db.sql`select private.tick()`;
  assert.equal((await db.sql`select from private.pokes where request_id > 0`).count, 1);
});

/** How many pokes one tick queues, when nothing else is queued. */
async function pokesOfTick(): Promise<number> {
  await emptyNetQueue(db.sql);
  await db.sql`select private.tick()`;
  return await queuedPokes(db.sql);
}

Deno.test("it pokes nobody for jobs that their limits keep waiting, and somebody once one may start", async () => {
  await setUpDispatch(db);
  await db.sql`
    insert into job_kinds (kind, paused, concurrency, rate_limit)
    values ('paused', true, null, null), ('full', false, 1, null), ('rated', false, null, 1)`;
  await db.sql`
    insert into jobs (kind, concurrency_key)
    select kind, case when kind = 'keyed' then 'one' end
    from unnest(array['paused', 'full', 'rated', 'keyed']) kind, generate_series(1, 300)`;
  await db.sql`update jobs set available_at = available_at - interval '1 minute' where true`;
  assert.equal((await claim(db.sql, 100)).length, 3);
  assert.equal(await pokesOfTick(), 0);

  const complete = async (kind: string) => {
    const { id, lease_token } = only(
      await db.sql`select id, lease_token from jobs where status = 'running' and kind = ${kind}`,
    );
    await db.sql`select complete_job(${id}, ${lease_token})`;
    return await pokesOfTick();
  };
  assert.equal(await complete("rated"), 0, "the rate is used up all the same");
  await db.sql`update jobs set finished_at = finished_at - interval '5 seconds' where status = 'succeeded'`;
  // Two workers run a job yet: what they leave is poked for after a second.
  assert.equal(await complete("keyed"), 0);
  await db.sql`update jobs set finished_at = finished_at - interval '5 seconds' where status = 'succeeded'`;
  assert.equal(await pokesOfTick(), 1);
  assert.equal((await claim(db.sql)).length, 1);
  assert.equal(await pokesOfTick(), 0);
  await db.sql`update job_kinds set paused = false where true`;
  assert.ok(await pokesOfTick() >= 1);
});
