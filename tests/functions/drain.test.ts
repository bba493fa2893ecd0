import assert from "node:assert/strict";
import { cronSecret, startTestStack, type TestStack } from "../support.ts";

/** The drain function: all that is due, for whatever scheduler calls it. */

let stack: TestStack;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

const drain = (method: string, authorization = `Bearer ${cronSecret}`) =>
  fetch(`${stack.apiUrl}/functions/v1/drain`, { method, headers: { Authorization: authorization } });

const nothingDone = { schedules: 0, queues: {}, budgetExhausted: false, errors: 0 };

Deno.test("it runs all that is ready and counts what became of it, by kind", async () => {
  const { sql } = stack;
  await sql`insert into jobs (kind, payload) select 'echo', '{"n": 1}' from generate_series(1, 30)`;
  await sql`
    insert into jobs (kind, payload, max_attempts)
    values ('fail', '{"how": "error", "message": "x"}', 5),
           ('fail', '{"how": "error", "message": "x"}', 1),
           ('fail', '{"how": "permanent", "message": "x"}', 5),
           ('append', '{"file": 1}', 5)`;
  await sql`select enqueue_job('echo', delay => '1 hour')`;
  const response = await drain("POST");
  assert.equal(response.status, 200);
  assert.deepEqual(await response.json(), {
    schedules: 0,
    queues: {
      echo: { succeeded: 30, failed: 0, dead: 0 },
      fail: { succeeded: 0, failed: 1, dead: 2 },
      append: { succeeded: 0, failed: 0, dead: 1 },
    },
    budgetExhausted: false,
    errors: 0,
  });
  assert.deepEqual(await (await drain("POST")).json(), nothingDone);
});

Deno.test("GET does the same, for schedulers that know nothing else", async () => {
  await stack.sql`select enqueue_job('echo', '{"n": 1}')`;
  const response = await drain("GET");
  assert.equal(response.status, 200);
  assert.deepEqual(await response.json(), {
    ...nothingDone,
    queues: { echo: { succeeded: 1, failed: 0, dead: 0 } },
  });
});

Deno.test("it rescues what a lost worker had claimed, and runs it in the same call", async () => {
  const { sql } = stack;
  const [job] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
  await sql`select from claim_jobs('gone')`;
  assert.deepEqual(await (await drain("POST")).json(), nothingDone);
  await sql`update jobs set lease_expires_at = clock_timestamp() where id = ${job?.id}`;
  assert.deepEqual((await (await drain("POST")).json()).queues, {
    echo: { succeeded: 1, failed: 0, dead: 0 },
  });
  const [row] = await sql`select status, attempts from jobs where id = ${job?.id}`;
  assert.deepEqual({ ...row }, { status: "succeeded", attempts: 2 });
});

Deno.test("a failed job whose dedupe key a newer one holds counts as failed, and job-worker calls it cancelled", async () => {
  const { sql } = stack;
  await using server = Deno.serve({ port: 0, onListen: () => {} }, async () => {
    await sql`select enqueue_job('ask', '{}', delay => '1 hour', dedupe_key => 'k', dedupe => 'waiting')`;
    return Response.redirect("http://127.0.0.1:1/"); // where nobody answers, so that the handler throws
  });
  const run = async (work: () => Promise<Response>) => {
    await sql`delete from jobs where true`;
    const payload = { url: `http://127.0.0.1:${server.addr.port}` };
    const [job] = await sql`select enqueue_job('ask', ${
      sql.json(payload)
    }, dedupe_key => 'k', dedupe => 'waiting') as id`;
    const answer = await (await work()).json();
    const [row] = await sql`select status, payload, last_error from jobs where id = ${job?.id}`;
    assert.deepEqual([row?.status, row?.payload], ["cancelled", payload]);
    assert.match(row?.last_error, /\nsuperseded: another job holds its dedupe key$/);
    return { id: job?.id, answer };
  };
  const drained = await run(() => drain("POST"));
  assert.deepEqual(drained.answer, { ...nothingDone, queues: { ask: { succeeded: 0, failed: 1, dead: 0 } } });
  const { id, answer } = await run(() => stack.call("job-worker", { wait: true }));
  assert.deepEqual(answer, { processed: 1, results: [{ id, kind: "ask", status: "cancelled" }] });
});

Deno.test("what it leaves when its budget is spent it says, and the next call does", async () => {
  const { sql } = stack;
  await sql`insert into jobs (kind, payload) select 'echo', '{"n": 1}' from generate_series(1, 600)`;
  const first = await (await drain("POST")).json();
  const second = await (await drain("POST")).json();
  assert.deepEqual([first.budgetExhausted, second.budgetExhausted], [true, false]);
  assert.deepEqual([first.queues.echo.succeeded, second.queues.echo.succeeded], [500, 100]);
});

Deno.test("whoever does not send CRON_SECRET is answered 401, another method 405", async () => {
  const [job] = await stack.sql`select enqueue_job('echo', '{"n": 1}') as id`;
  for (
    const [method, authorization, status] of [["GET", "Bearer wrong", 401], ["POST", "", 401], [
      "PUT",
      undefined,
      405,
    ]] as const
  ) {
    const response = await drain(method, authorization);
    assert.equal(response.status, status);
    assert.equal(response.headers.get("Content-Type"), "application/problem+json");
    assert.equal((await response.json()).status, status);
    assert.equal(response.headers.get("Allow"), status === 405 ? "GET, POST" : null);
  }
  const [row] = await stack.sql`select attempts from jobs where id = ${job?.id}`;
  assert.equal(row?.attempts, 0);
});

Deno.test("a drain whose isolate is about to end says that there may be more", async () => {
  const { sql } = stack;
  await sql`delete from jobs`;
  await sql`select enqueue_job('unload', '{"reason": "cpu"}')`;
  const answer = await (await drain("POST")).json();
  assert.deepEqual(answer.queues, { unload: { succeeded: 1, failed: 0, dead: 0 } });
  assert.equal(answer.budgetExhausted, true);
  await stack.restart("SIGKILL", "drain");
});
