import assert from "node:assert/strict";
import {
  claim,
  enqueue,
  enqueueAndClaim,
  job,
  only,
  openTransaction,
  rowText,
  sharedDatabase,
} from "./queue.ts";

const db = sharedDatabase();

async function cancel(ids: string[]): Promise<string[]> {
  const rows = await db.sql<{ id: string }[]>`select id from cancel_jobs(${ids}::uuid[]) id order by id`;
  return rows.map(({ id }) => id);
}

Deno.test("jobs that wait or run are cancelled; what has ended, or is not there, stays as it is", async () => {
  const waiting = await enqueue(db.sql, "waiting");
  const running = await enqueueAndClaim(db.sql, "running");
  const succeeded = await enqueueAndClaim(db.sql, "succeeded");
  await db.sql`select complete_job(${succeeded.id}, ${succeeded.lease_token})`;
  const dead = await enqueueAndClaim(db.sql, "dead");
  await db.sql`select fail_job(${dead.id}, ${dead.lease_token}, 'x', permanent => true)`;
  const ended = [succeeded.id, dead.id];
  const before = await Promise.all(ended.map((id) => rowText(db.sql, id)));

  const all = [waiting, running.id, ...ended, crypto.randomUUID(), waiting];
  assert.deepEqual(await cancel(all), [waiting, running.id].sort());
  for (const id of [waiting, running.id]) {
    const row = await job(db.sql, id);
    assert.deepEqual([row.status, row.lease_expires_at], ["cancelled", null]);
    assert.ok(row.finished_at);
  }
  assert.deepEqual(await Promise.all(ended.map((id) => rowText(db.sql, id))), before);
  assert.deepEqual(await cancel(all), [], "safe to repeat");
  assert.deepEqual(await claim(db.sql), []);
  assert.deepEqual(await cancel([]), []);
});

Deno.test("the token of a running job is void at once", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await cancel([id]);
  const before = await rowText(db.sql, id);
  const leases = db.sql.json([{ id, lease_token }]);
  for (const name of ["extend_jobs", "complete_jobs", "fail_jobs", "release_jobs"]) {
    assert.equal((await db.sql`select ${db.sql(name)}(${leases})`).count, 0, name);
  }
  await db.sql`select rescue_expired_jobs()`;
  assert.equal(await rowText(db.sql, id), before);
});

Deno.test("a cancelled job gives back its dedupe key, unless it holds that once and for all", async () => {
  for (
    const [dedupe, free] of [["active", true], ["waiting", true], ["replace", true], ["once", false]] as const
  ) {
    const jobs = db.sql.json([{ kind: "test", dedupe_key: dedupe, dedupe }]);
    const { id } = only(await db.sql<{ id: string }[]>`select id from enqueue_jobs(${jobs})`);
    await cancel([id]);
    assert.equal(only(await db.sql`select created from enqueue_jobs(${jobs})`).created, free, dedupe);
  }
});

Deno.test("a job that somebody keeps locked stays as it is, and the others are cancelled", async () => {
  const ids = [await enqueue(db.sql), await enqueue(db.sql)];
  const open = await openTransaction(db);
  await open.sql`select from jobs where id = ${ids[1] ?? ""} for update`;
  assert.deepEqual(await cancel(ids), [ids[0]]);
  await open.sql`rollback`;
  assert.deepEqual(await cancel(ids), [ids[1]]);
});
