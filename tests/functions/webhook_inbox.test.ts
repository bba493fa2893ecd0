import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import { createHmac } from "node:crypto";
import { signByPackages } from "../senders/senders.ts";
import { startFunction, startTestStack, type TestStack, until, untilStates } from "../support.ts";

/** What senders are answered, and what handlers are given of it. The verifiers have tests of their own. */

const secret = "a-secret-of-more-than-sixteen-characters";
const standardSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const stripeSecret = "whsec_a_secret_of_stripe";
const verifyToken = "a-token-for-the-dashboard";

let stack: TestStack;
Deno.test.beforeAll(async () => {
  stack = await startTestStack({
    env: {
      TEST_WEBHOOK_SECRET: `old-secret-of-the-same-source, ${secret}\n`,
      // As Supabase Auth has it, and rotated.
      TEST_STANDARD_SECRET: `v1,${standardSecret},v1,whsec_b2xkLXNlY3JldC1vZi10aGUtc2FtZS1zb3VyY2U=`,
      TEST_STRIPE_SECRET: stripeSecret,
      TEST_VERIFY_TOKEN: verifyToken,
    },
  });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Sent {
  method?: string;
  headers?: Record<string, string>;
  body?: BodyInit | null;
}

/** Sends a message to a source, with the right secret unless told otherwise. */
async function send(path: string, { method = "POST", headers = {}, body = "{}" }: Sent = {}) {
  const given = { "X-Test-Secret": secret, "Content-Type": "application/json", ...headers };
  const kept = Object.entries(given).filter(([, value]) => value !== "");
  return await fetch(`${stack.apiUrl}/functions/v1/webhook-inbox/${path}`, {
    method,
    headers: kept,
    body: ["GET", "HEAD"].includes(method) ? undefined : body,
  });
}

const json = (value: unknown): Sent => ({ body: JSON.stringify(value) });

/** Sends a message that is to be stored as new, and gives back its id. */
async function sendNew(path: string, sent: Sent): Promise<string> {
  const response = await send(path, sent);
  const { id, created } = await response.json();
  assert.deepEqual([response.status, created], [202, true]);
  return id;
}

async function assertRefused(response: Response, status: number, title: string, detail: RegExp) {
  assert.equal(response.status, status);
  assert.equal(response.headers.get("Content-Type"), "application/problem+json");
  const problem = await response.json();
  assert.deepEqual({ ...problem, detail: "" }, { type: "about:blank", title, status, detail: "" });
  assert.match(problem.detail, detail);
}

/** What the handler gave back of its message. */
async function resultOf(id: string) {
  await untilStates(stack, [id], "succeeded 1");
  const [row] = await stack.sql`select result from jobs where id = ${id}`;
  return row?.result;
}

const rowsOf = async (messageId: string) =>
  await stack.sql`select * from webhook_inbox where message_id = ${messageId}`;

Deno.test("a message is answered 202 with its id when it is new, and 200 with the same id when it comes again", async () => {
  const body = { id: "evt_1", type: "order.paid", tenant: "acme", amount: 5 };
  const id = await sendNew("orders", json(body));
  const again = await send("orders", json(body));
  assert.deepEqual([again.status, await again.json()], [200, { id, created: false }]);
  const [row] = await rowsOf("evt_1");
  assert.partialDeepStrictEqual(row, {
    id,
    source: "orders",
    tenant: "acme",
    type: "order.paid",
    payload: body,
    other_bodies: 0,
  });
  const [job] = await stack.sql`select kind, payload, context from jobs where id = ${id}`;
  assert.deepEqual({ ...job }, { kind: "webhook_orders", payload: {}, context: null });
});

Deno.test("the same id with another body is the message that came first, and its row says so", async () => {
  const id = await sendNew("orders", json({ id: "evt_2", n: 1 }));
  const other = await send("orders", json({ id: "evt_2", n: 2 }));
  assert.deepEqual([other.status, (await other.json()).id], [200, id]);
  const [row] = await rowsOf("evt_2");
  assert.deepEqual([row?.payload.n, row?.other_bodies], [1, 1]);
});

Deno.test("a handler is told all about its message and its job", async () => {
  const body = '{"id": "evt_3", "type": "a", "tenant": "acme", "page": 2}';
  const headers = { "X-Kept": "kept", "X-Other": "not kept", Cookie: "a=b" };
  const id = await sendNew("orders", { body, headers });
  const { receivedAt, createdAt, raw, ...told } = await resultOf(id);
  assert.deepEqual(told, {
    id: "evt_3",
    jobId: id,
    source: "orders",
    kind: "webhook_orders",
    type: "a",
    tenant: "acme",
    payload: JSON.parse(body),
    headers: { "content-type": "application/json", "x-kept": "kept" },
    attempts: 1,
    maxAttempts: 3,
    isLastAttempt: false,
    context: null,
    schedule: null,
    dueAt: null,
    progress: { page: 2 },
    aborted: false,
  });
  assert.equal(new TextDecoder().decode(new Uint8Array(raw)), body);
  assert.ok(Math.abs(Date.parse(receivedAt) - Date.parse(createdAt)) < 1_000);
  const [row] = await stack.sql`select headers::text from webhook_inbox where id = ${id}`;
  assert.doesNotMatch(row?.headers, /cookie|other|secret/i);
});

Deno.test("a failed attempt is repeated with what it has kept, and a permanent failure is dead", async () => {
  const id = await sendNew("orders", json({ id: "evt_4", fail: "once", page: 1 }));
  const dead = await sendNew("orders", json({ id: "evt_5", fail: "permanent" }));
  await untilStates(stack, [id], "succeeded 2");
  const [row] = await stack.sql`select result from jobs where id = ${id}`;
  assert.partialDeepStrictEqual(row?.result, { attempts: 2, progress: { page: 2 } });
  await untilStates(stack, [dead], "dead 1");
});

Deno.test("without an id the body's hash is the id", async () => {
  const id = await sendNew("orders", json({ n: "no id" }));
  const again = await send("orders", json({ n: "no id" }));
  assert.deepEqual([again.status, (await again.json()).id], [200, id]);
  assert.match((await resultOf(id)).id, /^sha256:[0-9a-f]{64}$/);
});

Deno.test("what the database cannot hold is stored and processed all the same", async () => {
  const long = "x".repeat(600);
  const bodies = [
    ["U+0000", JSON.stringify({ id: "nul\0", type: "a\0b", text: "\0" })],
    ["half a pair", '{"id": "\\ud800", "text": "\\udc00"}'],
    ["half of another", '{"id": "\\ud801", "text": "\\udc00"}'],
    ["a long id", JSON.stringify({ id: long, tenant: long, type: long })],
    ["an endless number", '{"id": "evt_6", "n": 1e400000}'],
    ["a deep body", `${"[".repeat(20_000)}${"]".repeat(20_000)}`],
  ] as const;
  for (const [what, body] of bodies) {
    const id = await sendNew("orders", { body });
    const [row] = await stack
      .sql`select convert_from(body, 'UTF8') as body from webhook_inbox where id = ${id}`;
    assert.equal(row?.body, body, what);
    const again = await send("orders", { body });
    assert.equal((await again.json()).id, id, what);
    if (what !== "a deep body") assert.equal((await resultOf(id)).jobId, id, what);
  }
  // Not UTF-8: its bytes are kept, and the payload has U+FFFD for them. A byte order mark is passed over.
  const bytes = new Uint8Array([0xef, 0xbb, 0xbf, ...new TextEncoder().encode('{"a":"'), 0xff, 0x22, 0x7d]);
  const { raw, payload } = await resultOf(await sendNew("orders", { body: bytes }));
  assert.deepEqual([raw, payload], [[...bytes], { a: "\ufffd" }]);
});

Deno.test("of types that the handler does not take nothing is asked, and a message has the key that the source reads", async () => {
  const other = await sendNew("odd", json({ type: "ping" }));
  assert.deepEqual(await resultOf(other), { ignored: "ping" });
  assert.deepEqual(await resultOf(await sendNew("odd", json({ customer: "c1" }))), { ignored: null });
  const taken = await sendNew("odd", json({ type: "taken", n: 1, customer: "c2" }));
  assert.deepEqual((await resultOf(taken)).payload, { n: 1 });
  const [job] = await stack.sql`select concurrency_key from jobs where id = ${taken}`;
  assert.equal(job?.concurrency_key, "c2");
});

Deno.test("a reader that throws, or gives no text, is 400, and the log names it", async () => {
  for (const [id, said] of [[5, /the source's id gives a number/], [{}, /id gives a object/]] as const) {
    await assertRefused(await send("odd", json({ id })), 400, "Bad request", /cannot be read/);
    await until(
      "the line",
      () => stack.lines.some((line) => /webhook_unreadable/.test(line) && said.test(line)),
    );
  }
  await assertRefused(await send("odd", json([])), 400, "Bad request", /cannot be read/);
});

Deno.test("numbers above 2^53 are in the table as they came", async () => {
  const id = await sendNew("orders", { body: '{"id": "evt_7", "n": 820982911946154508, "m": 1.10}' });
  const [row] = await stack.sql`select payload::text from webhook_inbox where id = ${id}`;
  assert.equal(row?.payload, '{"m": 1.10, "n": 820982911946154508, "id": "evt_7"}');
});

Deno.test("a form's fields are the payload, and JSON where it begins so; any text is that of a source of texts", async () => {
  const form = { "Content-Type": "application/x-www-form-urlencoded" };
  const id = await sendNew("forms", { headers: form, body: "a=1&b=x+y&a=2&__proto__=z&nul=%00" });
  const fields = JSON.parse('{"a": ["1", "2"], "b": "x y", "__proto__": "z", "nul": "\\u0000"}');
  assert.deepEqual((await resultOf(id)).payload.b, "x y");
  const [row] = await stack.sql`select payload from webhook_inbox where id = ${id}`;
  assert.deepEqual(row?.payload, { ...fields, nul: "\ufffd" });
  // Whatever its Content-Type says, which nobody signs: else one message could be two.
  const sent = await sendNew("forms", json({ a: [1] }));
  assert.deepEqual((await resultOf(sent)).payload, { a: [1] });
  const again = await send("forms", { ...json({ a: [1] }), headers: form });
  assert.deepEqual([again.status, (await again.json()).id], [200, sent]);
  const text = { headers: { "Content-Type": "text/plain" }, body: "a,b\n1,2\n" };
  assert.equal((await resultOf(await sendNew("texts", text))).payload, "a,b\n1,2\n");
});

Deno.test("either of two secrets will do; a missing or wrong one is 401 with one and the same text", async () => {
  await sendNew("orders", {
    ...json({ id: "evt_8" }),
    headers: { "X-Test-Secret": "old-secret-of-the-same-source" },
  });
  const answers = [];
  for (const given of ["", "wrong", `${secret}x`, secret.slice(0, -1), " "]) {
    const response = await send("orders", { headers: { "X-Test-Secret": given } });
    answers.push(await response.clone().text());
    await assertRefused(response, 401, "Unauthorized", /missing, wrong or too old/);
  }
  assert.equal(new Set(answers).size, 1);
  assert.ok(stack.lines.some((line) => /"webhook_refused".*"the secret is missing or wrong"/.test(line)));
});

Deno.test("a secret that ends in v1 is one of several like any other", async () => {
  const value = `a-secret-of-the-api-v1,${secret}`;
  await using inbox = await startFunction("webhook-inbox", {
    TEST_WEBHOOK_SECRET: value,
    SUPABASE_URL: "http://x",
  });
  for (const each of value.split(",")) {
    const headers = { "X-Test-Secret": each, "Content-Type": "application/json" };
    await assertRefused(
      await inbox.fetch("/orders", { method: "POST", headers, body: "{" }),
      400,
      "Bad request",
      /read/,
    );
  }
});

Deno.test("a secret that is unset or too short is 500, whoever asks, and the log says which and what to do", async () => {
  const short = [" \n,", `${secret}, fifteen-letters`, "v1,whsec_fifteen-letters"];
  for (const value of [undefined, ...short]) {
    const env: Record<string, string> = value === undefined ? {} : { TEST_WEBHOOK_SECRET: value };
    await using inbox = await startFunction("webhook-inbox", env);
    for (const given of ["", value?.trim() ?? "undefined", secret]) {
      const headers = { "X-Test-Secret": given.replaceAll("\n", ""), "Content-Type": "application/json" };
      const response = await inbox.fetch("/orders", { method: "POST", headers, body: "{}" });
      await assertRefused(response, 500, "Not configured", /its log says what to do/);
    }
    const line = await until("the line", () => inbox.lines.find((text) => text.includes("secret_unusable")));
    assert.match(
      line,
      /TEST_WEBHOOK_SECRET is (unset|shorter than 16 characters): set it with supabase secrets set/,
    );
    assert.ok(!inbox.lines.some((text) => text.includes("fifteen")));
  }
});

Deno.test("what is not there is 404, another method 405, another type than JSON 415, no JSON 400", async () => {
  for (
    const path of ["", "/", "nobody", "orders/", "orders/more", "__proto__", "%00?x=1", "trusted", "Orders"]
  ) {
    await assertRefused(await send(path), 404, "Not found", /no webhook source/);
  }
  assert.ok(stack.lines.some((line) => /"webhook_refused","source":"nobody","status":404/.test(line)));
  for (const method of ["GET", "PUT", "DELETE", "PATCH"]) {
    const response = await send("orders", { method });
    assert.equal(response.headers.get("Allow"), "POST");
    await assertRefused(response, 405, "Method not allowed", /Use POST/);
  }
  for (const type of ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", "text/json"]) {
    const response = await send("orders", { headers: { "Content-Type": type } });
    await assertRefused(response, 415, "Unsupported media type", /application\/json/);
  }
  for (
    const type of ["application/json; charset=utf-8", "Application/JSON", "application/cloudevents+json"]
  ) {
    const response = await send("orders", { ...json({ type }), headers: { "Content-Type": type } });
    assert.equal(response.status, 202, await response.text());
  }
  for (const body of ["", "{", "not json", "{'a': 1}", "\0"]) {
    await assertRefused(await send("orders", { body }), 400, "Bad request", /cannot be read/);
  }
});

Deno.test("a body that is too large is 413 and nothing is stored, with and without a true Content-Length", async () => {
  const text = { "Content-Type": "text/plain" };
  await sendNew("texts", { headers: text, body: "x".repeat(1_000) });
  const chunked = () => ReadableStream.from([new Uint8Array(600), new Uint8Array(600)]);
  for (const body of ["x".repeat(1_001), chunked()]) {
    await assertRefused(await send("texts", { headers: text, body }), 413, "Content too large", /1000 bytes/);
  }
  // Said before any of it has come.
  const { hostname, port } = new URL(stack.apiUrl);
  const socket = connect(Number(port), hostname);
  socket.write(
    `POST /functions/v1/webhook-inbox/orders HTTP/1.1\r\nHost: x\r\nX-Test-Secret: ${secret}\r\nContent-Length: 200000000\r\n\r\n`,
  );
  const [answer] = await once(socket, "data");
  socket.destroy();
  assert.match(String(answer), /^HTTP\/1.1 413 /);
});

Deno.test("what the senders' own packages sign is stored once, and refused when it is changed", async () => {
  const timestamp = Math.floor(Date.now() / 1000);
  const messages = ([
    ["standardwebhooks", "standard", standardSecret],
    ["svix", "standard", standardSecret],
    ["stripe", "stripe", stripeSecret],
    ["github", "github", secret],
  ] as const).map(([sender, source, secret]) => {
    const body = JSON.stringify({ id: `evt_${sender}`, type: "ping", text: "ünïcode ☃", n: 2 ** 60 });
    return { sender, source, secret, body, timestamp };
  });
  const signed = await signByPackages(messages);
  for (const [index, { sender, source, body }] of messages.entries()) {
    const sent = { headers: { ...signed[index], "X-Test-Secret": "" }, body };
    const id = await sendNew(source, sent);
    const again = await send(source, sent);
    assert.deepEqual([again.status, (await again.json()).id], [200, id], sender);
    const changed = await send(source, { ...sent, body: body.replace("ping", "pong") });
    await assertRefused(changed, 401, "Unauthorized", /missing, wrong or too old/);
    const { id: messageId, payload, headers } = await resultOf(id);
    assert.deepEqual(payload, JSON.parse(body), sender);
    assert.match(messageId, sender === "stripe" ? /^evt_stripe$/ : /^msg_\d$/);
    assert.ok(!Object.keys(headers).some((name) => name.includes("signature")));
  }
});

Deno.test("the questions that Slack and Meta ask are answered, to them alone, and not stored", async () => {
  const body = JSON.stringify({ type: "url_verification", challenge: "3eZbrw1aB" });
  const timestamp = String(Math.floor(Date.now() / 1000));
  const signature = createHmac("sha256", secret).update(`v0:${timestamp}:${body}`).digest("hex");
  const headers = { "X-Slack-Request-Timestamp": timestamp, "X-Slack-Signature": `v0=${signature}` };
  const answer = await send("slack", { headers, body });
  assert.deepEqual([answer.status, await answer.text()], [200, "3eZbrw1aB"]);
  await assertRefused(await send("slack", { body }), 401, "Unauthorized", /missing/);

  const ask = (token: string) =>
    send(`meta?hub.mode=subscribe&hub.challenge=1158201444&hub.verify_token=${token}`, { method: "GET" });
  const known = await ask(verifyToken);
  assert.deepEqual([known.status, await known.text()], [200, "1158201444"]);
  await assertRefused(await ask("guessed"), 401, "Unauthorized", /missing/);
  const put = await send("meta", { method: "PUT" });
  assert.equal(put.headers.get("Allow"), "GET, POST");
  await assertRefused(put, 405, "Method not allowed", /Use GET or POST/);
  const stored = await stack.sql`select from webhook_inbox where source in ('slack', 'meta')`;
  assert.equal(stored.length, 0);
});

type Facts = { id?: string; type?: string; headers?: Record<string, string> };

Deno.test("a message that is only stored by trusted code is checked, stored once and processed", async () => {
  const call = async (amount: string, facts: Facts = {}) => {
    const args = { payload: { amount }, facts };
    const [row] = await stack.sql`select enqueue_job('receive', ${stack.sql.json(args)}) as id`;
    return await until("the call", async () => {
      const [job] = await stack.sql`select result from jobs where id = ${row?.id}`;
      return job?.result;
    });
  };
  const stored = await call("7", { id: "row 1", type: "added", headers: { "X-Kept": "yes" } });
  assert.deepEqual(await call("7", { id: "row 1" }), { ...stored, created: false });
  assert.partialDeepStrictEqual(await resultOf(stored.id), {
    id: "row 1",
    type: "added",
    headers: { "x-kept": "yes" },
    payload: { amount: 7 },
  });
  assert.partialDeepStrictEqual(await call("x"), { code: "invalid_payload" });
});

Deno.test("a payload that does not fit is dead at once, as is a job without a message", async () => {
  const [misfit] = await stack.sql`select id from receive_webhook('trusted', '{"amount": "x"}')`;
  const [broken] = await stack.sql`select id from receive_webhook('trusted', 'no json')`;
  const [alone] = await stack.sql`select enqueue_job('webhook_trusted') as id`;
  for (
    const [row, error] of [
      [misfit, /^invalid_payload: amount: /],
      [broken, /^invalid_payload: \(payload\): not JSON/],
      [alone, /no message in webhook_inbox/],
    ] as const
  ) {
    await untilStates(stack, [row?.id], "dead 1");
    const [job] = await stack.sql`select last_error from jobs where id = ${row?.id}`;
    assert.match(job?.last_error, error);
  }
});
