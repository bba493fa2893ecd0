import assert from "node:assert/strict";
import { join } from "node:path";
import type postgres from "postgres";
import { type Gateway, startGateway } from "../../scripts/local/gateway.ts";
import { makeKeys } from "../../scripts/local/keys.ts";
import {
  cancelJobs,
  checkpointJob,
  claimJobs,
  completeJob,
  enqueueJob,
  enqueueJobs,
  failJob,
  JobError,
  jobStats,
  listDeadJobs,
  purgeJobs,
  rescheduleJobs,
  retryJobs,
} from "../../supabase/functions/_shared/jobs.ts";
import { createDatabase, projectDir, type TestDatabase } from "../support.ts";

/** jobs.ts as an app's functions call it, with the kinds of the app as it is shipped, through REST. */

let db: TestDatabase;
let sql: postgres.Sql;
let gateway: Gateway;
const keys = await makeKeys();

// No other test file sets these: files that run at the same time share one environment.
const environment = () => ({
  SUPABASE_URL: `http://127.0.0.1:${gateway.port}`,
  SUPABASE_SECRET_KEYS: JSON.stringify({ default: keys.secretKey }),
});

Deno.test.beforeAll(async () => {
  db = await createDatabase();
  sql = db.sql;
  gateway = await startGateway({ port: 0, databaseUrl: db.url("authenticator"), keys, functions: {} });
  for (const [name, value] of Object.entries(environment())) Deno.env.set(name, value);
});
Deno.test.afterAll(async () => {
  for (const name of Object.keys(environment())) Deno.env.delete(name);
  await gateway.stop();
  await db[Symbol.asyncDispose]();
});

const welcome = { to: "ada@example.com", template: "welcome" } as const;

async function job(id: string) {
  const [row] = await sql`select * from jobs where id = ${id}`;
  assert(row, `there is no job ${id}`);
  return row;
}

/** What a call throws, which must be a JobError; no job may come of it. */
async function refusal(call: () => Promise<unknown>): Promise<JobError> {
  const before = await sql`select count(*) from jobs`;
  const error = await call().then(() => null, (error: unknown) => error);
  assert(error instanceof JobError, String(error));
  assert.deepEqual(await sql`select count(*) from jobs`, before, "nothing is written");
  return error;
}

Deno.test("it gives back the id of a job that waits with its defaults", async () => {
  const id = await enqueueJob("send_email", welcome);
  const { kind, payload, status, priority, attempts, max_attempts, context } = await job(id);
  assert.deepEqual(
    { kind, payload, status, priority, attempts, max_attempts, context },
    {
      kind: "send_email",
      // As it was given: the schema's defaults are filled in when the job runs.
      payload: welcome,
      status: "pending",
      priority: 0,
      attempts: 0,
      max_attempts: null,
      context: null,
    },
  );
});

Deno.test("every option arrives", async () => {
  const id = await enqueueJob("send_email", welcome, {
    delay: 90.5,
    priority: -7,
    maxAttempts: 2,
    dedupeKey: "ada",
    dedupe: "once",
    concurrencyKey: "mails to ada",
    context: { user: "ada", roles: [1, null] },
  });
  const [row] = await sql`
    select priority, max_attempts, context, dedupe_key, dedupe, concurrency_key,
      extract(epoch from available_at - created_at)::float8 as delay
    from jobs where id = ${id}`;
  assert.deepEqual([row?.priority, row?.max_attempts, row?.context], [-7, 2, {
    user: "ada",
    roles: [1, null],
  }]);
  assert.deepEqual([row?.dedupe_key, row?.dedupe, row?.concurrency_key], ["ada", "once", "mails to ada"]);
  assert(Math.abs(row?.delay - 90.5) < 0.1, `delayed by ${row?.delay} s`);

  const availableAt = new Date("2100-01-02T03:04:05.678Z");
  assert.deepEqual(
    (await job(await enqueueJob("send_email", welcome, { availableAt }))).available_at,
    availableAt,
  );
});

Deno.test("an unknown kind is a type error, and at run time one that says where kinds are declared", async () => {
  // @ts-expect-error: no such kind
  const misspelt = await refusal(() => enqueueJob("sned_email", welcome));
  assert.equal(misspelt.code, "unknown_kind");
  assert.match(misspelt.message, /no kind "sned_email" \(Declare it in _app\/kinds\.ts\.\)/);
  // @ts-expect-error: what every object has is no kind
  assert.equal((await refusal(() => enqueueJob("constructor", {}))).code, "unknown_kind");
});

Deno.test("a payload that does not fit is a type error, and at run time one that names the field", async () => {
  for (
    const [call, field] of [
      // @ts-expect-error: a field is missing
      [() => enqueueJob("send_email", { template: "welcome" }), "to"],
      // @ts-expect-error: no such template
      [() => enqueueJob("send_email", { to: "ada@example.com", template: "goodbye" }), "template"],
      // @ts-expect-error: not a text
      [() => enqueueJob("send_email", { ...welcome, data: { name: 7 } }), "data.name"],
      // @ts-expect-error: no payload at all
      [() => enqueueJob("send_email"), "(payload)"],
      [() => enqueueJob("send_email", { ...welcome, to: "ada" }), "to"],
    ] as const
  ) {
    const error = await refusal(call);
    assert.equal(error.code, "invalid_payload");
    assert(error.message.startsWith(`enqueueJob: payload of send_email: ${field}: `), error.message);
  }
});

Deno.test("what the database refuses comes with its SQLSTATE and says which argument it was", async () => {
  for (
    const [options, detail] of [
      [{ priority: 101 }, /priority 101/],
      [{ delay: -1 }, /delay -00:00:01/],
      [{ maxAttempts: 0 }, /max_attempts 0/],
      [{ delay: 1, availableAt: new Date() }, /both delay and available_at/],
    ] as const
  ) {
    const error = await refusal(() => enqueueJob("send_email", welcome, options));
    assert.equal(error.code, "22023");
    assert.match(error.detail, detail);
  }
});

Deno.test("a payload that jsonb cannot hold is refused with an error that says why", async () => {
  for (
    const name of ["a\u0000b", "a\ud800b"]
  ) {
    const payload = { ...welcome, data: { name } };
    const good = { kind: "send_email", payload: welcome } as const;
    for (
      const [enqueuing, where] of [
        [() => enqueueJob("send_email", payload), "enqueueJob: payload of send_email"],
        [() => enqueueJobs([good, { ...good, payload }]), "enqueueJobs: entry 1: payload of send_email"],
        [() => enqueueJobs([good, { ...good, context: name }]), "enqueueJobs: entry 1: context"],
      ] as const
    ) {
      const error = await refusal(enqueuing);
      assert.equal(error.code, "invalid_payload");
      assert.equal(error.message, `${where} has U+0000 or half a surrogate pair, which jsonb cannot hold`);
    }
  }
  await enqueueJob("send_email", { ...welcome, data: { name: "\\u0000 in words" } });
});

Deno.test("what has no JSON is refused before anything is written", async () => {
  const circular: Record<string, unknown> = {};
  circular.self = circular;
  for (const [context, why] of [[1n, /context has no JSON: .*BigInt/], [circular, /circular/]] as const) {
    const error = await refusal(() => enqueueJob("send_email", welcome, { context }));
    assert.equal(error.code, "invalid_payload");
    assert.match(error.detail, why);
  }
});

Deno.test("with a dedupe key, a second enqueue gives back the id of the job that holds it", async () => {
  const options = { dedupeKey: "same", dedupe: "waiting" } as const;
  const id = await enqueueJob("send_email", welcome, options);
  assert.equal(await enqueueJob("send_email", welcome, options), id);
  assert.notEqual(await enqueueJob("send_email", welcome, { ...options, dedupeKey: "other" }), id);
});

const batchOf = (count: number) =>
  Array.from({ length: count }, (_, n) => ({ kind: "send_email", payload: welcome, context: n } as const));

Deno.test("3,000 jobs are enqueued in one call, their ids in the order given", async () => {
  const answers = await enqueueJobs(batchOf(3_000));
  assert(answers.every(({ created }) => created));
  const rows = await sql`
    select j.context from unnest(${answers.map(({ id }) => id)}::uuid[]) with ordinality u(id, n)
    join jobs j using (id) order by u.n`;
  assert.deepEqual(rows.map(({ context }) => context), Array.from({ length: 3_000 }, (_, n) => n));
});

Deno.test("each job of a batch has options of its own, and one whose key is held says that it was not created", async () => {
  const [first, second, third] = await enqueueJobs([
    { kind: "send_email", payload: welcome, dedupeKey: "batch", dedupe: "replace", maxAttempts: 3 },
    { kind: "send_email", payload: welcome, availableAt: new Date("2100-01-01"), concurrencyKey: "c" },
    { kind: "send_email", payload: welcome, dedupeKey: "batch", dedupe: "replace", priority: 5, delay: 60 },
  ]);
  assert(first && second && third);
  assert.deepEqual([first.created, second.created, third.created], [true, true, false]);
  assert.equal(third.id, first.id);
  const { priority, max_attempts } = await job(first.id);
  assert.deepEqual([priority, max_attempts], [5, null], "of the same replace key in one call the last wins");
  const { concurrency_key, available_at } = await job(second.id);
  assert.deepEqual([concurrency_key, available_at], ["c", new Date("2100-01-01")]);
  assert.deepEqual(await enqueueJobs([]), []);
});

Deno.test("a batch with one entry that does not fit is refused as a whole, and the entry is named", async () => {
  const good = { kind: "send_email", payload: welcome } as const;
  // @ts-expect-error: no such kind
  const misspelt = await refusal(() => enqueueJobs([good, { kind: "sned_email", payload: welcome }]));
  assert.equal(misspelt.code, "unknown_kind");
  assert.match(misspelt.message, /^enqueueJobs: entry 1: no kind "sned_email"/);
  const misfit = await refusal(() =>
    // @ts-expect-error: no such template
    enqueueJobs([good, good, { kind: "send_email", payload: { to: "a@example.com", template: "goodbye" } }])
  );
  assert.equal(misfit.code, "invalid_payload");
  assert(
    misfit.message.startsWith("enqueueJobs: entry 2: payload of send_email: template: "),
    misfit.message,
  );
  const noJson = await refusal(() => enqueueJobs([good, { ...good, context: 1n }]));
  assert.equal(noJson.code, "invalid_payload");
  assert.match(noJson.message, /^enqueueJobs: entry 1: context has no JSON: /);
  for (
    const [options, detail] of [
      [{ priority: 101 }, /entry 1: priority 101/],
      [{ delay: NaN }, /entry 1: delay is not a number of seconds/],
      [{ availableAt: new Date(NaN) }, /entry 1: availableAt is not a Date with a time/],
      [{ dedupe: "once" }, /entry 1: dedupe is once, but there is no dedupe_key/],
      [{ delay: 1, availableAt: new Date() }, /entry 1: both delay and available_at/],
      [{ dedupeKey: "" }, /entry 1: dedupe_key has 0 characters/],
      [{ concurrencyKey: "x".repeat(513) }, /entry 1: concurrency_key has 513 characters/],
    ] as const
  ) {
    const error = await refusal(() => enqueueJobs([good, { ...good, ...options }]));
    assert.equal(error.code, "22023");
    assert.match(error.message, detail);
  }
});

Deno.test("jobs are cancelled, put back and purged; a failure whose key a newer job holds says cancelled", async () => {
  await sql`delete from jobs where true`;
  const options = { dedupeKey: "k", dedupe: "waiting" } as const;
  const id = await enqueueJob("send_email", welcome, options);
  assert.deepEqual(await cancelJobs([id]), [id]);
  assert.deepEqual(await cancelJobs([id]), []);
  assert.deepEqual(await retryJobs({ kind: "send_email" }), [], "by kind dead ones only");
  assert.equal((await refusal(() => retryJobs({ ids: undefined }))).code, "22023", "that would be all");
  assert.deepEqual(await retryJobs({ ids: [id], maxJobs: 1 }), [id]);

  const [claimed] = await claimJobs("w");
  assert(claimed);
  const newer = await enqueueJob("send_email", welcome, options);
  assert.equal(await failJob(id, claimed.leaseToken, "x"), "cancelled");
  assert.match((await job(id)).last_error, /^x\nsuperseded/);

  const [next] = await claimJobs("w");
  assert.equal(next?.id, newer);
  assert.equal(await completeJob(newer, next.leaseToken), true);
  await sql`update jobs set finished_at = now() - interval '8 days' where true`;
  assert.equal(await purgeJobs(1), 1);
  assert.equal(await purgeJobs(), 1);
});

Deno.test("jobs are rescheduled and checkpointed, and the dead are listed page by page", async () => {
  await sql`delete from jobs where true`;
  const ids = [
    await enqueueJob("send_email", welcome, { context: { user: "ada" } }),
    await enqueueJob("send_email", welcome),
  ];
  const [first = "", second = ""] = ids;
  assert.deepEqual(await rescheduleJobs(ids, new Date("2040-01-01T00:00:00Z")), ids);
  assert.deepEqual(await claimJobs("w"), []);
  assert.deepEqual(await rescheduleJobs([first], new Date(0)), [first]);
  assert.equal((await refusal(() => rescheduleJobs(ids, new Date(NaN)))).code, "22023");
  const [claimed] = await claimJobs("w");
  assert.equal(claimed?.id, first);
  assert.equal(await checkpointJob(first, claimed.leaseToken, { camelCase: { snake_case: 1 } }), true);
  assert.equal(await checkpointJob(first, claimed.leaseToken + 1, {}), false);
  assert.equal(await failJob(first, claimed.leaseToken, "the end", { permanent: true }), "dead");
  await rescheduleJobs([second], new Date(0));
  const [other] = await claimJobs("w");
  assert.equal(await failJob(second, other?.leaseToken ?? 0, "also", { permanent: true }), "dead");

  const [latest, ...more] = await listDeadJobs({ kind: "send_email", maxJobs: 1 });
  assert.deepEqual([latest?.id, more], [second, []]);
  const [dead] = await listDeadJobs({ before: second });
  assert(dead);
  const { finishedAt, createdAt, ...rest } = dead;
  assert.ok(new Date(finishedAt) > new Date(createdAt));
  assert.deepEqual(rest, {
    id: first,
    kind: "send_email",
    payload: welcome,
    attempts: 1,
    lastError: "the end",
    context: { user: "ada" },
    progress: { camelCase: { snake_case: 1 } },
  });
  assert.equal((await refusal(() => listDeadJobs({ maxJobs: 0 }))).code, "22023");
});

/** Enqueues a job in a process of its own with this environment; gives back its id, or what the error says. */
async function enqueueWith(
  env: Record<string, string>,
): Promise<{ id?: string; code?: string; message?: string }> {
  const jobsModule = JSON.stringify(
    new URL("../../supabase/functions/_shared/jobs.ts", import.meta.url).href,
  );
  const { stdout, stderr } = await new Deno.Command(Deno.execPath(), {
    args: [
      "eval",
      "--config",
      join(projectDir, "supabase/functions/deno.json"),
      `const { enqueueJob } = await import(${jobsModule});
       const answer = await enqueueJob("send_email", ${JSON.stringify(welcome)})
         .then((id) => ({ id }), ({ code, message }) => ({ code, message }));
       console.log(JSON.stringify(answer));`,
    ],
    env: { SUPABASE_URL: "", SUPABASE_SECRET_KEYS: "", SUPABASE_SERVICE_ROLE_KEY: "", ...env },
  }).output();
  const text = new TextDecoder().decode(stdout);
  assert(text, new TextDecoder().decode(stderr));
  return JSON.parse(text);
}

Deno.test("the key is read from SUPABASE_SECRET_KEYS, or is the older SUPABASE_SERVICE_ROLE_KEY", async () => {
  const { SUPABASE_URL, SUPABASE_SECRET_KEYS } = environment();
  const answers = await Promise.all([
    enqueueWith({ SUPABASE_URL, SUPABASE_SECRET_KEYS }),
    enqueueWith({ SUPABASE_URL, SUPABASE_SECRET_KEYS, SUPABASE_SERVICE_ROLE_KEY: "not this one" }),
    enqueueWith({ SUPABASE_URL, SUPABASE_SERVICE_ROLE_KEY: keys.serviceRoleKey }),
  ]);
  for (const { id, message } of answers) {
    assert(id, message);
    assert.equal((await job(id)).status, "pending");
  }
});

Deno.test("what is not configured is named", async () => {
  const { SUPABASE_URL, SUPABASE_SECRET_KEYS } = environment();
  const [noUrl, noKey, noJson, unreachable] = await Promise.all([
    enqueueWith({ SUPABASE_SECRET_KEYS }),
    enqueueWith({ SUPABASE_URL }),
    enqueueWith({ SUPABASE_URL, SUPABASE_SECRET_KEYS: keys.secretKey }),
    enqueueWith({ SUPABASE_URL: "http://127.0.0.1:1", SUPABASE_SECRET_KEYS }),
  ]);
  assert.equal(noUrl.code, "not_configured");
  assert.match(noUrl.message ?? "", /^SUPABASE_URL is not set/);
  assert.equal(noKey.code, "not_configured");
  assert.match(
    noKey.message ?? "",
    /^SUPABASE_SECRET_KEYS holds no key, .*SUPABASE_SERVICE_ROLE_KEY is not set/,
  );
  assert.equal(noJson.code, "not_configured");
  assert.match(noJson.message ?? "", /^SUPABASE_SECRET_KEYS is not JSON/);
  assert(!noJson.message?.includes(keys.secretKey));
  assert.equal(unreachable.code, "unreachable");
  assert.match(unreachable.message ?? "", /enqueue_job: .*Check SUPABASE_URL/);
});

Deno.test("jobStats gives counts as text and times in seconds", async () => {
  await sql`
    insert into jobs (kind, status, available_at, locked_at, finished_at) values
      ('counted', 'pending', now() - interval '2 days 03:00:05', null, null),
      ('counted', 'succeeded', now(), now() - interval '61.5 s', now())`;
  await sql`insert into job_kinds (kind, paused) values ('counted', true)`;
  const [stats, none] = await jobStats(["counted", "nothing"]);
  assert.ok(stats && none);
  const { oldestReadyAge, ...rest } = stats;
  assert.ok(
    oldestReadyAge !== null && oldestReadyAge >= 183_605 && oldestReadyAge < 183_635,
    `${oldestReadyAge}`,
  );
  assert.deepEqual(rest, {
    kind: "counted",
    ready: "1",
    delayed: "0",
    retrying: "0",
    running: "0",
    dead: "0",
    succeededLastHour: "1",
    failedLastHour: "0",
    medianRunTime: 61.5,
    p95RunTime: 61.5,
    paused: true,
    limited: false,
  });
  assert.equal(none.oldestReadyAge, null);
  assert.deepEqual((await jobStats()).filter(({ kind }) => kind === "counted").length, 1);
});
