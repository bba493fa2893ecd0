import assert from "node:assert/strict";
import { join } from "node:path";
import {
  changeConstants,
  cronSecret,
  insertJobs,
  linesOf,
  startTestStack,
  states,
  type TestStack,
  until,
  untilLines,
} from "../support.ts";

/** The drain function: all that is due, for whatever scheduler calls it. */

let stack: TestStack;
/** Where the hooks of tests/app/drain.ts write what they are told. */
let hooks: string;

Deno.test.beforeAll(async () => {
  const env: Record<string, string> = {};
  stack = await startTestStack({
    dispatch: false,
    env,
    async prepare(appDir) {
      hooks = env.TEST_DRAIN_HOOKS = join(appDir, "hooks");
      await Deno.writeTextFile(`${hooks}.how`, "");
      await changeConstants(appDir, "_schedules/drain.ts", { "HOOK_MS = 5_000": "HOOK_MS = 300" });
    },
  });
  await stack.sql`select cron.unschedule('nightshift_tick')`;
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

const drain = (method: string, authorization = `Bearer ${cronSecret}`, query = "") =>
  fetch(`${stack.apiUrl}/functions/v1/drain${query}`, { method, headers: { Authorization: authorization } });

interface Report {
  schedules: number;
  queues: Record<string, { succeeded: number; failed: number; dead: number }>;
  budgetExhausted: boolean;
  errors: number;
}

async function answerOf(body?: Record<string, unknown>): Promise<Report> {
  const response = await stack.call("drain", body);
  assert.equal(response.status, 200);
  return await response.json();
}

const succeeded = (count: number) => ({ succeeded: count, failed: 0, dead: 0 });

const nothingDone = { schedules: 0, queues: {}, budgetExhausted: false, errors: 0 };

Deno.test("it runs all that is ready and counts what became of it, by kind", async () => {
  const { sql } = stack;
  await sql`insert into jobs (kind, payload) select 'echo', '{"n": 1}' from generate_series(1, 30)`;
  await sql`
    insert into jobs (kind, payload, max_attempts)
    values ('fail', '{"how": "error", "message": "x"}', 5),
           ('fail', '{"how": "error", "message": "x"}', 1),
           ('fail', '{"how": "permanent", "message": "x"}', 5),
           ('append', '{"file": 1}', 5),
           ('constructor', '{}', 5)`;
  await sql`select enqueue_job('echo', delay => '1 hour')`;
  const response = await drain("POST");
  assert.equal(response.status, 200);
  assert.deepEqual(await response.json(), {
    schedules: 0,
    queues: {
      echo: { succeeded: 30, failed: 0, dead: 0 },
      fail: { succeeded: 0, failed: 1, dead: 2 },
      append: { succeeded: 0, failed: 0, dead: 1 },
      constructor: { succeeded: 0, failed: 0, dead: 1 },
    },
    budgetExhausted: false,
    errors: 0,
  });
  assert.deepEqual(await (await drain("POST")).json(), nothingDone);
});

Deno.test("GET does the same, for schedulers that know nothing else", async () => {
  await stack.sql`select enqueue_job('echo', '{"n": 1}')`;
  const response = await drain("GET");
  assert.equal(response.status, 200);
  assert.deepEqual(await response.json(), {
    ...nothingDone,
    queues: { echo: { succeeded: 1, failed: 0, dead: 0 } },
  });
});

Deno.test("it rescues what a lost worker had claimed, and runs it in the same call", async () => {
  const { sql } = stack;
  const [job] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
  await sql`select from claim_jobs('gone')`;
  assert.deepEqual(await (await drain("POST")).json(), nothingDone);
  await sql`update jobs set lease_expires_at = clock_timestamp() where id = ${job?.id}`;
  assert.deepEqual((await (await drain("POST")).json()).queues, {
    echo: { succeeded: 1, failed: 0, dead: 0 },
  });
  const [row] = await sql`select status, attempts from jobs where id = ${job?.id}`;
  assert.deepEqual({ ...row }, { status: "succeeded", attempts: 2 });
});

Deno.test("a failed job whose dedupe key a newer one holds counts as failed, and job-worker calls it cancelled", async () => {
  const { sql } = stack;
  await using server = Deno.serve({ port: 0, onListen: () => {} }, async () => {
    await sql`select enqueue_job('ask', '{}', delay => '1 hour', dedupe_key => 'k', dedupe => 'waiting')`;
    return Response.redirect("http://127.0.0.1:1/"); // where nobody answers, so that the handler throws
  });
  const run = async (work: () => Promise<Response>) => {
    await sql`delete from jobs where true`;
    const payload = { url: `http://127.0.0.1:${server.addr.port}` };
    const [job] = await sql`select enqueue_job('ask', ${
      sql.json(payload)
    }, dedupe_key => 'k', dedupe => 'waiting') as id`;
    const answer = await (await work()).json();
    const [row] = await sql`select status, payload, last_error from jobs where id = ${job?.id}`;
    assert.deepEqual([row?.status, row?.payload], ["cancelled", payload]);
    assert.match(row?.last_error, /\nsuperseded: another job holds its dedupe key$/);
    return { id: job?.id, answer };
  };
  const drained = await run(() => drain("POST"));
  assert.deepEqual(drained.answer, { ...nothingDone, queues: { ask: { succeeded: 0, failed: 1, dead: 0 } } });
  const { id, answer } = await run(() => stack.call("job-worker", { wait: true }));
  assert.deepEqual(answer, { processed: 1, results: [{ id, kind: "ask", status: "cancelled" }] });
});

Deno.test("after its budget it claims nothing more, finishes what it claimed, and says that jobs are left, if so; the next call does them", async () => {
  const file = join(stack.appDir, "long");
  const ids = await insertJobs(stack, "append", { file, ms: 400 }, 15);
  const first = await answerOf({ budgetMs: 200 });
  assert.deepEqual(first, { ...nothingDone, queues: { append: succeeded(10) }, budgetExhausted: true });
  assert.deepEqual(await states(stack, ids), [
    ...Array(10).fill("succeeded 1"),
    ...Array(5).fill("pending 0"),
  ]);
  const second = await answerOf({ budgetMs: 200 });
  assert.deepEqual(
    second,
    { ...nothingDone, queues: { append: succeeded(5) } },
    "its budget was spent, but nothing is left",
  );
});

Deno.test("a budget of a millisecond rescues, but starts no job; one that is none is refused, in query and body", async () => {
  const { sql } = stack;
  const ids = await insertJobs(stack, "echo", {}, 2);
  await sql`select from claim_jobs('gone', 1)`;
  await sql`update jobs set lease_expires_at = clock_timestamp() where status = 'running'`;
  assert.deepEqual(await answerOf({ budgetMs: 1 }), { ...nothingDone, budgetExhausted: true });
  assert.deepEqual(await states(stack, ids), ["pending 1", "pending 0"]);
  for (const budgetMs of [0, -1, 70_001, 1.5, "50", null, {}]) {
    const response = await stack.call("drain", { budgetMs });
    assert.equal(response.status, 400);
    assert.match((await response.json()).detail, /^budgetMs: /);
  }
  for (const budgetMs of ["", "soon", "0", "70001", "1.5"]) {
    assert.equal((await drain("GET", undefined, `?budgetMs=${budgetMs}`)).status, 400, budgetMs);
  }
  const response = await drain("GET", undefined, "?budgetMs=1");
  assert.equal((await response.json()).budgetExhausted, true);
  assert.deepEqual((await answerOf({ budgetMs: 70_000 })).queues, { echo: succeeded(2) });
});

Deno.test("a job whose timeout no longer fits into the isolate's life is left, and that is said", async () => {
  await stack.sql`update job_kinds set timeout_ms = 70000 where kind = 'pause'`;
  await insertJobs(stack, "pause", { ms: 1_020 }, 11);
  const left = { ...nothingDone, queues: { pause: succeeded(10) }, budgetExhausted: true };
  assert.deepEqual(await answerOf(), left);
  await stack.sql`update job_kinds set timeout_ms = 70001 where kind = 'pause'`;
  await answerOf({ budgetMs: 1 });
  await until(
    "the drain to hear of it",
    () => stack.lines.some((line) => line.includes('"kind_not_claimed"')),
  );
  assert.deepEqual(await answerOf({ budgetMs: 1 }), nothingDone, "what never fits is not for a drain to do");
  await stack.sql`update job_kinds set timeout_ms = null where kind = 'pause'`;
  await answerOf({ budgetMs: 1 });
  await stack.sql`delete from jobs where kind = 'pause'`;
});

Deno.test("there is no cap on its jobs, and kinds that are not asked for wait", async () => {
  await insertJobs(stack, "echo", { n: 1 }, 510);
  await insertJobs(stack, "describe", { amount: 1 });
  assert.deepEqual(await answerOf({ kinds: ["echo"] }), { ...nothingDone, queues: { echo: succeeded(510) } });
  assert.deepEqual((await answerOf({ else: "does not count" })).queues, { describe: succeeded(1) });
});

Deno.test("a schedule that is due is enqueued and run in one call, and its job knows it", async () => {
  const { sql } = stack;
  await sql`
    select schedule_job('due', '@hourly', 'describe', '{"amount": "1"}', next_run => clock_timestamp() - interval '1 hour')`;
  assert.deepEqual(await answerOf(), { ...nothingDone, schedules: 1, queues: { describe: succeeded(1) } });
  const [job] = await sql`select result, due_at from jobs where schedule = 'due'`;
  assert.equal(job?.result.schedule, "due");
  assert.equal(job?.result.dueAt, job?.due_at.toISOString());
  await sql`select unschedule_job('due')`;
});

Deno.test("schedules that come due while others are enqueued do not keep it from its work", async () => {
  const { sql } = stack;
  await sql.unsafe(`
    select schedule_job('again', '@hourly', 'echo', next_run => clock_timestamp());
    create function public.again() returns trigger language plpgsql as $$
    begin
      update public.schedules set next_run = clock_timestamp() where name = 'again';
      return null;
    end $$;
    create trigger again after insert on jobs for each row execute function public.again()`).simple();
  try {
    assert.deepEqual(await answerOf({ budgetMs: 1_000 }), {
      ...nothingDone,
      schedules: 1,
      queues: { echo: succeeded(1) },
    });
  } finally {
    await sql`drop trigger again on jobs`;
    await sql`select unschedule_job('again')`;
    await sql`delete from jobs where status = 'pending'`;
  }
});

Deno.test("a schedule that fails is an error of the drain, and a line in the log", async () => {
  const { sql } = stack;
  await told();
  await sql`select schedule_job('gone', '@hourly', 'echo', next_run => clock_timestamp())`;
  await sql`update schedules set time_zone = 'Atlantis/Capital' where name = 'gone'`;
  const answer = await answerOf();
  assert.deepEqual(answer, { ...nothingDone, schedules: 1, queues: { echo: succeeded(1) }, errors: 1 });
  const [, [hook, why, job]] = await told();
  assert.deepEqual([hook, job], ["onError", null]);
  assert.match(why, /^schedule_failed: paused, since there is no next run: .*Atlantis/);
  assert(stack.lines.some((line) => line.includes('"schedule_failed","schedule":"gone"')));
  await sql`select unschedule_job('gone')`;
});

Deno.test("two drains at once and a job-worker beside them run each job, and enqueue each due run, once, and their answers add up", async () => {
  const { sql } = stack;
  const file = join(stack.appDir, "beside");
  const ids = await insertJobs(stack, "append", { file }, 300);
  await sql`
    select schedule_job('many ' || n, '@daily', 'append', ${
    sql.json({ file })
  }, next_run => clock_timestamp())
    from generate_series(1, 100) n`;
  const [one, two, worker] = await Promise.all([
    answerOf(),
    answerOf(),
    stack.call("job-worker", { wait: true }).then((response) => response.json()),
  ]);
  assert.deepEqual([one.errors, two.errors], [0, 0]);
  assert.equal(one.schedules + two.schedules, 100);
  const rest = await answerOf();
  const done = [one, two, rest].map(({ queues }) => queues.append?.succeeded ?? 0);
  assert.equal(done.reduce((sum, count) => sum + count) + worker.processed, 400);
  const lines = await linesOf(file);
  assert.equal(lines.length, 400);
  assert.equal(new Set(lines).size, 400);
  assert.deepEqual(ids.filter((id) => !lines.includes(id)), []);
  await sql`select unschedule_jobs('many ')`;
});

/** What the hooks of tests/app/drain.ts have been told since the last call, while they behave as `how` says. */
const told = async () => {
  const lines = (await linesOf(hooks)).map((line) => JSON.parse(line));
  await Deno.remove(hooks).catch(() => {});
  return lines;
};
const behave = (how: string) => Deno.writeTextFile(`${hooks}.how`, how);

Deno.test("the monitor is told when a drain starts and how it ends, and onError of each failed attempt, with its job", async () => {
  await told();
  const [failed] = await insertJobs(stack, "fail", { how: "error", message: "no" });
  await insertJobs(stack, "echo", {});
  const answer = await answerOf();
  assert.deepEqual(answer.errors, 0, "a failed attempt is in queues");
  const [started, error, finished, ...rest] = await told();
  assert.match(started[1], /^[0-9a-f]{32}$/);
  assert.deepEqual(
    [started[0], error, finished, rest],
    [
      "started",
      ["onError", "no", { id: failed, kind: "fail", attempt: 1 }],
      ["finished", started[1], answer],
      [],
    ],
  );
  await stack.sql`delete from jobs where id = ${failed ?? null}`;
});

Deno.test("a job that is lost in the middle counts as an error of that drain, and not of another in the same isolate", async () => {
  await told();
  const file = join(stack.appDir, "lost");
  const [lost = ""] = await insertJobs(stack, "wait_for_gate", { file });
  const losing = answerOf({ kinds: ["wait_for_gate"] });
  await untilLines(file, 1);
  await stack.sql`select cancel_jobs(array[${lost}::uuid])`;
  const [failed] = await insertJobs(stack, "fail", { how: "permanent", message: "never" });
  const other = await answerOf({ kinds: ["fail"] });
  await Deno.writeTextFile(`${file}.gate`, "");
  const answer = await losing;
  assert.deepEqual([answer.errors, other.errors], [1, 0]);
  assert.deepEqual(answer.queues, { wait_for_gate: succeeded(0) });
  assert.deepEqual((await told()).filter(([hook]) => hook === "onError"), [
    ["onError", "never", { id: failed, kind: "fail", attempt: 1 }],
    ["onError", "lease_lost", { id: lost, kind: "wait_for_gate", attempt: 1 }],
  ]);
});

for (const how of ["throw", "reject", "hang"]) {
  Deno.test(`hooks that ${how} change nothing but the log, and are waited for no longer than they may`, async () => {
    await behave(how);
    stack.lines.length = 0;
    await insertJobs(stack, "fail", { how: "permanent", message: "never" }, 2);
    const startedAt = performance.now();
    const answer = await answerOf();
    const ms = performance.now() - startedAt;
    assert.deepEqual(answer, { ...nothingDone, queues: { fail: { succeeded: 0, failed: 0, dead: 2 } } });
    assert(ms < 1_500, `${ms} ms`);
    const ends = {
      throw: /^Error: (\w+) throws$/,
      reject: /^Error: (\w+) rejects$/,
      hang: /not over after 0.3 s$/,
    };
    const lines = await until("four lines", () => {
      const lines = stack.lines.filter((line) => line.includes('"drain_hook_failed"'));
      return lines.length >= 4 && lines.map((line) => JSON.parse(line.replace("[drain] ", "")));
    });
    assert.deepEqual(lines.map(({ hook }) => hook).toSorted(), [
      "monitor.finished",
      "monitor.started",
      "onError",
      "onError",
    ]);
    for (const { error } of lines) assert.match(error, ends[how as keyof typeof ends]);
    await behave("");
  });
}

Deno.test("one step that fails is counted and stops no other; when nothing can be done it answers 500, and the monitor hears of it", async () => {
  const { sql } = stack;
  await told();
  const functions = [
    "enqueue_due_schedules_as_json",
    "rescue_expired_jobs",
    "purge_jobs",
    "purge_expired_keys",
  ];
  await insertJobs(stack, "echo", {});
  try {
    await sql.unsafe("revoke execute on function enqueue_due_schedules_as_json from service_role");
    assert.deepEqual(await answerOf(), { ...nothingDone, queues: { echo: succeeded(1) }, errors: 1 });
    const [, [, why, ...noJob]] = await told();
    assert.match(why, /permission denied for function enqueue_due_schedules_as_json/);
    assert.deepEqual(noJob, [null]);

    await sql.unsafe(`revoke execute on function ${functions} from service_role`);
    const response = await stack.call("drain", { budgetMs: 1 });
    assert.equal(response.status, 500);
    assert.equal((await response.json()).title, "The drain failed");
    const lines = await told();
    assert.deepEqual(lines.map(([hook]) => hook), ["started", ...functions.map(() => "onError"), "failed"]);
    assert.match(lines.at(-1)[2], /permission denied for function rescue_expired_jobs/);
  } finally {
    await sql.unsafe(`grant execute on function ${functions} to service_role`);
  }
});

Deno.test("idempotency keys and leases whose time is over are deleted, and what keeps them stops nothing else", async () => {
  const { sql } = stack;
  await sql`select begin_idempotent_request('over', 'f'), acquire_lease('over'), acquire_lease('held')`;
  await sql`update idempotency_keys set expires_at = now() where key = 'over'`;
  await sql`update leases set expires_at = now() where key = 'over'`;
  const left = async () => {
    const rows = await sql`select key from idempotency_keys union all select key from leases order by key`;
    return rows.map(({ key }) => key);
  };
  try {
    await sql`revoke execute on function purge_expired_keys from service_role`;
    assert.deepEqual(await answerOf(), { ...nothingDone, errors: 1 });
    assert.deepEqual(await left(), ["held", "over", "over"]);
  } finally {
    await sql`grant execute on function purge_expired_keys to service_role`;
  }
  assert.deepEqual(await answerOf(), nothingDone);
  assert.deepEqual(await left(), ["held"]);
  await sql`delete from leases where key = 'held'`;
});

Deno.test("the app's schedules are brought in step at its first call, and again by a new process when they are others", async () => {
  const { sql } = stack;
  const [before] = await sql`select time_zone, overlap, payload from schedules where name = 'app:echo'`;
  assert.deepEqual({ ...before }, { time_zone: "Europe/Berlin", overlap: "skip", payload: { n: 29 } });
  const path = join(stack.appDir, "supabase/functions/_app/schedules.ts");
  const text = await Deno.readTextFile(path);
  await Deno.writeTextFile(
    path,
    text.replace("echo: {", "wrong: { cron: '61 * * * *', kind: 'echo', payload: {} }, $&"),
  );
  await stack.restart("SIGTERM", "drain");
  for (let i = 0; i < 2; i++) {
    assert.equal((await answerOf()).errors, 1, "refused as a whole, and tried again");
  }
  assert(stack.lines.some((line) => /"app_schedules".*minute: 61/.test(line)));
  await Deno.writeTextFile(path, text.replace("echo: {", "other: {"));
  await stack.restart("SIGTERM", "drain");
  assert.deepEqual(await answerOf(), nothingDone);
  assert.deepEqual((await sql`select name from schedules`).map(({ name }) => name), ["app:other"]);
  await sql`select unschedule_job('app:other')`;
  assert.deepEqual(await answerOf(), nothingDone);
  assert.equal((await sql`select from schedules`).count, 0, "what an operator removes stays away");
});

Deno.test("whoever does not send CRON_SECRET is answered 401, another method 405", async () => {
  await told();
  const [job] = await stack.sql`select enqueue_job('echo', '{"n": 1}') as id`;
  for (
    const [method, authorization, status] of [["GET", "Bearer wrong", 401], ["POST", "", 401], [
      "PUT",
      undefined,
      405,
    ]] as const
  ) {
    const response = await drain(method, authorization);
    assert.equal(response.status, status);
    assert.equal(response.headers.get("Content-Type"), "application/problem+json");
    assert.equal((await response.json()).status, status);
    assert.equal(response.headers.get("Allow"), status === 405 ? "GET, POST" : null);
  }
  const [row] = await stack.sql`select attempts from jobs where id = ${job?.id}`;
  assert.equal(row?.attempts, 0);
  assert.deepEqual(await told(), [], "no hook hears of it");
});

Deno.test("a drain whose isolate is about to end says that there may be more", async () => {
  const { sql } = stack;
  await sql`delete from jobs`;
  await sql`select enqueue_job('unload', '{"reason": "cpu"}')`;
  const answer = await (await drain("POST")).json();
  assert.deepEqual(answer.queues, { unload: { succeeded: 1, failed: 0, dead: 0 } });
  assert.equal(answer.budgetExhausted, true);
  await stack.restart("SIGKILL", "drain");
});
