import assert from "node:assert/strict";
import { join } from "node:path";
import { shortLease, startTestStack, type TestStack, until, untilLines } from "../support.ts";
import { endConnections, endLease, hold, killGateway, untilBlocked, watchCompletions } from "./crashes.ts";

/** Processes that are killed, frozen or cut off at a chosen moment: every job ends, completed once, by itself. */

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ prepare: shortLease(3, 200) });
  await watchCompletions(stack);
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

async function enqueue(kind: string, payload: Record<string, string>): Promise<string> {
  const [row] = await stack.sql`select enqueue_job(${kind}, ${stack.sql.json(payload)}) as id`;
  return String(row?.id);
}

/** A file for handlers to write to, removed with the stack. */
const newFile = () => join(stack.appDir, `lines-${++files}`);

const openGate = (file: string) => Deno.writeTextFile(`${file}.gate`, "");

async function job(id: string): Promise<{ status: string; attempts: number; result: unknown }> {
  const [row] = await stack.sql`select status, attempts, result from jobs where id = ${id}`;
  assert(row, `there is no job ${id}`);
  return { status: row.status, attempts: row.attempts, result: row.result };
}

/** Waits until the job has succeeded: once, at this attempt, with a readable failure for each one before. */
async function assertSucceeds(id: string, attempts: number): Promise<void> {
  const { sql } = stack;
  await until(`job ${id} to end`, async () => !["pending", "running"].includes((await job(id)).status));
  const failures =
    await sql`select kind, attempt, error from job_failures where job_id = ${id} order by attempt`;
  for (const { error } of failures) {
    assert.match(
      error,
      /^lease expired: worker edge-\w+ neither finished the job nor extended its lease by /,
    );
  }
  const [completed] = await sql`select count(*)::int as times from completions where job_id = ${id}`;
  const { status, attempts: counted } = await job(id);
  assert.deepEqual({
    status,
    attempts: counted,
    completed: completed?.times,
    failed: failures.map((row) => row.attempt),
  }, {
    status: "succeeded",
    attempts,
    completed: 1,
    failed: Array.from({ length: attempts - 1 }, (_, n) => n + 1),
  });
  // Those whose worker could not say so any more are reported by the next one.
  for (const { kind, attempt, error } of failures) {
    const line = JSON.stringify({ id, kind, attempt, error }).slice(1);
    await until(
      "the report",
      () => stack.lines.some((text) => text.includes('"event":"attempt_failed"') && text.includes(line)),
    );
  }
}

const lockRow = (id: string) =>
  hold(stack.db, async (sql) => await sql`select from jobs where id = ${id} for update`);

/** The claim has picked its jobs and locked their rows when it comes to this table. */
const lockKinds = () =>
  hold(stack.db, async (sql) => await sql`lock table job_kinds in access exclusive mode`);

/** A worker is awake that has heard of the kinds, so that it claims without asking for them first. */
async function warmUp(): Promise<void> {
  await assertSucceeds(await enqueue("echo", {}), 1);
}

for (
  const [moment, when] of [["before its handler is called", "before"], ["inside its handler", "inside"], [
    "after its handler has returned",
    "returned",
  ]] as const
) {
  Deno.test(`a worker that is killed ${moment} leaves the job to the next`, async () => {
    const file = newFile();
    const id = await enqueue("die_once", { file, when });
    await until("the death", () => Deno.stat(`${file}.died`).catch(() => null));
    await endLease(stack, id);
    await assertSucceeds(id, 2);
    assert.equal((await job(id)).result, 2);
  });
}

Deno.test("the jobs of a worker that is killed wait for their lease and run again at the next tick, with nobody's help", async () => {
  const id = await enqueue("die_once", { file: newFile(), when: "inside" });
  await assertSucceeds(id, 2);
  const [row] = await stack.sql`
    select extract(epoch from failed_at - created_at)::float8 as seconds
    from jobs j join job_failures f on f.job_id = j.id where j.id = ${id}`;
  assert(row?.seconds >= 3 && row.seconds < 3 + 5, `${row?.seconds} s`);
});

Deno.test("a worker that is killed while it claims takes an attempt of the jobs that were claimed for it, and no more", async () => {
  await warmUp();
  const lock = await lockKinds();
  const id = await enqueue("echo", {});
  await untilBlocked(stack, "claim_jobs");
  await stack.restart();
  await lock.release();
  await until("the claim to take effect", async () => (await job(id)).status === "running");
  await endLease(stack, id);
  await assertSucceeds(id, 2);
});

Deno.test("a worker that is killed while it settles has completed the job, or another does: once", async () => {
  for (const released of [true, false]) {
    const file = newFile();
    const id = await enqueue("wait_for_gate", { file });
    await untilLines(file, 1);
    const lock = await lockRow(id);
    await openGate(file);
    await untilBlocked(stack, "complete_jobs");
    const pid = stack.pid();
    Deno.kill(pid, "SIGKILL");
    if (released) await lock.release();
    await stack.untilRestarted(pid);
    if (!released) {
      await until("the call to give up", async () => {
        const rows = await stack.sql`
          select from pg_stat_activity where datname = current_database() and query like '%complete_jobs%' and state = 'active'`;
        return rows.length <= 1; // this one
      });
      await lock.release();
      await endLease(stack, id);
    }
    await assertSucceeds(id, released ? 1 : 2);
  }
});

Deno.test("a worker that is frozen for longer than its lease finds its jobs given to others: it stops them, and what it completes is refused", async () => {
  const { sql } = stack;
  const [heedless, heeding] = [newFile(), newFile()];
  const ids = [
    await enqueue("wait_for_gate", { file: heedless }),
    await enqueue("wait_for_signal", { file: heeding }),
  ];
  await untilLines(heedless, 1);
  await untilLines(heeding, 1);
  const lostBefore = stack.lines.filter((line) => line.includes("lease_lost")).length;
  const pid = stack.pid();
  Deno.kill(pid, "SIGSTOP");
  try {
    await until("the leases to be over", async () => {
      const rows = await sql`select from jobs where id = any(${ids}) and attempts = 1 and status = 'pending'`;
      return rows.length === 2;
    });
    const [claim] = await sql`select lease_token from claim_jobs('another', kinds => '{wait_for_signal}')`;
    await sql`select complete_job(${ids[1] ?? ""}, ${claim?.lease_token}, '"by another"')`;
    await openGate(heedless);
    const drained = await stack.call("drain");
    assert.deepEqual((await drained.json()).queues, { wait_for_gate: { succeeded: 1, failed: 0, dead: 0 } });
  } finally {
    Deno.kill(pid, "SIGCONT");
  }
  await untilLines(heeding, 2);
  assert.equal(await Deno.readTextFile(heeding), `${ids[1]}\n${ids[1]} aborted\n`);
  await until(
    "both to be lost",
    () => stack.lines.filter((line) => line.includes("lease_lost")).length === lostBefore + 2,
  );
  assert.equal(stack.pid(), pid, "it works on");
  for (const id of ids) await assertSucceeds(id, 2);
});

Deno.test("a gateway that is killed during a claim undoes it: the attempt is not counted", async () => {
  await warmUp();
  const lock = await lockKinds();
  const id = await enqueue("echo", {});
  await untilBlocked(stack, "claim_jobs");
  await killGateway(stack);
  await lock.release();
  await assertSucceeds(id, 1);
});

for (
  const [what, cut] of [
    ["the gateway is killed", killGateway],
    ["every connection of the API is ended", endConnections],
  ] as const
) {
  Deno.test(`a settling during which ${what} is repeated`, async () => {
    const file = newFile();
    const id = await enqueue("wait_for_gate", { file });
    await untilLines(file, 1);
    const lock = await lockRow(id);
    await openGate(file);
    await untilBlocked(stack, "complete_jobs");
    await cut(stack);
    await lock.release();
    await assertSucceeds(id, 1);
    assert.equal(await Deno.readTextFile(file), `${id}\n`);
  });
}

Deno.test("while the players of cron and net are gone nothing starts, and all does when they are back", async () => {
  const { players } = stack.services;
  players.kill("SIGKILL");
  await players.status;
  await assertSucceeds(await enqueue("echo", {}), 1);
});
