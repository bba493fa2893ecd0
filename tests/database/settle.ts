import assert from "node:assert/strict";
import postgres from "postgres";
import {
  type Claim,
  claim,
  type Database,
  enqueue,
  enqueueAndClaim,
  expireLeases,
  job,
  only,
  rowText,
} from "./queue.ts";

/** Settles one job by a token; true when it was held. */
export type Settle = (sql: postgres.Sql, id: string, leaseToken: number) => Promise<boolean>;

/** What every function that settles a claim must hold to, as one test. */
export function testFence(db: Database, name: string, settle: Settle): void {
  Deno.test(`${name} is fenced by the lease token`, async (t) => {
    await t.step("a token that was never given, or is no longer, changes nothing and says so", async () => {
      const held = await enqueueAndClaim(db.sql);
      const before = await rowText(db.sql, held.id);
      for (const token of [0, -1, held.lease_token + 1, held.lease_token - 1]) {
        assert.equal(await settle(db.sql, held.id, token), false, `token ${token}`);
      }
      assert.equal(await settle(db.sql, crypto.randomUUID(), held.lease_token), false, "no such job");
      assert.equal(await rowText(db.sql, held.id), before);
      assert.equal((await db.sql`select from job_failures`).count, 0);
      assert.equal(await settle(db.sql, held.id, held.lease_token), true);
    });

    await db.sql`truncate jobs cascade`;
    await t.step("a pending or finished job cannot be settled, whatever the token", async () => {
      const fresh = await enqueue(db.sql);
      const succeeded = await enqueueAndClaim(db.sql, "other");
      await db.sql`select complete_job(${succeeded.id}, ${succeeded.lease_token})`;
      const retried = await enqueueAndClaim(db.sql, "third");
      await db.sql`select fail_job(${retried.id}, ${retried.lease_token}, 'x')`;
      for (const id of [fresh, succeeded.id, retried.id]) {
        const before = await rowText(db.sql, id);
        const { lease_token } = await job(db.sql, id);
        for (const token of [0, 1, lease_token, lease_token + 1]) {
          assert.equal(await settle(db.sql, id, token), false, `token ${token}`);
        }
        assert.equal(await rowText(db.sql, id), before);
      }
    });

    await db.sql`truncate jobs cascade`;
    await t.step("a stale worker cannot touch a job that was given to another", async () => {
      const stale = await enqueueAndClaim(db.sql);
      await expireLeases(db.sql);
      await db.sql`select rescue_expired_jobs()`;
      const current: Claim = only(await claim(db.sql, 1, "another"));
      assert.equal(current.id, stale.id);
      const before = await rowText(db.sql, stale.id);
      assert.equal(await settle(db.sql, stale.id, stale.lease_token), false);
      assert.equal(await rowText(db.sql, stale.id), before);
      assert.equal(await settle(db.sql, current.id, current.lease_token), true);
    });
  });
}
