import assert from "node:assert/strict";
import { join } from "node:path";
import { linesOf, shortLease, startTestStack, type TestStack, until, untilLines } from "../support.ts";

/** What the worker does with jobs, through the function: each test enqueues its own and runs them. */

let stack: TestStack;
let files = 0;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({
    dispatch: false,
    prepare: shortLease(3, 200),
  });
  // Its leases of three seconds may run out on a busy machine: nobody but a test is to find them.
  await stack.sql`select cron.unschedule('nightshift_tick')`;
  // The kind declares a minute; what an operator set goes before it.
  await stack.sql`insert into job_kinds (kind, timeout_ms) values ('hang', 300)`;
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

interface Result {
  id: string;
  kind: string;
  status: string;
}

interface Row {
  id: string;
  status: string;
  attempts: number;
  result: unknown;
  last_error: string | null;
}

async function enqueue(kind: string, payload: Record<string, unknown>, count = 1): Promise<string[]> {
  const rows = await stack.sql`
    insert into jobs (kind, payload) select ${kind}, ${stack.sql.json(JSON.parse(JSON.stringify(payload)))}
    from generate_series(1, ${count}) returning id`;
  return rows.map(({ id }) => id);
}

async function enqueueOne(kind: string, payload: Record<string, unknown>): Promise<string> {
  const [id] = await enqueue(kind, payload);
  assert(id);
  return id;
}

/** Runs what is ready and waits for it. */
async function run(body: Record<string, unknown> = {}): Promise<Result[]> {
  const response = await stack.call("job-worker", { wait: true, ...body });
  assert.equal(response.status, 200);
  const { results }: { results: Result[] } = await response.json();
  return results;
}

/** Pokes a worker, which works on after its answer. */
async function poke(body: Record<string, unknown> = {}): Promise<void> {
  const response = await stack.call("job-worker", body);
  assert.equal(response.status, 202);
  await response.body?.cancel();
}

async function jobs(ids: string[]): Promise<Row[]> {
  return await stack.sql<Row[]>`
    select id, status, attempts, result, last_error from jobs where id = any(${ids}) order by id`;
}

async function job(id: string): Promise<Row> {
  const [row] = await jobs([id]);
  assert(row, `there is no job ${id}`);
  return row;
}

/** A file for handlers to write to, removed with the stack. */
const newFile = () => join(stack.appDir, `lines-${++files}`);

const openGate = (file: string) => Deno.writeTextFile(`${file}.gate`, "");

const untilStatus = (id: string, status: string) =>
  until(`job ${id} to be ${status}`, async () => (await job(id)).status === status);

const makeDue = (id: string) => stack.sql`update jobs set available_at = clock_timestamp() where id = ${id}`;

Deno.test("8 workers at once and 5,000 jobs: every handler runs once, and every job succeeds at its first attempt", async () => {
  const file = newFile();
  const ids = await enqueue("append", { file }, 5_000);
  const results = await Promise.all(Array.from({ length: 8 }, () => run({ maxJobs: 1_000 })));
  assert.deepEqual(results.flat().map(({ id }) => id).toSorted(), ids.toSorted());
  assert.deepEqual((await linesOf(file)).toSorted(), ids.toSorted());
  const [counts] = await stack.sql`
    select count(*)::int as jobs, (select count(*)::int from job_failures) as failures from jobs
    where id = any(${ids}) and status = 'succeeded' and attempts = 1 and result is not null and locked_by like 'edge-%'`;
  assert.deepEqual({ ...counts }, { jobs: 5_000, failures: 0 });
});

Deno.test("a worker keeps ten slots full, and never runs more at once", async () => {
  const ids = await enqueue("append", { file: newFile(), ms: 20 }, 45);
  await run();
  const spans = (await jobs(ids)).map(({ result }) => {
    assert(typeof result === "object" && result !== null && "from" in result && "to" in result);
    return { from: Number(result.from), to: Number(result.to) };
  });
  const atOnce = spans.map(({ from }) => spans.filter((span) => span.from <= from && from < span.to).length);
  assert.equal(Math.max(...atOnce), 10);
});

Deno.test("jobs of one kind start in the order in which they were enqueued", async () => {
  const file = newFile();
  const ids: string[] = [];
  for (const count of [1, 100, 1, 98]) ids.push(...await enqueue("append", { file }, count));
  await run();
  assert.deepEqual(await linesOf(file), ids);
});

Deno.test("a handler is told about its job, and gets the payload as its schema makes it", async () => {
  const { sql } = stack;
  const [row] = await sql`
    select enqueue_job('describe', '{"amount": "12.5"}', max_attempts => 1, context => '{"user": 7}') as id`;
  await run();
  const { result } = await job(row?.id);
  const [stored] = await sql`select created_at from jobs where id = ${row?.id}`;
  assert.deepEqual(result, {
    id: row?.id,
    kind: "describe",
    attempts: 1,
    maxAttempts: 1,
    isLastAttempt: true,
    context: { user: 7 },
    createdAt: stored?.created_at.toISOString(),
    schedule: null,
    dueAt: null,
    progress: {},
    amount: 12.5,
    aborted: false,
  });
});

Deno.test("an attempt that takes too long is aborted and has failed with handler_timeout, though the handler goes on; the last one leaves the job dead", async () => {
  const file = newFile();
  const id = await enqueueOne("hang", { file });
  let error = "handler_timeout: the handler was still running after 300 ms";
  assert.deepEqual(await run(), [{ id, kind: "hang", status: "pending" }]);
  assert.deepEqual(await job(id), { id, status: "pending", attempts: 1, result: null, last_error: error });
  assert.deepEqual(await linesOf(file), [`${id} aborted`]);

  // A changed setting holds from the next attempt on.
  await stack.sql`update job_kinds set timeout_ms = 200 where kind = 'hang'`;
  error = error.replace("300", "200");
  await makeDue(id);
  assert.deepEqual(await run(), [{ id, kind: "hang", status: "dead" }]);
  assert.deepEqual(await job(id), { id, status: "dead", attempts: 2, result: null, last_error: error });
});

Deno.test("a kind whose timeout does not fit into a worker's lifetime is left alone, and the log says so", async () => {
  await stack.sql`update job_kinds set timeout_ms = 80000 where kind = 'describe'`;
  await until("a worker to have heard of it", async () => {
    await run();
    return stack.lines.some((line) =>
      line.includes('"kind_not_claimed","kind":"describe","timeoutMs":80000')
    );
  });
  const id = await enqueueOne("describe", { amount: "1" });
  const unknown = await enqueueOne("unheard_of", {});
  assert.deepEqual(await run(), [{ id: unknown, kind: "unheard_of", status: "dead" }]);
  // As long as the lifetime is not too long.
  await stack.sql`update job_kinds set timeout_ms = 70000 where kind = 'describe'`;
  await run();
  await until(
    "the job to be claimed again",
    async () => (await run()).length > 0 || (await job(id)).attempts > 0,
  );
  await stack.sql`update job_kinds set timeout_ms = null where kind = 'describe'`;
});

Deno.test("a running job that is cancelled in SQL: its handler is told within a heartbeat, and nothing that it returns is stored", async () => {
  const file = newFile();
  const id = await enqueueOne("wait_for_signal", { file });
  const running = run();
  await untilLines(file, 1);
  await stack.sql`select cancel_jobs(array[${id}::uuid])`;
  await untilLines(file, 2);
  assert.deepEqual(await linesOf(file), [id, `${id} aborted`]);
  assert.deepEqual(await running, [{ id, kind: "wait_for_signal", status: "lost" }]);
  const { status, attempts, result } = await job(id);
  assert.deepEqual([status, attempts, result], ["cancelled", 1, null]);
});

Deno.test("what a handler throws decides: an error is retried, RetryAfterError says when, PermanentError is the end", async () => {
  const error = await enqueueOne("fail", { how: "error", message: "no such luck" });
  const later = await enqueueOne("fail", { how: "retry_after", message: "too many" });
  const never = await enqueueOne("fail", { how: "permanent", message: "no such user" });
  await run();

  assert.deepEqual(await job(error), {
    id: error,
    status: "pending",
    attempts: 1,
    result: null,
    last_error: "Error: no such luck",
  });
  const waits = await stack.sql`
    select extract(epoch from j.available_at - f.failed_at)::float8 as seconds
    from jobs j join job_failures f on f.job_id = j.id
    where j.id in ${stack.sql([error, later])} order by j.id`;
  const [first, asked] = waits.map(({ seconds }) => seconds);
  assert(first > 47 && first < 61, `30 s × 2, less up to a fifth: ${first}`);
  assert(asked > 119 && asked < 121, `as asked for: ${asked}`);
  assert.equal((await job(later)).last_error, "RetryAfterError: too many");
  assert.deepEqual(await job(never), {
    id: never,
    status: "dead",
    attempts: 1,
    result: null,
    last_error: "PermanentError: no such user",
  });
});

Deno.test("a job whose kind has no handler is dead at once, and so is one whose payload does not fit its schema", async () => {
  const unheard = await enqueueOne("sned_email", {});
  const inherited = await enqueueOne("constructor", {});
  const misfit = await enqueueOne("append", { file: 3 });
  await run();
  assert.deepEqual(
    (await jobs([unheard, inherited, misfit])).map(({ status, attempts }) => [status, attempts]),
    Array(3).fill(["dead", 1]),
  );
  assert.equal((await job(unheard)).last_error, "unknown_kind: sned_email");
  assert.equal((await job(inherited)).last_error, "unknown_kind: constructor");
  assert.match((await job(misfit)).last_error ?? "", /^invalid_payload: file: .*expected string/);
});

Deno.test("a job that a worker of older code did not know is put back and run by one that knows its kind", async () => {
  const id = await enqueueOne("echo", { n: 1 });
  await stack.sql`
    update jobs set status = 'dead', attempts = 1, last_error = 'unknown_kind: echo', finished_at = clock_timestamp()
    where id = ${id}`;
  await until("the job to succeed", async () => {
    await run();
    return (await job(id)).status === "succeeded";
  });
  assert.equal((await job(id)).attempts, 1);
});

Deno.test("the time of an attempt covers the look at its payload", async () => {
  await stack.sql`insert into job_kinds (kind, timeout_ms) values ('slow_schema', 100)
    on conflict (kind) do update set timeout_ms = 100`;
  const id = await enqueueOne("slow_schema", { n: 1 });
  assert.deepEqual(await run(), [{ id, kind: "slow_schema", status: "pending" }]);
  assert.match((await job(id)).last_error ?? "", /^handler_timeout: /);
});

Deno.test("an error that nobody catches is logged, and ends neither the worker nor another's job", async () => {
  const pid = stack.services.functions.pid("job-worker");
  const ids = [...await enqueue("careless", {}), ...await enqueue("echo", { n: 1 })];
  assert.deepEqual((await run()).map(({ status }) => status), ["succeeded", "succeeded"]);
  assert((await jobs(ids)).every(({ attempts }) => attempts === 1));
  for (const what of ["promise", "timer"]) {
    assert(stack.lines.some((line) => line.includes(`nobody waits for this ${what}`)), what);
  }
  assert.equal(stack.services.functions.pid("job-worker"), pid);
});

Deno.test("a worker that has done its share wakes a successor for the rest", async () => {
  const ids = await enqueue("echo", { n: 1 }, 1_200); // a worker's share is 500
  await poke();
  await until("all jobs to succeed", async () => {
    const [row] = await stack.sql`
      select count(*)::int as jobs, count(distinct locked_by)::int as workers from jobs
      where id = any(${ids}) and status = 'succeeded'`;
    return row?.jobs === 1_200 && row.workers >= 3;
  });
});

Deno.test("a heartbeat extends the lease of a job at work; when the lease is lost, the handler is aborted and its result refused", async () => {
  const { sql } = stack;
  const file = newFile();
  const id = await enqueueOne("wait_for_signal", { file });
  await poke();
  await untilLines(file, 1);
  await sql`update jobs set lease_expires_at = clock_timestamp() - interval '1 second' where id = ${id}`;
  await until("the lease to be extended", async () => {
    const [row] =
      await sql`select lease_expires_at > clock_timestamp() as extended from jobs where id = ${id}`;
    return row?.extended;
  });

  // Rescued as from a worker that is gone, and given to another.
  const [claim] = await sql.begin(async (sql) => {
    await sql`update jobs set lease_expires_at = clock_timestamp() - interval '1 second' where id = ${id}`;
    await sql`select rescue_expired_jobs()`;
    return await sql`select lease_token from claim_jobs('another', kinds => '{wait_for_signal}')`;
  });
  await untilLines(file, 2);
  assert.deepEqual(await linesOf(file), [id, `${id} aborted`]);
  await until("the loss to be logged", () => stack.lines.some((line) => line.includes("lease_lost")));
  assert.deepEqual(
    { ...(await sql`select status, attempts, locked_by, result from jobs where id = ${id}`)[0] },
    { status: "running", attempts: 2, locked_by: "another", result: null },
  );
  await sql`select complete_job(${id}, ${claim?.lease_token}, '"by the other"')`;
  assert.equal((await job(id)).result, "by the other");
});

Deno.test("a settling that the database refuses for a moment is repeated until it is accepted", async () => {
  const { sql } = stack;
  const file = newFile();
  const id = await enqueueOne("wait_for_gate", { file });
  await poke();
  await untilLines(file, 1);
  await sql`revoke execute on function complete_jobs from service_role`;
  try {
    await openGate(file);
    await until("a repetition", () => stack.lines.some((line) => line.includes("settle_repeated")));
  } finally {
    await sql`grant execute on function complete_jobs to service_role`;
  }
  await untilStatus(id, "succeeded");
  assert.equal((await job(id)).attempts, 1);
  assert.equal((await linesOf(file)).length, 1);
});

Deno.test("a trigger of the app that raises as a job ends fails that attempt with its message, and holds up no other", async () => {
  const { sql } = stack;
  await sql.unsafe(`
    create function public.refuse() returns trigger language plpgsql as $$
    begin
      if new.status = 'succeeded' and new.payload ->> 'n' = '-1' then raise exception 'no room'; end if;
      return new;
    end $$;
    create trigger refuse before update on public.jobs for each row execute function public.refuse();
  `).simple();
  try {
    const others = await enqueue("echo", { n: 1 }, 4);
    const refused = await enqueueOne("echo", { n: -1 });
    others.push(...await enqueue("echo", { n: 1 }, 4));
    await run();
    // Some may have gone to a worker that an earlier test has poked, and which looks on for two seconds.
    await until(
      "each to be over",
      async () =>
        (await jobs([...others, refused])).every(({ status, attempts }) =>
          status !== "running" && attempts > 0
        ),
    );
    for (const id of others) {
      const { status, attempts } = await job(id);
      assert.deepEqual([status, attempts], ["succeeded", 1]);
    }
    const row = await job(refused);
    assert.deepEqual([row.status, row.last_error], [
      "pending",
      "the result cannot be stored: JobError: no room",
    ]);
    await sql`delete from jobs where id = ${refused}`;
  } finally {
    await sql`drop function public.refuse cascade`;
  }
});

Deno.test("a job whose row somebody keeps locked holds up neither the settling nor the leases of the others", async () => {
  const { sql } = stack;
  const file = newFile();
  const [locked, ...others] = await enqueue("wait_for_gate", { file }, 4);
  assert(locked);
  const running = run();
  await untilLines(file, 4);
  const lock = stack.db.connect("postgres", { max: 1 });
  await lock`begin`;
  await lock`select from jobs where id = ${locked} for update`;
  await openGate(file);
  await until(
    "the others to succeed",
    async () => (await jobs(others)).every(({ status }) => status === "succeeded"),
  );
  assert.equal((await job(locked)).status, "running");
  await lock`commit`;
  await running;
  // It may have gone to a worker that an earlier test has poked, and which still has it.
  await until("it to succeed", async () => {
    await sql`select rescue_expired_jobs()`;
    await run();
    return (await job(locked)).status === "succeeded";
  });
  assert((await jobs(others)).every(({ attempts }) => attempts === 1));
});

Deno.test("a settling that finds the API gone is repeated until it is back", async () => {
  const file = newFile();
  const id = await enqueueOne("wait_for_gate", { file });
  await poke();
  await untilLines(file, 1);
  const repeatedBefore = stack.lines.filter((line) => line.includes("settle_repeated")).length;
  const { gateway } = stack.services;
  gateway.kill("SIGKILL");
  await gateway.status;
  await openGate(file);
  await untilStatus(id, "succeeded");
  assert(stack.lines.filter((line) => line.includes("settle_repeated")).length > repeatedBefore);
  assert.equal((await job(id)).attempts, 1);
  assert.equal((await linesOf(file)).length, 1);
});

Deno.test("the 10 jobs of a worker that was killed run again after their leases, once each", async () => {
  const { sql } = stack;
  const file = newFile();
  const ids = await enqueue("wait_for_gate", { file }, 10);
  await poke();
  await untilLines(file, 10);
  await stack.restart("SIGKILL");
  assert((await jobs(ids)).every(({ status, attempts }) => status === "running" && attempts === 1));
  await openGate(file);

  assert.deepEqual(await run(), [], "until the leases are over the jobs are another's");
  await sql`update jobs set lease_expires_at = clock_timestamp() where id = any(${ids})`;
  const [rescued] = await sql`select rescue_expired_jobs() as jobs`;
  assert.equal(rescued?.jobs, 10);
  assert.equal((await run()).length, 10);
  assert((await jobs(ids)).every(({ status, attempts }) => status === "succeeded" && attempts === 2));
  assert.deepEqual((await linesOf(file)).toSorted(), [...ids, ...ids].toSorted());
  const failures = await sql`select attempt, error from job_failures where job_id = any(${ids})`;
  assert.equal(failures.length, 10);
  assert(
    failures.every(({ attempt, error }) => attempt === 1 && error.startsWith("lease expired: worker edge-")),
  );
});

Deno.test("a worker that is told to shut down completes what ends in time, and gives the rest back uncounted", async () => {
  const { sql } = stack;
  const [quick, slow] = [newFile(), newFile()];
  const ends = await enqueueOne("wait_for_gate", { file: quick });
  const rest = await enqueue("wait_for_signal", { file: slow }, 3);
  await poke();
  await untilLines(quick, 1);
  await untilLines(slow, 3);
  const ended = stack.restart("SIGTERM");
  await openGate(quick);
  await untilStatus(ends, "succeeded");
  await ended;
  assert((await jobs(rest)).every(({ status, attempts }) => status === "pending" && attempts === 0));
  assert.deepEqual((await linesOf(slow)).slice(3).toSorted(), rest.map((id) => `${id} aborted`).toSorted());
  assert.equal((await sql`select from job_failures where job_id = any(${rest})`).length, 0);
  await sql`delete from jobs where id = any(${rest})`;
});

Deno.test("a settling that never gets through is given up with the lease, so that the job can be rescued", async () => {
  const { sql } = stack;
  const file = newFile();
  const id = await enqueueOne("wait_for_gate", { file });
  const running = run();
  await untilLines(file, 1);
  await sql`revoke execute on function complete_jobs, fail_jobs from service_role`;
  try {
    await openGate(file);
    assert.deepEqual(await running, [{ id, kind: "wait_for_gate", status: "lost" }]);
  } finally {
    await sql`grant execute on function complete_jobs, fail_jobs to service_role`;
  }
  const [rescued] = await sql`select rescue_expired_jobs() as jobs`;
  assert.equal(rescued?.jobs, 1);
  await run();
  assert.deepEqual(await linesOf(file), [id, id]);
  assert.equal((await job(id)).status, "succeeded");
});
