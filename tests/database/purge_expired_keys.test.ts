import assert from "node:assert/strict";
import { only, openTransaction, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

/** Adds idempotency keys whose time is over for so long; below zero it is to come. */
async function add(keys: string[], over = "1 minute"): Promise<void> {
  await db.sql`
    insert into idempotency_keys (scope, key, fingerprint, holder, locked_until, ttl, expires_at)
    select 's', k, 'f', 1, clock_timestamp() - ${over}::interval - interval '1 day', '1 day',
      clock_timestamp() - ${over}::interval
    from unnest(${keys}::text[]) k`;
}
const purge = async (most = 10_000): Promise<number> =>
  only(await db.sql`select purge_expired_keys(${most}) as deleted`).deleted;
/** Without a worker to poke a tick raises, but for one that has deleted something. */
const tick = async (sql = db.sql) => {
  await sql`select private.tick()`.catch((error) => assert.equal(error.code, "55000"));
};

Deno.test("the tick deletes keys and leases whose time is over, and no others", async () => {
  await add(["over"]);
  await add(["kept"], "-1 minute");
  await db.sql`select acquire_lease('over'), acquire_lease('held')`;
  await db.sql`update leases set expires_at = clock_timestamp() where key = 'over'`;
  await tick();
  const left = await db.sql`select key from idempotency_keys union all select key from leases order by 1`;
  assert.deepEqual(left.map(({ key }) => key), ["held", "kept"]);
});

Deno.test("it deletes so many at most, and passes over what is locked", async () => {
  await add(["a", "b", "c"]);
  const other = await openTransaction(db);
  await other.sql`select from idempotency_keys where key = 'b' for update`;
  assert.deepEqual([await purge(1), await purge(), await purge()], [1, 1, 0]);
  await other.sql`commit`;
  assert.equal(await purge(), 1);
});

Deno.test("what keeps keys from being deleted stops nothing else of a tick, and shows in the health", async () => {
  const { sql } = db;
  await add(["a"], "61 minutes");
  await sql.unsafe(`
    create function no() returns trigger language plpgsql as $$ begin raise exception 'not mine'; end $$;
    create trigger no before delete on idempotency_keys for each row execute function no()`).simple();
  const item = async () => {
    const { ok, detail } = only(await sql`select ok, detail from job_dispatch_health() where item = 'purge'`);
    return { ok, detail };
  };
  try {
    const warnings: string[] = [];
    const own = db.connect("postgres", { max: 1, onnotice: ({ message }) => warnings.push(String(message)) });
    await own`select schedule_job('s', '@hourly', 'test', next_run => '2020-01-01')`;
    await tick(own);
    assert.ok(warnings.includes("tick: expired keys: not mine"), warnings.join());
    assert.equal((await sql`select from jobs where schedule = 's'`).count, 1);
    const detail = "should be deleted since an hour or more: idempotency keys";
    assert.deepEqual(await item(), { ok: false, detail });
  } finally {
    await sql`drop function no cascade`;
  }
  assert.equal(await purge(), 1);
  assert.equal((await item()).ok, true);
});

Deno.test("it leaves off after a second, however many are left", async () => {
  await add(Array.from({ length: 20_000 }, (_, n) => `k${n}`));
  await db.sql.unsafe(`
    create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.004); return old; end $$;
    create trigger slow before delete on idempotency_keys for each row execute function slow()`).simple();
  try {
    assert.equal(await purge(), 500);
  } finally {
    await db.sql`drop function slow cascade`;
  }
  assert.equal(await purge(), 10_000);
  assert.equal(await purge(100_000), 9_500);
});
