import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { createServer, type ServerResponse } from "node:http";
import { freePort } from "../../scripts/local/ports.ts";
import { startOutbox } from "../../scripts/local/outbox.ts";
import { render } from "../../supabase/functions/_app/emails.ts";
import { retryAfterSeconds } from "../../supabase/functions/_shared/retry_after.ts";
import { startTestStack, type TestStack } from "../support.ts";

/** The kind send_email of the app as it is shipped, against a server that answers as Resend does. */

interface Call {
  path: string;
  headers: Headers;
  body: Record<string, unknown>;
}

/** What the server has been sent, and what it answers next: a response, or something worse. */
const calls: Call[] = [];
let answer: (call: Call) => Response | Promise<Response> | ((out: ServerResponse) => void);

const apiKey = "re_a-key-that-only-this-test-uses";
const env: Record<string, string> = {
  RESEND_API_KEY: apiKey,
  EMAIL_FROM: "Nightshift <night@example.com>",
};
let stack: TestStack;
const resend = createServer(async (request, out) => {
  const chunks: Uint8Array[] = [];
  for await (const chunk of request) chunks.push(chunk);
  const call = {
    path: `${request.method} ${request.url}`,
    headers: new Headers(Object.entries(request.headers).map(([name, value]) => [name, String(value)])),
    body: JSON.parse(Buffer.concat(chunks).toString()),
  };
  calls.push(call);
  const given = await answer(call);
  if (typeof given === "function") return given(out);
  out.writeHead(given.status, Object.fromEntries(given.headers));
  out.end(Buffer.from(await given.arrayBuffer()));
});
let resendUrl: string;

Deno.test.beforeAll(async () => {
  const port = freePort();
  await new Promise<void>((resolve) => resend.listen(port, "127.0.0.1", resolve));
  env.RESEND_BASE_URL = resendUrl = `http://127.0.0.1:${port}`;
  stack = await startTestStack({ dispatch: false, app: "supabase/functions/_app", env });
});
// A retry of an earlier test's may be due by now.
Deno.test.beforeEach(async () => void await stack.sql`delete from jobs where true`);
Deno.test.afterAll(async () => {
  await stack[Symbol.asyncDispose]();
  resend.closeAllConnections();
  await new Promise((resolve) => resend.close(resolve));
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
  await stack.restart();
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
  assert.equal(call.headers.get("Authorization"), `Bearer ${apiKey}`);
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

Deno.test("429 and 5xx are tried again when Retry-After says, or after the kind's own wait", async () => {
  const at = Date.parse("2020-02-29T23:59:00Z"); // not today: the date counts from the answer's own
  const cases: [status: number, headers: Record<string, string>, wait: [number, number]][] = [
    [429, { "Retry-After": "7" }, [7, 7]],
    [503, { "Retry-After": "120" }, [120, 120]],
    [503, { "Retry-After": new Date(at + 90_000).toUTCString(), Date: new Date(at).toUTCString() }, [90, 90]],
    [429, { "Retry-After": "0" }, [1, 1]],
    [500, { "Retry-After": "999999999999999999999" }, [86_400, 86_400]],
    [429, { "Retry-After": "-5" }, [48, 60]],
    [429, { "Retry-After": "soon" }, [48, 60]],
    [429, { "Retry-After": "" }, [48, 60]],
    [429, {}, [48, 60]],
  ];
  for (const [status, headers, [least, most]] of cases) {
    answer = refuse(status, "rate_limit_exceeded", headers);
    const row = await attempt(await enqueue());
    assert(row.status === "pending" && row.wait >= least && row.wait <= most, JSON.stringify([headers, row]));
    assert.match(row.last_error, new RegExp(`Error: Resend answered ${status}: rate_limit_exceeded: `));
  }
});

Deno.test("mails that a rate limit refuses again come back spread over minutes, none before Retry-After", async () => {
  answer = refuse(429, "rate_limit_exceeded", { "Retry-After": "7" });
  const ids = await Promise.all(Array.from({ length: 20 }, () => enqueue()));
  const { sql } = stack;
  for (const _attempt of [1, 2]) {
    await sql`update jobs set available_at = clock_timestamp() where id = any (${ids})`;
    await (await stack.call("job-worker", { wait: true })).body?.cancel();
  }
  const waits = (await sql`
    select extract(epoch from available_at - updated_at)::float as wait from jobs where id = any (${ids}) and attempts = 2`)
    .map(({ wait }) => wait);
  assert.equal(waits.length, 20);
  const [least, most] = [Math.min(...waits), Math.max(...waits)];
  assert(least >= 6.9 && most <= 127.1 && most - least > 30, `waits from ${least} to ${most} s`);
});

Deno.test("Retry-After is read as RFC 9110 has it, and anything else is not taken for a time", () => {
  const date = "Sun, 06 Nov 1994 08:49:37 GMT";
  const read = (value: string, headers: Record<string, string> = { Date: date }) =>
    retryAfterSeconds(new Response(null, { headers: { "Retry-After": value, ...headers } }));
  const cases: [string, number | undefined][] = [
    ["0", 0],
    [" 120 ", 120],
    ["86401", 86_400],
    ["Sun, 06 Nov 1994 08:50:37 GMT", 60],
    ["Sunday, 06-Nov-94 08:50:37 GMT", 60],
    ["Sun Nov  6 08:50:37 1994", 60],
    ["Sun, 06 Nov 2094 08:50:37 GMT", 86_400],
    [date, undefined],
    ["Sun, 06 Nov 1994 08:48:37 GMT", undefined],
    ["Sun, 99 Nov 1994 08:48:37 GMT", undefined],
    ["1994-11-06T08:50:37Z", undefined],
    ...["", "-1", "1.5", "1e3", "0x10", "Infinity", "soon 5", "7, 8", "60s"].map((value) =>
      [value, undefined] satisfies [string, undefined]
    ),
  ];
  for (const [value, seconds] of cases) assert.equal(read(value), seconds, value);
  assert.equal(retryAfterSeconds(new Response()), undefined);
  const headers: Record<string, string>[] = [{}, { Date: "yesterday" }];
  for (const without of headers) {
    const seconds = read(new Date(Date.now() + 60_000).toUTCString(), without) ?? 0;
    assert(seconds >= 58 && seconds <= 60, `without a Date: ${seconds}`);
  }
});

Deno.test("a failure of Resend's, or a first attempt that is still under way there, is tried again", async () => {
  for (
    const [status, name] of [
      [500, "application_error"],
      [500, "internal_server_error"],
      [503, "service_unavailable"],
      [408, "timeout"],
      [409, "concurrent_idempotent_requests"],
      [429, "daily_quota_exceeded"],
      [429, "monthly_quota_exceeded"],
    ] as const
  ) {
    answer = refuse(status, name);
    const row = await attempt(await enqueue());
    assert.deepEqual([row.status, row.attempts], ["pending", 1], name);
    assert.equal(row.last_error, `Error: Resend answered ${status}: ${name}: ${name}, said the test`);
  }
});

Deno.test("another refusal is final", async () => {
  for (
    const [status, name] of [
      [400, "validation_error"],
      [400, "invalid_idempotency_key"],
      [401, "missing_api_key"],
      [401, "restricted_api_key"],
      [403, "invalid_api_key"],
      [403, "validation_error"],
      [404, "not_found"],
      [405, "method_not_allowed"],
      [409, "invalid_idempotent_request"],
      [422, "invalid_parameter"],
      [422, "invalid_from_address"],
      [451, "security_error"],
    ] as const
  ) {
    answer = refuse(status, name);
    const row = await attempt(await enqueue());
    assert.deepEqual([row.status, row.attempts], ["dead", 1], name);
    assert.match(row.last_error, new RegExp(`^PermanentError: Resend answered ${status}: .*${name}`));
  }
});

Deno.test("an answer that is not Resend's JSON counts by its status, and is not quoted", async () => {
  const html = { "Content-Type": "text/html" };
  for (
    const [status, body, headers, expected, error] of [
      [502, "<html>Bad gateway</html>", html, "pending", /^Error: Resend answered 502: text\/html$/],
      [422, "<html>Blocked</html>", html, "dead", /^PermanentError: Resend answered 422: text\/html$/],
      [500, '{"name": "appl', {}, "pending", /^Error: Resend answered 500: [^{]*$/],
      [400, '{"name": 7, "message": null}', {}, "dead", /^PermanentError: Resend answered 400: [^{]*$/],
      [504, "", {}, "pending", /^Error: Resend answered 504: /],
    ] as const
  ) {
    answer = () => new Response(body, { status, headers });
    const row = await attempt(await enqueue());
    assert.equal(row.status, expected, body);
    assert.match(row.last_error, error);
  }
});

Deno.test("a redirect is not followed, and not with the key", async () => {
  answer = () => new Response(null, { status: 307, headers: { Location: `${resendUrl}/elsewhere` } });
  calls.length = 0;
  const row = await attempt(await enqueue());
  assert.deepEqual([row.status, calls.length], ["pending", 1]);
  assert.match(row.last_error, /^Error: Resend answered 307: .*\/elsewhere$/);
});

Deno.test("of an answer that does not end no more than its beginning is read", async () => {
  for (const status of [500, 200]) {
    const closed = Promise.withResolvers<void>();
    answer = () => (out) => {
      out.on("close", closed.resolve);
      out.writeHead(status);
      const fill = () => {
        while (!out.destroyed && out.write("x".repeat(65_536)));
      };
      out.on("drain", fill);
      fill();
    };
    const row = await attempt(await enqueue());
    assert.deepEqual([row.status, row.attempts], [status === 200 ? "succeeded" : "pending", 1]);
    await closed.promise;
  }
});

Deno.test("a connection that breaks is tried again with the same key and the same mail, also after half an answer", async () => {
  const breaks: ((out: ServerResponse) => void)[] = [
    (out) => out.socket?.destroy(),
    (out) => {
      out.writeHead(200, { "Content-Length": "100", "Content-Type": "application/json" });
      out.write('{"id": "ma', () => out.socket?.destroy());
    },
  ];
  for (const breakOff of breaks) {
    const id = await enqueue();
    calls.length = 0;
    answer = () => breakOff;
    const broken = await attempt(id);
    assert.deepEqual([broken.status, broken.attempts], ["pending", 1]);
    assert.match(broken.last_error, /^\w*Error: /);
    answer = () => Response.json({ id: "mail-2" });
    assert.deepEqual((await attempt(id)).result, { id: "mail-2" });
    // More than two where Deno itself sends again what a kept connection has swallowed.
    assert(calls.length >= 2);
    for (const { headers, body } of calls) {
      assert.deepEqual([headers.get("Idempotency-Key"), body], [id, calls[0]?.body]);
    }
  }
});

Deno.test("no answer in time is a timeout that is tried again, and the connection is closed", async () => {
  const { sql } = stack;
  const beginnings: ((out: ServerResponse) => void)[] = [
    () => {},
    (out) => out.writeHead(200).write('{"id": '),
  ];
  for (const begin of beginnings) {
    const closed = Promise.withResolvers<void>();
    answer = () => (out) => {
      out.on("close", closed.resolve);
      begin(out);
    };
    await sql`update job_kinds set timeout_ms = 300 where kind = 'send_email'`;
    const row = await attempt(await enqueue());
    await sql`update job_kinds set timeout_ms = 20000 where kind = 'send_email'`;
    assert.deepEqual([row.status, row.attempts], ["pending", 1]);
    assert.match(row.last_error, /^handler_timeout: /);
    await closed.promise;
  }
});

Deno.test("no error quotes the key or the mail, though the answer does", async () => {
  const name = "Ada Augusta King";
  answer = ({ headers, body }) =>
    Response.json({
      name: "validation_error",
      message: `headers ${JSON.stringify([...headers])}, body ${JSON.stringify(body)}`,
    }, { status: 422 });
  const { status, last_error } = await attempt(await enqueue({ data: { name } }));
  assert.equal(status, "dead");
  assert.match(last_error, /^PermanentError: Resend answered 422: validation_error: headers /);
  for (const secret of [apiKey, name, "your account is ready"]) {
    assert(!last_error.includes(secret), last_error);
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

Deno.test("what is not configured or unreachable fails the attempt with its name, and is tried again", async () => {
  const cases: [Record<string, string>, RegExp][] = [
    [{ RESEND_BASE_URL: `http://127.0.0.1:${freePort()}` }, /^TypeError: .*Connection refused/s],
    [{ RESEND_API_KEY: `${apiKey}\u{1f511}` }, /^TypeError: /],
    [
      { RESEND_API_KEY: "" },
      /^JobError: RESEND_API_KEY is not set \(Set it among the functions' secrets, or in the worker's environment\.\)$/,
    ],
  ];
  for (const [changes, error] of cases) {
    await restartWith(changes);
    const row = await attempt(await enqueue());
    assert.deepEqual([row.status, row.attempts], ["pending", 1]);
    assert.match(row.last_error, error);
    assert(!row.last_error.includes(apiKey), row.last_error);
  }
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
