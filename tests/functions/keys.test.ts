import assert from "node:assert/strict";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import {
  cronSecret,
  startFunction,
  startTestStack,
  type TestFunction,
  type TestStack,
  until,
} from "../support.ts";

/** With which of the project's API keys job-worker calls the database, and what it says when there is none. */

let stack: TestStack;
Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

const notKeys = /SUPABASE_SECRET_KEYS is not JSON of keys by name/;
const wrongKey = "sb_secret_that-no-project-has";

/** job-worker with these variables and no other of Supabase's. */
const startWorker = (env: Record<string, string>) =>
  startFunction("job-worker", {
    SUPABASE_URL: stack.apiUrl,
    SUPABASE_SECRET_KEYS: "",
    SUPABASE_SERVICE_ROLE_KEY: "",
    CRON_SECRET: cronSecret,
    ...env,
  });

const post = (worker: TestFunction, body: unknown) =>
  worker.fetch("", {
    method: "POST",
    headers: { Authorization: `Bearer ${cronSecret}` },
    body: JSON.stringify(body),
  });

/** Enqueues a job, has the worker run what there is, and gives back the answer's status and the job's. */
async function run(worker: TestFunction): Promise<[number, string]> {
  const [job] = await stack.sql`select enqueue_job('echo') as id`;
  const response = await post(worker, { wait: true });
  await response.body?.cancel();
  const [row] = await stack.sql`select status from jobs where id = ${job?.id}`;
  return [response.status, row?.status];
}

const dictionary = (keys: Record<string, string>) => ({ SUPABASE_SECRET_KEYS: JSON.stringify(keys) });

for (
  const [what, env] of [
    ["the new dictionary alone", () => dictionary({ default: stack.keys.secretKey })],
    ["the older key alone", () => ({ SUPABASE_SERVICE_ROLE_KEY: stack.keys.serviceRoleKey })],
    ["both, of which the older has been disabled", () => ({
      ...dictionary({ default: stack.keys.secretKey }),
      SUPABASE_SERVICE_ROLE_KEY: wrongKey,
    })],
    [
      "the key named default among others",
      () => dictionary({ billing: wrongKey, default: stack.keys.secretKey }),
    ],
    ["a single key of another name", () => dictionary({ jobs: stack.keys.secretKey })],
    ["the older key and a dictionary that is still empty", () => ({
      ...dictionary({}),
      SUPABASE_SERVICE_ROLE_KEY: stack.keys.serviceRoleKey,
    })],
  ] as const
) {
  Deno.test(`a job runs with ${what}`, async () => {
    await using worker = await startWorker(env());
    assert.deepEqual(await run(worker), [200, "succeeded"], worker.lines.join("\n"));
  });
}

Deno.test("the older key is not tried when the new one is refused", async () => {
  await using worker = await startWorker({
    ...dictionary({ default: wrongKey }),
    SUPABASE_SERVICE_ROLE_KEY: stack.keys.serviceRoleKey,
  });
  assert.deepEqual(await run(worker), [500, "pending"]);
});

for (
  const [what, env, named] of [
    [
      "neither key is set",
      () => ({}),
      /SUPABASE_SECRET_KEYS holds no key.*SUPABASE_SERVICE_ROLE_KEY is not set/,
    ],
    ["the dictionary is empty", () => dictionary({}), /SUPABASE_SECRET_KEYS holds no key/],
    ["the dictionary is a bare key", () => ({ SUPABASE_SECRET_KEYS: stack.keys.secretKey }), notKeys],
    ["the dictionary is a list", () => ({ SUPABASE_SECRET_KEYS: `["${stack.keys.secretKey}"]` }), notKeys],
    [
      "a key is no text",
      () => ({ SUPABASE_SECRET_KEYS: '{"default": {"key": "sb_secret_nested"}}' }),
      notKeys,
    ],
    ["the address is not set", () => ({
      ...dictionary({ default: stack.keys.secretKey }),
      SUPABASE_URL: "",
    }), /SUPABASE_URL is not set/],
  ] as const
) {
  Deno.test(`when ${what} every call is answered 500, and the log names the variable`, async () => {
    await using worker = await startWorker(env());
    for (const [calls, body] of [{ wait: true }, {}].entries()) {
      const response = await post(worker, body);
      assert.equal(response.status, 500);
      assert.equal(response.headers.get("Content-Type"), "application/problem+json");
      const answer = await response.text();
      await until("the log's line", () => worker.lines.length > calls);
      assert.equal(worker.lines.length, calls + 1);
      assert.match(worker.lines[calls] ?? "", named);
      for (const text of [answer, ...worker.lines]) {
        for (const secret of [cronSecret, stack.keys.secretKey, "sb_secret_nested"]) {
          assert(!text.includes(secret), "no secret is told");
        }
      }
      assert(!answer.includes("SUPABASE_"), "what is wrong is for the log only");
    }
  });
}

Deno.test("a worker without a key shows in job_dispatch_health() as soon as it is poked", async () => {
  await using worker = await startWorker({});
  // Where the database finds job-worker: this one in place of the stack's.
  const server = Deno.serve(
    { hostname: "127.0.0.1", port: 0, onListen() {} },
    async (request) =>
      worker.fetch("", { method: "POST", headers: request.headers, body: await request.text() }),
  );
  await setVaultSecrets(stack.db.url("postgres"), {
    project_url: `http://127.0.0.1:${server.addr.port}`,
    cron_secret: cronSecret,
  });
  await stack.sql`select enqueue_job('echo')`;
  const health = await until("the poke's answer", async () => {
    const [row] = await stack
      .sql`select ok, detail, todo from job_dispatch_health() where item = 'worker' and not ok`;
    return row;
  });
  assert.match(health.detail, /: 500 .*Not configured/);
  assert.match(health.todo, /log of the function job-worker/);
  await server.shutdown();
});
