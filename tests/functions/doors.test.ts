import assert from "node:assert/strict";
import { connect } from "node:net";
import {
  cronSecret,
  startFunction,
  startTestStack,
  type TestFunction,
  type TestStack,
  until,
} from "../support.ts";

/**
 * The doors of job-worker and drain, to whatever may come in: the same for both. Requests go to the functions themselves,
 * byte for byte, since hosted another gateway is in front of them.
 */

const oldSecret = "the-secret-before-that-is-being-rotated-out";
const authorization = `Authorization: Bearer ${cronSecret}`;
const doors = [
  { name: "job-worker", methods: ["POST"], opened: 202 },
  { name: "drain", methods: ["GET", "POST"], opened: 200 },
];
let stack: TestStack;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false, env: { CRON_SECRET: ` ${cronSecret},\t${oldSecret}\n` } });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Request {
  method?: string;
  /** Lines as they are sent; with CRON_SECRET as the bearer unless they say otherwise. */
  headers?: string[];
  body?: string | Uint8Array;
  /** Ends its side after the body. */
  end?: boolean;
  /** Reads to the end of the connection, to see whether anything follows the answer. */
  toEnd?: boolean;
}

interface Answer {
  /** NaN when there was none: the server ends a connection on which it finds no HTTP. */
  status: number;
  headers: Headers;
  body: string;
  /** All that came. */
  text: string;
}

/** Sends a request as it is given, and reads until its answer is there or the connection ends. */
async function send(name: string, request: Request): Promise<Answer> {
  const { method = "POST", headers = [authorization], body = "", end, toEnd } = request;
  const lines = [`${method} /${name} HTTP/1.1`, "Host: localhost", "Connection: close", ...headers, "", ""];
  const socket = connect(stack.services.functions.sockets[name] ?? "");
  socket.setTimeout(10_000, () => socket.destroy(new Error("no answer in 10 s")));
  socket.write(lines.join("\r\n"));
  if (end) socket.end(body);
  else socket.write(body);
  let answer = readAnswer("");
  socket.on("data", (chunk) => {
    answer = readAnswer(answer.text + chunk);
    const length = Number(answer.headers.get("Content-Length") ?? Infinity);
    if (!toEnd && answer.body.length >= length) socket.destroy();
  });
  // An error as well is an end: the function may answer and close before it has read all that is sent.
  await new Promise<void>((resolve, reject) =>
    socket.on("close", () => resolve()).on(
      "error",
      (error) => error.message.includes("10 s") && reject(error),
    )
  );
  return answer;
}

function readAnswer(text: string): Answer {
  const [head = "", body = ""] = text.split(/\r\n\r\n([^]*)/);
  const [line = "", ...fields] = head.split("\r\n");
  const headers = new Headers();
  for (const field of fields) headers.append(...splitField(field));
  return { status: Number(line.split(" ")[1]), headers, body, text };
}

function splitField(field: string): [name: string, value: string] {
  const colon = field.indexOf(":");
  return [field.slice(0, colon), field.slice(colon + 1)];
}

/** Checks that an answer is an error in the form of RFC 9457, with this status. */
function assertProblem(
  { status, headers, body }: Omit<Answer, "text">,
  expected: number,
  what: string,
): void {
  assert.equal(status, expected, what);
  assert.equal(headers.get("Content-Type"), "application/problem+json", what);
  const { detail, title, ...rest }: Record<string, unknown> = JSON.parse(body);
  assert.deepEqual(rest, { type: "about:blank", status }, what);
  assert.ok(detail && title, what);
}

/** A request whose body is as long as it says. */
function withBody(body: string | Uint8Array): Request {
  const length = typeof body === "string" ? new TextEncoder().encode(body).length : body.length;
  return { headers: [authorization, `Content-Length: ${length}`], body };
}

/** A request whose body comes in chunks, without a length. */
function chunked(chunks: string[]): Request {
  return {
    headers: [authorization, "Transfer-Encoding: chunked"],
    body: chunks.map((chunk) => `${chunk.length.toString(16)}\r\n${chunk}\r\n`).join("") + "0\r\n\r\n",
  };
}

for (const { name, methods, opened } of doors) {
  Deno.test(`${name}: without CRON_SECRET as the bearer, once and whole, the answer is 401`, async () => {
    const refused: string[][] = [
      [],
      ["Authorization:"],
      ["Authorization: Bearer"],
      [`Authorization: ${cronSecret}`],
      [`Authorization: Basic ${cronSecret}`],
      [`Authorization: Basic ${btoa(`user:${cronSecret}`)}`],
      [`Authorization: Bearer,${cronSecret}`],
      [`Authorization: Bearer ${"x".repeat(cronSecret.length)}`],
      [`Authorization: Bearer ${cronSecret.toUpperCase()}`],
      [`Authorization: Bearer ${cronSecret.slice(1)}`],
      [`Authorization: Bearer ${cronSecret.slice(0, -1)}`],
      [`Authorization: Bearer ${cronSecret}${cronSecret}`],
      [`Authorization: Bearer ${cronSecret},${oldSecret}`],
      [`Authorization: Bearer ${cronSecret} ${oldSecret}`],
      [`Authorization: Bearer ,`],
      [`Authorization: Bearer ${cronSecret}\t`, "Authorization: Bearer x"],
      [authorization, authorization],
      [authorization, "Authorization:"],
      ["Authorization: Basic eDp5", authorization],
      [`Proxy-Authorization: Bearer ${cronSecret}`],
      [`apikey: ${cronSecret}`],
      [`Cookie: Authorization=Bearer ${cronSecret}`],
      [`Authorization: Bearer ${"x".repeat(10_000)}`],
      [`Authorization: Bearer ${cronSecret}${"x".repeat(10_000)}`],
    ];
    for (const headers of refused) {
      for (const method of methods) {
        const answer = await send(name, { method, headers });
        assertProblem(answer, 401, `${method} ${headers.join(" / ").slice(0, 200)}`);
        assert.equal(answer.headers.get("WWW-Authenticate"), "Bearer");
      }
    }
    // What the server itself finds too long never reaches the function.
    const { status } = await send(name, {
      headers: [`Authorization: Bearer ${"x".repeat(2_000_000)}`, authorization],
    });
    assert.ok(Number.isNaN(status) || (status >= 400 && status < 500), `${status}`);
  });

  Deno.test(`${name}: while a secret is being rotated both open it, whatever space is around them`, async () => {
    for (const secret of [cronSecret, oldSecret]) {
      for (const method of methods) {
        for (const scheme of ["Bearer", "bearer", "BEARER"]) {
          const { status } = await send(name, { method, headers: [`Authorization: ${scheme} ${secret}`] });
          assert.equal(status, opened, `${method} ${scheme}`);
        }
      }
    }
  });

  Deno.test(`${name}: another method is answered 405 with those to use, whoever asks`, async () => {
    for (const method of ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "QUERY"]) {
      if (methods.includes(method)) continue;
      for (
        const headers of [undefined, [], [
          "Origin: https://example.com",
          "Access-Control-Request-Method: POST",
        ]]
      ) {
        const answer = await send(name, { method, headers });
        if (method === "HEAD") assert.deepEqual([answer.status, answer.body], [405, ""]);
        else assertProblem(answer, 405, method);
        assert.equal(answer.headers.get("Allow"), methods.join(", "));
        assert.equal(answer.headers.get("Access-Control-Allow-Origin"), null, "it is no door for browsers");
      }
    }
  });

  Deno.test(`${name}: a body that is not JSON is answered 400, and an empty one or one with a mark in front is not`, async () => {
    const bytes = (...numbers: number[]) => new Uint8Array(numbers);
    const refused: (string | Uint8Array)[] = [
      "{",
      "{} {}",
      "hello",
      "kinds=echo",
      '{"kinds": ["a" "b"]}',
      '{"wait": false, "wait" }',
      "\u0000",
      "[".repeat(60_000),
      // Not UTF-8: a byte alone, a character cut off, a surrogate, UTF-16 with its mark.
      bytes(0x7b, 0x22, 0xff, 0x22, 0x3a, 0x31, 0x7d),
      bytes(0x22, 0xe2, 0x82, 0x22),
      bytes(0x22, 0xed, 0xa0, 0x80, 0x22),
      bytes(0xff, 0xfe, 0x7b, 0x00, 0x7d, 0x00),
    ];
    for (const body of refused) {
      assertProblem(await send(name, withBody(body)), 400, JSON.stringify(body).slice(0, 80));
    }
    for (const body of ["", " \r\n\t", "{}", "\ufeff{}", "\ufeff"]) {
      assert.equal((await send(name, withBody(body))).status, opened, JSON.stringify(body));
    }
  });

  Deno.test(`${name}: a body above 64 kB is answered 413, by its length or by count, and one of 64 kB is not`, async () => {
    const padded = (size: number) => "{}".padEnd(size);
    const tooLarge: Record<string, Request> = {
      "by its length": withBody(padded(65_537)),
      "by its length, before the body": { ...withBody(padded(65_537)), body: "" },
      "by the length that it claims": {
        headers: [authorization, "Content-Length: 18446744073709551615"],
        body: "{}",
      },
      "in one chunk": chunked([padded(65_537)]),
      "in many chunks": chunked(Array(65).fill(" ".repeat(1_024))),
      "in chunks without an end": { ...chunked([]), body: `ffffffff\r\n${" ".repeat(70_000)}` },
    };
    for (const [what, request] of Object.entries(tooLarge)) {
      assertProblem(await send(name, request), 413, what);
    }
    for (const request of [withBody(padded(65_536)), chunked([padded(65_536)])]) {
      assert.equal((await send(name, request)).status, opened);
    }
    assertProblem(
      await send(name, { ...withBody(padded(65_537)), headers: ["Content-Length: 65537"] }),
      401,
      "a stranger's",
    );
  });

  Deno.test(`${name}: a length that is not the body's starts nothing twice, and leaves nothing behind`, async () => {
    const printed = stack.lines.length;
    const second = `POST /${name} HTTP/1.1\r\nHost: localhost\r\n${authorization}\r\n\r\n`;
    const short = await send(name, {
      headers: [authorization, "Content-Length: 2"],
      body: `{}${second}`,
      toEnd: true,
    });
    assert.equal(short.status, opened);
    assert.equal(short.text.match(/HTTP\/1\.1/g)?.length, 1, "what follows is not taken for another request");
    const unfinished = { headers: [authorization, "Content-Length: 50"], body: "{}", end: true };
    const refusedOrCut = ({ status }: Answer) =>
      assert.ok(Number.isNaN(status) || status === 400, `${status}`);
    refusedOrCut(await send(name, unfinished));
    for (const length of ["-1", "two", "2, 3", "+2"]) {
      refusedOrCut(await send(name, { headers: [authorization, `Content-Length: ${length}`], body: "{}" }));
    }
    const both = [authorization, "Content-Length: 70000", "Transfer-Encoding: chunked"];
    refusedOrCut(await send(name, { headers: both, body: "2\r\n{}\r\n0\r\n\r\n" }));
    assert.equal((await send(name, {})).status, opened, "it still answers");
    assert.deepEqual(stack.lines.slice(printed), []);
  });
}

Deno.test("a body on a GET is not read by the drain", async () => {
  const answer = await send("drain", { ...withBody("not JSON"), method: "GET" });
  assert.equal(answer.status, 200);
});

Deno.test("job-worker refuses kinds that no job can have", async () => {
  for (const kind of ["", "Send Email", "a".repeat(64), "\u0000", "\ud800", "1"]) {
    assertProblem(
      await send("job-worker", withBody(JSON.stringify({ wait: true, kinds: [kind] }))),
      400,
      kind,
    );
  }
});

Deno.test("a CRON_SECRET that is unset or short refuses every call with 500, and says so once for each in the log", async () => {
  const cases = doors.flatMap(({ name, methods }) =>
    [undefined, "", " , ", "x".repeat(31), `${cronSecret},short`].map((secret) => ({ name, methods, secret }))
  );
  await Promise.all(cases.map(async ({ name, methods, secret }) => {
    const env: Record<string, string> = secret === undefined ? {} : { CRON_SECRET: secret };
    await using door = await startFunction(name, env);
    await assertUnusable(door, methods, secret);
  }));
});

async function assertUnusable(door: TestFunction, methods: string[], secret = ""): Promise<void> {
  const calls = methods.flatMap((method) =>
    [undefined, "Bearer ", `Bearer ${secret.split(",")[0]}`, `Bearer ${cronSecret}`].map((authorization) => ({
      method,
      headers: authorization === undefined ? undefined : { Authorization: authorization },
    }))
  );
  for (const call of calls) {
    const response = await door.fetch("", call);
    const { status, headers } = response;
    const body = await response.text();
    assertProblem({ status, headers, body }, 500, `${call.method} with ${secret}`);
    assert.ok(!body.includes("CRON_SECRET"), "what is wrong is for the log only");
  }
  const other = await door.fetch("", { method: "PUT" });
  assert.equal(other.status, 405);
  await other.body?.cancel();
  await until("a line for each call", () => door.lines.length >= calls.length);
  assert.equal(door.lines.length, calls.length);
  for (const line of door.lines) {
    assert.match(line, /"event":"cron_secret_unusable".*supabase secrets set/);
    assert.ok(!line.includes(cronSecret) && !line.includes("x".repeat(31)));
  }
}

Deno.test("webhook-inbox answers 405 to all but POST, and its 404 to a body of any size or kind", async () => {
  for (const method of ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"]) {
    const answer = await send("webhook-inbox", { method, headers: [] });
    if (method === "HEAD") assert.deepEqual([answer.status, answer.body], [405, ""]);
    else assertProblem(answer, 405, method);
    assert.equal(answer.headers.get("Allow"), "POST");
  }
  for (const body of ["", "{", new Uint8Array([0xff]), " ".repeat(65_537)]) {
    assertProblem(await send("webhook-inbox", withBody(body)), 404, `${body.length} bytes`);
  }
});
