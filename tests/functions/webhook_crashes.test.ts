import assert from "node:assert/strict";
import { join } from "node:path";
import { linesOf, shortLease, startFunction, startTestStack, type TestStack, until } from "../support.ts";
import {
  endConnections,
  endLease,
  hold,
  killGateway,
  outside,
  untilBlocked,
  watchCompletions,
} from "./crashes.ts";

/**
 * Webhooks while something dies, is away or is flooded: whoever is answered 2xx finds the message stored, whoever is not sends
 * again, and each message is there once and processed to success once.
 */

const secret = "a-secret-of-webhooks-that-only-tests-use";
const env = { TEST_WEBHOOK_SECRET: secret };
const headers = { "Content-Type": "application/json", "X-Test-Secret": secret };

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ env, prepare: shortLease(3, 200) });
  await watchCompletions(stack);
  // Every connection of the API is made.
  await Promise.all(Array.from({ length: 20 }, (_, n) => deliver(`warm ${n}`)));
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

/** A file for handlers to write to, removed with the stack. */
const newFile = () => join(stack.appDir, `lines-${++files}`);

const bodyOf = (id: string, fields: Record<string, unknown> = {}) => JSON.stringify({ id, ...fields });

interface Answer {
  /** 0 when the connection broke. */
  status: number;
  id?: string;
  retryAfter?: string | null;
}

/** Sends a message, and when the answer is 2xx looks for its row at once. */
async function send(body: BodyInit, more: HeadersInit = {}): Promise<Answer> {
  const response = await fetch(`${stack.apiUrl}/functions/v1/webhook-inbox/orders`, {
    method: "POST",
    headers: { ...headers, ...more },
    body,
  }).catch(() => null);
  if (!response) return { status: 0 };
  const retryAfter = response.headers.get("Retry-After");
  const { id } = await response.json().catch(() => ({}));
  if (!response.ok) return { status: response.status, retryAfter };
  const [row] = await stack
    .sql`select w.id from webhook_inbox w join jobs j on j.id = w.id where w.id = ${id}`;
  assert.equal(row?.id, id, "answered 2xx before the commit");
  return { status: response.status, id };
}

/** Sends as a provider does: again, until the answer is 2xx. Gives back that answer. */
const deliver = (id: string, fields?: Record<string, unknown>): Promise<Answer> =>
  until(`${id} to be taken`, async () => {
    const answer = await send(bodyOf(id, fields));
    return answer.id !== undefined && answer;
  });

/** Waits until the message has succeeded, and asserts that it is there once, with one job, and was completed once. */
async function assertProcessedOnce(messageId: string, attempts = 1): Promise<void> {
  const stored = () =>
    stack.sql`
      select status, attempts, (select count(*)::int from completions c where c.job_id = w.id) as completed
      from webhook_inbox w join jobs j on j.id = w.id where message_id = ${messageId}`;
  await until(`${messageId} to end`, async () => {
    const rows = await stored();
    return rows.length > 0 && rows.every(({ status }) => !["pending", "running"].includes(status));
  });
  assert.deepEqual((await stored()).map((row) => ({ ...row })), [{
    status: "succeeded",
    attempts,
    completed: 1,
  }]);
}

const lockInbox = () =>
  hold(stack.db, async (sql) => await sql`lock table webhook_inbox in access exclusive mode`);

const isStored = (messageId: string) =>
  until(`${messageId} to be stored`, async () => {
    const rows = await stack.sql`select from webhook_inbox where message_id = ${messageId}`;
    return rows.length > 0;
  });

Deno.test("of fifty deliveries at once one is new, all have its id, and it is processed once", async () => {
  const file = newFile();
  const answers = await Promise.all(Array.from({ length: 50 }, () => deliver("fifty", { file })));
  const statuses = answers.map(({ status }) => status).sort();
  assert.deepEqual(statuses, [...Array(49).fill(200), 202]);
  assert.equal(new Set(answers.map(({ id }) => id)).size, 1);
  await assertProcessedOnce("fifty");
  assert.deepEqual(await linesOf(file), ["fifty"]);
  const [row] = await stack.sql`select other_bodies from webhook_inbox where message_id = 'fifty'`;
  assert.equal(row?.other_bodies, 0);
});

Deno.test("webhook-inbox killed before it stores a message has not taken it: sent again, it is new", async () => {
  const { status } = await send(bodyOf("before"), { "X-Test-Die": newFile() });
  assert.equal(status, 500);
  assert.equal((await stack.sql`select from webhook_inbox where message_id = 'before'`).length, 0);
  assert.equal((await deliver("before")).status, 202);
  await assertProcessedOnce("before");
});

for (
  const [what, cut, first] of [
    ["webhook-inbox is killed", () => stack.restart("SIGKILL", "webhook-inbox"), 500],
    ["the database ends its connection", () => endConnections(stack), 503],
    ["the gateway is killed", () => killGateway(stack), 0],
  ] as const
) {
  Deno.test(`a message during whose storing ${what} is not answered 2xx, and is there once when it is sent again`, async () => {
    const lock = await lockInbox();
    const sent = send(bodyOf(what));
    await untilBlocked(stack, "receive_webhook");
    await cut();
    const answer = await sent;
    await lock.release();
    assert.equal(answer.status, first);
    if (first === 503) assert.equal(answer.retryAfter, "10");
    await deliver(what);
    await assertProcessedOnce(what);
  });
}

Deno.test("webhook-inbox killed after the commit and before its answer: sent again, the message is a duplicate", async () => {
  const lock = await lockInbox();
  const sent = send(bodyOf("committed"));
  await untilBlocked(stack, "receive_webhook");
  const pid = stack.pid("webhook-inbox");
  Deno.kill(pid, "SIGSTOP");
  await lock.release();
  await isStored("committed");
  Deno.kill(pid, "SIGKILL");
  assert.equal((await sent).status, 500);
  assert.equal((await deliver("committed")).status, 200);
  await assertProcessedOnce("committed");
});

Deno.test("a database that does not answer within two seconds is a 503 with Retry-After; what it commits all the same is a duplicate then", async () => {
  const lock = await lockInbox();
  const began = performance.now();
  const answer = await send(bodyOf("late"));
  const took = performance.now() - began;
  await lock.release();
  assert.deepEqual(answer, { status: 503, retryAfter: "10" });
  assert(took >= 2_000 && took < 3_000, `${took} ms`);
  await isStored("late");
  assert.equal((await deliver("late")).status, 200);
  await assertProcessedOnce("late");
});

Deno.test("while the database lets nobody in the answer is 503, and the log says so without a word of the message", async () => {
  const { admin, name } = outside(stack);
  const from = stack.lines.length;
  try {
    await admin`alter database ${admin(name)} allow_connections false`;
    await endConnections(stack);
    const answer = await send(bodyOf("away", { card: "4242-number" }));
    assert.deepEqual(answer, { status: 503, retryAfter: "10" });
  } finally {
    await admin`alter database ${admin(name)} allow_connections true`;
    await admin.end();
  }
  const line = await until(
    "the log",
    () => stack.lines.slice(from).find((line) => line.includes("webhook_not_stored")),
  );
  assert.match(line, /"level":"error".*"source":"orders"/);
  for (const hidden of [secret, "4242-number", "away"]) {
    assert(!stack.lines.slice(from).join("\n").includes(hidden), hidden);
  }
  assert.equal((await deliver("away")).status, 202);
  await assertProcessedOnce("away");
});

Deno.test("a job-worker killed before it has read the message leaves it to the next", async () => {
  const worker = stack.pid();
  Deno.kill(worker, "SIGSTOP");
  const { id } = await deliver("unread");
  assert(id);
  const lock = await lockInbox();
  Deno.kill(worker, "SIGCONT");
  await untilBlocked(stack, "read_webhook");
  await stack.restart();
  await lock.release();
  await endLease(stack, id);
  await assertProcessedOnce("unread", 2);
});

Deno.test("a job-worker killed in the handler leaves the message to the next", async () => {
  const file = newFile();
  const { id } = await deliver("inside", { die: file });
  assert(id);
  await until("the death", () => Deno.stat(`${file}.died`).catch(() => null));
  await endLease(stack, id);
  await assertProcessedOnce("inside", 2);
});

Deno.test("a job-worker killed after the handler, before the message is settled, has it handled again and completed once", async () => {
  const file = newFile();
  // The settling writes to this table.
  const lock = await hold(
    stack.db,
    async (sql) => await sql`lock table completions in access exclusive mode`,
  );
  const { id } = await deliver("unsettled", { file });
  assert(id);
  await untilBlocked(stack, "complete_jobs");
  const pid = stack.pid();
  Deno.kill(pid, "SIGKILL");
  await endConnections(stack);
  await lock.release();
  await endLease(stack, id);
  await assertProcessedOnce("unsettled", 2);
  assert.deepEqual(await linesOf(file), ["unsettled", "unsettled"]);
  await stack.untilRestarted(pid);
});

Deno.test("a message whose poke is lost is processed at the next tick", async () => {
  const { sql } = stack;
  await sql`select disable_dispatch()`;
  await stack.restart();
  const { id } = await deliver("unpoked");
  assert.equal((await sql`select status from jobs where id = ${id ?? null}`)[0]?.status, "pending");
  await sql`select enable_dispatch()`;
  await sql`select cron.schedule('nightshift_tick', '1 second', 'select private.tick()')`;
  await assertProcessedOnce("unpoked");
});

Deno.test("what jsonb cannot hold is stored and processed all the same, once", async () => {
  const bodies = {
    nul: '{"id":"nul","text":"\\u0000"}',
    half: '{"id":"half","text":"\\ud800"}',
  };
  for (const [id, body] of Object.entries(bodies)) {
    assert.equal((await send(body)).status, 202);
    assert.equal((await send(body)).status, 200);
    await assertProcessedOnce(id);
  }
  const rows = await stack.sql`
    select message_id, payload is null as unheld, convert_from(body, 'UTF8') as body
    from webhook_inbox where message_id = any(${Object.keys(bodies)})`;
  for (const { message_id, unheld, body } of rows) {
    assert(unheld, message_id);
    assert.equal(body, bodies[message_id as keyof typeof bodies]);
  }
});

Deno.test("at SIGTERM webhook-inbox answers what it is receiving, and what comes then is taken by the next process", async () => {
  const pid = stack.pid("webhook-inbox");
  const lock = await lockInbox();
  const sent = Array.from({ length: 5 }, (_, n) => send(bodyOf(`term ${n}`)));
  await untilBlocked(stack, "receive_webhook", 5);
  Deno.kill(pid, "SIGTERM");
  const later = deliver("term 5");
  await lock.release();
  const answers = await Promise.all(sent);
  assert.deepEqual(answers.map(({ status }) => status), Array(5).fill(202));
  await later;
  await stack.untilRestarted(pid, "webhook-inbox");
  for (let n = 0; n <= 5; n++) await assertProcessedOnce(`term ${n}`);
});

/** The most memory that a process has had so far, in MB. */
async function peakMemory(pid: number): Promise<number> {
  const status = await Deno.readTextFile(`/proc/${pid}/status`);
  return Number(/^VmHWM:\s+(\d+) kB/m.exec(status)?.[1]) / 1024;
}

/** Asserts that the processes on a request's way have taken less than that many MB more, at their most, when `flood` is over. */
async function assertFlat(maxGrowth: number, flood: () => Promise<void>): Promise<void> {
  const pids = { inbox: stack.pid("webhook-inbox"), gateway: stack.services.gateway.pid };
  const before = { inbox: await peakMemory(pids.inbox), gateway: await peakMemory(pids.gateway) };
  await flood();
  for (const name of ["inbox", "gateway"] as const) {
    const growth = await peakMemory(pids[name]) - before[name];
    assert(growth < maxGrowth, `${name} has grown by ${growth} MB`);
  }
}

const head = (secretSent: string, more: string, path = "/functions/v1/webhook-inbox/orders") =>
  `POST ${path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n` +
  `X-Test-Secret: ${secretSent}\r\n${more}\r\n\r\n`;

/** A body in the chunked coding. */
const chunked = (count: number, size: number) =>
  `${size.toString(16)}\r\n${"a".repeat(size)}\r\n`.repeat(count) + "0\r\n\r\n";

const gateway = () => Deno.connect({ port: Number(new URL(stack.apiUrl).port) });

/** Sends this as it comes, until there is an answer, and gives back the answer's status. */
async function sendRaw(connecting: Promise<Deno.Conn>, request: ReadableStream<Uint8Array>): Promise<number> {
  const connection = await connecting;
  const sending = request.pipeTo(connection.writable, { preventClose: true }).catch(() => {}); // it is answered before the end
  const answer = new Uint8Array(100);
  await connection.read(answer);
  connection.close();
  await sending;
  return Number(/^HTTP\/1\.1 (\d+) /.exec(new TextDecoder().decode(answer))?.[1]);
}

const written = (request: string) => new Blob([request]).stream();

for (const [what, sent] of [["right", secret], ["wrong", "none"]] as const) {
  Deno.test(`forty megabytes without Content-Length, with a ${what} secret, are a 413 that the sender gets, and memory stays flat`, async () => {
    const request = new Blob([head(sent, "Transfer-Encoding: chunked") + chunked(40, 1024 * 1024)]);
    await assertFlat(100, async () => {
      const statuses = await Promise.all(
        Array.from({ length: 5 }, () => sendRaw(gateway(), request.stream())),
      );
      assert.deepEqual(statuses, Array(5).fill(413));
    });
  });
}

Deno.test("a body in very small chunks takes the memory of its bytes, not of the buffers that they came in", async () => {
  await assertFlat(400, async () => {
    // Straight to the function: a gateway may join them.
    const send = (chunks: number) => {
      const path = stack.services.functions.sockets["webhook-inbox"] ?? "";
      const begin = head("none", "Transfer-Encoding: chunked", "/webhook-inbox/orders");
      return sendRaw(Deno.connect({ transport: "unix", path }), written(begin + chunked(chunks, 1)));
    };
    assert.equal(await send(9_000), 401);
    assert.equal(await send(30_000), 413);
  });
});

Deno.test("a Content-Length above the limit is a 413 before anything is sent; of a body that is longer than its own, that much counts", async () => {
  assert.equal(await sendRaw(gateway(), written(head(secret, "Content-Length: 200000000"))), 413);
  const body = bodyOf("longer");
  const request = head(secret, `Content-Length: ${body.length}`) + body + "x".repeat(100);
  assert.equal(await sendRaw(gateway(), written(request)), 202);
  await assertProcessedOnce("longer");
});

Deno.test("a sender that goes away amid its body leaves nothing, and no error in the function's log", async () => {
  const from = stack.lines.length;
  for (const rest of ["Content-Length: 500", "Transfer-Encoding: chunked"]) {
    const path = stack.services.functions.sockets["webhook-inbox"] ?? "";
    const connection = await Deno.connect({ transport: "unix", path });
    const begin = head(secret, rest, "/webhook-inbox/orders") +
      (rest.startsWith("C") ? '{"id":"gone"' : 'c\r\n{"id":"gone"\r\n');
    await connection.write(new TextEncoder().encode(begin));
    connection.close();
  }
  const logged = await until("both to be logged", () => {
    const lines = stack.lines.slice(from).filter((line) => line.startsWith("[webhook-inbox]"));
    return lines.length >= 2 && lines;
  });
  for (const line of logged) assert.match(line, /"level":"info","event":"webhook_refused".*"status":400/);
  assert.equal((await stack.sql`select from webhook_inbox where message_id = 'gone'`).length, 0);
});

Deno.test("a body that never ends, or of which no more comes, is answered 408", async () => {
  await using inbox = await startFunction("webhook-inbox", env, async (appDir) => {
    const path = join(appDir, "supabase/functions/_shared/http.ts");
    const text = await Deno.readTextFile(path);
    assert(text.includes("const BODY_MS = 10_000;"));
    await Deno.writeTextFile(path, text.replace("BODY_MS = 10_000", "BODY_MS = 300"));
  });
  async function* drip(most: number) {
    yield head(secret, "Transfer-Encoding: chunked", "/webhook-inbox/orders");
    for (let n = 0; n < most; n++) {
      yield "1\r\n \r\n";
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  }
  for (const most of [Infinity, 3]) {
    const request = ReadableStream.from(drip(most)).pipeThrough(new TextEncoderStream());
    assert.equal(await sendRaw(Deno.connect({ transport: "unix", path: inbox.socket }), request), 408);
  }
});
