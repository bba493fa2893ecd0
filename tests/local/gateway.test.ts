import assert from "node:assert/strict";
import { join } from "node:path";
import { type Gateway, type GatewayOptions, startGateway } from "../../scripts/local/gateway.ts";
import { makeKeys } from "../../scripts/local/keys.ts";
import { freePort } from "../../scripts/local/ports.ts";

const gatewayPath = join(import.meta.dirname ?? ".", "../../scripts/local/gateway.ts");
const keys = await makeKeys();
const folder = await Deno.makeTempDir();
const socket = (name: string) => join(folder, `${name}.sock`);
let gateway: Gateway;

const options: GatewayOptions = {
  port: 0,
  // No Postgres: what is tested here is decided before it is asked.
  databaseUrl: `postgres://authenticator@127.0.0.1:${freePort()}/postgres`,
  keys,
  functions: {
    echo: socket("echo"),
    late: socket("late"),
    absent: socket("absent"),
    doomed: socket("doomed"),
    guarded: socket("guarded"),
  },
  jwtFunctions: ["guarded"],
};

Deno.test.beforeAll(async () => {
  gateway = await startGateway(options);
});

Deno.test.afterAll(async () => {
  await gateway?.stop();
  await Deno.remove(folder, { recursive: true });
});

const url = (path: string) => `http://127.0.0.1:${gateway.port}${path}`;

function serveFunction(
  name: string,
  handler: Deno.ServeHandler<Deno.UnixAddr>,
): Deno.HttpServer<Deno.UnixAddr> {
  return Deno.serve({ path: socket(name), onListen: () => {} }, handler);
}

async function answer(request: Promise<Response>): Promise<[number, unknown]> {
  const response = await request;
  return [response.status, await response.json()];
}

Deno.test("a function gets the request as it was sent, its path below its name, and where it came from", async () => {
  await using _server = serveFunction("echo", async (request) => {
    const { pathname, search } = new URL(request.url);
    const headers = Object.fromEntries(request.headers);
    const body = await request.text();
    return Response.json({ method: request.method, path: pathname + search, headers, body }, {
      status: 418,
      headers: [["x-one", "1"], ["set-cookie", "a=1"], ["set-cookie", "b=2"]],
    });
  });
  const response = await fetch(url("/functions/v1/echo/deeper/path?q=a%20b&q=2"), {
    method: "PATCH",
    headers: { authorization: "Bearer anything", "x-mine": "yes", "content-type": "text/plain" },
    body: "the body",
  });
  assert.equal(response.status, 418);
  assert.equal(response.headers.get("x-one"), "1");
  assert.deepEqual(response.headers.getSetCookie(), ["a=1", "b=2"]);
  const { method, path, headers, body } = await response.json();
  assert.deepEqual([method, path, body], ["PATCH", "/echo/deeper/path?q=a%20b&q=2", "the body"]);
  assert.equal(headers.authorization, "Bearer anything");
  assert.equal(headers["x-mine"], "yes");
  assert.equal(headers["x-forwarded-for"], "127.0.0.1");
  assert.equal(headers["x-forwarded-proto"], "http");
  assert.equal(headers["x-forwarded-host"], "127.0.0.1");
  assert.equal(headers.host, `127.0.0.1:${gateway.port}`);
});

Deno.test("bodies stream both ways", async () => {
  const received = Promise.withResolvers<string>();
  await using _server = serveFunction("echo", async (request) => {
    const reader = request.body?.pipeThrough(new TextDecoderStream()).getReader();
    received.resolve((await reader?.read())?.value ?? "");
    const rest = await reader?.read();
    return new Response(
      ReadableStream.from([`first `, `${rest?.value}`]).pipeThrough(new TextEncoderStream()),
    );
  });
  const body = new TransformStream<string, string>();
  const writer = body.writable.getWriter();
  const response = fetch(url("/functions/v1/echo"), {
    method: "POST",
    body: body.readable.pipeThrough(new TextEncoderStream()),
  });
  await writer.write("one");
  assert.equal(await received.promise, "one", "the first part arrives before the last is sent");
  await writer.write("two");
  await writer.close();
  assert.equal(await (await response).text(), "first two");
});

Deno.test("redirects and preflights are the function's own", async () => {
  await using _server = serveFunction(
    "echo",
    (request) =>
      request.method === "OPTIONS"
        ? new Response("its own", { headers: { "access-control-allow-origin": "https://app" } })
        : new Response(null, { status: 302, headers: { location: "/elsewhere" } }),
  );
  const redirect = await fetch(url("/functions/v1/echo"), { redirect: "manual" });
  assert.deepEqual([redirect.status, redirect.headers.get("location")], [302, "/elsewhere"]);
  await redirect.body?.cancel();
  const preflight = await fetch(url("/functions/v1/echo"), { method: "OPTIONS" });
  assert.equal(preflight.headers.get("access-control-allow-origin"), "https://app");
  assert.equal(await preflight.text(), "its own");
});

Deno.test("a caller who leaves cancels the call", async () => {
  const cancelled = Promise.withResolvers<void>();
  const begun = Promise.withResolvers<void>();
  await using _server = serveFunction("echo", async (request) => {
    request.signal.addEventListener("abort", () => cancelled.resolve());
    begun.resolve();
    await cancelled.promise;
    return new Response();
  });
  const caller = new AbortController();
  const call = fetch(url("/functions/v1/echo"), { signal: caller.signal });
  await begun.promise;
  caller.abort();
  await assert.rejects(call);
  await cancelled.promise;
});

Deno.test("a function that is being started is waited for", async () => {
  const call = fetch(url("/functions/v1/late"), { method: "POST", body: "kept" });
  await new Promise((resolve) => setTimeout(resolve, 100));
  await using _server = serveFunction("late", async (request) => new Response(await request.text()));
  assert.equal(await (await call).text(), "kept");
});

Deno.test("a function that does not come is a 503, one that is not known a 404", async () => {
  assert.deepEqual(await answer(fetch(url("/functions/v1/unknown"))), [
    404,
    { code: "NOT_FOUND", message: "Requested function was not found" },
  ]);
  assert.deepEqual(await answer(fetch(url("/functions/v1/absent"))), [
    503,
    { code: "BOOT_ERROR", message: "Function failed to start (please check logs)" },
  ]);
});

Deno.test("a function that ends in the middle of a call is a 500, and the next call reaches its successor", async () => {
  const program = `
    const path = Deno.env.get("SOCKET");
    Deno.serve({ path, onListen: () => console.log("up") }, () => Deno.exit(1));`;
  const child = new Deno.Command(Deno.execPath(), {
    args: ["eval", program],
    env: { SOCKET: socket("doomed") },
    stdout: "piped",
  }).spawn();
  const output = child.stdout.getReader();
  await output.read();
  assert.deepEqual(await answer(fetch(url("/functions/v1/doomed"))), [
    500,
    { code: "WORKER_ERROR", message: "Function exited due to an error (please check logs)" },
  ]);
  await output.cancel();
  await child.status;
  await Deno.remove(socket("doomed"));
  await using _server = serveFunction("doomed", () => new Response("back"));
  assert.equal(await (await fetch(url("/functions/v1/doomed"))).text(), "back");
});

Deno.test("REST without a key, or with a key of another project, is a 401", async () => {
  assert.deepEqual(await answer(fetch(url("/rest/v1/items"))), [401, {
    message: "No API key found in request",
    hint: "No `apikey` request header or url param was found.",
  }]);
  const bearer = { authorization: `Bearer ${keys.serviceRoleKey}` };
  assert.equal((await answer(fetch(url("/rest/v1/items"), { headers: bearer })))[0], 401);
  assert.deepEqual(await answer(fetch(url("/rest/v1/items"), { headers: { apikey: "sb_secret_other" } })), [
    401,
    {
      message: "Invalid API key",
      hint: "Double check your Supabase `anon` or `service_role` API key.",
    },
  ]);
});

Deno.test("REST answers 503 while there is no database", async () => {
  const [status, body] = await answer(fetch(url(`/rest/v1/items?apikey=${keys.publishableKey}`)));
  assert.equal(status, 503);
  assert.match(JSON.stringify(body), /"code":"PGRST002"/);
});

Deno.test("browsers may call REST from anywhere", async () => {
  const preflight = await fetch(url("/rest/v1/items"), {
    method: "OPTIONS",
    headers: { origin: "https://app", "access-control-request-headers": "apikey,x-client-info" },
  });
  assert.equal(preflight.status, 200);
  assert.equal(preflight.headers.get("access-control-allow-origin"), "*");
  assert.equal(preflight.headers.get("access-control-allow-headers"), "apikey,x-client-info");
  assert.match(preflight.headers.get("access-control-allow-methods") ?? "", /PATCH/);
  const refused = await fetch(url("/rest/v1/items"), { headers: { origin: "https://app" } });
  assert.equal(refused.headers.get("access-control-allow-origin"), "*");
  await refused.body?.cancel();
});

Deno.test("a body over 16 MB is a 413", async () => {
  const headers = { apikey: keys.secretKey, "content-type": "application/json" };
  const large = new Uint8Array(16 * 1024 * 1024 + 1);
  const chunked = ReadableStream.from(Array.from({ length: 17 }, () => large.subarray(0, 1024 * 1024)));
  for (const body of [large, chunked]) {
    const response = await fetch(url("/rest/v1/rpc/anything"), { method: "POST", headers, body });
    assert.equal(response.status, 413);
    await response.body?.cancel();
  }
});

Deno.test("the rest of Supabase is a 501 that names supabase start", async () => {
  for (const path of ["/auth/v1/health", "/storage/v1/bucket", "/"]) {
    const [status, body] = await answer(fetch(url(path)));
    assert.equal(status, 501);
    assert.match(JSON.stringify(body), /supabase start/);
  }
});

Deno.test("a port that is taken is named, with what to do", async () => {
  await assert.rejects(
    startGateway({ ...options, port: gateway.port }),
    new RegExp(`^Error: Port ${gateway.port} .*is taken.*LOCAL_API_PORT`),
  );
});

Deno.test("as a process it says where it listens, and ends with SIGTERM or when its parent has gone", async () => {
  for (const end of ["SIGTERM", "stdin"]) {
    const child = new Deno.Command(Deno.execPath(), {
      args: ["run", "-A", "--no-check", gatewayPath],
      env: { LOCAL_GATEWAY: JSON.stringify(options) },
      stdin: "piped",
      stdout: "piped",
    }).spawn();
    const output = child.stdout.getReader();
    const { value } = await output.read();
    const port = /^listening (\d+)\n$/.exec(new TextDecoder().decode(value))?.[1];
    const response = await fetch(`http://127.0.0.1:${port}/rest/v1/`);
    assert.equal(response.status, 401);
    await response.body?.cancel();
    if (end === "SIGTERM") child.kill("SIGTERM");
    await child.stdin.close();
    await output.cancel();
    assert.equal((await child.status).code, 0);
  }
});

Deno.test("a function that wants a JWT is reached with one of this project only, and by a preflight", async () => {
  await using _server = serveFunction("guarded", () => Response.json("reached"));
  const call = (authorization?: string, method = "POST") =>
    answer(fetch(url("/functions/v1/guarded"), { method, headers: authorization ? { authorization } : {} }));
  const other = await makeKeys();
  assert.deepEqual(await call(), [401, { code: 401, message: "Missing authorization header" }]);
  for (const token of [keys.secretKey, other.anonKey, "a.b.c", ""]) {
    const [status] = await call(`Bearer ${token}`);
    assert.equal(status, 401, token);
  }
  assert.deepEqual(await call(`Bearer ${keys.anonKey}`), [200, "reached"]);
  assert.deepEqual(await call(undefined, "OPTIONS"), [200, "reached"]);
});
