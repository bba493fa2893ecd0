import assert from "node:assert/strict";
import {
  claim,
  cost,
  enqueue,
  enqueueAndClaim,
  expireLeases,
  job,
  only,
  openTransaction,
  rowText,
  sharedDatabase,
  untilBlocking,
} from "./queue.ts";

const db = sharedDatabase();

const rescue = "select rescue_expired_jobs() as n";

Deno.test("a job whose lease ran out is available again at once, and that attempt has failed", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await expireLeases(db.sql);
  assert.equal(only(await db.sql.unsafe(rescue)).n, 1);
  const row = await job(db.sql, id);
  assert.deepEqual([row.status, row.attempts], ["pending", 1]);
  assert.match(
    row.last_error,
    /^lease expired: worker w neither finished the job nor extended its lease by /,
  );
  const failure = only(await db.sql`select * from job_failures`);
  assert.deepEqual([failure.attempt, failure.lease_token, failure.worker], [1, lease_token, "w"]);
  assert.equal(failure.error, row.last_error);
  const again = only(await claim(db.sql, 1, "another"));
  assert.deepEqual([again.id, again.attempts], [id, 2]);
});

Deno.test("a lease that runs out on the last attempt makes the job dead, and last_error says why", async () => {
  await db.sql`insert into jobs (kind, max_attempts) values ('test', 2)`;
  for (const status of ["pending", "dead"]) {
    const { id } = only(await claim(db.sql));
    await expireLeases(db.sql);
    await db.sql.unsafe(rescue);
    assert.equal((await job(db.sql, id)).status, status);
  }
  const row = only(await db.sql`select * from jobs`);
  assert.match(row.last_error, /^lease expired: worker w /);
  assert.ok(row.finished_at);
  assert.deepEqual(await claim(db.sql), []);
});

Deno.test("a lease that holds, and anything that is not running, is left alone", async () => {
  const running = await enqueueAndClaim(db.sql);
  const succeeded = await enqueueAndClaim(db.sql);
  await db.sql`select complete_job(${succeeded.id}, ${succeeded.lease_token})`;
  const pending = await enqueue(db.sql);
  const ids = [running.id, succeeded.id, pending];
  const before = await Promise.all(ids.map((id) => rowText(db.sql, id)));
  assert.equal(only(await db.sql.unsafe(rescue)).n, 0);
  assert.deepEqual(await Promise.all(ids.map((id) => rowText(db.sql, id))), before);
});

Deno.test("a job for which a trigger of the app raises stays, with a warning, and holds up no other", async () => {
  const warnings: (string | undefined)[] = [];
  const sql = db.connect("postgres", { max: 1, onnotice: ({ message }) => warnings.push(message) });
  const bad = await enqueueAndClaim(sql, "raises");
  const good = [await enqueueAndClaim(sql), await enqueueAndClaim(sql)];
  await expireLeases(sql);
  await sql.unsafe(`
    create function public.refuse() returns trigger language plpgsql as $$
    begin
      if new.kind = 'raises' then raise exception 'not this one'; end if;
      return new;
    end $$;
    create trigger refuse before update on public.jobs for each row execute function public.refuse();
  `).simple();
  try {
    assert.equal(only(await sql.unsafe(rescue)).n, 2);
  } finally {
    await sql`drop function public.refuse cascade`;
  }
  assert.deepEqual(warnings.filter((text) => text?.startsWith("rescue")), [
    `rescue_expired_jobs: job ${bad.id} stays: not this one`,
  ]);
  for (const { id } of good) assert.equal((await job(sql, id)).status, "pending");
  assert.equal(only(await sql.unsafe(rescue)).n, 1);
});

Deno.test("at most max_jobs are rescued, those that ran out first", async () => {
  for (let i = 0; i < 3; i++) await enqueue(db.sql);
  const [a, b, c] = await claim(db.sql);
  assert.ok(a && b && c);
  const expired = { [c.id]: 30, [a.id]: 20, [b.id]: 10 };
  for (const [id, seconds] of Object.entries(expired)) {
    await db.sql`
      update jobs set lease_expires_at = clock_timestamp() - make_interval(secs => ${seconds}) where id = ${id}`;
  }
  assert.equal(only(await db.sql`select rescue_expired_jobs(2) as n`).n, 2);
  const left = await db.sql`select id from jobs where status = 'running'`;
  assert.deepEqual(left.map(({ id }) => id), [b.id]);
});

Deno.test("a job that is being completed is not waited for, and stays completed", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await expireLeases(db.sql);
  const worker = await openTransaction(db);
  assert.equal(only(await worker.sql`select complete_job(${id}, ${lease_token}) as held`).held, true);
  assert.equal(only(await db.sql.unsafe(rescue)).n, 0);
  await worker.sql`commit`;
  assert.equal(only(await db.sql.unsafe(rescue)).n, 0);
  const row = await job(db.sql, id);
  assert.deepEqual([row.status, row.last_error], ["succeeded", null]);
});

Deno.test("a worker that completes while its job is being rescued is told that it lost it", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await expireLeases(db.sql);
  const rescuer = await openTransaction(db);
  assert.equal(only(await rescuer.sql.unsafe(rescue)).n, 1);
  const completion = db.sql`select complete_job(${id}, ${lease_token}) as held`.execute();
  await untilBlocking(db, rescuer.pid);
  await rescuer.sql`commit`;
  assert.equal(only(await completion).held, false);
  assert.equal((await job(db.sql, id)).status, "pending");
});

Deno.test("a worker that completes while a rescue rolls back keeps its job", async () => {
  const { id, lease_token } = await enqueueAndClaim(db.sql);
  await expireLeases(db.sql);
  const rescuer = await openTransaction(db);
  await rescuer.sql.unsafe(rescue);
  const completion = db.sql`select complete_job(${id}, ${lease_token}) as held`.execute();
  await untilBlocking(db, rescuer.pid);
  await rescuer.sql`rollback`;
  assert.equal(only(await completion).held, true);
  assert.equal((await job(db.sql, id)).status, "succeeded");
});

Deno.test("leases that hold cost a rescue nothing", async () => {
  const sql = db.connect("postgres", { max: 1 });
  await cost(sql, rescue); // what is cached once per session is read here
  await sql`
    insert into jobs (kind, status, lease_expires_at)
    select 'test', 'running', clock_timestamp() + interval '1 hour' from generate_series(1, 10000)`;
  const { buffers } = await cost(sql, rescue);
  assert.ok(buffers < 60, `${buffers} buffers to find that none of 10,000 leases has run out`);
});
