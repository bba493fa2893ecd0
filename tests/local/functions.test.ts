import assert from "node:assert/strict";
import { startTestStack, until } from "../support.ts";

Deno.test("a function's process in which nothing else can run any more is ended, and started again", async () => {
  await using stack = await startTestStack({ dispatch: false, env: { LOCAL_STUCK_SECONDS: "1" } });
  const { sql, services: { functions } } = stack;
  const pid = functions.pid("job-worker");
  const [job] = await sql`select enqueue_job('block', '{"ms": 600000}') as id`;
  const response = await stack.call("job-worker");
  await response.body?.cancel();
  await until("another process", () => ![undefined, pid].includes(functions.pid("job-worker")));
  assert(stack.lines.some((line) => line.includes("nothing else could run for 1 s")), stack.lines.join("\n"));
  const [row] = await sql`select status, attempts from jobs where id = ${job?.id}`;
  assert.deepEqual({ ...row }, { status: "running", attempts: 1 });
  assert.equal((await stack.call("job-worker", { wait: true })).status, 200);
});
