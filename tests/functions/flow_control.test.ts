import assert from "node:assert/strict";
import { join } from "node:path";
import { linesOf, startTestStack, type TestStack, until } from "../support.ts";

/** The limits of job_kinds, with real workers. */

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

const newFile = () => join(stack.appDir, `lines-${++files}`);

async function enqueue(
  kind: string,
  count: number,
  payload: { file: string; ms?: number },
  key: string | null = null,
): Promise<string[]> {
  const rows = await stack.sql`
    insert into jobs (kind, payload, concurrency_key) select ${kind}, ${stack.sql.json(payload)}, ${key}
    from generate_series(1, ${count}) returning id`;
  return rows.map(({ id }) => id);
}

async function set(kind: string, settings: Record<string, string | number | boolean | null>): Promise<void> {
  const { sql } = stack;
  await sql`
    insert into job_kinds ${sql({ kind, ...settings })} on conflict (kind) do update set ${sql(settings)}`;
}

/** Calls job-worker that often at once, and again, until all these jobs have succeeded. */
async function run(ids: string[], workers = 1): Promise<void> {
  const call = async () => await (await stack.call("job-worker", { wait: true })).body?.cancel();
  await until(`${ids.length} jobs to succeed`, async () => {
    await Promise.all(Array.from({ length: workers }, call));
    const rows = await stack.sql`select from jobs where id = any(${ids}) and status = 'succeeded'`;
    return rows.count === ids.length;
  });
}

interface Span {
  id: string;
  from: number;
  to: number;
}

/** When the handlers of these jobs were at work, in the order in which they began. */
const spans = (ids: string[]) =>
  stack.sql<Span[]>`
    select id, (result ->> 'from')::float8 as from, (result ->> 'to')::float8 as to
    from jobs where id = any(${ids}) order by 2`;

function assertApart(times: Span[]): void {
  times.forEach(({ to }, i) => {
    const next = times[i + 1];
    assert(!next || next.from >= to, `one began ${to - (next?.from ?? 0)} ms before the one before it ended`);
  });
}

Deno.test("what kinds.ts declares is in job_kinds once a worker has started", async () => {
  const ids = await enqueue("limited", 1, { file: newFile() });
  await run(ids);
  const [row] = await stack.sql`
    select concurrency, key_concurrency, rate_limit, rate_period::text, keep_succeeded::text, keep_dead::text,
      keep_cancelled::text, paused
    from job_kinds where kind = 'limited'`;
  assert.deepEqual({ ...row }, {
    concurrency: 1,
    key_concurrency: 2,
    rate_limit: 1000,
    rate_period: "00:00:01.5",
    keep_succeeded: "01:00:00",
    keep_dead: "02:00:00",
    keep_cancelled: "00:00:00",
    paused: false,
  });
});

Deno.test("of a kind with concurrency 1 two calls never run two jobs at once, and other kinds go on beside it", async () => {
  const ids = await enqueue("limited", 8, { file: newFile(), ms: 60 });
  const others = await enqueue("append", 8, { file: newFile(), ms: 60 });
  await run([...ids, ...others], 2);
  assertApart(await spans(ids));
});

Deno.test("one call does all jobs of a kind with concurrency 1, also while another job takes long", async () => {
  const alone = await enqueue("limited", 6, { file: newFile(), ms: 5 });
  const call = async () => (await (await stack.call("job-worker", { wait: true })).json()).processed;
  assert.equal(await call(), 6);
  const beside = await enqueue("limited", 6, { file: newFile(), ms: 5 });
  const long = await enqueue("append", 1, { file: newFile(), ms: 1500 });
  assert.equal(await call(), 7);
  const [longest] = await spans(long);
  for (const { to } of await spans(beside)) assert(longest && to < longest.to, "its places are used at once");
  assertApart(await spans([...alone, ...beside]));
});

Deno.test("jobs of one conversation run in order and apart, while those of others go on", async () => {
  const file = newFile();
  const conversation = await enqueue("append", 6, { file, ms: 50 }, "conversation");
  const others = [
    ...await enqueue("append", 3, { file: newFile(), ms: 50 }, "another"),
    ...await enqueue("append", 6, { file: newFile(), ms: 50 }),
  ];
  await run([...conversation, ...others], 2);
  const times = await spans(conversation);
  assert.deepEqual(times.map(({ id }) => id), conversation);
  assert.deepEqual(await linesOf(file), conversation);
  assertApart(times);
  const [first] = await spans(others);
  assert(first && first.from < (times.at(-1)?.from ?? 0), "others do not wait for the conversation");
});

Deno.test("20 jobs at 5 a second take three seconds at least, and all get done", async () => {
  await set("append", { rate_limit: 5, rate_period: "1 second" });
  const ids = await enqueue("append", 20, { file: newFile() });
  await run(ids, 2);
  const rows = await stack.sql<{ at: number }[]>`
    select extract(epoch from locked_at)::float8 * 1000 as at from jobs where id = any(${ids}) order by 1`;
  const times = rows.map(({ at }) => at);
  times.forEach((at, i) => {
    const later = times[i + 5];
    assert(later === undefined || later - at >= 999.99, `6 within ${(later ?? 0) - at} ms`);
  });
  const took = (times.at(-1) ?? 0) - (times[0] ?? 0);
  assert(took >= 3000, `${took} ms`);
  await set("append", { rate_limit: null });
});

Deno.test("paused jobs stay while others run, and run once they are not", async () => {
  await set("append", { paused: true });
  const paused = await enqueue("append", 3, { file: newFile() });
  const limited = await enqueue("limited", 2, { file: newFile() });
  await run(limited);
  const rows = await stack
    .sql`select from jobs where id = any(${paused}) and status = 'pending' and attempts = 0`;
  assert.equal(rows.count, 3);
  await set("append", { paused: false });
  await run(paused);
});

Deno.test("a kind whose declared limit cannot be is named, and waits; the others go on", async () => {
  await using other = await startTestStack({
    dispatch: false,
    prepare: async (appDir) => {
      const path = join(appDir, "supabase/functions/_app/kinds.ts");
      const text = await Deno.readTextFile(path);
      assert(text.includes("echo: { schema"));
      await Deno.writeTextFile(path, text.replace("echo: { schema", "echo: { concurrency: 2.5, schema"));
    },
  });
  await other.sql`insert into jobs (kind, payload) values ('echo', '{}'), ('describe', '{"amount": 1}')`;
  const response = await other.call("job-worker", { wait: true });
  const { results } = await response.json();
  assert.deepEqual(results.map(({ kind }: { kind: string }) => kind), ["describe"]);
  const [row] = await other.sql`select status, attempts from jobs where kind = 'echo'`;
  assert.deepEqual({ ...row }, { status: "pending", attempts: 0 });
  const line = other.lines.find((line) => line.includes("kind_not_declared"));
  assert.match(line ?? "", /"kind":"echo".*2\.5.*what _app declares/);
});
