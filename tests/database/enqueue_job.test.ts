import assert from "node:assert/strict";
import { endlessInterval, job, only, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

Deno.test("enqueue_job writes the same row as a plain insert, and returns its id", async () => {
  const { id } = only(await db.sql`select enqueue_job('send_email', '{"to": "a@example.com"}') as id`);
  const inserted = only(
    await db
      .sql`insert into jobs (kind, payload) values ('send_email', '{"to": "a@example.com"}') returning *`,
  );
  const times = { id: 0, available_at: 0, created_at: 0, updated_at: 0 };
  assert.deepEqual({ ...await job(db.sql, id), ...times }, { ...inserted, ...times });
});

Deno.test("what is given is stored as it is", async () => {
  const { id } = only(
    await db.sql`
      select enqueue_job('test', '["ü", null, 1.50]', priority => -7, max_attempts => 3,
        context => '{"user": 5}', dedupe_key => 'k', dedupe => 'once', concurrency_key => 'c') as id`,
  );
  const row = await job(db.sql, id);
  assert.deepEqual([row.dedupe_key, row.dedupe, row.concurrency_key], ["k", "once", "c"]);
  assert.deepEqual([row.payload, row.priority, row.max_attempts, row.context], [["ü", null, 1.5], -7, 3, {
    user: 5,
  }]);
});

Deno.test("a job exists only if the caller's transaction commits", async () => {
  const undone = db.sql.begin(async (tx) => {
    await tx`select enqueue_job('test')`;
    throw new Error("undo");
  });
  await assert.rejects(undone, /undo/);
  assert.equal((await db.sql`select from jobs`).count, 0);
});

Deno.test("a delay counts from the call, by the database's clock", async () => {
  await db.sql`select enqueue_job('test', delay => '90 seconds')`;
  const row = only(
    await db.sql`select extract(epoch from available_at - created_at)::float as seconds from jobs`,
  );
  assert.ok(Math.abs(row.seconds - 90) < 1, `available after ${row.seconds} s`);
});

Deno.test("a time in the future is kept; one in the past becomes now, so that it overtakes nobody", async () => {
  const first = only(await db.sql`select enqueue_job('test') as id`).id;
  const past = only(await db.sql`select enqueue_job('test', available_at => '2020-01-01') as id`).id;
  const future = only(await db.sql`select enqueue_job('test', available_at => '2120-01-01') as id`).id;
  assert.equal((await job(db.sql, future)).available_at.toISOString(), "2120-01-01T00:00:00.000Z");
  assert.deepEqual((await db.sql`select id from claim_jobs('w')`).map(({ id }) => id), [first, past]);
});

Deno.test("an argument that is not usable is refused and named", async () => {
  const endless = await endlessInterval(db.sql);
  const cases: [call: string, message: RegExp][] = [
    ["null", /kind null is not/],
    ["'Send Email'", /kind 'Send Email' is not/],
    ["''", /kind '' is not/],
    [`repeat('x', 64)`, /kind 'x{64}' is not/],
    ["'test', null", /payload is null/],
    ["'test', delay => '1 s', available_at => now()", /both delay and available_at/],
    ["'test', delay => '-1 s'", /delay -00:00:01 is not/],
    ["'test', delay => '11 years'", /delay 11 years is not/],
    [`'test', delay => '${endless}'`, new RegExp(`delay ${endless} is not`)],
    ["'test', available_at => 'infinity'", /available_at is infinity/],
    ["'test', available_at => '-infinity'", /available_at is -infinity/],
    ["'test', priority => 101", /priority 101 is not/],
    ["'test', priority => -101", /priority -101 is not/],
    ["'test', priority => null", /priority null is not/],
    ["'test', max_attempts => 0", /max_attempts 0 is not/],
    ["'test', max_attempts => 1001", /max_attempts 1001 is not/],
    ["'test', dedupe_key => ''", /dedupe_key has 0 characters/],
    ["'test', dedupe_key => repeat('x', 513)", /dedupe_key has 513 characters/],
    [
      "'test', dedupe_key => 'k', dedupe => 'always'",
      /dedupe 'always' is not active, waiting, replace or once/,
    ],
    ["'test', dedupe => null", /dedupe null is not/],
    ["'test', concurrency_key => ''", /concurrency_key has 0 characters/],
    ["'test', concurrency_key => repeat('x', 513)", /concurrency_key has 513 characters/],
  ];
  for (const [call, message] of cases) {
    await assert.rejects(db.sql.unsafe(`select enqueue_job(${call})`), { code: "22023", message }, call);
  }
  await assert.rejects(db.sql`select enqueue_job('test', '"\\u0000"'::jsonb)`, { code: "22P05" });
  assert.equal((await db.sql`select from jobs`).count, 0);
});

Deno.test("a payload of more than 4 MB of JSON is refused, however it comes in, with what to do instead", async () => {
  const large = db.sql`jsonb_build_object('x', repeat('é', 2000000))`;
  for (
    const enqueue of [
      () => db.sql`select enqueue_job('test', ${large})`,
      () => db.sql`insert into jobs (kind, payload) values ('test', ${large})`,
      // A megabyte as it is stored, six as JSON.
      () => db.sql`select enqueue_job('test', jsonb_build_object('x', repeat(chr(1), 1000000)))`,
    ]
  ) {
    await assert.rejects(async () => await enqueue(), {
      code: "22023",
      message: /^jobs: payload or context has more than 4000000 bytes of JSON$/,
      hint: /Storage/,
    });
  }
  await db.sql`select enqueue_job('test', jsonb_build_object('x', repeat('é', 1900000)))`;
  assert.equal((await db.sql`select from jobs`).count, 1);
});

Deno.test("so is such a context, and JSON that has few bytes in the database and would have gigabytes as text", async () => {
  // 8000 times 131,072 digits.
  const bomb = db.sql`('[' || repeat('1e131071, ', 7999) || '1e131071]')::jsonb`;
  const small = db.sql`('[' || repeat('1e131071, ', 30) || '1e131071]')::jsonb`;
  await db.sql`create table public.kept (document jsonb)`;
  await db.sql`insert into public.kept select ${bomb}`;
  for (
    const enqueue of [
      () => db.sql`select enqueue_job('test', ${bomb})`,
      () => db.sql`select enqueue_job('test', context => ${bomb})`,
      () =>
        db.sql`insert into jobs (kind, context) values ('test', jsonb_build_object('x', repeat('é', 2000000)))`,
      () => db.sql`select enqueue_job('test', ${small})`,
      () => db.sql`insert into jobs (kind, payload) select 'test', document from public.kept`, // compressed
    ]
  ) {
    const startedAt = performance.now();
    await assert.rejects(async () => await enqueue(), {
      code: "22023",
      message: /^jobs: payload or context has more/,
    });
    assert.ok(performance.now() - startedAt < 2000);
  }
  await db.sql`drop table public.kept`;
  assert.equal((await db.sql`select from jobs`).count, 0);
});

Deno.test("whoever asks is recorded: the user of the request's JWT, with tenant and claims, unless a context is given", async () => {
  const ways = [
    "select enqueue_job('test') as id",
    "insert into jobs (kind) values ('test') returning id",
    `select id from enqueue_jobs('[{"kind": "test"}]')`,
    "select enqueue_job('test', dedupe_key => gen_random_uuid()::text, dedupe => 'replace') as id",
  ];
  const contextOf = (claims: string, way: string) =>
    db.sql.begin(async (sql) => {
      await sql`select set_config('request.jwt.claims', ${claims}, true)`;
      const { id } = only(await sql.unsafe(way));
      return only(await sql`select context from jobs where id = ${id}`).context;
    });
  const act = { sub: "support" };
  const user = { sub: "u1", role: "authenticated", act, app_metadata: { tenant_id: "t1" } };
  const claims = JSON.stringify({ ...user, exp: 1, iat: 1, nbf: 1, jti: "x" });
  for (const way of ways) {
    assert.deepEqual(await contextOf(claims, way), { user_id: "u1", tenant_id: "t1", claims: user }, way);
  }
  const [way = ""] = ways;
  const own = { sub: "u2", tenant_id: "t2", app_metadata: { tenant_id: "t1" } };
  assert.deepEqual(await contextOf(JSON.stringify(own), way), {
    user_id: "u2",
    tenant_id: "t2",
    claims: own,
  });
  assert.deepEqual(await contextOf('{"sub": "u3"}', way), {
    user_id: "u3",
    tenant_id: null,
    claims: { sub: "u3" },
  });
  for (const nobody of ["", '{"role": "service_role"}', '{"sub": ""}', '{"sub": null}', "[]", "null", "1"]) {
    assert.equal(await contextOf(nobody, way), null, nobody);
  }
  for (const given of ["{}", "null", '{"user": 5}']) {
    const enqueued = `select enqueue_job('test', context => '${given}') as id`;
    assert.deepEqual(await contextOf(claims, enqueued), JSON.parse(given), given);
  }
});

Deno.test("a replacement takes the context of whoever replaces", async () => {
  const enqueueAs = (sub: string) =>
    db.sql.begin(async (sql) => {
      await sql`select set_config('request.jwt.claims', ${JSON.stringify({ sub })}, true)`;
      return only(await sql`select enqueue_job('test', dedupe_key => 'k', dedupe => 'replace') as id`).id;
    });
  const id = await enqueueAs("first");
  assert.equal(await enqueueAs("second"), id);
  assert.equal((await job(db.sql, id)).context.user_id, "second");
});
