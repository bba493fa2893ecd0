import assert from "node:assert/strict";
import { startOutbox } from "../../scripts/local/outbox.ts";
import { render } from "../../supabase/functions/_app/emails.ts";
import { startTestStack, type TestStack, until } from "../support.ts";

/** The kind send_email of the app as it is shipped, against a server that answers as Resend does. */

interface Call {
  path: string;
  headers: Headers;
  body: Record<string, unknown>;
}

/** What the server has been sent, and what it answers next. */
const calls: Call[] = [];
let answer: (call: Call) => Response | Promise<Response>;

const env: Record<string, string> = {
  RESEND_API_KEY: "re_test",
  EMAIL_FROM: "Nightshift <night@example.com>",
};
let stack: TestStack;
let resend: Deno.HttpServer<Deno.NetAddr>;

Deno.test.beforeAll(async () => {
  resend = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async (request) => {
    const call = {
      path: `${request.method} ${new URL(request.url).pathname}`,
      headers: request.headers,
      body: await request.json(),
    };
    calls.push(call);
    return await answer(call);
  });
  env.RESEND_BASE_URL = `http://127.0.0.1:${resend.addr.port}`;
  stack = await startTestStack({ dispatch: false, app: "supabase/functions/_app", env });
});
Deno.test.afterAll(async () => {
  await stack[Symbol.asyncDispose]();
  await resend.shutdown();
});

async function enqueue(payload: Record<string, unknown> = {}): Promise<string> {
  const [row] = await stack.sql`
    select enqueue_job('send_email', ${
    stack.sql.json(JSON.parse(JSON.stringify({ to: "ada@example.com", template: "welcome", ...payload })))
  }) as id`;
  return row?.id;
}

/** Makes a job due, runs it, and gives back what became of it. */
async function attempt(id: string) {
  const { sql } = stack;
  await sql`update jobs set available_at = clock_timestamp() where id = ${id}`;
  const response = await stack.call("job-worker", { wait: true });
  assert.equal(response.status, 200);
  await response.body?.cancel();
  const [row] = await sql`
    select status, attempts, result, last_error, round(extract(epoch from available_at - updated_at))::int as wait
    from jobs where id = ${id}`;
  assert(row);
  return row;
}

/** Starts the functions again with other variables. */
async function restartWith(changes: Record<string, string>): Promise<void> {
  Object.assign(env, changes);
  const { functions } = stack.services;
  const pid = functions.pid("job-worker");
  assert(pid);
  Deno.kill(pid, "SIGKILL");
  await until("another worker", () => ![undefined, pid].includes(functions.pid("job-worker")));
}

const refuse = (status: number, name: string, headers: HeadersInit = {}) => () =>
  Response.json({ statusCode: status, name, message: `${name}, said the test` }, { status, headers });

Deno.test("a mail is one call, with the job's id as the idempotency key", async () => {
  answer = () => Response.json({ id: "mail-1" });
  const id = await enqueue({ data: { name: "Ada" } });
  calls.length = 0;
  const { status, result } = await attempt(id);
  assert.deepEqual([status, result], ["succeeded", { id: "mail-1" }]);
  assert.equal(calls.length, 1);
  const [call] = calls;
  assert.equal(call?.path, "POST /emails");
  assert.equal(call.headers.get("Authorization"), "Bearer re_test");
  assert.equal(call.headers.get("Idempotency-Key"), id);
  assert.equal(call.headers.get("Content-Type"), "application/json");
  assert.deepEqual(call.body, {
    from: "Nightshift <night@example.com>",
    to: ["ada@example.com"],
    ...render("welcome", { name: "Ada" }),
  });
});

Deno.test("an answer without an id is a mail that was sent, all the same", async () => {
  for (const body of ["", "<html>", "null", "[]", '{"ok": true}']) {
    answer = () => new Response(body);
    const { status, result } = await attempt(await enqueue());
    assert.deepEqual([status, result], ["succeeded", { id: null }], body);
  }
});

Deno.test("429 is tried again when Retry-After says, or after the kind's own wait", async () => {
  answer = refuse(429, "rate_limit_exceeded", { "Retry-After": "7" });
  const asked = await attempt(await enqueue());
  assert.deepEqual([asked.status, asked.wait], ["pending", 7]);
  assert.match(asked.last_error, /^RetryAfterError: Resend answered 429: .*rate_limit_exceeded/);

  answer = refuse(429, "daily_quota_exceeded");
  const plain = await attempt(await enqueue());
  assert(plain.status === "pending" && plain.wait >= 48 && plain.wait <= 60, JSON.stringify(plain));
});

Deno.test("a failure of Resend's, or a first attempt that is still under way there, is tried again", async () => {
  for (
    const [status, name] of [
      [500, "application_error"],
      [503, "service_unavailable"],
      [408, "timeout"],
      [409, "concurrent_idempotent_requests"],
    ] as const
  ) {
    answer = refuse(status, name);
    const row = await attempt(await enqueue());
    assert.deepEqual([row.status, row.attempts], ["pending", 1], name);
    assert.match(row.last_error, new RegExp(`^Error: Resend answered ${status}: .*${name}`));
  }
});

Deno.test("another refusal is final", async () => {
  for (
    const [status, name] of [
      [400, "validation_error"],
      [401, "missing_api_key"],
      [403, "invalid_from_address"],
      [409, "invalid_idempotent_request"],
      [422, "invalid_parameter"],
    ] as const
  ) {
    answer = refuse(status, name);
    const row = await attempt(await enqueue());
    assert.deepEqual([row.status, row.attempts], ["dead", 1], name);
    assert.match(row.last_error, new RegExp(`^PermanentError: Resend answered ${status}: .*${name}`));
  }
});

Deno.test("a payload that is no mail is dead before anything is sent", async () => {
  calls.length = 0;
  for (
    const [payload, error] of [
      [{ to: "nobody" }, /^invalid_payload: to: /],
      [{ template: "goodbye" }, /^invalid_payload: template: /],
      [{ data: { name: 7 } }, /^invalid_payload: data\.name: /],
    ] as const
  ) {
    const row = await attempt(await enqueue(payload));
    assert.equal(row.status, "dead");
    assert.match(row.last_error, error);
  }
  assert.equal(calls.length, 0);
});

Deno.test("a second attempt whose first one got through sends no second mail", async () => {
  const printed: string[] = [];
  const outbox = startOutbox(0, (line) => printed.push(line));
  try {
    // The mail is sent, and the answer is lost.
    answer = async ({ headers, body }) => {
      const key = headers.get("Idempotency-Key") ?? "";
      const response = await fetch(`http://127.0.0.1:${outbox.port}/emails`, {
        method: "POST",
        headers: { "Idempotency-Key": key },
        body: JSON.stringify(body),
      });
      await response.body?.cancel();
      return refuse(502, "bad_gateway")();
    };
    const id = await enqueue({ data: { name: "Ada" } });
    assert.equal((await attempt(id)).status, "pending");

    await restartWith({ RESEND_BASE_URL: `http://127.0.0.1:${outbox.port}` });
    const { status, attempts, result } = await attempt(id);
    assert.deepEqual([status, attempts], ["succeeded", 2]);
    const mails: { id: string }[] = await (await fetch(`http://127.0.0.1:${outbox.port}/emails`)).json();
    assert.deepEqual(mails.map(({ id }) => id), [result.id]);
    assert.equal(printed.length, 1);
    assert.match(printed[0] ?? "", /^mail to ada@example\.com: Welcome, Ada\n +Hello Ada,/);
  } finally {
    await outbox.stop();
  }
});

Deno.test("what is not configured fails the attempt with its name, and is tried again", async () => {
  await restartWith({ RESEND_API_KEY: "" });
  const row = await attempt(await enqueue());
  assert.deepEqual([row.status, row.attempts], ["pending", 1]);
  assert.match(
    row.last_error,
    /^JobError: RESEND_API_KEY is not set \(Set it with supabase secrets set\.\)$/,
  );
});

Deno.test("text and HTML are made from one source, and what comes from outside is escaped in the HTML", () => {
  const name = `<b>"Ada" & 'Co'</b>`;
  assert.deepEqual(render("welcome", { name }), {
    subject: `Welcome, ${name}`,
    text: `Hello ${name},\n\nyour account is ready. Reply to this mail if anything is unclear.`,
    html: "<p>Hello &lt;b&gt;&quot;Ada&quot; &amp; 'Co'&lt;/b&gt;,</p>\n" +
      "<p>your account is ready. Reply to this mail if anything is unclear.</p>",
  });
  assert.equal(render("password_changed", {}).text.split("\n")[0], "Hello there,");
  assert.equal(
    render("welcome", { name: "Ada\r\nBcc: all@example.com" }).subject,
    "Welcome, Ada Bcc: all@example.com",
  );
  assert.equal(render("welcome", { name: "{name} $& $1" }).text.split("\n")[0], "Hello {name} $& $1,");
});
