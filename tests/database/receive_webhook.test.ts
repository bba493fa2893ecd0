import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import postgres from "postgres";
import { seeded } from "../support.ts";
import {
  emptyNetQueue,
  only,
  openTransaction,
  queuedPokes,
  setUpDispatch,
  sharedDatabase,
  untilBlocking,
} from "./queue.ts";

const db = sharedDatabase();

interface Given {
  source?: string;
  body?: string | Uint8Array;
  message_id?: string | null;
  type?: string | null;
  tenant?: string | null;
  headers?: postgres.JSONValue;
  payload?: postgres.JSONValue;
  concurrency_key?: string;
  context?: postgres.JSONValue;
}

interface Received {
  id: string;
  created: boolean;
}

/** Receives a message; of source `billing`, with the body `{}` and the id `m` unless given. */
async function receive(given: Given = {}, sql = db.sql): Promise<Received> {
  const { source = "billing", body = "{}", message_id = "m", type = null, tenant = null } = given;
  const json = (value?: postgres.JSONValue) => value === undefined ? null : sql.json(value);
  const { headers = {}, payload, concurrency_key = null, context } = given;
  const rows = await sql<Received[]>`
    select * from receive_webhook(${source}, ${Buffer.from(body)}::bytea, ${message_id}, ${type}, ${tenant},
      ${sql.json(headers)}, ${json(payload)}, ${concurrency_key}, ${json(context)})`;
  return only(rows);
}

/** What is stored of a message, payload as Postgres writes it. */
async function stored(id: string): Promise<postgres.Row> {
  return only(await db.sql`select *, payload::text as json from webhook_inbox where id = ${id}`);
}

async function counts(): Promise<number[]> {
  const { messages, jobs } = only(
    await db.sql`
    select (select count(*)::int from webhook_inbox) as messages, (select count(*)::int from jobs) as jobs`,
  );
  return [messages, jobs];
}

Deno.test("a message is stored with all that is known of it, and its job waits under the same id for a worker", async () => {
  await setUpDispatch(db);
  await emptyNetQueue(db.sql);
  const facts = { type: "invoice.paid", tenant: "acme", headers: { "content-type": "application/json" } };
  const { id, created } = await receive({
    ...facts,
    body: '{"a": 1}',
    concurrency_key: "customer 7",
    context: { user_id: "u" },
  });
  assert.equal(created, true);
  const { received_at, json: _, body, ...row } = await stored(id);
  assert.deepEqual(
    { ...row, body: body.toString() },
    {
      id,
      source: "billing",
      message_id: "m",
      ...facts,
      payload: { a: 1 },
      body: '{"a": 1}',
      other_bodies: 0,
    },
  );
  assert.ok(Math.abs(Date.now() - received_at) < 60_000);
  const job = only(await db.sql`select * from claim_jobs('w')`);
  assert.deepEqual([job.id, job.kind, job.payload, job.concurrency_key, job.context], [
    id,
    "webhook_billing",
    {},
    "customer 7",
    { user_id: "u" },
  ]);
  assert.equal(await queuedPokes(db.sql), 1);
  const read = only(await db.sql`select * from read_webhook(${id})`);
  assert.deepEqual({ ...read }, { message_id: "m", ...facts, body: body.toString("base64"), received_at });
});

Deno.test("fifty at once of one message are one row and one job, and one of them has created it", async () => {
  const sql = db.connect("postgres", { max: 50 });
  await Promise.all(Array.from({ length: 50 }, () => sql`select pg_sleep(0.05)`)); // fifty connections
  for (const tenant of [null, "acme"]) {
    const all = await Promise.all(Array.from({ length: 50 }, () => receive({ tenant }, sql)));
    assert.equal(all.filter(({ created }) => created).length, 1);
    assert.equal(new Set(all.map(({ id }) => id)).size, 1);
  }
  assert.deepEqual(await counts(), [2, 2]);
  await sql.end();
});

Deno.test("who meets a message that is being stored waits: it is a duplicate once that is committed, and new when that is undone", async () => {
  for (const end of ["commit", "rollback"]) {
    const message_id = end;
    const first = await openTransaction(db);
    const mine = await receive({ message_id }, first.sql);
    assert.equal(
      (await db.sql`select from jobs where id = ${mine.id}`).count,
      0,
      "it is not there before the commit",
    );
    const others = Array.from({ length: 5 }, () => receive({ message_id }));
    await untilBlocking(db, first.pid);
    await first.sql.unsafe(end);
    const answers = await Promise.all(others);
    assert.equal(answers.filter(({ created }) => created).length, end === "commit" ? 0 : 1);
    const ids = new Set(answers.map(({ id }) => id));
    assert.deepEqual([ids.size, ids.has(mine.id)], [1, end === "commit"]);
    assert.equal(
      (await db.sql`select from jobs j join webhook_inbox w using (id) where w.message_id = ${end}`).count,
      1,
    );
  }
  assert.deepEqual(await counts(), [2, 2]);
});

Deno.test("a message and its job are there together or not at all, however the job goes", async () => {
  await db.sql`
    create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no jobs today'; end $$`;
  await db.sql`create trigger refuse before insert on jobs for each row execute function refuse()`;
  try {
    await assert.rejects(receive(), /no jobs today/);
  } finally {
    await db.sql`drop trigger refuse on jobs`;
    await db.sql`drop function refuse`;
  }
  assert.deepEqual(await counts(), [0, 0]);
  const { id } = await receive();
  await receive({ message_id: "other" });
  await db.sql`delete from jobs where id = ${id}`;
  assert.deepEqual(await counts(), [1, 1]);
  await db.sql`truncate jobs cascade`;
  assert.deepEqual(await counts(), [0, 0]);
  const service = db.connect("authenticator", { max: 1 });
  await service`set role service_role`;
  await receive({}, service);
  await service`delete from jobs where kind = 'webhook_billing'`;
  assert.deepEqual(await counts(), [0, 0]);
});

Deno.test("a message that comes again while it is purged waits for that: it is new once that is committed, else a duplicate", async () => {
  for (const end of ["rollback", "commit"]) {
    const { id } = await receive();
    const purge = await openTransaction(db);
    await purge.sql`select purge_webhooks('billing')`;
    const again = receive();
    await untilBlocking(db, purge.pid);
    await purge.sql.unsafe(end);
    const { created, id: stored } = await again;
    assert.deepEqual([created, stored === id], [end === "commit", end !== "commit"]);
  }
});

Deno.test("a message that is purged between the insert that meets it and the look for it is stored anew", async () => {
  const { id } = await receive();
  // A trigger at the insert's end is where the call can be held.
  await db.sql.unsafe(`
    create function hold() returns trigger language plpgsql as
      $$ begin perform pg_advisory_xact_lock(1); return null; end $$;
    create trigger hold after insert on webhook_inbox for each statement execute function hold();
  `).simple();
  try {
    const holder = await openTransaction(db);
    await holder.sql`select pg_advisory_xact_lock(1)`;
    const again = receive();
    await untilBlocking(db, holder.pid);
    assert.equal(only(await db.sql`select purge_webhooks('billing') as n`).n, 1);
    await holder.sql`commit`;
    const { created, id: stored } = await again;
    assert.deepEqual([created, stored === id], [true, false]);
  } finally {
    await db.sql`drop function hold cascade`;
  }
  assert.deepEqual(await counts(), [1, 1]);
});

Deno.test("messages that come while all are purged again and again are each stored, or were", async () => {
  const seed = Math.floor(Math.random() * 2 ** 32);
  console.log(`seed ${seed}`);
  const random = seeded(seed);
  let purging = true;
  let purged = 0;
  const purger = (async () => {
    while (purging) {
      purged += only(
        await db.sql`select purge_webhooks('billing') as n`.catch((error) => {
          if (error.code === "55P03") return [{ n: 0 }];
          throw error;
        }),
      ).n;
    }
  })();
  const answers = await Promise.all(Array.from({ length: 6 }, async () => {
    const mine: Received[] = [];
    for (let i = 0; i < 60; i++) {
      mine.push(
        await receive({
          message_id: String(Math.floor(random() * 3)),
          body: String(Math.floor(random() * 2)),
        }),
      );
    }
    return mine;
  }));
  purging = false;
  await purger;
  const all = answers.flat();
  const made = all.filter(({ created }) => created).map(({ id }) => id);
  assert.equal(new Set(made).size, made.length);
  assert.ok(all.every(({ id }) => made.includes(id)), "a duplicate names a message that somebody has stored");
  const [messages, jobs] = await counts();
  assert.deepEqual([messages, jobs], [made.length - purged, made.length - purged]);
  assert.ok(purged > 3, `${purged} were purged`);
});

Deno.test("the same id with another body is the same message: the first body stays, and how often others came is said", async () => {
  const first = await receive({ body: "first", type: "a", headers: { a: "1" } });
  const before = await stored(first.id);
  for (const body of ["second", "first", "third", "", "second"]) {
    assert.deepEqual(await receive({ body, type: "b", headers: {} }), { id: first.id, created: false });
  }
  const { other_bodies, ...after } = await stored(first.id);
  assert.equal(other_bodies, 4);
  assert.deepEqual({ ...after, other_bodies: 0 }, { ...before });
  assert.deepEqual(await counts(), [1, 1]);
});

Deno.test("the same id of another source, or of another tenant, is another message; none is a tenant of its own", async () => {
  const seen = new Set<string>();
  for (const source of ["billing", "shop"]) {
    for (const tenant of [null, "a", "b", "A", " "]) {
      const { id, created } = await receive({ source, tenant });
      assert.equal(created, true, `${source} ${tenant}`);
      seen.add(id);
      assert.deepEqual(await receive({ source, tenant }), { id, created: false });
    }
  }
  assert.equal(seen.size, 10);
});

Deno.test("a message without an id is known by the hash of its body", async () => {
  const { id } = await receive({ message_id: null, body: "hello" });
  assert.deepEqual(await receive({ message_id: null, body: "hello" }), { id, created: false });
  assert.equal((await receive({ message_id: null, body: "hello " })).created, true);
  assert.equal((await receive({ message_id: null, body: "hello", tenant: "a" })).created, true);
  assert.equal((await stored(id)).message_id, `sha256:${createHash("sha256").update("hello").digest("hex")}`);
});

const text = (value: string) => Buffer.from(value);
const MIB = 1024 * 1024;

/** Bodies, and the payload that jsonb has of each, written as Postgres does; null for none. */
const bodies: Record<string, [body: Uint8Array, payload: string | null]> = {
  "every byte": [Uint8Array.from({ length: 256 }, (_, i) => i), null],
  "nothing": [text(""), null],
  "white space": [text(" \n"), null],
  "null": [text("null"), "null"],
  "numbers beyond 2^53": [
    text("[9007199254740993, 12345678901234567890123, 0.1000, -1e2]"),
    "[9007199254740993, 12345678901234567890123, 0.1000, -100]",
  ],
  "the largest number": [text("1e131071"), `1${"0".repeat(131_071)}`],
  "a number beyond it": [text("1e131072"), null],
  "a number without end": [text("1e999999999999"), null],
  "many large numbers": [text(`[${Array(80_000).fill("1e130000").join()}]`), null],
  "many long zeros": [text(`[${Array(80_000).fill("0e-16000").join()}]`), null],
  "U+0000": [text('{"a": "\\u0000"}'), null],
  "half a surrogate pair": [text('{"a": "\\ud800"}'), null],
  "a whole pair": [text('{"a": "\\ud83d\\ude00"}'), '{"a": "😀"}'],
  "twice the same key": [text('{"a": 1, "a": 2}'), '{"a": 2}'],
  "a byte order mark": [text("\uFEFF{}"), "{}"],
  "two of them": [text("\uFEFF\uFEFF{}"), null],
  "not UTF-8": [Uint8Array.of(0x22, 0xff, 0x22), null],
  "UTF-16": [Uint8Array.of(0x7b, 0, 0x7d, 0), null],
  "broken off": [text('{"a": [1, 2'), null],
  "a form": [text("a=1&b=2"), null],
  "100,000 levels": [text("[".repeat(100_000) + "]".repeat(100_000)), null],
  "1 MiB of text": [text(`"${"x".repeat(MIB - 2)}"`), `"${"x".repeat(MIB - 2)}"`],
  "1 MiB of numbers": [text(`[${"1,".repeat(MIB / 2 - 2)}1]`), `[${"1, ".repeat(MIB / 2 - 2)}1]`],
  "6 MiB of numbers": [text(`[${"1,".repeat(3 * MIB - 2)}1]`), null],
};

Deno.test("every body is stored byte for byte and at once, and its payload is exact or null", async () => {
  let slowest: [ms: number, name: string] = [0, ""];
  for (const [name, [body, payload]] of Object.entries(bodies)) {
    const started = performance.now();
    const { id, created } = await receive({ message_id: name, body });
    const took = performance.now() - started;
    if (took > slowest[0]) slowest = [Math.round(took), name];
    const row = await stored(id);
    assert.ok(created && Buffer.compare(row.body, body) === 0, name);
    assert.ok(row.json === payload, `${name}: ${row.json?.slice(0, 80)}`);
  }
  // A sender waits for three seconds; it takes a fifth of one on a machine at rest.
  assert.ok(slowest[0] < 2_000, slowest.join(" ms: "));
});

Deno.test("a payload may be given where the body is not JSON; one that is too large to keep is not, and the message is", async () => {
  const form = await receive({ message_id: "form", body: "a=1", payload: { a: "1" } });
  assert.equal((await stored(form.id)).json, '{"a": "1"}');
  const large = await receive({ message_id: "large", body: "a=1", payload: { a: "x".repeat(4_000_001) } });
  assert.equal((await stored(large.id)).json, null);
  assert.equal((await stored(large.id)).body.toString(), "a=1");
});

Deno.test("what cannot be is refused by name, and nothing of it is stored", async () => {
  const long = "é".repeat(256) + "x"; // 513 bytes
  const wrong: [given: string, message: RegExp][] = [
    ["null, ''", /source null is not/],
    ["'Stripe', ''", /source 'Stripe' is not/],
    ["'', ''", /source '' is not/],
    ["E'a\\n', ''", /source 'a/],
    [`'${"a".repeat(56)}', ''`, /is not a source's name/],
    ["'a', null", /body is null/],
    ["'a', null, 'id'", /body is null/],
    ["'a', '', message_id => ''", /message_id does not have 1 to 512 bytes/],
    [`'a', '', message_id => '${long}'`, /message_id does not have 1 to 512 bytes/],
    ["'a', '', tenant => ''", /tenant does not have 1 to 512 bytes/],
    [`'a', '', tenant => '${long}'`, /tenant does not have 1 to 512 bytes/],
    [`'a', '', type => '${long}'`, /type has more than 512 bytes/],
    ["'a', '', concurrency_key => ''", /concurrency_key does not have 1 to 512 characters/],
    ["'a', '', headers => null", /headers is not an object of texts/],
    ...["[]", '"a"', "null", '{"a": 1}', '{"a": null}', '{"a": ["x"]}', '{"a": []}', '{"a": "x", "b": {}}']
      .map((
        json,
      ): [string, RegExp] => [`'a', '', headers => '${json}'`, /headers is not an object of texts/]),
  ];
  for (const [given, message] of wrong) {
    await assert.rejects(
      db.sql.unsafe(`select receive_webhook(${given})`),
      { code: "22023", message },
      given,
    );
  }
  const context = db.sql`
    select receive_webhook('a', '', context => to_jsonb(repeat('x', 4000001)))`;
  await assert.rejects(context, { code: "22023", message: /context has more than/ });
  assert.deepEqual(await counts(), [0, 0]);
  const most = "é".repeat(256);
  const { id } = await receive({ source: "a".repeat(55), message_id: most, type: most, tenant: most });
  assert.equal((await stored(id)).type, most);
});

Deno.test("a duplicate is found in the same time among many of its source, and among many tenants with its id", async () => {
  const sql = db.connect("postgres", { max: 1 });
  const buffers = async (args: string) => {
    const query = `explain (analyze, buffers, format json) select receive_webhook('billing', '{}', ${args})`;
    await sql.unsafe(query);
    const plan = only(await sql.unsafe(query))["QUERY PLAN"][0].Plan;
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"];
  };
  await fill(5_000, "'id' || n", "null");
  await fill(5_000, "'same'", "'tenant' || n");
  for (const args of ["'id7'", "'same', tenant => 'tenant7'", "'new'"]) {
    const read = await buffers(args);
    assert.ok(read < 100, `${args}: ${read} buffers`);
  }
});

/** That many messages of source `billing`, with ids and tenants in SQL, where n counts them. */
async function fill(count: number, messageId: string, tenant: string): Promise<void> {
  await db.sql.unsafe(`
    with added as (
      insert into jobs (kind) select 'webhook_billing' from generate_series(1, ${count}) returning id
    ), numbered as (select id, row_number() over () as n from added)
    insert into webhook_inbox (id, source, message_id, tenant, body)
    select id, 'billing', ${messageId}, ${tenant}, '{}' from numbered`);
}
