import assert from "node:assert/strict";
import { join } from "node:path";
import type postgres from "postgres";
import { type Gateway, startGateway } from "../../scripts/local/gateway.ts";
import { makeKeys } from "../../scripts/local/keys.ts";
import { enqueueJob, JobError, jobStats } from "../../supabase/functions/_shared/jobs.ts";
import { createDatabase, projectDir, type TestDatabase } from "../support.ts";

/** enqueueJob as an app's functions call it, with the kinds of the app as it is shipped, through REST. */

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
    context: { user: "ada", roles: [1, null] },
  });
  const [row] = await sql`
    select priority, max_attempts, context, extract(epoch from available_at - created_at)::float8 as delay
    from jobs where id = ${id}`;
  assert.deepEqual([row?.priority, row?.max_attempts, row?.context], [-7, 2, {
    user: "ada",
    roles: [1, null],
  }]);
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
    const [name, why] of [["a\u0000b", /\\u0000 cannot be converted to text/], [
      "a\ud800b",
      /surrogate/,
    ]] as const
  ) {
    const error = await refusal(() => enqueueJob("send_email", { ...welcome, data: { name } }));
    assert.match(error.code, /^22/);
    assert.match(error.message, why);
  }
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
