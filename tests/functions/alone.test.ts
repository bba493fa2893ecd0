import assert from "node:assert/strict";
import { join } from "node:path";
import { shortLease, startTestStack, type TestStack, until } from "../support.ts";

/** Jobs whose worker was lost again and again: they run with nothing beside them, in case it is they that end it. */

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false, prepare: shortLease(3, 200) });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Row {
  id: string;
  status: string;
  attempts: number;
  result: unknown;
  last_error: string | null;
}

async function enqueue(
  kind: string,
  payload: Record<string, string | number>,
  count: number,
): Promise<string[]> {
  const rows = await stack.sql`
    insert into jobs (kind, payload) select ${kind}, ${stack.sql.json(payload)}
    from generate_series(1, ${count}) returning id`;
  return rows.map(({ id }) => id);
}

const jobs = (ids: string[]) =>
  stack.sql<Row[]>`
    select id, status, attempts, result, last_error from jobs where id = any(${ids}) order by id`;

const newFile = () => join(stack.appDir, `lines-${++files}`);

Deno.test("a job that ends its worker's process is dead after its attempts, and the jobs beside it succeed", async () => {
  const { sql } = stack;
  const [exits] = await enqueue("exit", {}, 1);
  assert(exits);
  const beside = await enqueue("append", { file: newFile(), ms: 500 }, 12);
  const isOver = async () =>
    (await jobs([exits, ...beside])).every(({ status }) => status === "succeeded" || status === "dead");
  // What the tick does, without its ten seconds.
  await until("every job to end", async () => {
    await sql`select rescue_expired_jobs()`;
    await stack.call("job-worker", {}).then((response) => response.body?.cancel(), () => {});
    return await isOver();
  }, 60_000);
  const [{ status, attempts, last_error } = assert.fail()] = await jobs([exits]);
  assert.deepEqual([status, attempts], ["dead", 5]);
  assert.match(last_error ?? "", /^lease expired: worker edge-/);
  for (const { status, attempts } of await jobs(beside)) {
    assert.equal(status, "succeeded");
    assert(attempts <= 3, `${attempts} attempts: it runs alone from the third on`);
  }
});

Deno.test("jobs that must run alone do so one after the other, while what comes meanwhile waits", async () => {
  const { sql } = stack;
  const suspects = await enqueue("append", { file: newFile(), ms: 100 }, 3);
  await sql`
    update jobs set attempts = 2, last_error = 'lease expired: worker edge-0 neither finished' where id = any(${suspects})`;
  const others = await enqueue("append", { file: newFile(), ms: 100 }, 9);
  const spans = async (ids: string[]) =>
    (await jobs(ids)).map(({ result }) => {
      assert(typeof result === "object" && result !== null && "from" in result && "to" in result);
      return { from: Number(result.from), to: Number(result.to) };
    });
  await until("every job to succeed", async () => {
    await (await stack.call("job-worker", { wait: true })).body?.cancel();
    await sql`update jobs set available_at = clock_timestamp() where status = 'pending' and id = any(${suspects})`;
    return (await jobs([...suspects, ...others])).every(({ status }) => status === "succeeded");
  });
  const all = await spans([...suspects, ...others]);
  for (const alone of await spans(suspects)) {
    const beside = all.filter(({ from, to }) => from < alone.to && to > alone.from);
    assert.equal(beside.length, 1, "nothing ran beside it");
  }
  assert((await jobs(suspects)).every(({ attempts }) => attempts === 3));
});
