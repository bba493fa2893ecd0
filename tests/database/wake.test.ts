import assert from "node:assert/strict";
import postgres from "postgres";
import { createDatabase, cronSecret } from "../support.ts";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import {
  emptyNetQueue,
  enqueue,
  only,
  openTransaction,
  projectUrl,
  queuedPokes,
  setUpDispatch,
  sharedDatabase,
  workerUrl,
} from "./queue.ts";

const db = sharedDatabase();

/** Enqueues, and gives back how many pokes that queued. */
async function pokesOf(sql: postgres.Sql, insert: () => Promise<unknown>): Promise<number> {
  const before = await queuedPokes(sql);
  await insert();
  return await queuedPokes(sql) - before;
}

Deno.test("the first due job pokes the worker with the secret; while that is queued no other does", async () => {
  await setUpDispatch(db);
  await enqueue(db.sql);
  const poke = only(
    await db.sql`
      select id, method, url, headers, convert_from(body, 'utf8') as body, timeout_milliseconds as timeout
      from net.http_request_queue`,
  );
  assert.deepEqual({ ...poke }, {
    id: poke.id,
    method: "POST",
    url: workerUrl,
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${cronSecret}` },
    body: "{}",
    timeout: 5000,
  });
  assert.deepEqual({
    ...only(await db.sql`select request_id, reason from private.pokes where request_id > 0`),
  }, {
    request_id: poke.id,
    reason: "wake",
  });
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 0);
  await emptyNetQueue(db.sql);
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 1);
});

Deno.test("a plain insert of many jobs, by the API's role, makes one poke", async () => {
  await setUpDispatch(db);
  const api = db.connect("authenticator", { max: 1 });
  await api`set role service_role`;
  await api`insert into jobs (kind) select 'test' from generate_series(1, 500)`;
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("a job that is not due makes no poke, unless one beside it is", async () => {
  await setUpDispatch(db);
  assert.equal(await pokesOf(db.sql, () => db.sql`select enqueue_job('test', delay => '1 minute')`), 0);
  const finished = () => db.sql`insert into jobs (kind, status, finished_at) values ('test', 'dead', now())`;
  assert.equal(await pokesOf(db.sql, finished), 0);
  assert.equal(await pokesOf(db.sql, () => db.sql`insert into jobs (kind) select 'test' where false`), 0);
  const mixed = () =>
    db.sql`
      insert into jobs (kind, available_at) values ('test', now() + interval '1 minute'), ('test', now())`;
  assert.equal(await pokesOf(db.sql, mixed), 1);
});

Deno.test("while a worker has promised to look by itself nobody is poked; after that, again", async () => {
  await setUpDispatch(db);
  const promise = () => db.sql`select * from claim_jobs('w', 100, awake_for => '1 minute')`;
  await promise();
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 0);
  await db.sql`update private.awake_workers set awake_until = clock_timestamp() where true`;
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 1, "the promise ran out");
  await emptyNetQueue(db.sql);
  await promise();
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 0);
  await db.sql`select * from claim_jobs('w')`;
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 1, "the promise was taken back");
});

Deno.test("one worker's promise is not taken back by another's claim", async () => {
  await setUpDispatch(db);
  await db.sql`select * from claim_jobs('w', awake_for => '1 minute')`;
  await db.sql`select * from claim_jobs('other')`;
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 0);
});

Deno.test("1,000 single inserts make one poke while nothing drains the queue, a few when they come at once", async () => {
  await setUpDispatch(db);
  const one = db.connect("postgres", { max: 1 });
  await Promise.all(Array.from({ length: 1000 }, () => one`insert into jobs (kind) values ('test')`));
  assert.equal(await queuedPokes(db.sql), 1);
  await emptyNetQueue(db.sql);
  await Promise.all(Array.from({ length: 1000 }, () => db.sql`insert into jobs (kind) values ('test')`));
  const pokes = await queuedPokes(db.sql);
  assert.ok(pokes >= 1 && pokes <= 10, `${pokes} pokes by 10 sessions`);
});

Deno.test("an enqueuing transaction that stays open neither suppresses nor delays another's poke", async () => {
  await setUpDispatch(db);
  const open = await openTransaction(db);
  await enqueue(open.sql);
  assert.equal(await queuedPokes(open.sql), 1);
  assert.equal(await queuedPokes(db.sql), 0, "not sent before the job can be seen");
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 1);
  await open.sql`rollback`;
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("a poke that pg_net is sending counts as gone, however long the answers beside it take", async () => {
  await setUpDispatch(db);
  await enqueue(db.sql);
  const sending = await openTransaction(db);
  await sending.sql`delete from net.http_request_queue where true`;
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 1);
  await sending.sql`commit`;
});

Deno.test("after disable_dispatch an enqueue pokes nobody, after enable_dispatch it does", async () => {
  await setUpDispatch(db);
  await db.sql`select disable_dispatch()`;
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 0);
  await db.sql`select enable_dispatch()`;
  assert.equal(await pokesOf(db.sql, () => enqueue(db.sql)), 1);
});

Deno.test("of two secrets, as there are while one is rotated, the first is sent, and no white space", async () => {
  const second = "another-secret-that-is-about-to-go-away";
  await setVaultSecrets(db.url("postgres"), {
    project_url: `\t${projectUrl}/\n`,
    cron_secret: ` ${cronSecret}\n, ${second}`,
  });
  await enqueue(db.sql);
  const { url, headers } = only(await db.sql`select url, headers from net.http_request_queue`);
  assert.deepEqual([url, headers.Authorization], [workerUrl, `Bearer ${cronSecret}`]);
});

const unusable: Record<string, Record<string, string>> = {
  "no secrets at all": {},
  "no cron_secret": { project_url: projectUrl },
  "no project_url": { cron_secret: cronSecret },
  "a short cron_secret": { project_url: projectUrl, cron_secret: "short" },
  "an empty cron_secret": { project_url: projectUrl, cron_secret: "" },
  "a project_url without http": { project_url: "project.supabase.co", cron_secret: cronSecret },
  "a project_url without a host": { project_url: "https:///", cron_secret: cronSecret },
};
Deno.test("a setting that is missing or wrong never fails an enqueue", async (t) => {
  for (const [name, secrets] of Object.entries(unusable)) {
    await t.step(name, async () => {
      await db.sql`delete from vault.secrets where true`;
      await setVaultSecrets(db.url("postgres"), secrets);
      await enqueue(db.sql);
      assert.equal((await db.sql`select from claim_jobs('w')`).count, 1);
      assert.equal((await db.sql`select from net.http_request_queue`).count, 0);
    });
  }
});

Deno.test("an extension that is missing never fails an enqueue", async (t) => {
  for (const extension of ["pg_net", "supabase_vault", "pg_cron"]) {
    await t.step(extension, async () => {
      await using db = await createDatabase();
      await setUpDispatch(db);
      await db.connect("supabase_admin", { max: 1 }).unsafe(`drop extension ${extension} cascade`);
      await enqueue(db.sql);
      assert.equal((await db.sql`select from claim_jobs('w')`).count, 1);
    });
  }
});

Deno.test("a table that another session has locked never fails an enqueue, nor holds it up for long", async (t) => {
  const tables = [
    "net.http_request_queue",
    "vault.secrets",
    "private.awake_workers",
    "private.dispatch",
    "private.pokes",
  ];
  await setUpDispatch(db);
  const admin = db.connect("supabase_admin", { max: 1 });
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 2000 } });
  for (const table of tables) {
    await t.step(table, async () => {
      await emptyNetQueue(db.sql);
      await admin.unsafe(`begin; lock table ${table} in access exclusive mode`);
      try {
        const id = await enqueue(hurried);
        assert.equal((await hurried`select from jobs where id = ${id}`).count, 1);
      } finally {
        await admin`rollback`;
      }
    });
  }
});

Deno.test("a poke that fails leaves the caller's transaction usable", async () => {
  await db.sql.begin(async (tx) => {
    await tx`insert into jobs (kind) values ('test')`;
    await tx`insert into jobs (kind) values ('test')`;
  });
  assert.equal((await db.sql`select from jobs`).count, 2);
});

Deno.test("a job of a paused kind, or of one that no Edge Function has the time for, makes no poke, unless one beside it may start", async () => {
  await setUpDispatch(db);
  await db
    .sql`insert into job_kinds (kind, paused, timeout_ms) values ('paused', true, null), ('long', false, 70001)`;
  for (const kind of ["paused", "long"]) {
    assert.equal(await pokesOf(db.sql, () => enqueue(db.sql, kind)), 0);
    const dead = () =>
      db.sql`insert into jobs (kind, status, finished_at) values (${kind}, 'dead', now()) returning id`;
    const { id } = only(await dead());
    assert.equal(await pokesOf(db.sql, () => db.sql`select retry_jobs(array[${id}::uuid])`), 0);
    const both = () => db.sql`insert into jobs (kind) values (${kind}), ('test')`;
    assert.equal(await pokesOf(db.sql, both), 1);
    await emptyNetQueue(db.sql);
  }
  await db.sql`update job_kinds set paused = false, timeout_ms = 70000 where true`;
  for (const kind of ["paused", "long"]) {
    assert.equal(await pokesOf(db.sql, () => enqueue(db.sql, kind)), 1);
    await emptyNetQueue(db.sql);
  }
});
