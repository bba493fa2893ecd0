import assert from "node:assert/strict";
import { join } from "node:path";
import {
  insertJobs,
  linesOf,
  shortLease,
  startTestStack,
  states,
  type TestStack,
  until,
  untilLines,
  untilStates,
} from "../support.ts";

/**
 * What a worker does when the runtime announces the end of its isolate with `beforeunload`. The local runtime does so at
 * SIGTERM, with the reason "termination"; for the other reasons a handler tells its isolate what the runtime would.
 */

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ prepare: shortLease(3, 200) });
  // Long enough for no tick to help: what starts is started by an enqueue's own poke.
  await stack.sql`select cron.schedule('nightshift_tick', '59 seconds', 'select private.tick()')`;
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

/** A file for handlers to write to, removed with the stack. */
const newFile = () => join(stack.appDir, `lines-${++files}`);

async function poke(): Promise<void> {
  const response = await stack.call("job-worker");
  assert.equal(response.status, 202);
  await response.body?.cancel();
}

async function isPromised(): Promise<boolean> {
  const rows = await stack.sql`select from private.awake_workers where awake_until > clock_timestamp()`;
  return rows.length > 0;
}

/** Has a worker at hand: one job that ends when its gate opens, and three that end only when they are told to stop. */
async function startJobs() {
  const [quick, slow] = [newFile(), newFile()];
  const ends = await insertJobs(stack, "wait_for_gate", { file: quick });
  const rest = await insertJobs(stack, "wait_for_signal", { file: slow }, 3);
  await untilLines(quick, 1);
  await untilLines(slow, 3);
  await until("the worker to promise that it will look for more", async () => {
    await poke();
    return await isPromised();
  });
  return { ends, rest, slow, openGate: () => Deno.writeTextFile(`${quick}.gate`, "") };
}

async function announce(reason: string): Promise<void> {
  if (reason === "termination") Deno.kill(stack.pid(), "SIGTERM");
  else await untilStates(stack, await insertJobs(stack, "unload", { reason }), "succeeded 1"); // or another isolate would be told, later
  await until("the promise to be taken back", async () => !await isPromised());
}

for (const reason of ["cpu", "wall_clock", "early_drop", "termination"]) {
  Deno.test(`at a shutdown for ${reason} a worker takes no more, completes what ends in time and gives the rest back uncounted; the next enqueue finds another`, async () => {
    const { sql } = stack;
    const pid = stack.pid();
    const { ends, rest, slow, openGate } = await startJobs();
    await announce(reason);
    const [late] = await insertJobs(stack, "echo", {});
    assert(late);
    await openGate();
    await untilStates(stack, ends, "succeeded 1");

    await untilStates(stack, rest, "pending 0");
    const [given] = await sql`
      select bool_and(available_at <= clock_timestamp()) as due,
        (select count(*)::int from job_failures f where f.job_id = any(${rest})) as failures
      from jobs where id = any(${rest})`;
    assert.deepEqual({ ...given }, { due: true, failures: 0 });
    assert.deepEqual((await linesOf(slow)).slice(3).toSorted(), rest.map((id) => `${id} aborted`).toSorted());
    await sql`delete from jobs where id = any(${rest})`;
    assert.deepEqual(await states(stack, [late]), ["pending 0"]);

    // The runtime ends the isolate, and so does the local one after its SIGTERM.
    if (reason !== "termination") Deno.kill(pid, "SIGKILL");
    await stack.untilRestarted(pid);
    const [next] = await insertJobs(stack, "echo", {});
    assert(next);
    await untilStates(stack, [late, next], "succeeded 1");
  });
}

Deno.test("a worker that is killed before it has given its jobs back leaves them to their leases", async () => {
  const { sql } = stack;
  const { ends, rest, openGate } = await startJobs();
  await announce("wall_clock");
  const pid = stack.pid();
  Deno.kill(pid, "SIGKILL");
  await stack.untilRestarted(pid);
  assert.deepEqual(await states(stack, [...ends, ...rest]), Array(4).fill("running 1"));
  await sql`delete from jobs where id = any(${rest})`;
  await openGate();
  await sql`update jobs set lease_expires_at = clock_timestamp() where id = any(${ends})`;
  await (await stack.call("drain")).body?.cancel();
  assert.deepEqual(await states(stack, ends), ["succeeded 2"]);
  const failures = await sql`select error from job_failures where job_id = any(${ends})`;
  assert.match(failures[0]?.error, /^lease expired: worker edge-/);
});

Deno.test("an isolate that lives on after its shutdown answers, and takes nothing: another one does", async () => {
  const { rest, openGate } = await startJobs();
  await openGate();
  await announce("wall_clock");
  await untilStates(stack, rest, "pending 0");
  await stack.sql`delete from jobs where id = any(${rest})`;
  const pid = stack.pid();
  const ids = await insertJobs(stack, "echo", {}, 3);
  await poke();
  const response = await stack.call("job-worker", { wait: true });
  assert.deepEqual(await response.json(), { processed: 0, results: [] });
  assert.deepEqual(await states(stack, ids), Array(3).fill("pending 0"));
  assert.equal(await isPromised(), false);
  assert.equal(stack.pid(), pid);

  const drained = await stack.call("drain");
  assert.deepEqual((await drained.json()).queues, { echo: { succeeded: 3, failed: 0, dead: 0 } });
  Deno.kill(pid, "SIGKILL");
  await stack.untilRestarted(pid);
});

Deno.test("an isolate whose memory runs short gives back what does not end in time, uncounted, and takes jobs again if it lives on", async () => {
  const { sql } = stack;
  const pid = stack.pid();
  const { ends, rest, slow, openGate } = await startJobs();
  await untilStates(stack, await insertJobs(stack, "unload", { reason: "memory" }), "succeeded 1");
  await openGate();
  await untilStates(stack, ends, "succeeded 1");
  await until("the rest to be told to stop", async () => {
    const lines = await linesOf(slow);
    return rest.every((id) => lines.includes(`${id} aborted`));
  });
  await untilStates(stack, await insertJobs(stack, "echo", {}, 3), "succeeded 1");
  await untilLines(slow, 9); // entered, aborted and entered again
  assert.deepEqual(await states(stack, rest), Array(3).fill("running 1"));
  assert.equal((await sql`select from job_failures where job_id = any(${rest})`).length, 0);
  assert.equal(stack.pid(), pid);
  await sql`delete from jobs where id = any(${rest})`;
});

Deno.test("an isolate that is sent no more requests takes no more jobs, and gives those at hand all their time", async () => {
  const { sql } = stack;
  const pid = stack.pid();
  const { ends, rest, openGate } = await startJobs();
  await announce("drain");
  const [late] = await insertJobs(stack, "echo", {});
  assert(late);
  // Longer than it would wait at a shutdown.
  await new Promise((resolve) => setTimeout(resolve, 2_500));
  assert.deepEqual(await states(stack, [...ends, ...rest, late]), [
    ...Array(4).fill("running 1"),
    "pending 0",
  ]);
  await openGate();
  await untilStates(stack, ends, "succeeded 1");
  await sql`delete from jobs where id = any(${rest})`;
  Deno.kill(pid, "SIGKILL");
  await stack.untilRestarted(pid);
  await poke();
  await untilStates(stack, [late], "succeeded 1");
});
