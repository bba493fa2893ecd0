import assert from "node:assert/strict";
import { join } from "node:path";
import { linesOf, startTestStack, type TestStack, until, untilLines } from "../support.ts";
import {
  databaseEnv,
  startWorker,
  type TransportName,
  transports,
  withWorker,
  type WorkerProcess,
} from "./worker_process.ts";

/** What the queue promises, kept by a worker process over each transport. A promise is one entry of `promises`. */

let stack: TestStack;
Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false, prepare: withWorker });
  // Leases of three seconds may run out on a busy machine: nobody but the worker is to find them.
  await stack.sql`select cron.unschedule('nightshift_tick')`;
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

/** The worker that keeps the promises; a promise may end it and start another. */
interface Run {
  worker: WorkerProcess;
  start(): Promise<WorkerProcess>;
}

type Payload = Record<string, unknown>;

async function enqueue(kind: string, payload: Payload, options: Payload = {}): Promise<string> {
  const { sql } = stack;
  const entries = sql.json(JSON.parse(JSON.stringify([{ kind, payload, ...options }])));
  const [row] = await sql`select id from enqueue_jobs(${entries})`;
  return row?.id;
}

async function enqueueMany(
  count: number,
  kind: string,
  payload: Payload,
  options: Payload = {},
): Promise<string[]> {
  const { sql } = stack;
  const entries = sql.json(JSON.parse(JSON.stringify(Array(count).fill({ kind, payload, ...options }))));
  return (await sql`select id from enqueue_jobs(${entries})`).map(({ id }) => id);
}

interface Row {
  status: string;
  attempts: number;
  result: unknown;
  lastError: string | null;
  worker: string;
  token: number;
}

async function job(id: string): Promise<Row> {
  const [row] = await stack.sql<Row[]>`
    select status, attempts, result, last_error as "lastError", locked_by as worker, lease_token as token
    from jobs where id = ${id}`;
  assert(row, `there is no job ${id}`);
  return row;
}

const hasEnded = ({ status }: Row) => !["pending", "running"].includes(status);

/** The job once it is as it should be; when it has ended, unless said otherwise. */
const jobOnce = (id: string, is: (row: Row) => boolean = hasEnded) =>
  until(`job ${id}`, async () => {
    const row = await job(id);
    return is(row) && row;
  });

let files = 0;
const newFile = () => join(stack.appDir, `lines-${++files}`);

const promises: Record<string, (run: Run) => Promise<void>> = {
  async "runs what is enqueued, and stores what its handler returns"() {
    const { status, attempts, result, lastError, worker } = await jobOnce(await enqueue("echo", { n: 7 }));
    assert.deepEqual([status, attempts, result, lastError], ["succeeded", 1, { n: 7 }, null]);
    assert.match(worker, /^worker-.+-[0-9a-f]{8}$/);
  },

  async "tells a handler about its job, and gives it the payload as its schema makes it"() {
    const id = await enqueue("describe", { amount: "12.5" }, { context: { user: 7 }, max_attempts: 1 });
    const { result } = await jobOnce(id);
    const [stored] = await stack.sql`select created_at from jobs where id = ${id}`;
    const createdAt = stored?.created_at.toISOString();
    const told = {
      schedule: null,
      dueAt: null,
      id,
      kind: "describe",
      attempts: 1,
      maxAttempts: 1,
      isLastAttempt: true,
      context: { user: 7 },
    };
    assert.partialDeepStrictEqual(result, { ...told, createdAt, amount: 12.5, aborted: false });
  },

  async "brings the app's schedules in step when it starts, and enqueues what is due, whose job knows it"() {
    const due = await until("the job", async () => {
      const [row] = await stack.sql`
        select result, due_at from jobs where schedule = 'due' and status = 'succeeded'`;
      return row;
    });
    assert.partialDeepStrictEqual(due.result, { schedule: "due", dueAt: due.due_at.toISOString() });
    const names = (await stack.sql`select name from schedules`).map(({ name }) => name);
    assert.deepEqual(names, ["app:echo", "due"]);
  },

  async "leaves a payload that does not fit, and a kind that nobody knows, dead at once"() {
    const [misfit, unknown] = [await enqueue("append", { file: 3 }), await enqueue("sned_email", {})];
    const { status, attempts, lastError } = await jobOnce(misfit);
    assert.deepEqual([status, attempts], ["dead", 1]);
    assert.match(lastError ?? "", /^invalid_payload: file: .*expected string/);
    assert.equal((await jobOnce(unknown)).lastError, "unknown_kind: sned_email");
  },

  async "runs a job again after a failure, and records each"() {
    const id = await enqueue("fail_first", { times: 1 });
    assert.deepEqual((await jobOnce(id)).attempts, 2);
    const failures = await stack.sql`select attempt, error from job_failures where job_id = ${id}`;
    assert.deepEqual(failures.map((row) => ({ ...row })), [
      { attempt: 1, error: "RetryAfterError: attempt 1 fails" },
    ]);
  },

  async "waits for the kind's backoff, or for as long as the handler says"() {
    const failed = (id: string) => jobOnce(id, ({ lastError }) => lastError !== null);
    const ids = [
      await enqueue("fail", { how: "error", message: "no such luck" }),
      await enqueue("fail", { how: "retry_after", message: "too many" }),
    ];
    for (const id of ids) assert.equal((await failed(id)).status, "pending");
    const waits = await stack.sql`
      select extract(epoch from j.available_at - f.failed_at)::float8 as seconds
      from jobs j join job_failures f on f.job_id = j.id where j.id = any(${ids}) order by j.id`;
    const [backoff, asked] = waits.map(({ seconds }) => seconds);
    assert(backoff > 47 && backoff < 61, `30 s × 2, less up to a fifth: ${backoff}`);
    assert(asked > 119 && asked < 121, `as asked for: ${asked}`);
  },

  async "leaves a job dead at a PermanentError, and after its last attempt"() {
    const permanent = await jobOnce(await enqueue("fail", { how: "permanent", message: "no such user" }));
    assert.deepEqual([permanent.status, permanent.lastError], ["dead", "PermanentError: no such user"]);
    const last = await jobOnce(await enqueue("fail", { how: "error", message: "no" }, { max_attempts: 1 }));
    assert.deepEqual([last.status, last.attempts, last.lastError], ["dead", 1, "Error: no"]);
  },

  async "ends an attempt that takes too long"() {
    await stack.sql`insert into job_kinds (kind, timeout_ms, max_attempts) values ('hang', 100, 1)
      on conflict (kind) do update set timeout_ms = 100, max_attempts = 1`;
    const file = newFile();
    const id = await enqueue("hang", { file });
    assert.match((await jobOnce(id)).lastError ?? "", /^handler_timeout: .*100 ms/);
    await untilLines(file, 1);
  },

  async "runs each step of a job once, and the one that failed again"() {
    const file = newFile();
    const id = await enqueue("keep", { file, what: "a step that fails" });
    assert.equal((await jobOnce(id)).attempts, 3);
    assert.deepEqual(await linesOf(file), ["first", "second", "second", "second"]);
  },

  async "keeps what is checkpointed for the next attempt, whatever a step gave, and ends a job whose step cannot be stored"() {
    const [checkpoints, values, large] = [
      await enqueue("keep", { file: newFile(), what: "checkpoints" }),
      await enqueue("keep", { file: newFile(), what: "all sorts of values" }),
      await enqueue("keep", { file: newFile(), what: "five megabytes" }),
    ];
    assert.deepEqual((await jobOnce(checkpoints)).result, { page: 3, of: 3 });
    const { result } = await jobOnce(values);
    assert(typeof result === "object" && result !== null && "first" in result && "second" in result);
    assert.deepEqual(result.first, result.second);
    assert.match((await jobOnce(large)).lastError ?? "", /^PermanentError: the step cannot be stored: /);
  },

  async "lets a job snooze, which counts no attempt, until it is rescheduled"() {
    const id = await enqueue("keep", { file: newFile(), what: "a snooze" });
    await until("the snooze", async () => {
      const [row] = await stack.sql`
        select from jobs where id = ${id} and status = 'pending' and attempts = 0 and progress is not null
          and available_at > clock_timestamp() + interval '90 seconds'`;
      return row;
    });
    await stack.sql`select reschedule_jobs(array[${id}::uuid], clock_timestamp())`;
    assert.equal((await jobOnce(id)).result, "attempt 1");
  },

  async "stores a result that jsonb cannot hold as well as it can, or says that it cannot"() {
    const [nul, bigint] = [
      await enqueue("poisonous_result", { what: "nul" }),
      await enqueue("poisonous_result", { what: "bigint" }),
    ];
    assert.deepEqual((await jobOnce(nul)).result, { "key\ufffd": "a\ufffdb", kept: "\\u0000 in text" });
    const { status, lastError } = await jobOnce(bigint);
    assert.equal(status, "dead");
    assert.match(lastError ?? "", /^the result cannot be stored: /);
  },

  async "tells a running job's handler that it is cancelled, and stores nothing of it"() {
    const file = newFile();
    const id = await enqueue("wait_for_signal", { file });
    await untilLines(file, 1);
    await stack.sql`select cancel_jobs(array[${id}::uuid])`;
    await untilLines(file, 2);
    assert.deepEqual(await linesOf(file), [id, `${id} aborted`]);
    const { status, result } = await job(id);
    assert.deepEqual([status, result], ["cancelled", null]);
  },

  async "starts jobs of a kind in the order in which they were enqueued, higher priorities first"() {
    const file = newFile();
    await stack.sql`insert into job_kinds (kind, paused) values ('append', true)
      on conflict (kind) do update set paused = true`;
    const ids = await enqueueMany(20, "append", { file });
    const first = await enqueue("append", { file }, { priority: 1 });
    await stack.sql`update job_kinds set paused = false where kind = 'append'`;
    await untilLines(file, 21);
    const lines = await linesOf(file);
    assert.deepEqual(lines.filter((id) => id !== first), ids);
    // A claim of ten may be the one in ten that starts from the lowest priority.
    assert(lines.indexOf(first) <= 10, `${lines.indexOf(first)}`);
  },

  async "runs one job of a concurrency key at a time, beside others"() {
    const keys = ["one", "two"];
    const ids = await Promise.all(
      keys.map((key) => enqueueMany(4, "append", { file: newFile(), ms: 20 }, { concurrency_key: key })),
    );
    for (const list of ids) {
      const spans = [];
      for (const id of list) {
        const { result } = await jobOnce(id);
        assert(typeof result === "object" && result !== null && "from" in result && "to" in result);
        spans.push({ from: Number(result.from), to: Number(result.to) });
      }
      for (const [n, { from }] of spans.entries()) assert(n === 0 || from >= (spans[n - 1]?.to ?? Infinity));
    }
  },

  async "gives each of 100 jobs to one of two workers, once"(run) {
    await using _second = await run.start();
    const file = newFile();
    const ids = await enqueueMany(100, "append", { file });
    for (const id of ids) assert.equal((await jobOnce(id)).attempts, 1);
    assert.deepEqual((await linesOf(file)).toSorted(), ids.toSorted());
  },

  async "runs the job of a worker that was killed again, and refuses what the killed one would say of it"(
    run,
  ) {
    const file = newFile();
    const id = await enqueue("wait_for_gate", { file });
    await untilLines(file, 1);
    const { token } = await job(id);
    await run.worker.end("SIGKILL");
    await stack.sql`update jobs set lease_expires_at = clock_timestamp() where id = ${id}`;
    run.worker = await run.start();
    await untilLines(file, 2);
    const [stale] = await stack.sql`select complete_job(${id}, ${token}, '"stale"') as held`;
    assert.equal(stale?.held, false);
    await Deno.writeTextFile(`${file}.gate`, "");
    const { status, attempts, result } = await jobOnce(id);
    assert.deepEqual([status, attempts, result], ["succeeded", 2, null]);
    const [failure] = await stack.sql`select error from job_failures where job_id = ${id}`;
    assert.match(failure?.error, /^lease expired: worker worker-/);
    const reported = (line: string) => line.includes('"attempt_failed"') && line.includes(id);
    await until("the report", () => run.worker.lines.some(reported));
  },

  async "answers a call of the database as its API does, and keeps an error's code, detail and hint"() {
    const { sql } = stack;
    const [held] = await sql`
      insert into jobs (kind, status, attempts, lease_token, locked_by, locked_at, lease_expires_at)
      values ('counted', 'running', 1, 7, 'another', clock_timestamp(), clock_timestamp() + interval '1 hour') returning id`;
    const id = held?.id;
    const text = (n: number) => [{ id, lease_token: 7, error: `error ${n}` }];
    const calls: [name: string, args: Payload, answer: Payload][] = [
      ["extend_jobs", { leases: text(0), leaseSeconds: 3600 }, { answer: [{ id }] }],
      ["extend_jobs", { leases: [] }, { answer: [] }],
      ["complete_jobs", { completions: [] }, { answer: [] }],
      ["complete_job", { id, leaseToken: 6, result: ["a", null] }, { answer: false }],
      ["rescue_expired_jobs", {}, { answer: 0 }],
      ["job_stats", { kinds: ["nothing"] }, {
        answer: [{
          kind: "nothing",
          ready: "0",
          delayed: "0",
          retrying: "0",
          running: "0",
          dead: "0",
          oldest_ready_age: null,
          succeeded_last_hour: "0",
          failed_last_hour: "0",
          median_run_time: null,
          p95_run_time: null,
          paused: false,
          limited: false,
        }],
      }],
      ["next_cron_run", { cron: "0 0 29 2 *", after: "2026-01-01" }, {
        answer: "2028-02-29T00:00:00+00:00",
      }],
      ["ensure_schedules", { definitions: [], prefix: "no such" }, {
        answer: { scheduled: [], removed: [] },
      }],
      ["list_schedules", { prefix: "no such" }, { answer: [] }],
      ["resume_schedule", { name: "no such" }, { answer: null }],
      ["enqueue_job", { kind: "echo", priority: 1000 }, { code: "22023" }],
      ["enqueue_job", { kind: "echo", delay: "soon" }, { code: "22007" }],
      ["retry_jobs", { ids: null, kind: null }, {
        code: "22023",
        detail: "retry_jobs: what is given is null",
        hint:
          "Give ids, which may be {}, or a kind; call it without arguments for the dead jobs of all kinds.",
      }],
    ];
    const given = await Promise.all(calls.map(([name, args]) => enqueue("call", { name, args })));
    for (const [n, [name, , answer]] of calls.entries()) {
      assert.partialDeepStrictEqual((await jobOnce(given[n] ?? "")).result, answer, name);
    }
    const ask = async (name: string, args: Payload): Promise<Payload> =>
      Object(await jobOnce(await enqueue("call", { name, args })).then(({ result }) => result));
    const { answer } = await ask("fail_jobs", { failures: [{ ...text(1)[0], permanent: true }] });
    assert.deepEqual(answer, [{ id, status: "dead", available_at: null }]);
    assert.deepEqual((await ask("retry_jobs", { ids: [id] })).answer, [id]);
    const later = await enqueue("echo", {}, { delay: "1 hour" });
    assert.deepEqual((await ask("cancel_jobs", { ids: [later] })).answer, [later]);
    assert.match(String((await ask("no_such_function", {})).code), /^(PGRST202|42883)$/);
    assert.match(String((await ask("purge_jobs", { noSuch: 1 })).code), /^(PGRST202|42883)$/);
  },
};

async function keep(transport: TransportName, t: Deno.TestContext): Promise<void> {
  const start = () => startWorker(stack, databaseEnv(stack, transport), ["--stop-seconds", "1"]);
  await stack.sql`delete from jobs where schedule is not null`;
  await stack.sql`delete from private.app_schedules`;
  await stack.sql`delete from schedules`;
  await stack.sql`
    select schedule_job('due', '@daily', 'describe', '{"amount": "1"}', next_run => clock_timestamp())`;
  const run: Run = { start, worker: await start() };
  try {
    for (const [promise, kept] of Object.entries(promises)) await t.step(promise, () => kept(run));
    assert.equal(await run.worker.end(), 0, run.worker.lines.join("\n"));
  } finally {
    await run.worker[Symbol.asyncDispose]();
  }
}

for (const transport of transports) {
  Deno.test(`a worker process over ${transport} keeps the queue's promises`, (t) => keep(transport, t));
}
