import assert from "node:assert/strict";
import { cronSecret, startFunction, startTestStack, type TestStack, until } from "../support.ts";

/** job-worker over HTTP: who is let in, what is refused, and what it answers. What it does with jobs: work_jobs.test.ts. */

const oldSecret = "the-secret-before-that-is-being-rotated-out";
let stack: TestStack;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false, env: { CRON_SECRET: `${oldSecret}, ${cronSecret}` } });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

const post = (init: RequestInit) =>
  fetch(`${stack.apiUrl}/functions/v1/job-worker`, {
    method: "POST",
    ...init,
    headers: { Authorization: `Bearer ${cronSecret}`, ...init.headers },
  });

/** Checks an error answer's form (RFC 9457) and status; gives back its detail. */
async function problemIn(response: Response, status: number): Promise<string> {
  assert.equal(response.status, status);
  assert.equal(response.headers.get("Content-Type"), "application/problem+json");
  const { detail, ...rest }: Record<string, unknown> = await response.json();
  assert.equal(typeof rest.title, "string");
  assert.deepEqual(rest, { type: "about:blank", title: rest.title, status });
  return String(detail);
}

Deno.test("whoever does not send CRON_SECRET as the bearer is answered 401 and starts nothing", async () => {
  const [job] = await stack.sql`select enqueue_job('echo') as id`;
  for (
    const authorization of [
      undefined,
      "",
      "Bearer",
      "Bearer ",
      cronSecret,
      `Basic ${cronSecret}`,
      `Bearer ${"x".repeat(cronSecret.length)}`,
      `Bearer ${cronSecret.slice(0, -1)}`,
      `Bearer ${cronSecret}x`,
      `Bearer ${oldSecret},${cronSecret}`,
      `Bearer ${cronSecret} ${cronSecret}`,
      `Bearer ${stack.keys.serviceRoleKey}`,
    ]
  ) {
    const response = await fetch(`${stack.apiUrl}/functions/v1/job-worker`, {
      method: "POST",
      headers: authorization === undefined ? {} : { Authorization: authorization },
      body: '{"wait": true}',
    });
    assert.equal(response.headers.get("WWW-Authenticate"), "Bearer", authorization);
    await problemIn(response, 401);
  }
  const [row] = await stack.sql`select status, attempts from jobs where id = ${job?.id}`;
  assert.deepEqual({ ...row }, { status: "pending", attempts: 0 });
  await stack.sql`delete from jobs where id = ${job?.id}`;
});

Deno.test("while a secret is being rotated both open the door, whatever the case of the scheme", async () => {
  for (const authorization of [`Bearer ${oldSecret}`, `Bearer ${cronSecret}`, `bearer ${cronSecret}`]) {
    const response = await post({
      headers: { Authorization: authorization },
      body: '{"wait": true, "kinds": ["none"]}',
    });
    assert.equal(response.status, 200);
    await response.body?.cancel();
  }
});

for (
  const [what, secret] of [
    ["is empty", ""],
    ["is shorter than 32 characters", "a-short-secret"],
    ["holds one good and one short secret", `${cronSecret},a-short-secret`],
  ] as const
) {
  Deno.test(`a CRON_SECRET that ${what} lets nobody in and is reported in the log`, async () => {
    await using worker = await startFunction("job-worker", { CRON_SECRET: secret });
    const response = await worker.fetch("", {
      method: "POST",
      headers: { Authorization: `Bearer ${secret.split(",")[0]}` },
    });
    const detail = await problemIn(response, 500);
    assert(!detail.includes("CRON_SECRET"), "what is wrong is for the log only");
    await until("the log's line", () => worker.lines.length > 0);
    assert.equal(worker.lines.length, 1);
    assert.match(worker.lines[0] ?? "", /CRON_SECRET is unset or shorter than 32 characters/);
    assert(!worker.lines[0]?.includes("a-short-secret") && !worker.lines[0]?.includes(cronSecret));
  });
}

Deno.test("another method is answered 405, naming the one to use", async () => {
  for (const method of ["GET", "PUT", "DELETE", "PATCH"]) {
    const response = await post({ method });
    assert.equal(response.headers.get("Allow"), "POST");
    await problemIn(response, 405);
  }
});

Deno.test("a body that is not JSON, or not what the worker takes, is answered 400 naming the field", async () => {
  for (
    const [body, detail] of [
      ['{"kinds": ', /not JSON/],
      ["hello", /not JSON/],
      ["[]", /\(payload\)/],
      ["null", /\(payload\)/],
      ['{"kinds": []}', /kinds/],
      ['{"kinds": "echo"}', /kinds/],
      ['{"kinds": ["echo", 1]}', /kinds\.1/],
      ['{"maxJobs": 0}', /maxJobs/],
      ['{"maxJobs": 1001}', /maxJobs/],
      ['{"maxJobs": 1.5}', /maxJobs/],
      ['{"wait": "yes"}', /wait/],
      ['{"waits": true}', /waits/],
    ] as const
  ) {
    assert.match(await problemIn(await post({ body }), 400), detail, body);
  }
});

Deno.test("a body above 64 kB is answered 413, by its Content-Length or by count", async () => {
  const padded = (size: number) => '{"wait": true, "kinds": ["none"]}'.padEnd(size);
  assert.match(await problemIn(await post({ body: padded(65_537) }), 413), /65536/);
  for (const body of [padded(65_536), new Blob([padded(65_536)]).stream()]) {
    const response = await post({ body });
    assert.equal(response.status, 200);
    await response.body?.cancel();
  }

  // The answer comes before the body has, or has ended: what is too large is not read.
  await using worker = await startFunction("job-worker", { CRON_SECRET: cronSecret });
  for (
    const rest of [
      "Content-Length: 65537\r\n\r\n",
      `Transfer-Encoding: chunked\r\n\r\n10001\r\n${padded(65_537)}\r\n`,
    ]
  ) {
    using connection = await Deno.connect({ transport: "unix", path: worker.socket });
    const head = `POST /job-worker HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${cronSecret}\r\n`;
    await new Response(head + rest).body?.pipeTo(connection.writable, { preventClose: true });
    let answer = "";
    const reading = connection.readable.getReader().read().then(({ value }) => {
      answer = new TextDecoder().decode(value);
    });
    await until("an answer", () => answer, 5_000);
    await reading;
    assert.match(answer, /^HTTP\/1\.1 413 /);
  }
});

Deno.test("with wait the answer says what became of each job", async () => {
  const { sql } = stack;
  const rows = await sql`
    insert into jobs (kind, payload, max_attempts)
    values ('echo', '{"n": 1}', 5),
           ('fail', '{"how": "error", "message": "first"}', 5),
           ('fail', '{"how": "error", "message": "last"}', 1)
    returning id`;
  const response = await stack.call("job-worker", { wait: true, kinds: ["echo", "fail"] });
  assert.equal(response.status, 200);
  const answer: { processed: number; results: { id: string; kind: string; status: string }[] } =
    await response.json();
  assert.equal(answer.processed, 3);
  assert.deepEqual(
    answer.results.toSorted((a, b) => a.id.localeCompare(b.id)),
    [["echo", "succeeded"], ["fail", "pending"], ["fail", "dead"]]
      .map(([kind, status], i) => ({ id: rows[i]?.id, kind, status })),
  );
});

Deno.test("only the kinds that are named are run, and no more jobs than maxJobs", async () => {
  const { sql } = stack;
  await sql`insert into jobs (kind, payload) select 'echo', '{"n": 2}' from generate_series(1, 25)`;
  const [other] = await sql`select enqueue_job('describe', '{"amount": 1}') as id`;
  const run = async (body: unknown) => {
    const { results }: { results: { id: string; kind: string }[] } =
      await (await stack.call("job-worker", body)).json();
    return results;
  };
  const first = await run({ wait: true, kinds: ["echo"], maxJobs: 7 });
  assert.equal(first.length, 7);
  const second = await run({ wait: true, kinds: ["echo"], maxJobs: 1000 });
  assert.equal(second.length, 18);
  assert([...first, ...second].every(({ kind }) => kind === "echo"));
  assert.deepEqual((await run({ wait: true })).map(({ id }) => id), [other?.id]);
  assert.deepEqual(await run({ wait: true }), []);
});

Deno.test("a poke is answered 202 while the job it starts is still at work", async () => {
  const file = `${stack.appDir}/entered`;
  const [job] = await stack.sql`select enqueue_job('wait_for_gate', ${stack.sql.json({ file })}) as id`;
  const status = async () => {
    const [row] = await stack.sql`select status from jobs where id = ${job?.id}`;
    return row?.status;
  };
  const response = await post({});
  assert.equal(response.status, 202);
  assert.deepEqual(await response.json(), { accepted: true });
  await until("the handler to be entered", () => Deno.stat(file).catch(() => null));
  assert.equal(await status(), "running");
  await Deno.writeTextFile(`${file}.gate`, "");
  await until("the job to succeed", async () => await status() === "succeeded");
});

Deno.test("a poke that comes while a call for other kinds is starting finds its jobs all the same", async () => {
  const { sql } = stack;
  await stack.restart();
  const [job] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
  const other = stack.call("job-worker", { wait: true, kinds: ["none"] });
  await new Promise((resolve) => setTimeout(resolve, 5));
  const poke = await stack.call("job-worker");
  assert.equal(poke.status, 202);
  await poke.body?.cancel();
  await (await other).body?.cancel();
  await until("the job to succeed", async () => {
    const [row] = await sql`select status from jobs where id = ${job?.id}`;
    return row?.status === "succeeded";
  });
});

Deno.test("the app's schedules are brought in step by the next call when that failed, and no job waits for it", async () => {
  const { sql } = stack;
  const hasSchedule = async () => (await sql`select from schedules where name = 'app:echo'`).count === 1;
  await sql`revoke execute on function ensure_app_schedules from service_role`;
  await stack.restart();
  await sql`delete from schedules where true`;
  await sql`delete from private.app_schedules where true`;
  const lines = () => stack.lines.filter((line) => line.includes('"app_schedules_failed"')).length;
  await stack.call("job-worker", { wait: true });
  await until("the line about it", () => lines() > 0);
  for (let i = 0; i < 3; i++) await stack.call("job-worker", { wait: true });
  assert.equal(lines(), 1, "one that every poke would repeat");

  await sql`grant execute on function ensure_app_schedules to service_role`;
  await sql`select enqueue_job('echo')`;
  await sql.begin(async (tx) => {
    await tx`lock table private.app_schedules`;
    const { processed } = await (await stack.call("job-worker", { wait: true })).json();
    assert.equal(processed, 1);
    assert.equal(await hasSchedule(), false);
  });
  await until("the app's schedule", hasSchedule);
});
