import assert from "node:assert/strict";
import postgres from "postgres";
import { seeded } from "../support.ts";
import { cost, only, openTransaction, sharedDatabase, untilBlocking } from "./queue.ts";

/** acquire_lease, extend_lease and release_lease. */

const db = sharedDatabase();

/** The holder; null when somebody else has it. */
async function acquire(key: string, seconds = 60, scope = "", sql: postgres.Sql = db.sql) {
  const { holder } = only(await sql`select acquire_lease(${key}, ${seconds}, ${scope})::float8 as holder`);
  return holder as number | null;
}
async function extend(key: string, holder: number | null, seconds = 60, scope = "") {
  return only(await db.sql`select extend_lease(${key}, ${holder}, ${seconds}, ${scope}) as held`).held;
}
async function release(key: string, holder: number | null, scope = "", sql: postgres.Sql = db.sql) {
  return only(await sql`select release_lease(${key}, ${holder}, ${scope}) as held`).held;
}
/** How many seconds a lease has left. */
async function left(key: string): Promise<number> {
  const [row] = await db.sql`
    select extract(epoch from expires_at - clock_timestamp())::float8 as seconds from leases where key = ${key}`;
  return row?.seconds ?? 0;
}
const expire = (key: string) =>
  db.sql`update leases set expires_at = clock_timestamp() - interval '1 ms' where key = ${key}`;

Deno.test("a lease has one holder until it is released; then the next has it, with a higher number", async () => {
  const first = await acquire("a");
  assert.equal(await acquire("a"), null);
  assert.equal(await release("a", first), true);
  assert.equal(await release("a", first), false);
  const second = await acquire("a");
  assert.ok(first && second && second > first);
});

Deno.test("keys and scopes do not meet", async () => {
  const holders = [await acquire("a"), await acquire("b"), await acquire("a", 60, "t"), await acquire("A")];
  assert.ok(holders.every(Boolean));
  assert.equal(await release("a", holders[2] ?? null), false, "without its scope it is another's");
  assert.equal(await release("a", holders[2] ?? null, "t"), true);
  assert.equal(await acquire("a"), null);
});

Deno.test("it lasts 60 seconds, or as long as is said, and as long from each extension on", async () => {
  const a = only(await db.sql`select acquire_lease('a')::float8 as holder`).holder;
  assert.ok(Math.abs(await left("a") - 60) < 1);
  assert.equal(only(await db.sql`select extend_lease('a', ${a}) as held`).held, true);
  assert.equal(await extend("a", a, 300), true);
  assert.ok(Math.abs(await left("a") - 300) < 1);
  assert.equal(await extend("a", a, 5), true);
  assert.ok(Math.abs(await left("a") - 5) < 1);
});

Deno.test("a late holder can neither extend nor release, whether or not another has taken its place", async () => {
  const late = await acquire("a");
  await expire("a");
  assert.deepEqual([await extend("a", late), await release("a", late)], [false, false]);
  const next = await acquire("a");
  assert.ok(late && next && next > late);
  assert.deepEqual([await extend("a", late), await release("a", late)], [false, false]);
  assert.equal(await extend("a", next), true);
});

Deno.test("of many who want a lease at once one gets it", async () => {
  for (const key of ["new", "expired"]) {
    if (key === "expired") {
      await acquire(key);
      await expire(key);
    }
    const sessions = Array.from({ length: 8 }, () => db.connect("postgres", { max: 1 }));
    const holders = await Promise.all(
      Array.from({ length: 80 }, (_, n) => acquire(key, 60, "", sessions[n % 8])),
    );
    assert.equal(holders.filter((holder) => holder !== null).length, 1, key);
    await Promise.all(sessions.map((session) => session.end()));
  }
});

Deno.test("two holders never overlap, and each has a higher number than the one before, however they end", async () => {
  const seed = Math.floor(Math.random() * 1e9);
  console.log(`seed ${seed}`);
  const random = seeded(seed);
  const { sql } = db;
  // Whoever holds a lease writes here what it has seen: the one before it must have had a lower number, and be gone.
  await sql`create unlogged table held (key text primary key, holder bigint, at_work int not null default 0)`;
  await sql`insert into held select k, 0 from unnest(array['a', 'b', 'c']) k`;
  const ends = { released: 0, expired: 0, purged: 0, busy: 0 };
  const work = async () => {
    const own = db.connect("postgres", { max: 1 });
    for (let i = 0; i < 60; i++) {
      const key = "abc"[Math.floor(random() * 3)] ?? "a";
      const end = random();
      const holder = await acquire(key, 60, "", own);
      if (holder === null) {
        ends.busy++;
        continue;
      }
      const [seen] = await own`
        update held set holder = ${holder}, at_work = at_work + 1
        where key = ${key} and holder < ${holder} and at_work = 0 returning key`;
      assert.ok(seen, `${key}: ${holder} came beside or after a later one`);
      await own`update held set at_work = 0 where key = ${key}`;
      if (end < 0.5) {
        assert.equal(await release(key, holder, "", own), true);
        ends.released++;
        continue;
      }
      await own`update leases set expires_at = clock_timestamp() where key = ${key} and holder = ${holder}`;
      if (end < 0.75) await own`select purge_expired_keys()`;
      ends[end < 0.75 ? "purged" : "expired"]++;
    }
    await own.end();
  };
  await Promise.all(Array.from({ length: 8 }, work));
  assert.ok(Object.values(ends).every((count) => count > 5), JSON.stringify(ends));
  await sql`drop table held`;
});

Deno.test("who asks while another transaction takes a lease is told after a second that it is not free", async () => {
  const other = await openTransaction(db);
  const holder = await acquire("a", 60, "", other.sql);
  const began = performance.now();
  const asking = acquire("a");
  await untilBlocking(db, other.pid);
  assert.equal(await asking, null);
  assert.ok(performance.now() - began < 3000);
  await other.sql`commit`;
  assert.equal(await acquire("a"), null);
  assert.equal(await release("a", holder), true);
});

Deno.test("a lease that is taken in a transaction which rolls back was never taken", async () => {
  const other = await openTransaction(db);
  const never = await acquire("a", 60, "", other.sql);
  const asking = acquire("a");
  await untilBlocking(db, other.pid);
  await other.sql`rollback`;
  const holder = await asking;
  assert.ok(holder && never && holder > never);
  assert.equal(await release("a", never), false);
});

Deno.test("numbers go on rising in a project that is set up anew", async () => {
  const { ms } = only(await db.sql`select extract(epoch from clock_timestamp()) * 1000 as ms`);
  const holder = await acquire("a");
  assert.ok(holder && Math.abs(Number(ms) - holder) < 3_600_000 && Number.isSafeInteger(holder));
});

Deno.test("what is not usable is refused with 22023, naming it", async () => {
  const wrong: [call: string, message: RegExp][] = [
    ["acquire_lease('')", /^acquire_lease: key does not have 1 to 512 characters$/],
    ["acquire_lease(null)", /key does not have/],
    ["acquire_lease(repeat('é', 513))", /key does not have/],
    ["acquire_lease('a', scope => null)", /scope does not have up to 512 bytes$/],
    ["acquire_lease('a', scope => repeat('é', 257))", /scope does not have/],
    ["acquire_lease('a', 0)", /^acquire_lease: seconds 0 is not between 1 and 86400$/],
    ["acquire_lease('a', 86401)", /seconds 86401/],
    ["acquire_lease('a', null)", /seconds null/],
    ["extend_lease('a', 1, 0)", /^extend_lease: seconds 0/],
  ];
  for (const [call, message] of wrong) {
    await assert.rejects(db.sql.unsafe(`select ${call}`), { code: "22023", message }, call);
  }
  assert.equal((await db.sql`select from leases`).count, 0);
  assert.ok(await acquire("é".repeat(512), 86400, "é".repeat(256)));
  assert.equal(await release("nobody's", null), false);
});

Deno.test("beside 20,000 leases a call touches few pages", async () => {
  await db.sql`
    insert into leases (scope, key, holder, expires_at)
    select 's', 'k' || n, n, clock_timestamp() + interval '1 hour' from generate_series(1, 20000) n`;
  const own = db.connect("postgres", { max: 1 });
  for (
    const call of [
      "acquire_lease('k7', 60, 's')",
      "acquire_lease('new', 60, 's')",
      "extend_lease('k7', 7, 60, 's')",
      "release_lease('k7', 7, 's')",
    ]
  ) {
    await cost(own, `select ${call.replace("k7", "k8").replace(" 7,", " 8,")}`); // the session's first looks at more
    const { buffers } = await cost(own, `select ${call}`);
    assert.ok(buffers < 150, `${call}: ${buffers}`);
  }
});
