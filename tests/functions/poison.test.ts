import assert from "node:assert/strict";
import { startTestStack, type TestStack, until } from "../support.ts";

/** Payloads, results and errors that are hard to store, and handlers that harm their worker. */

let stack: TestStack;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Row {
  status: string;
  attempts: number;
  result: unknown;
  last_error: string | null;
}

async function enqueue(kind: string, payload: Record<string, string | number>): Promise<string> {
  const [row] = await stack.sql`select enqueue_job(${kind}, ${stack.sql.json(payload)}) as id`;
  return row?.id;
}

async function job(id: string): Promise<Row> {
  const [row] = await stack.sql<
    Row[]
  >`select status, attempts, result, last_error from jobs where id = ${id}`;
  assert(row);
  return row;
}

/** Runs a job of this kind for each `what`, each between two neighbours, which must succeed. */
async function runEach(kind: string, whats: string[]): Promise<Map<string, Row>> {
  const ids = new Map<string, string>();
  const neighbours: string[] = [];
  for (const what of whats) {
    ids.set(what, await enqueue(kind, { what }));
    neighbours.push(await enqueue("echo", { n: 1 }));
  }
  const response = await stack.call("job-worker", { wait: true });
  assert.equal(response.status, 200);
  await response.body?.cancel();
  for (const id of neighbours) {
    assert.deepEqual(await job(id), { status: "succeeded", attempts: 1, result: { n: 1 }, last_error: null });
  }
  const rows = new Map<string, Row>();
  for (const [what, id] of ids) rows.set(what, await job(id));
  return rows;
}

Deno.test("a result that jsonb can hold is stored, with U+FFFD for the characters that it cannot", async () => {
  const expected: Record<string, unknown> = {
    nul: { "key\ufffd": "a\ufffdb", kept: "\\u0000 in text" },
    surrogates: ["half \ufffd", "\ufffd", "whole 😀"],
    nothing: null,
    function: null,
    megabyte: "é".repeat(999_000),
    "json once": "once",
  };
  for (const [what, row] of await runEach("poisonous_result", Object.keys(expected))) {
    assert.deepEqual(
      row,
      { status: "succeeded", attempts: 1, result: expected[what], last_error: null },
      what,
    );
  }
});

Deno.test("a result of more than a million characters is cut, and says so", async () => {
  const rows = await runEach("poisonous_result", ["20 megabytes"]);
  assert.deepEqual(rows.get("20 megabytes"), {
    status: "succeeded",
    attempts: 1,
    result: { cut: `"${"x".repeat(9_999)}`, characters: 20_000_002 },
    last_error: null,
  });
});

Deno.test("a result that has no JSON, or too deep a one, leaves its job dead at once, since its work is done", async () => {
  const expected: Record<string, RegExp> = {
    bigint: /BigInt/,
    circular: /circular structure/,
    unreadable: /no entry/,
    "nested 200,000 deep": /nested too deeply|stack depth limit/,
  };
  for (const [what, row] of await runEach("poisonous_result", Object.keys(expected))) {
    assert.deepEqual([row.status, row.attempts], ["dead", 1], what);
    assert.match(row.last_error ?? "", /^the result cannot be stored: /, what);
    assert.match(row.last_error ?? "", expected[what] ?? /^$/, what);
  }
  // How deep is too deep is the database's to say.
  const row = (await runEach("poisonous_result", ["nested 3,000 deep"])).get("nested 3,000 deep");
  assert(row?.status === "succeeded" || row?.last_error?.startsWith("the result cannot be stored: "));
});

Deno.test("whatever a handler throws fails its attempt with a text that can be read", async () => {
  const expected: Record<string, RegExp> = {
    text: /^just text$/,
    null: /^thrown object: null$/,
    undefined: /^thrown undefined: undefined$/,
    bigint: /^thrown bigint: 1$/,
    circular: /cannot be read/,
    "not even itself": /cannot be read/,
    "later, but when?": /^RetryAfterError: later$/,
    nul: /^Error: a.+b$/,
    surrogate: /^Error: half \ufffd$/,
    megabyte: /^Error: x{9993}… \(cut, 1000007 characters in all\)$/,
    unreadable: /cannot be read/,
  };
  for (const [what, row] of await runEach("poisonous_error", Object.keys(expected))) {
    assert.deepEqual([row.status, row.attempts], ["pending", 1], what);
    assert.match(row.last_error ?? "", expected[what] ?? /^$/, what);
  }
  const [soonest] = await stack.sql`
    select min(extract(epoch from available_at - updated_at))::int as seconds from jobs where status = 'pending'`;
  assert(soonest?.seconds >= 47, `all wait for the kind's backoff: ${soonest?.seconds} s`);
});

Deno.test("a payload with a megabyte of text arrives whole; one that jsonb cannot hold is refused with a reason", async () => {
  const { sql } = stack;
  const [big] = await sql`
    select enqueue_job('echo', jsonb_build_object('n', 1, 'text', repeat('é', 1000000))) as id`;
  const response = await stack.call("job-worker", { wait: true });
  await response.body?.cancel();
  assert.equal((await job(big?.id)).status, "succeeded");
  for (const text of ["a\\u0000b", "\\ud83d"]) {
    await assert.rejects(
      sql.unsafe(`select enqueue_job('echo', '{"text": "${text}"}')`),
      /unsupported Unicode escape sequence|invalid input syntax for type json/,
    );
  }
});

Deno.test("a handler that blocks its worker for 30 seconds costs no other job an attempt", async () => {
  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async () => {
    await new Promise((resolve) => setTimeout(resolve, 500));
    return new Response("an answer");
  });
  const url = `http://127.0.0.1:${server.addr.port}`;
  const file = `${stack.appDir}/blocked`;
  // Its answer comes, and its five seconds run out, while nothing can run.
  const asks = await enqueue("ask", { url });
  const waits = await enqueue("append", { file, ms: 1_000 });
  const running = stack.call("job-worker", { wait: true });
  await until("both to have started", () => Deno.stat(file).catch(() => null));
  const blocks = await enqueue("block", { ms: 30_000 });
  const later = await enqueue("echo", { n: 1 });
  await (await running).body?.cancel();
  for (const id of [asks, waits, blocks, later]) {
    const { status, attempts, last_error } = await job(id);
    assert.deepEqual([status, attempts, last_error], ["succeeded", 1, null]);
  }
  await server.shutdown();
});
