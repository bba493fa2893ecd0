import assert from "node:assert/strict";
import { join } from "node:path";
import { shortLease, startTestStack, type TestStack, until } from "../support.ts";

/** Jobs whose worker was lost again and again: it may be they that end it, so they run one at a time. */

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
    assert(attempts <= 3, `${attempts} attempts: from the third on it does not run beside the other`);
  }
});

Deno.test("suspects run one after the other, and other jobs beside them", async () => {
  const { sql } = stack;
  const suspects = await enqueue("append", { file: newFile(), ms: 300 }, 3);
  await sql`
    update jobs set attempts = 2, last_error = 'lease expired: worker edge-0 neither finished' where id = any(${suspects})`;
  const others = await enqueue("append", { file: newFile(), ms: 300 }, 9);
  await until("every job to succeed", async () => {
    await (await stack.call("job-worker", { wait: true })).body?.cancel();
    return (await jobs([...suspects, ...others])).every(({ status }) => status === "succeeded");
  });
  const spans = async (ids: string[]) =>
    (await jobs(ids)).map(({ result }) => {
      assert(typeof result === "object" && result !== null && "from" in result && "to" in result);
      return { from: Number(result.from), to: Number(result.to) };
    });
  const all = await spans(suspects);
  for (const one of all) assert.equal(all.filter(({ from, to }) => from < one.to && to > one.from).length, 1);
  const [first = assert.fail()] = all.toSorted((a, b) => a.from - b.from);
  assert((await spans(others)).some(({ from, to }) => from < first.to && to > first.from));
  assert((await jobs(suspects)).every(({ attempts }) => attempts === 3));
});

Deno.test("while one suspect runs, the others come back about one a second, and no call counts them", async () => {
  const { sql } = stack;
  const suspects = await enqueue("append", { file: newFile(), ms: 3_000 }, 60);
  await sql`
    update jobs set attempts = 2, last_error = 'lease expired: worker edge-0 neither finished' where id = any(${suspects})`;
  const response = await stack.call("job-worker", { wait: true, maxJobs: 2 });
  const { results }: { results: { status: string }[] } = await response.json();
  assert(
    results.length > 0 && results.every(({ status }) => status === "succeeded"),
    JSON.stringify(results),
  );
  const [waits] = await sql`
    select count(*)::int as jobs, max(attempts) as attempts,
      max(extract(epoch from available_at - updated_at))::int as longest
    from jobs where id = any(${suspects}) and status = 'pending'`;
  assert(waits?.jobs > 50 && waits.longest >= waits.jobs - 5, JSON.stringify(waits));
  assert.equal(waits.attempts, 2);
  await sql`delete from jobs where id = any(${suspects})`;
});
