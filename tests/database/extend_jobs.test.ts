import assert from "node:assert/strict";
import { enqueueAndClaim, expireLeases, job, only, sharedDatabase } from "./queue.ts";
import { testFence } from "./settle.ts";

const db = sharedDatabase();

testFence(
  db,
  "extend_jobs",
  async (sql, id, lease_token) =>
    (await sql`select * from extend_jobs(${sql.json([{ id, lease_token }])})`).count === 1,
);

Deno.test("an extended lease ends that many seconds from now, and its token stays", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  const secondsLeft = async (leaseSeconds: number) => {
    await db.sql`select extend_jobs(${db.sql.json([{ id, lease_token }])}, ${leaseSeconds})`;
    const { left } = only(
      await db.sql`
        select extract(epoch from lease_expires_at - clock_timestamp())::float as left from jobs where id = ${id}`,
    );
    return Math.round(left);
  };
  assert.equal(await secondsLeft(500), 500);
  assert.equal(await secondsLeft(60), 60);
  assert.ok(await secondsLeft(0) <= 1);
  assert.equal(await secondsLeft(1_000_000), 86_400);
  const row = await job(db.sql, id);
  assert.deepEqual([row.status, row.lease_token, row.attempts], ["running", lease_token, 1]);
});

Deno.test("a lease that has run out may still be extended until the job is rescued", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await expireLeases(db.sql);
  const lease = db.sql.json([{ id, lease_token }]);
  assert.equal((await db.sql`select extend_jobs(${lease})`).count, 1);
  assert.equal(only(await db.sql`select rescue_expired_jobs() as n`).n, 0);
  await expireLeases(db.sql);
  assert.equal(only(await db.sql`select rescue_expired_jobs() as n`).n, 1);
  assert.equal((await db.sql`select extend_jobs(${lease})`).count, 0);
});

Deno.test("of several leases, those that are still held are named, and the lost ones are missing", async () => {
  const held = await enqueueAndClaim(db.sql);
  const lost = await enqueueAndClaim(db.sql);
  await db.sql`select release_jobs(${db.sql.json([{ id: lost.id, lease_token: lost.lease_token }])})`;
  const leases = [held, lost].map(({ id, lease_token }) => ({ id, lease_token }));
  const still = await db.sql`select id from extend_jobs(${db.sql.json(leases)}, 60)`;
  assert.deepEqual(still.map(({ id }) => id), [held.id]);
});
