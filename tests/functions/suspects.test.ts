import assert from "node:assert/strict";
import { join } from "node:path";
import { shortLease, startTestStack, type TestStack, until } from "../support.ts";

/** Jobs whose worker was lost again and again: it may be they that end it, so they run with nothing beside them. */

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
    assert(attempts <= 4, `${attempts} attempts: the fourth is by itself`);
  }
});

Deno.test("a suspect runs with nothing beside it, and what comes meanwhile waits", async () => {
  const { sql } = stack;
  const suspects = await enqueue("append", { file: newFile(), ms: 200 }, 3);
  await sql`
    update jobs set attempts = 3, last_error = 'lease expired: worker edge-0 neither finished' where id = any(${suspects})`;
  const others = await enqueue("append", { file: newFile(), ms: 200 }, 40);
  const call = async () => await (await stack.call("job-worker", { wait: true })).body?.cancel();
  await until("every job to succeed", async () => {
    await Promise.all([call(), call(), call()]);
    return (await jobs([...suspects, ...others])).every(({ status }) => status === "succeeded");
  });
  const all = (await jobs([...suspects, ...others])).map(({ id, attempts, result }) => {
    assert(typeof result === "object" && result !== null && "from" in result && "to" in result);
    assert.equal(attempts, suspects.includes(id) ? 4 : 1);
    return { id, from: Number(result.from), to: Number(result.to) };
  });
  for (const one of all.filter(({ id }) => suspects.includes(id))) {
    assert.equal(all.filter(({ from, to }) => from < one.to && to > one.from).length, 1, "only itself");
  }
});

Deno.test("jobs that end the worker do not end others with it, however many they are", async () => {
  const { sql } = stack;
  const victims = await enqueue("append", { file: newFile(), ms: 300 }, 6);
  const killers = await enqueue("exit", {}, 30);
  await sql`update jobs set max_attempts = 3 where id = any(${killers})`;
  await until("the victims to end", async () => {
    await sql`select rescue_expired_jobs()`;
    await stack.call("job-worker", {}).then((response) => response.body?.cancel(), () => {});
    return (await jobs(victims)).every(({ status }) => status === "succeeded" || status === "dead");
  }, 90_000);
  assert((await jobs(victims)).every(({ status }) => status === "succeeded"));
  await sql`delete from jobs`;
});
