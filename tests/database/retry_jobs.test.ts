import assert from "node:assert/strict";
import {
  claim,
  emptyNetQueue,
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

/** Enqueues a job that dies of its first attempt; its id. */
async function addDead(kind = "test"): Promise<string> {
  const { id, lease_token } = await enqueueAndClaim(db.sql, kind);
  await db.sql`select fail_job(${id}, ${lease_token}, 'boom', permanent => true)`;
  return id;
}

async function retry(args: string): Promise<string[]> {
  const rows = await db.sql.unsafe<{ id: string }[]>(`select id from retry_jobs(${args}) id order by id`);
  return rows.map(({ id }) => id);
}

Deno.test("a dead job goes back with all its attempts, due at once, its failures kept, and a worker is woken", async () => {
  const id = await addDead();
  const { lease_token } = await job(db.sql, id);
  await setUpDispatch(db);
  await emptyNetQueue(db.sql);
  assert.deepEqual(await retry(`array['${id}']::uuid[]`), [id]);
  const row = await job(db.sql, id);
  assert.deepEqual(
    [row.status, row.attempts, row.last_error, row.finished_at, row.lease_token > lease_token],
    ["pending", 0, "boom", null, true],
  );
  assert.equal((await db.sql`select from job_failures where job_id = ${id}`).count, 1);
  assert.equal(await queuedPokes(db.sql), 1);
  const claimed = only(await claim(db.sql));
  assert.deepEqual([claimed.id, claimed.attempts], [id, 1]);
  await db.sql`select fail_job(${id}, ${claimed.lease_token}, 'again')`;
  assert.equal((await db.sql`select from job_failures where job_id = ${id}`).count, 2);
});

Deno.test("without arguments the dead jobs of all kinds go back; with nulls, or no ids, none do", async () => {
  const ids = [await addDead("one"), await addDead("other")].sort();
  for (
    const args of [
      "null",
      "ids => null, kind => null",
      "kind => null",
      "kind => (select kind from jobs where kind = 'none')",
      "null, ''",
      "(select array_agg(id) from jobs where kind = 'none')",
    ]
  ) {
    await assert.rejects(retry(args), {
      code: "22023",
      message: /what is given is null/,
      hint: /without arguments/,
    });
  }
  assert.deepEqual(await retry("'{}'"), []);
  assert.deepEqual(await retry(""), ids);
});

Deno.test("by id, dead and cancelled jobs go back; others, and those of another kind than is given, stay as they are", async () => {
  const dead = await addDead();
  const other = await addDead("other");
  const cancelled = await enqueue(db.sql);
  await db.sql`select cancel_jobs(${[cancelled]}::uuid[])`;
  const succeeded = await enqueueAndClaim(db.sql);
  await db.sql`select complete_job(${succeeded.id}, ${succeeded.lease_token})`;
  const running = await enqueueAndClaim(db.sql);
  const waiting = await enqueue(db.sql);
  const untouched = [succeeded.id, running.id, waiting, other];
  const before = await Promise.all(untouched.map((id) => rowText(db.sql, id)));
  const all = [dead, cancelled, ...untouched, crypto.randomUUID(), dead];
  const ids = `array['${all.join("','")}']::uuid[]`;
  assert.deepEqual(await retry(`${ids}, kind => 'test'`), [dead, cancelled].sort());
  assert.deepEqual(await Promise.all(untouched.map((id) => rowText(db.sql, id))), before);
  assert.deepEqual(await retry(ids), [other]);
  assert.deepEqual(await retry(`array[]::uuid[]`), []);
});

Deno.test("without ids only dead jobs go back, the first to die first, of one kind or of any, at most as many as asked for", async () => {
  const cancelled = await enqueue(db.sql);
  await db.sql`select cancel_jobs(${[cancelled]}::uuid[])`;
  const died = [];
  for (let n = 0; n < 4; n++) died.push(await addDead(n === 1 ? "other" : "test"));
  // The last is the first to have died.
  await db.sql`update jobs set finished_at = now() - interval '1 hour' where id = ${died[3] ?? ""}`;
  assert.deepEqual(await retry("kind => 'test', max_jobs => 1"), [died[3]]);
  assert.deepEqual(await retry("kind => 'test'"), [died[0], died[2]]);
  assert.deepEqual(await retry("kind => 'nothing'"), []);
  assert.deepEqual(await retry(""), [died[1]]);
  assert.equal((await job(db.sql, cancelled)).status, "cancelled");
});

Deno.test("of two dead jobs with one key one goes back, and of more than fit the rest wait for the next call", async () => {
  for (let n = 0; n < 2; n++) {
    const { id } = only(
      await db.sql<{ id: string }[]>`select enqueue_job('test', dedupe_key => 'k') as id`,
    );
    const { lease_token } = only(await claim(db.sql));
    await db.sql`select fail_job(${id}, ${lease_token}, 'boom', permanent => true)`;
  }
  const rest = await addDead();
  const back = await retry("kind => 'test'");
  assert.equal(back.length, 2);
  assert.ok(back.includes(rest));
  const stayed = only(await db.sql`select * from jobs where status = 'dead'`);
  assert.match(stayed.last_error, /^boom\nsuperseded/);
});

Deno.test("max_jobs that is not usable is refused", async () => {
  for (const max of ["0", "-1", "100001", "null"]) {
    await assert.rejects(retry(`max_jobs => ${max}`), {
      code: "22023",
      message: new RegExp(`max_jobs ${max} is not between`),
    });
  }
});

Deno.test("a job that somebody keeps locked stays as it is, and the others go back", async () => {
  const ids = [await addDead(), await addDead()];
  const open = await openTransaction(db);
  await open.sql`select from jobs where id = ${ids[1] ?? ""} for update`;
  assert.deepEqual(await retry("kind => 'test'"), [ids[0]]);
  await open.sql`rollback`;
  assert.deepEqual(await retry("kind => 'test'"), [ids[1]]);
});
