import assert from "node:assert/strict";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import { cronSecret, startTestStack, type TestStack, until } from "../support.ts";

/** From an enqueue to a finished job with nothing but the database to start the worker: wake, tick and health. */

let stack: TestStack;

Deno.test.beforeAll(async () => {
  stack = await startTestStack();
  await scheduleTick("1 second");
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

const scheduleTick = (schedule: string) =>
  stack.sql`select cron.schedule('nightshift_tick', ${schedule}, 'select private.tick()')`;

async function count(query: PromiseLike<readonly Record<string, unknown>[]>): Promise<number> {
  const [row] = await query;
  return Number(row?.count);
}

const pokes = () => count(stack.sql`select count(*) from private.pokes`);

const untilSucceeded = (ids: string[], timeoutMs?: number) =>
  until(
    `${ids.length} jobs to succeed`,
    async () =>
      await count(stack.sql`
        select count(*) from jobs where id = any(${ids}) and status = 'succeeded' and attempts = 1`) ===
        ids.length,
    timeoutMs,
  );

/** The worker has ended and no poke is under way. */
const untilIdle = () =>
  until("the stack to be idle", async () => {
    const [row] = await stack.sql`
      select not exists (select from private.awake_workers)
        and not exists (select from net.http_request_queue)
        and not exists (select from jobs where status = 'running') as idle`;
    return row?.idle;
  });

/** Ends the worker in the midst of its lingering: nobody looks for jobs by himself any more. */
async function endWorker(): Promise<void> {
  await stack.restart();
  await stack.sql`delete from private.awake_workers`;
}

/** Waits until cron has run the tick `runs` more times, and gives back how the runs ended. */
async function ticks(runs: number): Promise<{ status: string; return_message: string }[]> {
  const { sql } = stack;
  const [last] = await sql`select coalesce(max(runid), 0) as runid from cron.job_run_details`;
  return await until(`${runs} ticks`, async () => {
    const rows = await sql<{ status: string; return_message: string }[]>`
      select d.status, d.return_message from cron.job_run_details d join cron.job j using (jobid)
      where j.jobname = 'nightshift_tick' and d.runid > ${last?.runid} and d.end_time is not null`;
    return rows.length >= runs && [...rows];
  });
}

async function health(item: string): Promise<{ ok: boolean; detail: string; todo: string | null }> {
  const [row] = await stack.sql`select ok, detail, todo from job_dispatch_health() where item = ${item}`;
  assert(row, item);
  return { ok: row.ok, detail: row.detail, todo: row.todo };
}

Deno.test("a job starts by itself, whether it was enqueued by the function or by a plain insert", async () => {
  const { sql } = stack;
  for (
    const enqueue of [
      () => sql`select enqueue_job('echo', '{"n": 1}') as id`,
      () => sql`insert into jobs (kind, payload) values ('echo', '{"n": 2}') returning id`,
    ]
  ) {
    await untilIdle();
    const [row] = await enqueue();
    await untilSucceeded([row?.id], 5_000);
  }
  assert.deepEqual(
    (await sql`select item from job_dispatch_health() where not ok`).map(({ item }) => item),
    [],
  );
});

Deno.test("1,000 single inserts make a few pokes, and all jobs succeed", async () => {
  const { sql } = stack;
  await untilIdle();
  const before = await pokes();
  const ids = await Promise.all(Array.from({ length: 1_000 }, async (_, n) => {
    const [row] = await sql`insert into jobs (kind, payload) values ('echo', ${
      sql.json({ n })
    }) returning id`;
    return String(row?.id);
  }));
  await untilSucceeded(ids);
  const made = await pokes() - before;
  assert(made >= 1 && made <= 30, `${made} pokes`);
});

Deno.test("jobs that come 20 to 150 ms apart are picked up without a poke each", async () => {
  const { sql } = stack;
  await untilIdle();
  const before = await pokes();
  const ids: string[] = [];
  for (let n = 0; n < 30; n++) {
    const [row] = await sql`select enqueue_job('echo', ${sql.json({ n })}) as id`;
    ids.push(row?.id);
    await new Promise((resolve) => setTimeout(resolve, 20 + (n * 37) % 130));
  }
  await untilSucceeded(ids, 5_000);
  const made = await pokes() - before;
  assert(made <= 3, `${made} pokes`);
});

Deno.test("an enqueuing transaction that is left open holds up nobody's job, and its own starts when it commits", async () => {
  const { sql } = stack;
  await untilIdle();
  const open = await sql.reserve();
  try {
    await open`begin`;
    const [own] = await open`select enqueue_job('echo', '{"n": 1}') as id`;
    const [other] = await sql`select enqueue_job('echo', '{"n": 2}') as id`;
    await untilSucceeded([other?.id], 5_000);
    await untilIdle();
    const [later] = await sql`select enqueue_job('echo', '{"n": 3}') as id`;
    await untilSucceeded([later?.id], 5_000);
    await untilIdle();
    await open`commit`;
    await untilSucceeded([own?.id], 5_000);
  } finally {
    open.release();
  }
});

Deno.test("a worker that leaves a kind out makes no promise: an enqueue beside it pokes", async () => {
  const { sql } = stack;
  // A second after its start a worker has no time for it.
  await sql`
    insert into job_kinds (kind, timeout_ms) values ('describe', 70000)
    on conflict (kind) do update set timeout_ms = excluded.timeout_ms`;
  await untilIdle();
  await endWorker(); // the next one hears of it before it begins
  const before = await pokes();
  for (let n = 1; n <= 2; n++) {
    await until("the promise of its first second to be over", async () => {
      const rows = await sql`select from private.awake_workers where awake_until > clock_timestamp()`;
      return rows.length === 0;
    });
    const [row] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
    await untilSucceeded([row?.id], 5_000);
    await until("the poke to be over", async () => {
      const [row] = await sql`select not exists (select from net.http_request_queue) as over`;
      return row?.over;
    });
    assert(await pokes() >= before + n, "each enqueue poked");
  }
  await sql`delete from job_kinds where kind = 'describe'`;
});

Deno.test("an idle stack makes no function calls, but for one every ten minutes", async () => {
  const { sql } = stack;
  await sql`select enqueue_job('echo', delay => '1 hour')`;
  await untilIdle();
  // Until the app's schedules have come, a worker is poked every minute to look for them; then every ten.
  await sql`insert into private.app_schedules (digest) values ('of this test') on conflict do nothing`;
  const before = await pokes();
  const printed = stack.lines.length;
  const runs = await ticks(3);
  assert(runs.every(({ status }) => status === "succeeded"), "the tick went on all the while");
  assert.equal(await pokes(), before);
  assert.equal(await count(sql`select count(*) from net.http_request_queue`), 0);
  assert.deepEqual(stack.lines.slice(printed), []);
});

Deno.test("a job whose poke was lost is started by the next tick", async () => {
  const { sql } = stack;
  await endWorker();
  const [job] = await sql.begin(async (sql) => {
    const rows = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
    // pg_net's queue is unlogged: this is what a crash of the server leaves.
    await sql`delete from net.http_request_queue`;
    return rows;
  });
  await untilSucceeded([job?.id], 10_000);
  const [poke] = await sql`select reason from private.pokes order by poked_at desc limit 1`;
  assert.equal(poke?.reason, "tick");
});

Deno.test("a secret that is missing from Vault fails the tick, never an enqueue, and health says what to do", async () => {
  const { sql } = stack;
  await endWorker();
  await sql`delete from vault.secrets where name = 'cron_secret'`;
  const [job] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;

  const run = (await ticks(2)).at(-1);
  assert.equal(run?.status, "failed");
  assert.match(run.return_message, /no worker can be started: cron_secret is not in Vault/);
  assert.match(run.return_message, /HINT: .*job_dispatch_health/);
  const secret = await health("cron_secret");
  assert.equal(secret.ok, false);
  assert.equal(secret.detail, "not in Vault");
  assert.match(secret.todo ?? "", /vault\.create_secret/);
  assert.equal((await health("tick")).ok, false);
  assert.equal(await count(sql`select count(*) from jobs where id = ${job?.id} and status = 'pending'`), 1);

  await setVaultSecrets(stack.db.url("postgres"), { cron_secret: cronSecret });
  await untilSucceeded([job?.id], 10_000);
});

Deno.test("a secret that differs from the functions' shows as a 401 in health, with what to do", async () => {
  const { sql } = stack;
  await endWorker();
  await setVaultSecrets(stack.db.url("postgres"), {
    cron_secret: "not-the-secret-that-the-functions-know-about",
  });
  const [job] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
  const worker = await until("the 401 to be seen", async () => {
    const worker = await health("worker");
    return !worker.ok && worker;
  });
  assert.match(worker.detail, /: 401 /);
  assert.match(worker.todo ?? "", /CRON_SECRET .* cron_secret in Vault differ/);
  assert(!worker.detail.includes("not-the-secret"));

  await setVaultSecrets(stack.db.url("postgres"), { cron_secret: cronSecret });
  await untilSucceeded([job?.id], 10_000);
  await until("the worker to be well again", async () => (await health("worker")).ok);
});

Deno.test("a worker that dies leaves its jobs to the tick, which has them run again", async () => {
  const { sql } = stack;
  const file = `${stack.appDir}/lines`;
  const [job] = await sql`select enqueue_job('wait_for_gate', ${sql.json({ file })}) as id`;
  await until("the handler to be entered", () => Deno.stat(file).catch(() => null));
  await endWorker();
  await Deno.writeTextFile(`${file}.gate`, "");
  await sql`update jobs set lease_expires_at = clock_timestamp() where id = ${job?.id}`;
  await until(
    "the second attempt to succeed",
    async () =>
      await count(
        sql`select count(*) from jobs where id = ${job?.id} and status = 'succeeded' and attempts = 2`,
      ) === 1,
  );
  const [failure] = await sql`select attempt, error from job_failures where job_id = ${job?.id}`;
  assert.equal(failure?.attempt, 1);
  assert.match(failure.error, /^lease expired: /);
});

Deno.test("a worker whose lifetime is spent while jobs keep coming hands over to a successor, without a poke", async () => {
  const { sql } = stack;
  await scheduleTick("59 seconds");
  // A worker claims only what fits into its 70 seconds: with this it is spent after half a second.
  await sql`update job_kinds set timeout_ms = 69500`;
  await endWorker();
  const ids: string[] = [];
  const enqueue = async () => {
    const [row] = await sql`select enqueue_job('echo', '{"n": 1}') as id`;
    ids.push(row?.id);
  };
  await enqueue();
  await untilSucceeded(ids);
  const [{ at } = { at: null }] = await sql`select clock_timestamp()::text as at`;
  await until("the fourth worker", async () => {
    await enqueue();
    return await count(sql`select count(distinct locked_by) from jobs where id = any(${ids})`) >= 4;
  });
  await untilSucceeded(ids);
  const poked = await sql`select reason, poked_at from private.pokes where poked_at > ${at}`;
  assert.deepEqual([...poked], []);
});
