import assert from "node:assert/strict";
import { join } from "node:path";
import { linesOf, startTestStack, type TestStack, until, untilLines } from "../support.ts";

/** What a job keeps from one attempt to the next, through the function. Its heartbeats are too far apart to have a part in it. */

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false });
  await stack.sql`select cron.unschedule('nightshift_tick')`;
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Row {
  status: string;
  attempts: number;
  result: unknown;
  progress: unknown;
  last_error: string | null;
}

async function enqueue(what: string): Promise<{ id: string; file: string }> {
  const file = join(stack.appDir, `lines-${++files}`);
  const [row] = await stack.sql`select enqueue_job('keep', ${stack.sql.json({ file, what })}) as id`;
  return { id: String(row?.id), file };
}

async function job(id: string): Promise<Row> {
  const [row] = await stack
    .sql<Row[]>`select status, attempts, result, progress, last_error from jobs where id = ${id}`;
  assert(row);
  return row;
}

/** Runs what is ready, again and again until nothing is; what became of each attempt. */
async function run(): Promise<string[]> {
  const response = await stack.call("job-worker", { wait: true });
  const { results }: { results: { status: string }[] } = await response.json();
  return results.map(({ status }) => status);
}

async function runOne(what: string): Promise<Row> {
  const { id } = await enqueue(what);
  await run();
  return await job(id);
}

/** Takes a job from whoever runs it, as the tick does once its lease is over. */
async function rescue(id: string): Promise<void> {
  await stack
    .sql`update jobs set lease_expires_at = clock_timestamp() where id = ${id} and status = 'running'`;
  await until("the rescue", async () => {
    const [row] = await stack.sql`select rescue_expired_jobs() as jobs`;
    return row?.jobs > 0;
  });
}

Deno.test("a job of three steps whose worker is killed after each: every step is run once, and its stored value comes back", async () => {
  const { id, file } = await enqueue("three steps, killed after each");
  for (const name of ["reserve", "charge", "send"]) {
    await until(`the death after ${name}`, async () => {
      await run().catch(() => {}); // it ends with the worker; the function may still be starting
      return await Deno.stat(`${file}.${name}.died`).catch(() => null);
    });
    const { progress } = await job(id);
    assert(progress && typeof progress === "object" && "steps" in progress && progress.steps);
    assert.ok(Object.hasOwn(progress.steps, name), "it can be seen in SQL");
    await rescue(id);
  }
  await until("the last attempt", async () => {
    await run().catch(() => {}); // the function may still be starting
    return (await job(id)).status === "succeeded";
  });
  assert.deepEqual(await linesOf(file), ["reserve", "charge", "send"]);
  const { attempts, result } = await job(id);
  assert.equal(attempts, 4);
  assert.deepEqual(result, [
    { name: "reserve", attempt: 1 },
    { name: "charge", attempt: 2 },
    { name: "send", attempt: 3 },
  ]);
});

Deno.test("a step gives the same at first as later, whatever it is, and undefined is null", async () => {
  const { result, attempts } = await runOne("all sorts of values");
  const values = [1.5, "ü\n", null, null, true, [], {}, { a: [{ b: null }] }, 2 ** 53];
  assert.equal(attempts, 2);
  assert.deepEqual(result, { first: values, second: values });
});

Deno.test("what is checkpointed is there at once and in the next attempt, and the last call for a field counts", async () => {
  const { id } = await enqueue("checkpoints");
  await run();
  const { result, attempts } = await job(id);
  assert.equal(attempts, 2);
  assert.deepEqual(result, { page: 3, of: 3 });
  const [failure] = await stack.sql`select error from job_failures where job_id = ${id}`;
  assert.equal(failure?.error, 'RetryAfterError: in this attempt: {"page":3,"of":3}');
});

Deno.test("a step that fails is run again, those before it are not", async () => {
  const { id, file } = await enqueue("a step that fails");
  await run();
  assert.deepEqual(await linesOf(file), ["first", "second", "second", "second"]);
  const { status, progress } = await job(id);
  assert.deepEqual([status, progress], ["succeeded", { steps: { first: null, second: null } }]);
});

Deno.test("a step that fails may be tried again in the same attempt", async () => {
  const { id, file } = await enqueue("a step that is tried again at once");
  await run();
  assert.deepEqual(await linesOf(file), ["1", "2"]);
  const { attempts, result, progress } = await job(id);
  assert.deepEqual([attempts, result, progress], [1, 2, { steps: { page: 2 } }]);
});

Deno.test("any name does that JSON can hold; a name twice, an empty and a long one are refused before the step is run", async () => {
  assert.equal((await runOne("awkward names")).attempts, 2);
  const { id, file } = await enqueue("a name twice");
  await run();
  const { status, last_error } = await job(id);
  assert.equal(status, "pending");
  assert.match(
    last_error ?? "",
    /^JobError: job\.step: this attempt has a step "page" already \(.*the row's id/,
  );
  assert.deepEqual(await linesOf(file), ["page"]);
  for (const what of ["an empty name", "a long name", "a name with U+0000"]) {
    assert.match((await runOne(what)).last_error ?? "", /^JobError: job\.step: a step's name has/, what);
  }
});

for (
  const [what, error] of Object.entries({
    "a date": /what "date" gave\.at\[0\] is Date, which JSON does not give back/,
    "a bigint": /what "bigint" gave has no JSON: .*BigInt/,
    "not a number": /gave\.n is NaN/,
    "a response": /gave is Response/,
    "U+0000 in a value": /gave\[0\] has U\+0000/,
    "a circle": /gave has no JSON: .*circular/i,
    "five megabytes": /progress would have more than 1000000 bytes/,
  })
) {
  Deno.test(`a step that gives ${what} ends its job, since what it did would be done again`, async () => {
    const { status, attempts, last_error, progress } = await runOne(what);
    assert.deepEqual([status, attempts, progress], ["dead", 1, null]);
    assert.match(last_error ?? "", /^PermanentError: the step cannot be stored: JobError: /);
    assert.match(last_error ?? "", error);
  });
}

Deno.test("a checkpoint that cannot be stored is the handler's error, and what was kept stays", async () => {
  assert.match((await runOne("a checkpoint of steps")).last_error ?? "", /its field steps is for job\.step/);
  assert.match((await runOne("a checkpoint of a date")).last_error ?? "", /fields\.at is Date/);
  const { status, result, progress } = await runOne("a checkpoint that is too large, caught");
  assert.equal(status, "succeeded");
  assert.deepEqual(progress, { page: 1 });
  assert(result && typeof result === "object" && "error" in result && "progress" in result);
  assert.match(String(result.error), /^JobError: checkpoint_job: progress would have more than 1000000/);
  assert.deepEqual(result.progress, { page: 1 });
});

Deno.test("a stale worker does not begin its next step, and is aborted; the one that has the job now goes on", async () => {
  const { id, file } = await enqueue("a step, and another after the gate");
  const stale = run();
  await untilLines(file, 1);
  await until("the step's storing", async () => (await job(id)).progress !== null);
  const storedAt = performance.now();
  await rescue(id);
  const current = stack.call("drain");
  await untilLines(file, 3);
  assert.deepEqual((await linesOf(file)).slice(0, 3), [
    "first of attempt 1",
    "second of attempt 2",
    "third of attempt 2",
  ]);
  await (await current).body?.cancel();
  // What the database has said is taken to hold for a second.
  await until("a second to pass", () => performance.now() - storedAt > 1_100);
  await Deno.writeTextFile(`${file}.gate`, "");
  await untilLines(file, 5);
  assert.deepEqual((await linesOf(file)).slice(3), [
    "aborted: Error: the job was stopped: it was cancelled, or its lease is lost",
    "refused: true",
  ]);
  assert.deepEqual(await stale, ["lost"]);
  const { result, progress } = await job(id);
  assert.deepEqual([result, progress], [2, { steps: { first: null, second: null, third: null } }]);
});

Deno.test("a handler whose job was cancelled long before its first step does not begin it", async () => {
  const { id, file } = await enqueue("a step after the gate");
  const running = run();
  await untilLines(file, 1);
  const startedAt = performance.now();
  await stack.sql`select cancel_jobs(array[${id}::uuid])`;
  await until("a second to pass", () => performance.now() - startedAt > 1_100);
  await Deno.writeTextFile(`${file}.gate`, "");
  await untilLines(file, 2);
  assert.deepEqual(await linesOf(file), ["begun", "refused: true"]);
  assert.deepEqual(await running, ["lost"]);
});

Deno.test("what a step gives whose job is cancelled meanwhile is refused, and the worker stops", async () => {
  const { id, file } = await enqueue("a step in which it waits for the gate");
  const running = run();
  await untilLines(file, 1);
  await stack.sql`select cancel_jobs(array[${id}::uuid])`;
  await Deno.writeTextFile(`${file}.gate`, "");
  await untilLines(file, 3);
  assert.deepEqual(await linesOf(file), ["begun", "done", "refused: true"]);
  assert.deepEqual(await running, ["lost"]);
  const { status, progress } = await job(id);
  assert.deepEqual([status, progress], ["cancelled", null]);
});

Deno.test("when one of several steps fails, those under way are waited for and stored, and none begins any more", async () => {
  const { id, file } = await enqueue("steps side by side, of which one fails");
  await run();
  assert.deepEqual(await linesOf(file), ["charge", "send"]);
  assert.equal((await job(id)).attempts, 2);
  const failures = await stack.sql`select error from job_failures where job_id = ${id}`;
  assert.deepEqual(failures.map(({ error }) => error), ["RetryAfterError: again"]);
});

Deno.test("steps and checkpoints that a handler does not await are kept all the same", async () => {
  const { id, file } = await enqueue("what is not awaited");
  await run();
  assert.deepEqual(await linesOf(file), ["step"]);
  const { result, progress } = await job(id);
  assert.deepEqual([result, progress], ["done", { kept: true, steps: { step: null } }]);
});

Deno.test("a handler that has failed beside a step that never ends has failed as it says, when its time is over", async () => {
  await stack.sql`insert into job_kinds (kind, timeout_ms) values ('keep', 300)
    on conflict (kind) do update set timeout_ms = 300`;
  const what = ["a failure beside a step that never ends", "an error of its own when it is aborted"];
  const [failed, aborted] = await Promise.all(what.map(enqueue));
  await run();
  await stack.sql`update job_kinds set timeout_ms = null where kind = 'keep'`;
  assert.equal((await job(failed?.id ?? "")).last_error, "Error: the failure that counts");
  // What it throws because its time is over is no news.
  const { status, last_error } = await job(aborted?.id ?? "");
  assert.deepEqual([status, last_error?.split(":")[0]], ["pending", "handler_timeout"]);
});

Deno.test("steps side by side begin at once, with one look whether the job is still held", async () => {
  assert.deepEqual((await runOne("steps side by side after a while")).result, [4, 4, 4, 4]);
});

Deno.test("a step is stored although the database cannot be reached for a while", async () => {
  const { id, file } = await enqueue("a step, and another after the gate");
  const running = run();
  await untilLines(file, 1);
  await until("the step's storing", async () => (await job(id)).progress !== null);
  const lock = stack.db.connect("postgres", { max: 1 });
  await lock`begin`;
  await lock`select from jobs where id = ${id} for update`;
  await Deno.writeTextFile(`${file}.gate`, "");
  await until("a refusal", () => stack.lines.some((line) => line.includes('"checkpoint_repeated"')));
  await lock`commit`;
  assert.deepEqual(await running, ["succeeded"]);
  assert.deepEqual(
    await linesOf(file),
    [1, 2, 3].map((n) => `${["", "first", "second", "third"][n]} of attempt 1`),
  );
});

Deno.test("a snoozed job waits as long as it was told, keeps its progress, and its attempts are unchanged", async () => {
  const { id } = await enqueue("a snooze");
  assert.deepEqual(await run(), ["snoozed"]);
  const { status, attempts, last_error } = await job(id);
  assert.deepEqual([status, attempts, last_error], ["pending", 0, null]);
  const [wait] = await stack.sql`
    select extract(epoch from available_at - updated_at)::float8 as seconds, (select count(*)::int from job_failures where job_id = id)
      as failures from jobs where id = ${id}`;
  assert.ok(Math.abs(wait?.seconds - 100) < 1, `${wait?.seconds}`);
  assert.equal(wait?.failures, 0);
  await stack.sql`select reschedule_jobs(array[${id}::uuid], clock_timestamp())`;
  assert.deepEqual(await run(), ["succeeded"]);
  assert.equal((await job(id)).result, "attempt 1");
});

Deno.test("a snooze for no time is one of a second; one for no number of seconds fails the attempt", async () => {
  const { id } = await enqueue("a snooze for no time");
  assert.deepEqual(await run(), ["snoozed"]);
  const [row] = await stack
    .sql`select available_at - updated_at > interval '900 ms' as waits from jobs where id = ${id}`;
  assert.equal(row?.waits, true);
  await stack.sql`select cancel_jobs(array[${id}::uuid])`;
  const { last_error, attempts } = await runOne("a snooze for NaN");
  assert.deepEqual([attempts, last_error], [1, "RangeError: SnoozeError: NaN is no number of seconds"]);
});
