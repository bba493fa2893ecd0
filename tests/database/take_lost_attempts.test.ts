import assert from "node:assert/strict";
import { enqueueAndClaim, expireLeases, job, only, openTransaction, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

const take = async () => [...await db.sql`select * from take_lost_attempts()`];

/** Each of another kind, since one that was lost is available again. */
async function loseOne(kind = "test"): Promise<string> {
  const claimed = await enqueueAndClaim(db.sql, kind);
  await expireLeases(db.sql);
  await db.sql`select rescue_expired_jobs()`;
  return claimed.id;
}

Deno.test("an attempt that ended with its lease is handed over once, with what its job says of it", async () => {
  const id = await loseOne();
  const { last_error } = await job(db.sql, id);
  assert.deepEqual({ ...only(await take()) }, {
    job_id: id,
    kind: "test",
    attempt: 1,
    error: last_error,
  });
  assert.deepEqual(await take(), []);
});

Deno.test("an attempt that a worker has ended itself is not", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await db.sql`select fail_job(${id}, ${lease_token}, 'x')`;
  assert.deepEqual(await take(), []);
});

Deno.test("each is given to one of several who ask at once, the oldest first, at most max_attempts", async () => {
  const ids: string[] = [];
  for (let n = 0; n < 5; n++) ids.push(await loseOne(`kind_${n}`));
  const other = await openTransaction(db);
  const first = await other.sql`select job_id from take_lost_attempts(2)`;
  const second = await db.sql`select job_id from take_lost_attempts(2)`;
  await other.sql`commit`;
  const third = await db.sql`select job_id from take_lost_attempts(2)`;
  const taken = [first, second, third].map((rows) => rows.map(({ job_id }) => job_id).toSorted());
  assert.deepEqual(taken, [ids.slice(0, 2), ids.slice(2, 4), ids.slice(4)]);
});

Deno.test("what nobody takes for a day is handed over no more", async () => {
  await loseOne();
  await db.sql`update job_failures set failed_at = failed_at - interval '25 hours' where true`;
  assert.deepEqual(await take(), []);
});
