import assert from "node:assert/strict";
import {
  claim,
  enqueue,
  enqueueAndClaim,
  job,
  only,
  openTransaction,
  queuedPokes,
  rowText,
  setUpDispatch,
  sharedDatabase,
} from "./queue.ts";

const db = sharedDatabase();

async function reschedule(ids: string[], availableAt: string): Promise<string[]> {
  const rows = await db.sql<{ id: string }[]>`
    select id from reschedule_jobs(${ids}::uuid[], ${availableAt}::text::timestamptz) id order by id`;
  return rows.map(({ id }) => id);
}

Deno.test("waiting jobs get the new time, a retry included; what runs or has ended stays as it is", async () => {
  const running = await enqueueAndClaim(db.sql, "running");
  const dead = await enqueueAndClaim(db.sql, "dead");
  await db.sql`select fail_job(${dead.id}, ${dead.lease_token}, 'x', permanent => true)`;
  const retrying = await enqueueAndClaim(db.sql, "retrying");
  await db.sql`select fail_job(${retrying.id}, ${retrying.lease_token}, 'no luck')`;
  const waiting = await enqueue(db.sql);
  const before = await Promise.all([running.id, dead.id].map((id) => rowText(db.sql, id)));

  const all = [running.id, dead.id, retrying.id, waiting, crypto.randomUUID(), waiting];
  assert.deepEqual(await reschedule(all, "2040-01-01 12:00:00.123456Z"), [retrying.id, waiting].sort());
  const rows = await db.sql`
    select available_at::text as at, attempts, last_error from jobs where id = any (${[
    retrying.id,
    waiting,
  ]}) order by attempts`;
  const at = only(await db.sql`select '2040-01-01 12:00:00.123456Z'::text::timestamptz::text as at`).at;
  assert.deepEqual(rows.map((row) => [row.at, row.attempts, row.last_error]), [
    [at, 0, null],
    [at, 1, "no luck"],
  ]);
  assert.deepEqual(await Promise.all([running.id, dead.id].map((id) => rowText(db.sql, id))), before);
  assert.deepEqual(await claim(db.sql), []);
  assert.deepEqual(await reschedule([], "2040-01-01"), []);
});

Deno.test("a job that is brought forward is claimed at once, behind those that have waited, and a worker is woken", async () => {
  await setUpDispatch(db);
  const later = only(await db.sql`select enqueue_job('test', delay => '1 hour') as id`).id;
  assert.equal(await queuedPokes(db.sql), 0);
  await db.sql`insert into jobs (kind) values ('test')`;
  await db.sql`delete from net.http_request_queue where true`;
  assert.deepEqual(await reschedule([later], "2020-01-01"), [later]);
  assert.equal(await queuedPokes(db.sql), 1);
  assert.deepEqual((await claim(db.sql)).map(({ id }) => id)[1], later);
});

Deno.test("null and an endless time are refused, and a job that somebody keeps locked stays as it is", async () => {
  const ids = [await enqueue(db.sql), await enqueue(db.sql)];
  for (const time of ["infinity", "-infinity"]) {
    await assert.rejects(() => reschedule(ids, time), { code: "22023", hint: /cancel_jobs/ });
  }
  await assert.rejects(
    () => db.sql`select reschedule_jobs(${ids}::uuid[], null)`,
    { code: "22023", message: /available_at is null/ },
  );
  const open = await openTransaction(db);
  await open.sql`select from jobs where id = ${ids[1] ?? ""} for update`;
  assert.deepEqual(await reschedule(ids, "2040-01-01"), [ids[0]]);
  await open.sql`rollback`;
  assert.ok((await job(db.sql, ids[1] ?? "")).available_at < new Date());
});
