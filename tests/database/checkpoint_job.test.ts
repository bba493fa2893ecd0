import assert from "node:assert/strict";
import postgres from "postgres";
import { claim, enqueueAndClaim, expireLeases, job, only, openTransaction, sharedDatabase } from "./queue.ts";
import { testFence } from "./settle.ts";

const db = sharedDatabase();

type Fields = Record<string, postgres.JSONValue>;

async function checkpoint(id: string, token: number, fields: Fields | postgres.JSONValue): Promise<boolean> {
  const rows = await db.sql<
    { held: boolean }[]
  >`select checkpoint_job(${id}, ${token}, ${db.sql.json(fields)}) as held`;
  return only(rows).held;
}

testFence(db, "checkpoint_job", (_, id, token) => checkpoint(id, token, { x: 1 }));

Deno.test("fields are merged: a new one stands beside the others, one of the same name replaces it, and steps are merged by name", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  assert.equal((await job(db.sql, id)).progress, null);
  const calls: Fields[] = [
    { page: 1, of: { n: 2 } },
    { page: 2, steps: { a: [1] } },
    { of: {}, steps: { b: null } },
    {},
    { steps: { a: 3 } },
  ];
  for (const fields of calls) assert.equal(await checkpoint(id, lease_token, fields), true);
  const row = await job(db.sql, id);
  assert.deepEqual(row.progress, { page: 2, of: {}, steps: { a: 3, b: null } });
  assert.deepEqual([row.status, row.attempts, row.lease_token], ["running", 1, lease_token]);
});

Deno.test("the next attempt is given it, whoever ends the attempt; so is a job that is put back; what a replacement enqueues begins anew", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await checkpoint(id, lease_token, { page: 1 });
  await db.sql`select fail_job(${id}, ${lease_token}, 'x', '0')`;
  const claimAgain = async () => {
    const { progress } = only(await db.sql`select * from claim_jobs('w')`);
    return progress;
  };
  assert.deepEqual(await claimAgain(), { page: 1 });
  await expireLeases(db.sql);
  await db.sql`select rescue_expired_jobs()`;
  assert.deepEqual(await claimAgain(), { page: 1 });
  await db.sql`select release_jobs(jsonb_build_array(to_jsonb(j))) from jobs j`;
  assert.deepEqual(await claimAgain(), { page: 1 });
  await db.sql`select cancel_jobs(array[${id}::uuid])`;
  await db.sql`select retry_jobs(array[${id}::uuid])`;
  assert.deepEqual(await claimAgain(), { page: 1 });

  const replace = () =>
    db.sql`select enqueue_job('other', '{}', dedupe_key => 'k', dedupe => 'replace') as id`;
  const replaced = only(await replace()).id;
  const held = only(await db.sql`select * from claim_jobs('w')`);
  await checkpoint(replaced, held.lease_token, { page: 1 });
  await db.sql`select fail_job(${replaced}, ${held.lease_token}, 'x', '0')`;
  assert.equal(only(await replace()).id, replaced);
  assert.equal(await claimAgain(), null);
});

Deno.test("what is no object, or too large together, is refused, and what was kept stays", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await checkpoint(id, lease_token, { text: "x".repeat(600_000) });
  const before = await job(db.sql, id);
  for (const fields of [null, 1, "x", [{}], { steps: 1 }, { steps: null }, { steps: [] }]) {
    await assert.rejects(() => checkpoint(id, lease_token, fields), {
      code: "22023",
      message: /not an object/,
    });
  }
  await assert.rejects(
    () => db.sql`select checkpoint_job(${id}, ${lease_token}, null)`,
    { code: "22023", message: /not an object/ },
  );
  await assert.rejects(
    () => checkpoint(id, lease_token, { more: "x".repeat(600_000) }),
    { code: "22023", message: /progress would have more than 1000000 bytes/, hint: /Storage/ },
  );
  assert.deepEqual(await job(db.sql, id), before);
  await assert.rejects(
    () =>
      db.sql`insert into jobs (kind, progress) values ('test', jsonb_build_object('x', repeat('x', 1000000)))`,
    { code: "22023", message: /^jobs: progress has more than 1000000 bytes/ },
  );
  for (const progress of ["[]", "1", '{"steps": 1}']) {
    await assert.rejects(() => db.sql`update jobs set progress = ${progress}::text::jsonb where id = ${id}`, {
      code: "23514",
    });
  }
});

Deno.test("many at once lose nothing, and a row that somebody keeps locked is waited for one second", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  const names = Array.from({ length: 50 }, (_, n) => `step ${n}`);
  await Promise.all(names.map((name) => checkpoint(id, lease_token, { steps: { [name]: name } })));
  const { progress } = await job(db.sql, id);
  assert.deepEqual(Object.keys(progress.steps).sort(), names.sort());
  const open = await openTransaction(db);
  await open.sql`select from jobs where id = ${id} for update`;
  await assert.rejects(() => checkpoint(id, lease_token, { x: 1 }), { code: "55P03" });
  await open.sql`rollback`;
  assert.equal(await checkpoint(id, lease_token, { x: 1 }), true);
});

Deno.test("a cancelled job keeps what it had, and takes no more", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await checkpoint(id, lease_token, { page: 1 });
  await db.sql`select cancel_jobs(array[${id}::uuid])`;
  assert.equal(await checkpoint(id, lease_token, { page: 2 }), false);
  assert.deepEqual((await job(db.sql, id)).progress, { page: 1 });
  assert.deepEqual(await claim(db.sql), []);
});
