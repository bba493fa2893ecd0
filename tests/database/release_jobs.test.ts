import assert from "node:assert/strict";
import { claim, endlessInterval, enqueue, enqueueAndClaim, job, only, sharedDatabase } from "./queue.ts";
import { testFence } from "./settle.ts";

const db = sharedDatabase();

testFence(
  db,
  "release_jobs",
  async (sql, id, lease_token) =>
    (await sql`select release_jobs(${sql.json([{ id, lease_token }])})`).count === 1,
);

Deno.test("a released job is pending again, its attempt uncounted, in its old place", async () => {
  const first = await enqueue(db.sql);
  const second = await enqueue(db.sql);
  const { id, lease_token } = only(await claim(db.sql, 1));
  const before = await job(db.sql, id);
  await db.sql`select release_jobs(${db.sql.json([{ id, lease_token }])})`;
  const after = await job(db.sql, id);
  assert.deepEqual([after.status, after.attempts, after.lease_expires_at, after.last_error], [
    "pending",
    0,
    null,
    null,
  ]);
  assert.deepEqual(after.available_at, before.available_at);
  assert.deepEqual((await claim(db.sql)).map((job) => job.id), [first, second]);
});

Deno.test("a token never comes again, although the attempt does", async () => {
  await enqueue(db.sql);
  const tokens = new Set<number>();
  for (let i = 0; i < 5; i++) {
    const { id, lease_token, attempts } = only(await claim(db.sql));
    assert.equal(attempts, 1);
    tokens.add(lease_token);
    await db.sql`select release_jobs(${db.sql.json([{ id, lease_token }])})`;
  }
  assert.equal(tokens.size, 5);
});

Deno.test("a delay, as an interval or in seconds, is how long the job then waits", async () => {
  const waitOf = async (delay: string | number) => {
    const { id, lease_token } = await enqueueAndClaim(db.sql);
    await db.sql`select release_jobs(${db.sql.json([{ id, lease_token, delay }])})`;
    const { seconds } = only(
      await db.sql`
        select extract(epoch from available_at - updated_at)::float as seconds from jobs where id = ${id}`,
    );
    await db.sql`delete from jobs where id = ${id}`;
    return Math.round(seconds);
  };
  assert.equal(await waitOf(90), 90);
  assert.equal(await waitOf("2 minutes"), 120);
  assert.ok(await waitOf("-1 hour") <= 0);
  const longest = await waitOf(await endlessInterval(db.sql));
  assert.equal(Math.round(longest / (365.25 * 24 * 3600)), 10, "at most ten years");
});
