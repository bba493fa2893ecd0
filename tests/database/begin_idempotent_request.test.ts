import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import postgres from "postgres";
import { seeded } from "../support.ts";
import { cost, type Database, only, openTransaction, sharedDatabase, untilBlocking } from "./queue.ts";

/** begin_idempotent_request and what follows it: extend_, complete_ and release_idempotent_request. */

const db = sharedDatabase();

interface Begun {
  outcome: "started" | "in_progress" | "mismatch" | "replay";
  holder: number | null;
  status: number | null;
  headers: Record<string, string> | null;
  body: Buffer | null;
}

async function begin(
  key: string,
  fingerprint = "f",
  scope = "s",
  sql: postgres.Sql = db.sql,
): Promise<Begun> {
  return only(
    await sql<Begun[]>`
      select outcome, holder::float8, status, headers, body
      from begin_idempotent_request(${key}, ${fingerprint}, scope => ${scope})`,
  );
}
async function outcome(...args: Parameters<typeof begin>): Promise<string> {
  return (await begin(...args)).outcome;
}
/** Begins a request, which must start, and gives back its holder. */
async function start(...args: Parameters<typeof begin>): Promise<number> {
  const { outcome, holder } = await begin(...args);
  assert.equal(outcome, "started");
  assert.ok(holder);
  return holder;
}
interface Answer {
  status?: number;
  headers?: Record<string, string>;
  body?: Buffer;
}
async function complete(key: string, holder: number, answer: Answer = {}, scope = "s"): Promise<boolean> {
  const { status = 200, headers = {}, body = Buffer.from("done") } = answer;
  return only(
    await db.sql`
      select complete_idempotent_request(${key}, ${holder}, ${status}, ${
      db.sql.json(headers)
    }, ${body}, ${scope}) as held`,
  ).held;
}
const extend = async (key: string, holder: number, seconds = 60, scope = "s"): Promise<boolean> =>
  only(
    await db.sql`select extend_idempotent_request(${key}, ${holder}, ${seconds}, ${scope}) as held`,
  ).held;
const release = async (key: string, holder: number, scope = "s"): Promise<boolean> =>
  only(await db.sql`select release_idempotent_request(${key}, ${holder}, ${scope}) as held`).held;
/** The whole row, to see that nothing of it has changed. */
const row = async (key: string) =>
  only(await db.sql`select k::text from idempotency_keys k where key = ${key}`);

/** Moves a key in time: its lock is over, or all of it. */
async function endLock(key: string): Promise<void> {
  await db.sql`
    update idempotency_keys set expires_at = expires_at - (locked_until - clock_timestamp()), locked_until = clock_timestamp()
    where key = ${key}`;
}
const expire = (key: string) =>
  db.sql`
    update idempotency_keys set locked_until = least(locked_until, clock_timestamp()), expires_at = clock_timestamp()
    where key = ${key}`;

Deno.test("a request starts once; until it ends it is in progress, and then its answer is replayed", async () => {
  const holder = await start("a");
  assert.equal(await outcome("a"), "in_progress");
  const headers = { "Content-Type": "text/plain", ETag: '"ü"' };
  const body = Buffer.from(Uint8Array.from({ length: 256 }, (_, n) => n));
  assert.equal(await complete("a", holder, { status: 201, headers, body }), true);
  const answer = { outcome: "replay", holder: null, status: 201, headers, body };
  assert.deepEqual([{ ...await begin("a") }, { ...await begin("a") }], [answer, answer]);
  assert.equal(await complete("b", await start("b"), { body: Buffer.alloc(0) }), true);
  assert.deepEqual((await begin("b")).body, Buffer.alloc(0));
});

Deno.test("of a hundred who begin at once one starts", async () => {
  const sessions = Array.from({ length: 10 }, () => db.connect("postgres", { max: 1 }));
  for (const before of ["nothing", "its lock is over", "it has expired"]) {
    if (before === "its lock is over") await endLock("a");
    if (before === "it has expired") await expire("a");
    const all = await Promise.all(
      Array.from({ length: 100 }, (_, n) => outcome("a", "f", "s", sessions[n % 10])),
    );
    assert.deepEqual(all.filter((each) => each !== "in_progress"), ["started"], before);
  }
  await Promise.all(sessions.map((session) => session.end()));
});

Deno.test("another request with the key is a mismatch, in flight, stale and finished, and changes nothing", async () => {
  const holder = await start("a");
  for (const state of ["in flight", "stale", "finished"]) {
    if (state === "stale") await endLock("a");
    if (state === "finished") await complete("a", holder);
    const before = await row("a");
    assert.equal(await outcome("a", "other"), "mismatch", state);
    assert.deepEqual(await row("a"), before, state);
  }
  assert.equal(await outcome("a"), "replay");
});

Deno.test("once its lock is over the same request starts anew, and the late holder can do nothing any more", async () => {
  const late = await start("a");
  await endLock("a");
  const next = await start("a");
  assert.ok(next > late);
  const before = await row("a");
  assert.deepEqual([await complete("a", late), await release("a", late), await extend("a", late)], [
    false,
    false,
    false,
  ]);
  assert.deepEqual(await row("a"), before);
  assert.equal(await complete("a", next, { body: Buffer.from("next") }), true);
  assert.deepEqual([await complete("a", late), await release("a", late)], [false, false]);
  assert.deepEqual((await begin("a")).body, Buffer.from("next"));
});

Deno.test("a holder whose lock is over, and whom nobody has replaced, may store: its work is done", async () => {
  const holder = await start("a");
  await endLock("a");
  assert.equal(await extend("a", holder), true);
  assert.equal(await outcome("a"), "in_progress");
  await endLock("a");
  assert.equal(await complete("a", holder), true);
  assert.equal(await outcome("a"), "replay");
});

Deno.test("storing the same answer again is no loss, and another one is refused; what is stored is not released", async () => {
  const holder = await start("a");
  assert.equal(await complete("a", holder), true);
  const before = await row("a");
  assert.equal(await complete("a", holder), true);
  for (const other of [{ status: 201 }, { body: Buffer.from("other") }, { headers: { ETag: "e" } }]) {
    assert.equal(await complete("a", holder, other), false);
  }
  assert.deepEqual([await release("a", holder), await extend("a", holder)], [false, false]);
  assert.deepEqual(await row("a"), before);
});

Deno.test("a request that was released starts again at once, and is whatever comes next", async () => {
  const first = await start("a");
  assert.equal(await release("a", first), true);
  assert.equal(await release("a", first), false);
  const second = await start("a", "other");
  assert.deepEqual([await complete("a", first), await complete("a", second)], [false, true]);
});

Deno.test("the lock lasts 60 seconds, or as many as are said, and the answer a day from the end, or as long as is said", async () => {
  const times = async () =>
    only(
      await db.sql`
        select round(extract(epoch from locked_until - clock_timestamp()))::int as lock,
          round(extract(epoch from expires_at - clock_timestamp()))::int as ttl from idempotency_keys`,
    );
  const holder = only(await db.sql`select holder::float8 from begin_idempotent_request('a', 'f')`).holder;
  assert.deepEqual({ ...await times() }, { lock: 60, ttl: 86_460 });
  await extend("a", holder, 100, "");
  assert.deepEqual({ ...await times() }, { lock: 100, ttl: 86_500 });
  await complete("a", holder, {}, "");
  assert.equal((await times()).ttl, 86_400);
  await db.sql`delete from idempotency_keys where key = 'a'`;
  const other = only(
    await db.sql`select holder::float8 from begin_idempotent_request('a', 'f', 5, '1 hour', 's')`,
  ).holder;
  assert.deepEqual({ ...await times() }, { lock: 5, ttl: 3605 });
  await complete("a", other);
  assert.equal((await times()).ttl, 3600);
});

Deno.test("a key whose time is over is free for another request", async () => {
  await complete("a", await start("a"));
  await expire("a");
  const holder = await start("a", "other");
  assert.equal(await outcome("a"), "mismatch");
  await complete("a", holder, { body: Buffer.from("other") });
  assert.deepEqual((await begin("a", "other")).body, Buffer.from("other"));
});

Deno.test("scopes do not meet; without one it is the user whose request this is, and nobody else's", async () => {
  await complete("a", await start("a", "f", "s"));
  assert.equal(await outcome("a", "f", "t"), "started");
  const own = db.connect("postgres", { max: 1 });
  const as = async (claims: { role: string; sub?: string } | null) => {
    await own`select set_config('request.jwt.claims', ${claims ? JSON.stringify(claims) : ""}, false)`;
    const { holder } = only(await own`select holder from begin_idempotent_request('b', 'f')`);
    return holder;
  };
  const user = { role: "authenticated", sub: "ada" };
  const holder = await as(user);
  assert.ok(holder && await as({ role: "authenticated", sub: "eve" }) && await as({ role: "service_role" }));
  assert.equal(await as(user), null, "it is in progress");
  assert.equal(await as(null), null, "without a user it is one scope");
  await as(user);
  assert.equal(only(await own`select complete_idempotent_request('b', ${holder}, 200) as held`).held, true);
  const scopes = await own`select scope from idempotency_keys where key = 'b' order by scope`;
  assert.deepEqual(scopes.map(({ scope }) => scope), ["", "user ada", "user eve"]);
  for (const claims of [{ role: "anon" }, { role: "anon", sub: "" }]) {
    await assert.rejects(as(claims), {
      code: "22023",
      message: "begin_idempotent_request: scope is not given, and nobody is signed in",
    });
  }
});

Deno.test("what is begun in a transaction that rolls back was never begun; what commits is replayed to who waited", async () => {
  for (const end of ["rollback", "commit"]) {
    const other = await openTransaction(db);
    const { holder } = await begin(end, "f", "s", other.sql);
    await other.sql`select complete_idempotent_request(${end}, ${holder}, 200, '{}', 'done', 's')`;
    const waiting = begin(end);
    await untilBlocking(db, other.pid);
    await other.sql.unsafe(end);
    assert.equal((await waiting).outcome, end === "commit" ? "replay" : "started");
  }
});

Deno.test("who begins what another transaction keeps open is told after a second that it is in progress", async () => {
  const other = await openTransaction(db);
  await begin("a", "f", "s", other.sql);
  const began = performance.now();
  assert.equal(await outcome("a"), "in_progress");
  assert.equal(await outcome("a", "other"), "in_progress", "nobody can know yet what it is");
  assert.ok(performance.now() - began < 5000);
  await other.sql`commit`;
  assert.equal(await outcome("a", "other"), "mismatch");
});

Deno.test("while the whole table is locked nothing is said of any request", async () => {
  const other = await openTransaction(db);
  await other.sql`lock table idempotency_keys, leases in access exclusive mode`;
  const calls = [begin("a"), db.sql`select acquire_lease('a')`, db.sql`select extend_lease('a', 1)`];
  await Promise.all(calls.map((call) => assert.rejects(call, { code: "55P03" })));
  await other.sql`rollback`;
});

Deno.test("a transaction whose snapshot does not see a key that is there is told to begin anew", async () => {
  const own = db.connect("postgres", { max: 1 });
  await own`begin isolation level repeatable read`;
  await own`select from idempotency_keys`;
  await complete("a", await start("a"));
  await assert.rejects(begin("a", "f", "s", own), { code: "40001" });
  await own`rollback`;
});

Deno.test("what is not usable is refused with 22023, naming it", async () => {
  const begins: [args: string, message: RegExp][] = [
    ["'', 'f'", /^begin_idempotent_request: key does not have 1 to 255 characters$/],
    ["null, 'f'", /key does not have/],
    ["repeat('é', 256), 'f'", /key does not have/],
    ["'a', ''", /^begin_idempotent_request: fingerprint does not have 1 to 512 bytes$/],
    ["'a', null", /fingerprint/],
    ["'a', repeat('f', 513)", /fingerprint/],
    ["'a', 'f', 0", /^begin_idempotent_request: lock_seconds 0 is not between 1 and 86400$/],
    ["'a', 'f', null", /lock_seconds null/],
    ["'a', 'f', ttl => '0'", /^begin_idempotent_request: ttl 00:00:00 is not between 1 second and 366 days$/],
    ["'a', 'f', ttl => null", /ttl null/],
    ["'a', 'f', ttl => '367 days'", /ttl 367 days/],
    [
      "'a', 'f', scope => repeat('é', 257)",
      /^begin_idempotent_request: scope does not have up to 512 bytes$/,
    ],
  ];
  const calls = begins.map(([args, message]) => [`begin_idempotent_request(${args})`, message] as const);
  const completes: [args: string, message: RegExp][] = [
    ["199", /^complete_idempotent_request: status 199 is not between 200 and 599$/],
    ["null", /status null/],
    [
      "200, 'null'",
      /^complete_idempotent_request: headers is not an object of texts with up to 65536 bytes$/,
    ],
    ["200, null", /headers is not/],
    [`200, '{"a": 1}'`, /headers is not/],
    ["200, jsonb_build_object('a', repeat('x', 65536))", /headers is not/],
    ["200, '{}', null", /^complete_idempotent_request: body is null$/],
    ["200, '{}', convert_to(repeat('x', 6291457), 'UTF8')", /body has more than 6291456 bytes$/],
  ];
  const more = completes.map(([args, message]) =>
    [`complete_idempotent_request('a', 1, ${args})`, message] as const
  );
  const last = [[
    "extend_idempotent_request('a', 1, 0)",
    /^extend_idempotent_request: lock_seconds 0/,
  ]] as const;
  for (const [call, message] of [...calls, ...more, ...last]) {
    await assert.rejects(db.sql.unsafe(`select ${call}`), { code: "22023", message }, call);
  }
  assert.equal((await db.sql`select from idempotency_keys`).count, 0);
  const key = "é".repeat(255);
  assert.equal(await complete(key, await start(key, "f".repeat(512)), { body: Buffer.alloc(6291456) }), true);
});

Deno.test("whatever is called in whatever order, it does what a simple model of it does", async () => {
  const seed = Math.floor(Math.random() * 1e9);
  console.log(`seed ${seed}`);
  const random = seeded(seed);
  const pick = <T>(list: readonly T[]): T => list[Math.floor(random() * list.length)] ?? assert.fail();
  type Kept = { fingerprint: string; holder: number; stale: boolean; answer: string | null };
  const model = new Map<string, Kept>();
  const holders: { key: string; holder: number }[] = [];
  const seen = new Map<string, number>();
  for (let i = 0; i < 600; i++) {
    const key = pick(["a", "b", "c"]);
    const kept = model.get(key);
    const action = pick(["begin", "begin", "begin", "complete", "release", "extend", "endLock", "expire"]);
    let result = action;
    if (action === "begin") {
      const fingerprint = pick(["f", "f", "g"]);
      const begun = await begin(key, fingerprint);
      const expected = kept && kept.fingerprint !== fingerprint
        ? "mismatch"
        : kept && kept.answer !== null
        ? "replay"
        : kept && !kept.stale
        ? "in_progress"
        : "started";
      assert.equal(begun.outcome, expected);
      assert.equal(begun.body?.toString(), expected === "replay" ? kept?.answer : undefined);
      if (begun.holder) {
        assert.ok(holders.every(({ holder }) => holder < (begun.holder ?? 0)));
        holders.push({ key, holder: begun.holder });
        model.set(key, { fingerprint, holder: begun.holder, stale: false, answer: null });
      }
      result = expected;
    } else if (action === "endLock") {
      await endLock(key);
      if (kept) kept.stale = true;
    } else if (action === "expire") {
      if (random() < 0.5) continue;
      await expire(key);
      model.delete(key);
      if (random() < 0.5) await db.sql`select purge_expired_keys()`;
      // What is left of it may be finished by its holder, as long as nobody needs the key.
      else await db.sql`delete from idempotency_keys where key = ${key}`;
    } else if (holders.length > 0) {
      const of = random() < 0.5 && kept ? { key, holder: kept.holder } : pick(holders);
      const state = model.get(of.key);
      const holds = state?.holder === of.holder;
      const answer = String(i);
      if (action === "complete") {
        assert.equal(
          await complete(of.key, of.holder, { body: Buffer.from(answer) }),
          holds && state.answer === null,
        );
        if (holds) state.answer ??= answer;
      } else if (action === "release") {
        assert.equal(await release(of.key, of.holder), holds && state.answer === null);
        if (holds && state.answer === null) model.delete(of.key);
      } else {
        assert.equal(await extend(of.key, of.holder), holds && state.answer === null);
        if (holds && state.answer === null) state.stale = false;
      }
      result = `${action} ${holds}`;
    }
    seen.set(result, (seen.get(result) ?? 0) + 1);
  }
  for (const each of ["started", "replay", "mismatch", "in_progress", "complete true", "release false"]) {
    assert.ok((seen.get(each) ?? 0) > 3, `${each}: ${JSON.stringify([...seen])}`);
  }
});

Deno.test("beside 20,000 keys a call touches few pages", async () => {
  await db.sql`
    insert into idempotency_keys (scope, key, fingerprint, holder, locked_until, ttl, expires_at)
    select 's', 'k' || n, 'f', n, now(), '1 day', now() + interval '1 day' from generate_series(1, 20000) n`;
  const own = db.connect("postgres", { max: 1 });
  for (
    const call of [
      "begin_idempotent_request('k#', 'f', scope => 's')",
      "begin_idempotent_request('new #', 'f', scope => 's')",
      "extend_idempotent_request('k1#', 1#, scope => 's')",
      "complete_idempotent_request('k1#', 1#, 200, scope => 's')",
      "release_idempotent_request('k2#', 2#, 's')",
    ]
  ) {
    await cost(own, `select ${call.replaceAll("#", "7")}`); // the session's first looks at more
    const { buffers } = await cost(own, `select ${call.replaceAll("#", "8")}`);
    assert.ok(buffers < 150, `${call}: ${buffers}`);
  }
});

/** A function of an app's, which its users call over REST: the README's. */
const createOrder = await readmeFunction();

async function readmeFunction(): Promise<string> {
  const readme = await Deno.readTextFile(new URL("../../README.md", import.meta.url));
  const blocks = [...readme.matchAll(/```sql\n([\s\S]*?)```/g)].map(([, text = ""]) => text);
  return blocks.filter((text) => /create (table orders|function create_order)/.test(text)).join("\n");
}

Deno.test("a function that begins and completes in its own transaction makes one order for each key", async () => {
  const { sql } = db;
  await sql.unsafe(createOrder).simple();
  const order = (caller: postgres.Sql, request: string, item: string, quantity = 1) =>
    caller`select create_order(${request}, ${item}, ${quantity}) as answer`.then(only);
  const [ada, eve] = [await asUser(db, crypto.randomUUID()), await asUser(db, crypto.randomUUID())];
  const first = await order(ada, "1", "book");
  assert.deepEqual(await order(ada, "1", "book"), first);
  assert.notDeepEqual(await order(eve, "1", "book"), first);
  await assert.rejects(order(ada, "1", "pen"), { code: "PT422" });
  // What fails has never been begun, so that the key is good for another.
  await assert.rejects(order(ada, "2", "book", 0), { code: "23514" });
  assert.ok(await order(ada, "2", "pen"));
  const adas = only(await sql`select owner from orders where request = '2'`).owner;
  const more = await Promise.all([adas, adas, adas].map((owner) => asUser(db, owner)));
  const [one, ...others] = await Promise.all(more.map((caller) => order(caller, "3", "book")));
  assert.deepEqual(others, [one, one]);
  const made = await sql`select request, count(*)::int as n from orders group by 1 order by 1`;
  assert.deepEqual(made.map(({ request, n }) => [request, n]), [["1", 2], ["2", 1], ["3", 1]]);
  await sql`drop function create_order; drop table orders`.simple();
});

/** A connection that is a signed-in user, as REST makes it. */
async function asUser(db: Database, sub: string): Promise<postgres.Sql> {
  const sql = db.connect("postgres", { max: 1 });
  await sql`select set_config('request.jwt.claims', ${
    JSON.stringify({ sub, role: "authenticated" })
  }, false)`;
  await sql`set role authenticated`;
  return sql;
}
