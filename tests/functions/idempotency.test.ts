import assert from "node:assert/strict";
import { connect } from "node:net";
import { join } from "node:path";
import { gunzipSync } from "node:zlib";
import { signJwt } from "../../scripts/local/jwt.ts";
import { sideBySide, startTestStack, type TestStack, until } from "../support.ts";
import { hold } from "./crashes.ts";

/** idempotency.handle, in an endpoint of an app's own, over HTTP. */

const source = `
import { contextOf, idempotency, serviceClient } from "../_shared/jobs.ts";
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const bytes = Uint8Array.from({ length: 256 }, (_, n) => n);
const text = (count, ms, last) => new ReadableStream({
  n: 0,
  async pull(controller) {
    if (ms > 0) await pause(ms);
    if (this.n < count) controller.enqueue(new TextEncoder().encode("part " + this.n++ + "\\n"));
    else if (last === "error") controller.error(new Error("broken off"));
    else controller.close();
  },
  cancel: () => console.log("cancelled by its reader"),
});
const headersOf = (name) => new Headers([
  ["Set-Cookie", "a=1"], ["Set-Cookie", "b=2"], ["Content-Type", "text/csv"], ["ETag", '"7"'], ["X-Own", "mine"],
  ["Access-Control-Allow-Origin", "https://example.com"], ["Link", "</a>; rel=next"],
]);
const gzip = (text) => new Response(text).body.pipeThrough(new CompressionStream("gzip"));
const answers = {
  text: () => new Response("grüße", { status: 201, statusText: "Made" }),
  json: () => Response.json({ a: [1, "ü", null] }, { status: 202 }),
  binary: () => new Response(bytes),
  blob: () => new Response(new Blob([bytes], { type: "image/png" })),
  empty: () => new Response(""),
  nobody: () => new Response(null, { headers: { "Cache-Control": "no-store" } }),
  204: () => new Response(null, { status: 204 }),
  205: () => new Response(null, { status: 205 }),
  304: () => new Response(null, { status: 304, headers: { ETag: '"8"' } }),
  redirect: () => Response.redirect("https://example.com/orders/7", 303),
  404: () => new Response("there is none", { status: 404 }),
  422: () => Response.json({ field: "item" }, { status: 422 }),
  headers: () => new Response("a,b", { headers: headersOf() }),
  pieces: () => new Response(text(5, 20), { headers: { "Content-Type": "text/plain" } }),
  events: () => new Response(text(4, 200), { headers: { "Content-Type": "text/event-stream; charset=utf-8" } }),
  endless: () => new Response(text(1e9, 100), { headers: { "Content-Type": "text/event-stream" } }),
  slow: () => new Response(text(12, 250)),
  trickle: () => new Response(text(2400, 1)),
  large: () => new Response(text(100_000, 0)),
  larger: () => new Response(new Uint8Array(2_000_001).fill(7)),
  gzip: () => new Response(gzip("zipped"), { headers: { "Content-Encoding": "gzip" } }),
  error: () => Response.error(),
  nothing: () => undefined,
  read: async () => {
    const answer = new Response("read");
    await answer.text();
    return answer;
  },
  throws: () => { throw new Error("of its own"); },
  breaks: () => new Response(text(3, 1, "error")),
};
for (const status of [500, 503, 401, 403, 408, 429]) answers[status] = () => new Response("not now", { status });
async function handler(request, { key, signal }) {
  const { searchParams } = new URL(request.url);
  await serviceClient().from("runs").insert({ name: searchParams.get("run") ?? searchParams.get("answer") });
  if (searchParams.has("echo")) {
    const body = new Uint8Array(await request.arrayBuffer()).toHex();
    return Response.json({ key, method: request.method, url: request.url, type: request.headers.get("Content-Type"), body });
  }
  const ms = Number(searchParams.get("ms") ?? 0);
  for (const end = performance.now() + ms; performance.now() < end && !signal.aborted;) await pause(10);
  if (signal.aborted) return new Response("aborted: " + signal.reason.code);
  return answers[searchParams.get("answer") ?? "text"]();
}
const own = (status, title, detail, headers) => Response.json({ own: title, detail }, { status, headers });
Deno.serve(async (request) => {
  const options = JSON.parse(request.headers.get("X-Options") ?? "{}");
  if (options.read) await request.text();
  if (options.scope === "function") options.scope = (request) => request.headers.get("X-Partner");
  if (options.problem) options.problem = own;
  try {
    return await idempotency.handle(request, handler, options);
  } catch (error) {
    return new Response(error.name + ": " + error.message, { status: 500, headers: { "X-Thrown": "yes" } });
  }
});
`;

let stack: TestStack;
const users: Record<string, string> = {};
const key = () => crypto.randomUUID();

Deno.test.beforeAll(async () => {
  const section = '\n[functions.NAME]\nverify_jwt = false\nimport_map = "./functions/deno.json"\n';
  stack = await startTestStack({
    dispatch: false,
    prepare: async (appDir) => {
      for (const name of ["pay", "frozen"]) {
        await Deno.mkdir(join(appDir, "supabase/functions", name));
        await Deno.writeTextFile(join(appDir, "supabase/functions", name, "index.ts"), source);
        await Deno.writeTextFile(join(appDir, "supabase/config.toml"), section.replace("NAME", name), {
          append: true,
        });
      }
    },
  });
  await stack.sql`create table runs (name text)`;
  await stack.sql`grant insert on runs to service_role`;
  const exp = Math.floor(Date.now() / 1000) + 3600;
  const claims = { role: "authenticated", aud: "authenticated" };
  for (const name of ["ada", "eve"]) {
    users[name] = await signJwt({ ...claims, sub: crypto.randomUUID(), exp }, stack.keys.jwtSecret);
  }
  users.late = await signJwt({ ...claims, sub: crypto.randomUUID(), exp: exp - 7200 }, stack.keys.jwtSecret);
  users.forged = await signJwt(
    { ...claims, sub: crypto.randomUUID(), exp },
    "another secret, of more than 32 characters",
  );
  // The API's schema is read anew at the first call that needs a table which it does not know.
  assert.equal((await send("", { key: key() })).status, 201);
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Sent {
  key?: string;
  method?: string;
  path?: string;
  body?: BodyInit;
  headers?: Record<string, string>;
  /** Options of idempotency.handle; a scope unless given. */
  options?: Record<string, unknown>;
  user?: string;
  to?: string;
}

function request(query: string, { to = "pay", path = "", ...sent }: Sent): [string, RequestInit] {
  const headers = new Headers({
    "X-Options": JSON.stringify({ scope: "s", ...sent.options }),
    ...sent.headers,
  });
  if (sent.key !== undefined) headers.set("Idempotency-Key", sent.key);
  if (sent.user) headers.set("Authorization", `Bearer ${users[sent.user]}`);
  return [`${stack.apiUrl}/functions/v1/${to}${path}?${query}`, {
    method: sent.method ?? "POST",
    headers,
    body: sent.body,
    redirect: "manual",
  }];
}

/** What a request is answered; the body byte for byte. */
async function send(query: string, sent: Sent) {
  const response = await fetch(...request(query, sent));
  return await received(response);
}
async function received(response: Response) {
  const body = new Uint8Array(await response.arrayBuffer()).toHex();
  const { status, statusText, headers } = response;
  return { status, statusText, headers, body, replayed: headers.get("Idempotency-Replayed") };
}
const textOf = ({ body }: { body: string }) => new TextDecoder().decode(Uint8Array.fromHex(body));
const runs = async (name: string) => (await stack.sql`select from runs where name = ${name}`).length;
const titleOf = (answer: { body: string }) => JSON.parse(textOf(answer)).title;

Deno.test("of a hundred calls at once one runs, and later ones get its answer, byte for byte, whatever it is", async () => {
  const same = [
    "text",
    "json",
    "binary",
    "blob",
    "empty",
    "nobody",
    "204",
    "205",
    "304",
    "redirect",
    "404",
    "422",
    "pieces",
  ];
  await Promise.all(same.map(async (name) => {
    const sent = { key: key(), body: "the body" };
    const query = `answer=${name}&run=${name} at once&ms=30`;
    const all = await Promise.all(
      Array.from({ length: name === "json" || name === "binary" ? 100 : 5 }, () => send(query, sent)),
    );
    const [first, ...others] = all.filter(({ replayed, status }) => status !== 409 && !replayed);
    assert.ok(first && others.length === 0, `${name}: ${all.map(({ status }) => status)}`);
    const kept = (headers: Headers) =>
      ["content-type", "location", "etag", "cache-control"].map((header) => headers.get(header));
    for (const answer of [...all.filter(({ replayed }) => replayed), await send(query, sent)]) {
      assert.equal(answer.replayed, "true", name);
      assert.deepEqual([answer.status, answer.body, ...kept(answer.headers)], [
        first.status,
        first.body,
        ...kept(first.headers),
      ]);
    }
    assert.equal(await runs(`${name} at once`), 1, name);
  }));
});

Deno.test("while a request is at work the same one is answered 409, with when to come again", async () => {
  const sent = { key: key() };
  const first = send("ms=300&run=slowly", sent);
  await until("its start", async () => await runs("slowly") === 1);
  const second = await send("ms=300&run=slowly", sent);
  assert.deepEqual([second.status, second.headers.get("Retry-After")], [409, "1"]);
  assert.equal(titleOf(second), "A request is outstanding for this Idempotency-Key");
  const other = await send("ms=300&run=slowly", { ...sent, body: "other" });
  assert.equal(other.status, 422, "a mismatch is one before anything is said of a lock");
  assert.equal((await first).status, 201);
});

Deno.test("another body or query with the key is answered 422, in whatever state the key is, and takes nothing over", async () => {
  const sent = { key: key(), body: "one" };
  await send("run=mismatch", sent);
  for (const state of ["finished", "stale"]) {
    if (state === "stale") {
      await stack.sql`
        update idempotency_keys set status = null, headers = null, body = null, finished_at = null, locked_until = now()
        where key = ${sent.key}`;
    }
    for (
      const [query, body] of [["run=mismatch", "two"], ["run=mismatch&x=1", "one"], [
        "run=mismatch",
        "",
      ]] as const
    ) {
      const answer = await send(query, { ...sent, body });
      assert.deepEqual([answer.status, titleOf(answer)], [422, "Idempotency-Key is already used"], state);
    }
  }
  assert.equal(await runs("mismatch"), 1);
  assert.equal(
    (await send("run=mismatch", sent)).replayed,
    null,
    "the stale one is taken over by the same request",
  );
});

Deno.test("another path, method or user with the key is another request", async () => {
  const sent = { key: key(), body: "one" };
  const all = [
    await send("run=apart", sent),
    await send("run=apart", { ...sent, path: "/refunds" }),
    await send("run=apart", { ...sent, method: "PUT" }),
    await send("run=apart", { ...sent, options: { scope: "t" } }),
    await send("run=apart", { ...sent, options: { scope: undefined }, user: "ada" }),
    await send("run=apart", { ...sent, options: { scope: undefined }, user: "eve" }),
  ];
  assert.deepEqual(all.map(({ status, replayed }) => [status, replayed]), Array(6).fill([201, null]));
  assert.equal(await runs("apart"), 6);
  const [{ scope } = { scope: "" }] = await stack.sql`
    select scope from idempotency_keys where key = ${sent.key} and scope like '% user %'`;
  const mimic = scope.replace(/^POST \/pay user /, "");
  const answer = await send("run=apart", { ...sent, options: { scope: mimic } });
  assert.equal(answer.replayed, null, "a scope that is given is none of a user who is verified");
});

Deno.test("without a scope callers are who they prove to be, and nobody else is let in", async () => {
  const ask = (user?: string, headers = {}) =>
    send("run=who", { key: "who", options: { scope: undefined }, user, headers });
  assert.deepEqual([(await ask("ada")).status, (await ask("ada")).replayed], [201, "true"]);
  for (const user of [undefined, "late", "forged"]) {
    const answer = await ask(user);
    assert.deepEqual([answer.status, answer.headers.get("WWW-Authenticate")], [401, "Bearer"], user);
  }
  const nobody = [stack.keys.secretKey, stack.keys.publishableKey].map((key) => ({
    Authorization: `Bearer ${key}`,
  }));
  for (const headers of nobody) assert.equal((await ask(undefined, headers)).status, 401);
  assert.equal(await runs("who"), 1);
});

Deno.test("a scope may be a function of the request; one that is empty is an error, and runs nothing", async () => {
  const ask = (partner: string) =>
    send("run=partner", { key: "p", options: { scope: "function" }, headers: { "X-Partner": partner } });
  assert.deepEqual([(await ask("a")).replayed, (await ask("a")).replayed, (await ask("b")).replayed], [
    null,
    "true",
    null,
  ]);
  for (const answer of [await ask(""), await send("run=partner", { key: "p", options: { scope: "" } })]) {
    assert.equal(textOf(answer), "TypeError: idempotency.handle: scope is empty");
  }
  assert.equal(await runs("partner"), 2);
});

Deno.test("a key is one text, quoted or not, of 1 to 255 visible characters; all else is answered 400", async () => {
  const id = key();
  const good: [string, string][] = [
    [id, `"${id}"`],
    ["x".repeat(255), `"${"x".repeat(255)}"`],
    ["a:b;c=1/+~!", '"a:b;c=1/+~!"'],
    ['"with space, comma"', '"with space, comma"'],
    [String.raw`"q\"u\\o"`, String.raw`"q\"u\\o"`],
  ];
  for (const [one, other] of good) {
    assert.equal((await send("", { key: one })).replayed, null, one);
    assert.equal((await send("", { key: other })).replayed, "true", other);
  }
  const bad = [
    "",
    '""',
    "x".repeat(256),
    `"${"x".repeat(256)}"`,
    '"open',
    'a"b',
    "a b",
    "a,b",
    '"a", "a"',
    '"a";v=1',
  ];
  for (const header of [...bad, String.raw`"a\b"`, "é"]) {
    const answer = await send("run=malformed", { key: header });
    assert.deepEqual([answer.status, titleOf(answer)], [400, "Idempotency-Key is malformed"], header);
  }
  // Twice, as two lines, which fetch does not send.
  assert.match(await raw(["Idempotency-Key: a", "Idempotency-Key: a"]), /^HTTP\/1.1 400 /);
  assert.match(await raw(["Idempotency-Key: a"]), /^HTTP\/1.1 201 /);
  assert.equal(await runs("malformed"), 1);
});

/** What a request with these lines is answered. */
async function raw(lines: string[]): Promise<string> {
  const { hostname, port } = new URL(stack.apiUrl);
  const socket = connect(Number(port), hostname);
  const head = [
    "POST /functions/v1/pay?run=malformed HTTP/1.1",
    "Host: x",
    'X-Options: {"scope":"raw"}',
    ...lines,
  ];
  socket.write(`${head.join("\r\n")}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n`);
  let answer = "";
  for await (const chunk of socket) answer += chunk;
  return answer;
}

Deno.test("without a key a request runs as often as it comes, unless keys are required", async () => {
  for (let i = 0; i < 2; i++) assert.equal((await send("run=keyless", {})).status, 201);
  assert.equal(JSON.parse(textOf(await send("run=keyless&echo", {}))).key, null);
  const refused = await send("run=keyless", { options: { required: true } });
  assert.deepEqual([refused.status, titleOf(refused)], [400, "Idempotency-Key is missing"]);
  assert.equal(await runs("keyless"), 3);
});

Deno.test("other methods than POST, PUT, PATCH and DELETE just run, with a key or without", async () => {
  for (const method of ["GET", "HEAD", "OPTIONS"]) {
    for (const sent of [{ key: "k" }, { key: "k" }, {}]) {
      const answer = await send(`run=${method}`, { ...sent, method, options: { required: true } });
      assert.deepEqual([answer.status, answer.replayed], [201, null]);
    }
    assert.equal(await runs(method), 3);
  }
  for (const method of ["PUT", "PATCH", "DELETE"]) {
    const sent = { key: "k", method };
    assert.deepEqual([(await send("", sent)).replayed, (await send("", sent)).replayed], [null, "true"]);
  }
});

Deno.test("a request whose body has been read already is an error: any would look the same", async () => {
  const answer = await send("run=read", { key: key(), body: "b", options: { read: true } });
  assert.equal(textOf(answer), "TypeError: idempotency.handle: the request's body has been read already");
  assert.equal(await runs("read"), 0);
});

Deno.test("the handler has the request as it was sent, and its key", async () => {
  const bytes = Uint8Array.from({ length: 256 }, (_, n) => n);
  const sent = {
    key: '"the key"',
    method: "PATCH",
    path: "/a%20b",
    headers: { "Content-Type": "application/x-own" },
  };
  const { url, ...echo } = JSON.parse(textOf(await send("echo=1&x=%C3%BC", { ...sent, body: bytes })));
  assert.deepEqual(echo, { key: "the key", method: "PATCH", type: "application/x-own", body: bytes.toHex() });
  assert.match(url, /\/pay\/a%20b\?echo=1&x=%C3%BC$/);
  assert.equal(JSON.parse(textOf(await send("echo", { key: key(), method: "DELETE" }))).body, "");
});

Deno.test("Set-Cookie and headers about how a body is sent are never stored; the first caller has what the handler gave", async () => {
  const sent = { key: key() };
  const first = await send("answer=headers", sent);
  assert.deepEqual([first.headers.getSetCookie(), first.headers.get("X-Own")], [["a=1", "b=2"], "mine"]);
  const again = await send("answer=headers", sent);
  assert.deepEqual([again.headers.getSetCookie(), again.headers.get("X-Own")], [[], null]);
  for (const name of ["Content-Type", "ETag", "Link", "Access-Control-Allow-Origin"]) {
    assert.equal(again.headers.get(name), first.headers.get(name), name);
  }
  const [stored] = await stack.sql`select headers from idempotency_keys where key = ${sent.key}`;
  assert.doesNotMatch(JSON.stringify(stored), /cookie|length|encoding|own/i);

  const options = { headers: ["x-own", "content-type"] };
  const keeping = { key: key(), options };
  await send("answer=headers", keeping);
  const kept = await send("answer=headers", keeping);
  assert.deepEqual([kept.headers.get("X-Own"), kept.headers.get("Content-Type")], ["mine", "text/csv"]);
  for (
    const name of ["set-cookie", "Content-Length", "Transfer-Encoding", "content-encoding", "Connection"]
  ) {
    const answer = await send("", { key: key(), options: { headers: [name] } });
    assert.equal(textOf(answer), `TypeError: idempotency.handle: the header ${name} is never kept`);
  }
});

Deno.test("what came to nothing is not kept, and the next request runs: 5xx, 401, 403, 408, 429 and what throws", async () => {
  const names = ["500", "503", "401", "403", "408", "429", "error", "nothing", "read", "throws", "breaks"];
  await Promise.all(names.map(async (name) => {
    const sent = { key: key() };
    const query = `answer=${name}&run=released ${name}`;
    const answers = [];
    for (let i = 0; i < 2; i++) answers.push(await send(query, sent).catch(() => null));
    assert.equal(await runs(`released ${name}`), 2, name);
    for (const answer of answers) {
      if (/^\d/.test(name)) {
        assert.deepEqual([answer?.status, answer && textOf(answer)], [Number(name), "not now"]);
      }
      if (name === "throws") assert.equal(answer && textOf(answer), "Error: of its own");
      if (name === "nothing" || name === "read") {
        assert.match(
          answer ? textOf(answer) : "",
          /^TypeError: .* no Response, or one whose body has been read$/,
        );
      }
    }
    assert.equal((await stack.sql`select from idempotency_keys where key = ${sent.key}`).length, 0, name);
  }));
});

Deno.test("what cannot be kept is sent as it is, and says so; later requests are told that the work is done", async () => {
  const cases: [name: string, why: string, options?: Record<string, unknown>][] = [
    ["large", "it has more than 1048576 bytes"],
    ["larger", "it has more than 2000000 bytes", { maxAnswerBytes: 2_000_000 }],
    ["gzip", "it has a Content-Encoding"],
    ["events", "it is a stream"],
  ];
  await Promise.all(cases.map(async ([name, why, options]) => {
    const sent = { key: key(), options };
    const query = `answer=${name}&run=unkept ${name}`;
    const response = await fetch(...request(query, { ...sent, headers: { "Accept-Encoding": "identity" } }));
    assert.equal(response.headers.get("Idempotency-Stored"), "false", name);
    const body = new Uint8Array(await response.arrayBuffer());
    if (name === "larger") assert.ok(body.length === 2_000_001 && body.every((byte) => byte === 7));
    if (name === "large") {
      const parts = Array.from({ length: 100_000 }, (_, n) => `part ${n}\n`).join("");
      assert.ok(new TextDecoder().decode(body) === parts);
    }
    if (name === "gzip") {
      assert.match(String(body[0] === 31 ? gunzipSync(body) : new TextDecoder().decode(body)), /^zipped$/);
    }
    if (name === "events") assert.equal(new TextDecoder().decode(body), "part 0\npart 1\npart 2\npart 3\n");
    const again = await send(query, sent);
    assert.deepEqual([again.status, again.replayed], [410, "true"], name);
    assert.equal(
      JSON.parse(textOf(again)).detail,
      `The request was carried out. Its answer is not kept: ${why}.`,
    );
    assert.equal(await runs(`unkept ${name}`), 1);
  }));
  const kept = { key: key(), options: { maxAnswerBytes: 1e9 } };
  const first = await send("answer=larger", kept);
  const again = await send("answer=larger", kept);
  assert.ok(again.replayed && again.body === first.body);
});

Deno.test("a stream is there as it comes, and ends at its source when nobody reads it any more", async () => {
  const sent = { key: key() };
  const response = await fetch(...request("answer=endless", sent));
  const reader = response.body?.getReader();
  const { value } = await reader?.read() ?? {};
  assert.match(new TextDecoder().decode(value), /^part 0\n/);
  assert.equal((await send("answer=endless", sent)).status, 410, "while it goes on");
  await reader?.cancel();
  await until("the end", () => stack.lines.some((line) => line.includes("cancelled by its reader")));
});

Deno.test("a body that is too large, or too long in coming, is refused before anything is begun", async () => {
  const sent = { key: key(), body: "x".repeat(101), options: { maxBodyBytes: 100 } };
  const answer = await send("run=large", sent);
  assert.deepEqual([answer.status, answer.headers.get("Content-Type")], [413, "application/problem+json"]);
  assert.equal((await send("run=large", { key: key(), body: "x".repeat(1024 * 1024 + 1) })).status, 413);
  assert.equal(await runs("large"), 0);
  assert.equal((await send("run=large", { ...sent, body: "x".repeat(100) })).status, 201);
});

Deno.test("what is answered in the handler's place has the app's own form where it has one, else that of RFC 9457", async () => {
  const cases: [status: number, query: string, sent: Sent][] = [
    [400, "", { options: { required: true } }],
    [400, "", { key: '"' }],
    [401, "", { key: "k", options: { scope: undefined } }],
    [401, "", { key: "k", options: { scope: undefined }, user: "forged" }],
    [413, "", { key: "k", body: "xx", options: { maxBodyBytes: 1 } }],
    [422, "own", { key: "own", body: "other" }],
    [410, "answer=gzip", { key: "own gone".replace(" ", "-") }],
    [500, "", { key: "k", options: { ttl: 1e9 } }],
  ];
  await send("own", { key: "own" });
  await send("answer=gzip", { key: "own-gone" });
  for (const [status, query, sent] of cases) {
    const plain = await send(query, sent);
    assert.deepEqual([plain.status, plain.headers.get("Content-Type")], [status, "application/problem+json"]);
    const { type, title, status: said, detail } = JSON.parse(textOf(plain));
    assert.deepEqual([type, said, typeof title, typeof detail], ["about:blank", status, "string", "string"]);
    if (status === 410) continue; // it was stored in the form of then
    const own = await send(query, { ...sent, options: { ...sent.options, problem: true } });
    assert.deepEqual([own.status, JSON.parse(textOf(own))], [status, { own: title, detail }]);
  }
  const sent = { key: key(), options: { problem: true } };
  await send("answer=gzip", sent);
  const gone = await send("answer=gzip", sent);
  assert.deepEqual([gone.status, JSON.parse(textOf(gone)).own, gone.replayed], [
    410,
    "Answer not kept",
    "true",
  ]);
});

Deno.test("the answer is kept for as long as ttl says, in seconds", async () => {
  const sent = { key: key(), options: { ttl: 3600.5 } };
  await send("", sent);
  const [row] = await stack.sql`
    select extract(epoch from expires_at - finished_at)::float8 as ttl from idempotency_keys where key = ${sent.key}`;
  assert.ok(Math.abs(row?.ttl - 3600.5) < 0.1);
});

Deno.test("a client that hangs up does not stop the work: who asks next gets its answer", async () => {
  const sent = { key: key() };
  const controller = new AbortController();
  const [url, init] = request("ms=300&run=left", sent);
  const left = fetch(url, { ...init, signal: controller.signal });
  await until("its start", async () => await runs("left") === 1);
  controller.abort();
  await assert.rejects(left);
  await until("its answer", async () => (await send("ms=300&run=left", sent)).replayed === "true");
  assert.equal(await runs("left"), 1);
});

sideBySide({
  "the lock is renewed as long as the handler runs": async () => {
    const sent = { key: key(), options: { lockSeconds: 1 } };
    const first = send("ms=2500&run=renewed", sent);
    await until("its start", async () => await runs("renewed") === 1);
    const [{ locked_until: before } = { locked_until: 0 }] = await stack.sql`
      select locked_until from idempotency_keys where key = ${sent.key}`;
    await until("the end of the first lock", () => Date.now() > before.getTime() + 300);
    assert.equal((await send("ms=2500&run=renewed", sent)).status, 409);
    assert.equal((await first).status, 201);
    assert.equal((await send("ms=2500&run=renewed", sent)).replayed, "true");
    assert.equal(await runs("renewed"), 1);
  },

  "a handler whose lock is taken is told by its signal; its client gets its answer, which is not stored":
    async () => {
      const sent = { key: key(), options: { lockSeconds: 1 } };
      const first = send("ms=9000&run=taken", sent);
      await until("its start", async () => await runs("taken") === 1);
      await stack
        .sql`update idempotency_keys set holder = holder + 1000000, locked_until = now() + interval '1 hour' where key = ${sent.key}`;
      assert.equal(textOf(await first), "aborted: lease_lost");
      assert.equal((await send("ms=9000&run=taken", sent)).status, 409, "the other one is still at work");
      await until(
        "a line in the log",
        () => stack.lines.some((line) => line.includes("idempotency_key_lost")),
      );
    },

  "a slow body is a stream after two seconds, and loses nothing": async () => {
    await Promise.all(([["slow", 12], ["trickle", 2400]] as const).map(async ([name, length]) => {
      const sent = { key: key() };
      const answer = await send(`answer=${name}`, sent);
      assert.equal(answer.headers.get("Idempotency-Stored"), "false", name);
      assert.equal(textOf(answer), Array.from({ length }, (_, n) => `part ${n}\n`).join(""));
      assert.equal((await send(`answer=${name}`, sent)).status, 410);
    }));
  },

  "an answer that cannot be stored for a while is sent after two seconds, and stored later": async () => {
    const sent = { key: key(), body: "a secret body" };
    const first = send("ms=300&run=stored late", sent);
    await until("its start", async () => await runs("stored late") === 1);
    const { release } = await hold(
      stack.db,
      (sql) => sql`select from idempotency_keys where key = ${sent.key} for update`,
    );
    const began = performance.now();
    const answer = await first;
    const ms = performance.now() - began;
    assert.deepEqual([answer.status, textOf(answer)], [201, "grüße"]);
    assert.ok(ms < 4000, `${ms} ms`);
    const reported = () => stack.lines.filter((line) => line.includes("idempotent_answer_not_stored"));
    await until("a report", () => reported().length > 0);
    assert.equal((await send("ms=300&run=stored late", sent)).status, 409);
    await release();
    await until("the answer", async () => (await send("ms=300&run=stored late", sent)).replayed === "true");
    assert.equal(await runs("stored late"), 1);
    for (const line of reported()) assert.ok(!line.includes(sent.key) && !line.includes("a secret"), line);
    assert.match(reported()[0] ?? "", /"route":"POST \/pay"/);
  },
});

/** Runs a test while a trigger on idempotency_keys raises an error of that code. */
async function whileRefused(
  when: "insert" | "update",
  code: string,
  test: () => Promise<void>,
): Promise<void> {
  await stack.sql.unsafe(`
    create function no() returns trigger language plpgsql as $$
    begin raise exception 'not mine' using errcode = '${code}'; end $$;
    create trigger no before ${when} on idempotency_keys for each row execute function no()`).simple();
  try {
    await test();
  } finally {
    await stack.sql`drop function no cascade`;
  }
}

Deno.test("an answer that the database refuses is sent all the same, with a report", async () => {
  await whileRefused("update", "P0001", async () => {
    const answer = await send("run=refused", { key: key() });
    assert.deepEqual([answer.status, textOf(answer)], [201, "grüße"]);
    await until(
      "a report",
      () =>
        stack.lines.some((line) =>
          line.includes("idempotent_answer_not_stored") && line.includes("not mine")
        ),
    );
  });
});

Deno.test("when the database cannot begin a request nothing runs, and the client is told whether to send it again", async () => {
  for (const [code, status] of [["53300", 503], ["P0001", 500]] as const) {
    await whileRefused("insert", code, async () => {
      const answer = await send("run=unanswered", { key: key() });
      const retryAfter = answer.headers.get("Retry-After");
      assert.deepEqual([answer.status, retryAfter], [status, status === 503 ? "5" : null]);
    });
  }
  assert.equal(await runs("unanswered"), 0);
});

Deno.test("who died is succeeded when the lock is over; who only slept can neither store nor release", async () => {
  const sent = { key: key(), options: { lockSeconds: 1 }, to: "frozen", path: "/x" };
  for (const signal of ["SIGSTOP", "SIGKILL"] as const) {
    const run: string = signal;
    const id = key();
    const first = send(`ms=300&run=${run}`, { ...sent, key: id });
    await until("its start", async () => await runs(run) === 1);
    const [begun] = await stack.sql`select holder from idempotency_keys where key = ${id}`;
    const pid = stack.pid("frozen");
    Deno.kill(pid, signal);
    if (signal === "SIGKILL") {
      await first.catch(() => {});
      await stack.untilRestarted(pid, "frozen");
    }
    // Of the same route, as another process of the function would begin it.
    const [row] = await stack.sql`select scope, fingerprint from idempotency_keys where key = ${id}`;
    const next = await until("the end of the lock", async () => {
      const [next] = await stack.sql`
        select outcome, holder from begin_idempotent_request(${id}, ${row?.fingerprint}, 60, scope => ${row?.scope})`;
      return next?.outcome === "started" && next;
    });
    assert.ok(Number(next.holder) > Number(begun?.holder));
    if (signal === "SIGSTOP") {
      Deno.kill(pid, "SIGCONT");
      assert.match(textOf(await first), /^(grüße|aborted: lease_lost)$/);
    }
    const { count } = await stack.sql`
      select from idempotency_keys where key = ${id} and holder = ${next.holder} and status is null`;
    assert.equal(count, 1, "the next one's is as it was");
    const held = await stack
      .sql`select complete_idempotent_request(${id}, ${begun?.holder}, 200, scope => ${row?.scope}) as held`;
    assert.equal(held[0]?.held, false);
    await stack
      .sql`select complete_idempotent_request(${id}, ${next.holder}, 200, '{}', 'next', ${row?.scope})`;
    assert.equal(textOf(await send(`ms=300&run=${run}`, { ...sent, key: id })), "next");
    assert.equal(await runs(run), 1);
  }
});
