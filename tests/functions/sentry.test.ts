import assert from "node:assert/strict";
import { join } from "node:path";
import { changeConstants, startFunction, startTestStack, type TestStack, until } from "../support.ts";
import { type SentryEvent, type SentryServer, startSentry } from "./sentry_server.ts";

/** Errors reach Sentry, and no job waits for that. */

let sentry: SentryServer;
let stack: TestStack;
const env: Record<string, string> = {};

Deno.test.beforeAll(async () => {
  sentry = startSentry();
  Object.assign(env, { SENTRY_DSN: sentry.dsn, SENTRY_ENVIRONMENT: "testing", SENTRY_RELEASE: "app@1.2.3" });
  stack = await startTestStack({
    dispatch: false,
    env,
    // The same with less patience, so that nobody has to wait for its end.
    prepare: (appDir) =>
      changeConstants(appDir, "_shared/sentry.ts", {
        "SEND_MS = 3_000": "SEND_MS = 1_000",
        "MAX_WAITING = 1_000": "MAX_WAITING = 300", // more than any test sends, but the one that sends too much
      }),
  });
});
Deno.test.afterAll(async () => {
  await stack[Symbol.asyncDispose]();
  slow.resolve();
  await sentry[Symbol.asyncDispose]();
});

interface Result {
  id: string;
  status: string;
}

async function enqueue(kind: string, payload: Record<string, string>, count = 1): Promise<string[]> {
  const rows = await stack.sql`
    insert into jobs (kind, payload) select ${kind}, ${
    stack.sql.json(payload)
  } from generate_series(1, ${count})
    returning id`;
  return rows.map(({ id }) => id);
}

async function run(): Promise<Result[]> {
  const response = await stack.call("job-worker", { wait: true });
  assert.equal(response.status, 200);
  const { results }: { results: Result[] } = await response.json();
  return results;
}

const failPermanently = (message: string, count = 1) => enqueue("fail", { how: "permanent", message }, count);

/** Waits for as many events of a name, and gives them back with what else has come, which is forgotten. */
async function arrived(event: string, count = 1): Promise<SentryEvent[]> {
  await until(
    `${count} events ${event}`,
    () => sentry.events.filter(({ tags }) => tags.event === event).length >= count,
  );
  return sentry.events.splice(0);
}

async function only(event: string): Promise<SentryEvent> {
  const events = await arrived(event);
  assert.equal(events.length, 1);
  assert(events[0]);
  return events[0];
}

/** What the worker has logged since the last call, as JSON; lines that are none as { text }. */
function logged(): Record<string, unknown>[] {
  return stack.lines.splice(0).filter((line) => line.startsWith("[job-worker] ")).map((line) => {
    const text = line.replace("[job-worker] ", "");
    return text.startsWith("{") ? JSON.parse(text) : { text };
  });
}

Deno.test("a failed attempt is reported with job id, kind and attempt as tags, with stack and causes, without the payload", async () => {
  const { sql } = stack;
  await sql`
    insert into jobs (kind, payload, context)
    values ('tell', '{"reversed": "yhw", "where": "cause", "more": "planted"}', '"planted too"')`;
  const [job] = await run();
  const event = await only("attempt_failed");
  assert.deepEqual(event.tags, { event: "attempt_failed", job_id: job?.id, kind: "tell", attempt: "1" });
  assert.deepEqual([event.level, event.environment, event.release], ["error", "testing", "app@1.2.3"]);
  const [cause, outer] = event.exception?.values ?? [];
  assert.deepEqual([cause?.type, cause?.value], ["TypeError", "is the cause"]);
  assert.deepEqual([outer?.type, outer?.value], ["Error", "has something to tell"]);
  const frames = outer?.stacktrace?.frames ?? [];
  const inner = frames.at(-1);
  assert.match(inner?.filename ?? "", /^\/.*\/functions\/_app\/handlers\.ts$/);
  assert.match(inner?.function ?? "", /tell/);
  assert.equal(typeof inner?.lineno, "number");
  assert.equal(inner?.in_app, true);
  assert(frames.some(({ filename }) => filename?.endsWith("/_shared/attempt.ts")), "the callers come before");
  assert(!sentry.received.join().includes("planted"));

  await sql`update jobs set available_at = now() where id = ${job?.id ?? null}`;
  await run();
  assert.equal((await only("attempt_failed")).tags.attempt, "2");
  await sql`delete from jobs`;
});

Deno.test("what the engine says of an attempt is grouped by its sort and kind", async () => {
  await stack.sql`update job_kinds set timeout_ms = 50 where kind = 'hang'`;
  await enqueue("not_declared", {});
  await enqueue("hang", { file: join(stack.appDir, "hang") });
  await enqueue("poisonous_result", { what: "bigint" });
  await run();
  const events = await arrived("attempt_failed", 3);
  assert.deepEqual(events.map(({ fingerprint }) => fingerprint).toSorted(), [
    ["attempt_failed", "hang", "handler_timeout"],
    ["attempt_failed", "not_declared", "unknown_kind"],
    ["attempt_failed", "poisonous_result", "the result cannot be stored"],
  ]);
  assert(events.every(({ exception }) => exception === undefined));
  assert(events.some(({ message }) => message === "attempt_failed: unknown_kind: not_declared"));
  await stack.sql`delete from jobs`;
});

Deno.test("whatever a handler throws is reported", async () => {
  for (const where of ["text", "object", "stack", "nobody's promise"]) {
    await enqueue("tell", { reversed: "gnihtemos", where });
  }
  const results = await run();
  const events = await arrived("attempt_failed", 4);
  await until("the promise's rejection", () => {
    events.push(...sentry.events.splice(0));
    return events.some(({ tags }) => tags.event === "unhandled_rejection");
  });
  assert.equal(events.length, 5);
  assert.deepEqual(
    events.flatMap(({ tags }) => tags.job_id ?? []).toSorted(),
    results.map(({ id }) => id).toSorted(),
  );
  await stack.sql`delete from jobs`;
});

Deno.test("an error object that is thrown twice is reported twice", async () => {
  await enqueue("poisonous_error", { what: "the same" }, 2);
  await run();
  assert.equal((await arrived("attempt_failed", 2)).length, 2);
  await stack.sql`delete from jobs`;
});

Deno.test("errors of the worker itself are reported", async () => {
  await stack.sql`revoke execute on function claim_jobs from service_role`;
  const running = run();
  const [event] = await arrived("claim_failed");
  await stack.sql`grant execute on function claim_jobs to service_role`;
  await running;
  assert.equal(event?.exception?.values.at(-1)?.type, "JobError");
  assert.match(event?.exception?.values.at(-1)?.value ?? "", /permission denied for function claim_jobs/);
  assert.match(String(event?.extra.worker), /^edge-/);
});

Deno.test("a drain checks in when it starts and when it ends, as an error when something went wrong in it", async () => {
  const { sql } = stack;
  const drain = async () => {
    assert.equal((await stack.call("drain")).status, 200);
    return sentry.checkIns.splice(0);
  };
  const [started, ended, ...more] = await drain();
  const same = {
    monitor_slug: "drain",
    environment: "testing",
    release: "app@1.2.3",
    check_in_id: started?.check_in_id,
  };
  const schedule = { type: "interval", value: 1, unit: "minute" };
  assert.match(started?.check_in_id ?? "", /^[0-9a-f]{32}$/);
  assert.partialDeepStrictEqual(started, { ...same, status: "in_progress", monitor_config: { schedule } });
  assert.partialDeepStrictEqual(ended, { ...same, status: "ok" });
  assert(Number(ended?.duration) > 0 && Number(ended?.duration) < 10);
  assert.deepEqual(more, []);

  await sql`revoke execute on function purge_jobs from service_role`;
  assert.deepEqual((await drain()).map(({ status }) => status), ["in_progress", "error"]);
  await arrived("drain_step_failed");
  await sql`grant execute on function purge_jobs to service_role`;
  logged();
});

Deno.test("a burst of 200 failures arrives whole, equal ones each by itself", async () => {
  const ids = await failPermanently("all the same", 200);
  await run();
  const events = await arrived("attempt_failed", 200);
  assert.deepEqual(events.map(({ tags }) => tags.job_id).toSorted(), ids.toSorted());
  assert.equal(new Set(events.map(({ event_id }) => event_id)).size, 200);
  assert(!logged().some(({ event }) => event === "report_failed"));
});

const slow = Promise.withResolvers<void>();
for (
  const [what, setUp, reason] of [
    [
      "takes ten seconds to answer",
      (s) => s.respond = () => slow.promise.then(() => new Response()),
      /TimeoutError/,
    ],
    ["answers 500", (s) => s.respond = () => new Response("oops", { status: 500 }), /Sentry answered 500/],
    ["answers 403", (s) => s.respond = () => new Response(null, { status: 403 }), /Sentry answered 403/],
    ["redirects", (s) => s.respond = () => Response.redirect("http://127.0.0.1:2/"), /Sentry answered 302/],
    ["resets connections", (s) => s.connections = "reset", /error sending request/],
    ["answers nonsense", (s) => s.connections = "garbage", /error sending request/],
    ["is not there", (s) => s.connections = "refuse", /error sending request/],
  ] satisfies [string, (server: SentryServer) => void, RegExp][]
) {
  Deno.test(`a Sentry that ${what} holds up no job, and costs one line for many events`, async () => {
    logged();
    setUp(sentry);
    const ids = await failPermanently("nobody will know", 50);
    const startedAt = performance.now();
    const results = await run();
    const ms = performance.now() - startedAt;
    assert(ms < 2_000, `${ms} ms`);
    assert.deepEqual(
      results.map(({ id, status }) => [id, status]).toSorted(),
      ids.map((id) => [id, "dead"]).toSorted(),
    );
    const lines: Record<string, unknown>[] = [];
    const failed = () => lines.filter(({ event }) => event === "report_failed");
    await until("all to be given up", () => {
      lines.push(...logged());
      return failed().reduce((sum, { events }) => sum + Number(events), 0) === 50;
    });
    assert(failed().length < 25, JSON.stringify(failed()));
    for (const { error } of failed()) assert.match(String(error), reason);
    assert.equal(lines.length, 50 + failed().length);
    assert.deepEqual(sentry.events, []);

    // Afterwards all is well again.
    sentry.respond = undefined;
    sentry.connections = "serve";
    const [id] = await until("Sentry to be told again", async () => {
      const ids = await failPermanently("somebody will know");
      await run();
      return await until("an event", () => sentry.events.length > 0, 300).then(() => ids, () => null);
    });
    assert((await arrived("attempt_failed")).some(({ tags }) => tags.job_id === id));
    logged();
  });
}

for (
  const [status, headers] of [
    [429, { "Retry-After": "3" }],
    [429, { "X-Sentry-Rate-Limits": "60:transaction, 3:default;error:key" }],
  ] as const
) {
  Deno.test(`a Sentry that answers ${status} with ${JSON.stringify(headers)} is left alone for three seconds`, async () => {
    sentry.respond = () => new Response(null, { status, headers });
    const before = sentry.answered;
    await failPermanently("one too many");
    await run();
    await until("Sentry to be told", () => sentry.answered > before);
    const told = performance.now();
    logged();
    await failPermanently("while Sentry wants none", 50);
    await run();
    let unsent = 0;
    await until("the lines about what was not sent", () => {
      for (const { event, events } of logged()) if (event === "report_failed") unsent += Number(events);
      return unsent === 50;
    });
    assert.equal(sentry.answered, before + 1);

    sentry.respond = undefined;
    await until("the silence to be over", () => performance.now() > told + 3_000);
    await failPermanently("after the silence");
    await run();
    await arrived("attempt_failed");
  });
}

Deno.test("a limit on something else than errors changes nothing", async () => {
  sentry.respond = () =>
    Response.json({}, { headers: { "X-Sentry-Rate-Limits": "60:transaction;session:organization" } });
  for (let i = 0; i < 2; i++) {
    const before = sentry.answered;
    await failPermanently("one more");
    await run();
    await until("Sentry to be told", () => sentry.answered > before);
  }
  sentry.respond = undefined;
});

Deno.test("what does not fit into the queue is counted and said, in any runtime", async () => {
  const module = join(stack.appDir, "supabase/functions/_shared/log.ts");
  const { stderr } = await new Deno.Command(Deno.execPath(), {
    args: [
      "eval",
      "--config",
      join(stack.appDir, "supabase/functions/deno.json"),
      `import { log } from ${JSON.stringify(module)};
      for (let i = 1; i <= 400; i++) log("error", "from_afar", { i });`,
    ],
    env: { SENTRY_DSN: sentry.dsn, NO_COLOR: "1" },
  }).output();
  const lines = new TextDecoder().decode(stderr).trim().split("\n").map((line) => JSON.parse(line));
  assert.equal(lines.length, 401);
  const { events } = lines.find(({ event }) => event === "report_failed");
  assert.equal((await arrived("from_afar", 400 - events)).length, 400 - events);
  assert.equal(events, 99, "one is on its way when all others wait");
});

Deno.test("an isolate stays until its errors are with Sentry, but not for one that is slow", async () => {
  const gate = Promise.withResolvers<Response>();
  sentry.respond = () => gate.promise;
  const count = sentry.answered;
  await failPermanently("the last words");
  await run();
  await until("Sentry to be told", () => sentry.received.some((text) => text.includes("the last words")));
  const ending = stack.restart("SIGTERM");
  const ended = await Promise.race([
    ending,
    new Promise((resolve) => setTimeout(() => resolve("stays"), 200)),
  ]);
  assert.equal(ended, "stays");
  gate.resolve(new Response());
  await ending;
  assert.equal(sentry.answered, count + 1);

  sentry.respond = () => slow.promise.then(() => new Response());
  await failPermanently("nobody waits for these");
  await run();
  const startedAt = performance.now();
  await stack.restart("SIGTERM");
  assert(performance.now() - startedAt < 3_000);
  sentry.respond = undefined;
  logged();
});

Deno.test("a SENTRY_DSN that is none is one line, and no more", async () => {
  await using worker = await startFunction("job-worker", {
    SENTRY_DSN: "https://sentry.example/42",
    CRON_SECRET: "",
  });
  for (let i = 0; i < 3; i++) await (await worker.fetch("", { method: "POST" })).body?.cancel();
  await until("the lines", () => worker.lines.length >= 4);
  const events = worker.lines.map((line) => JSON.parse(line.replace("[job-worker] ", "")).event);
  assert.equal(events.filter((event) => event === "sentry_dsn_unusable").length, 1);
  assert.equal(events.filter((event) => event === "cron_secret_unusable").length, 3);
});

Deno.test("without SENTRY_DSN an error is one line, and what speaks to Sentry is not even loaded", async () => {
  const path = join(stack.appDir, "supabase/functions/_shared/sentry.ts");
  await Deno.writeTextFile(path, 'throw new Error("sentry.ts was loaded");');
  delete env.SENTRY_DSN;
  await stack.restart("SIGTERM");
  logged();
  const [id] = await failPermanently("only in the log");
  await run();
  const line = { level: "error", event: "attempt_failed", id, kind: "fail", attempt: 1 };
  assert.deepEqual(logged(), [{ ...line, error: "PermanentError: only in the log" }]);

  // With it, and one that cannot be loaded, the job ends all the same.
  env.SENTRY_DSN = sentry.dsn;
  await stack.restart("SIGTERM");
  logged();
  await failPermanently("in the log");
  const [result] = await run();
  assert.equal(result?.status, "dead");
  const lines = await until("the line about it", () => stack.lines.length >= 2 && logged());
  assert.deepEqual(lines.map(({ event }) => event), ["attempt_failed", "report_failed"]);
  assert.match(String(lines[1]?.error), /sentry\.ts was loaded/);
});
