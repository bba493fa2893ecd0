import assert from "node:assert/strict";
import postgres from "postgres";
import { only, openTransaction, sharedDatabase, untilBlocking } from "./queue.ts";
import { addSchedules, allSchedules, schedule } from "./schedules.ts";

const db = sharedDatabase();

interface Ensured {
  scheduled: string[];
  removed: string[];
}

const hourly = (name: string, more: Record<string, postgres.JSONValue> = {}) => ({
  name,
  cron: "@hourly",
  kind: "test",
  ...more,
});

async function ensure(
  definitions: postgres.JSONValue,
  prefix: string | null = "p:",
  tenant: string | null = null,
): Promise<Ensured> {
  const { scheduled, removed } = only(
    await db.sql<Ensured[]>`select * from ensure_schedules(${
      db.sql.json(definitions)
    }, ${prefix}, ${tenant})`,
  );
  return { scheduled, removed };
}

async function ensureApp(
  sql: postgres.Sql,
  digest: string,
  definitions: postgres.JSONValue,
): Promise<Ensured & { error: string | null }> {
  const { scheduled, removed, error } = only(
    await sql<(Ensured & { error: string | null })[]>`
      select * from ensure_app_schedules(${digest}, ${sql.json(definitions)})`,
  );
  return { scheduled, removed, error };
}

/** Each schedule with the version of its row, which changes with every update. */
const versions = async () =>
  (await db.sql`select name || ' ' || xmin as version from schedules order by name`).map(({ version }) =>
    version
  );

Deno.test("what is defined is scheduled, what is not is removed, and what is there as defined is left alone", async () => {
  await addSchedules(db.sql, ["o", "p:old", "q"]);
  const definitions = [
    hourly("p:b", { next_run: "2041-01-01T00:00:00Z" }),
    hourly("p:a", { payload: { n: [1, null] } }),
  ];
  assert.deepEqual(await ensure(definitions), { scheduled: ["p:a", "p:b"], removed: ["p:old"] });
  assert.deepEqual(await allSchedules(db.sql), ["o", "p:a", "p:b", "q"]);
  assert.deepEqual((await schedule(db.sql, "p:a")).payload, { n: [1, null] });
  assert.deepEqual((await schedule(db.sql, "p:b")).next_run, new Date("2041-01-01T00:00:00Z"));

  const before = await versions();
  const nextRuns = definitions.map((each) => ({ ...each, next_run: "2042-01-01T00:00:00Z" }));
  assert.deepEqual(await ensure(nextRuns.reverse()), { scheduled: [], removed: [] });
  assert.deepEqual(await versions(), before);
});

Deno.test("whatever changes of a definition is taken; the pause and, with the same cron and zone, the next run stay", async () => {
  await ensure([hourly("p:a")]);
  await db.sql`update schedules set next_run = '2040-01-01', paused = true where true`;
  let definition = hourly("p:a");
  const taken = async (change: Record<string, postgres.JSONValue>) => {
    definition = { ...definition, ...change };
    assert.deepEqual(await ensure([definition]), { scheduled: ["p:a"], removed: [] });
    assert.deepEqual(await ensure([definition]), { scheduled: [], removed: [] });
    const row = await schedule(db.sql, "p:a");
    assert.equal(row.paused, true);
    return row;
  };
  const given = new Date("2040-01-01T00:00:00Z");
  const changes: Record<string, postgres.JSONValue> = {
    kind: "other",
    payload: { n: 1 },
    tenant: "t",
    context: { user_id: "u" },
    priority: 1,
    max_attempts: 7,
    overlap: "skip",
  };
  for (const [field, value] of Object.entries(changes)) {
    const row = await taken({ [field]: value });
    assert.deepEqual(row[field], value);
    assert.deepEqual(row.next_run, given);
  }
  assert.ok((await taken({ time_zone: "Asia/Tokyo" })).next_run < given);
  await db.sql`update schedules set next_run = '2040-01-01' where true`;
  assert.ok((await taken({ cron: "2 hours" })).next_run < given);
  assert.equal((await taken({ overlap: null })).overlap, "allow", "null is as if it were left out");
});

Deno.test("a tenant's call gives its definitions that tenant, and removes no other's", async () => {
  await ensure([hourly("p:1"), hourly("p:2", { tenant: "b" })]);
  assert.deepEqual(await ensure([hourly("p:3"), hourly("p:4", { tenant: "a" })], "p:", "a"), {
    scheduled: ["p:3", "p:4"],
    removed: [],
  });
  const tenants = await db.sql`select tenant from schedules order by name`;
  assert.deepEqual(tenants.map(({ tenant }) => tenant), [null, "b", "a", "a"]);
  // Nor takes it another's, or nobody's, for itself.
  for (const name of ["p:1", "p:2"]) {
    await assert.rejects(ensure([hourly("p:5"), hourly(name)], "p:", "a"), {
      code: "22023",
      message: `ensure_schedules: entry 1, '${name}': name '${name}' is that of another tenant's schedule`,
    });
  }
  await assert.rejects(ensure([hourly("p:2", { tenant: "b" })], "p:", "a"), {
    code: "22023",
    message: "ensure_schedules: entry 0, 'p:2': tenant 'b' is not that of the call",
  });
  assert.deepEqual(await ensure([], "p:", "a"), { scheduled: [], removed: ["p:3", "p:4"] });
  assert.deepEqual(await ensure([], "p:"), { scheduled: [], removed: ["p:1", "p:2"] });
});

const unusable: [definitions: postgres.JSONValue, message: string][] = [
  [{}, "definitions is object, not an array"],
  [["x"], "entry 0: it is string, not an object"],
  [[hourly("p:a"), hourly("p:b", { paused: true })], "entry 1, 'p:b': there is no field 'paused'"],
  [[{ cron: "@hourly", kind: "test" }], "entry 0: name null does not have 1 to 200 characters"],
  [[hourly("p:a"), hourly("p:a")], "entry 1, 'p:a': name 'p:a' is there already"],
  [[hourly("a")], "entry 0, 'a': name 'a' does not start with 'p:'"],
  [[hourly("p:a"), hourly("p:b", { kind: "B" })], "entry 1, 'p:b': kind 'B' is not a kind's name"],
  [[hourly("p:a", { cron: "0 25 * * *" })], "entry 0, 'p:a': hour: 25 is not within 0-23"],
  [[hourly("p:a", { priority: "high" })], `entry 0, 'p:a': invalid input syntax for type integer: "high"`],
  [[hourly("p:a", { next_run: "soon" })], "entry 0, 'p:a': invalid input syntax for type timestamp"],
];

Deno.test("one wrong definition is named by its entry, and nothing is written", async () => {
  await addSchedules(db.sql, ["p:old"]);
  for (const [definitions, message] of unusable) {
    const entry = Array.isArray(definitions) ? [hourly("p:fine"), ...definitions] : definitions;
    const expected = message.replace(/\d+/, (n) => String(Number(n) + 1));
    await assert.rejects(
      ensure(entry),
      (error: postgres.PostgresError) =>
        error.code === "22023" && error.message.startsWith(`ensure_schedules: ${expected}`),
      expected,
    );
  }
  for (const prefix of ["", null]) {
    await assert.rejects(ensure([], prefix), { code: "22023", message: /prefix is not given/ });
  }
  await assert.rejects(ensure([], "p:", ""), { code: "22023", message: /tenant is empty/ });
  assert.deepEqual(await allSchedules(db.sql), ["p:old"]);
});

Deno.test("two calls with the same names in whatever order both come to their end", async () => {
  const names = Array.from({ length: 30 }, (_, n) => `p:${n}`);
  const once = (n: number) =>
    ensure(names.toSorted(() => Math.random() - 0.5).slice(n).map((name) => hourly(name, { priority: n })));
  for (let round = 0; round < 3; round++) await Promise.all(Array.from({ length: 10 }, (_, n) => once(n)));
  assert.deepEqual((await ensure(names.map((name) => hourly(name)))).removed, []);
  assert.deepEqual(await allSchedules(db.sql), names.toSorted());
});

Deno.test("what is there as defined waits for nobody's lock", async () => {
  await ensure([hourly("p:a")]);
  const holder = await openTransaction(db);
  await holder.sql`select from schedules for update`;
  assert.deepEqual(await ensure([hourly("p:a")]), { scheduled: [], removed: [] });
  await holder.sql`rollback`;
});

const nothingDone = { scheduled: [], removed: [], error: null };

Deno.test("the app's schedules are brought in step once for each digest", async () => {
  const definitions = [hourly("app:a"), hourly("app:b")];
  assert.deepEqual(await ensureApp(db.sql, "1", definitions), {
    scheduled: ["app:a", "app:b"],
    removed: [],
    error: null,
  });
  // What an operator does stays until the app declares something else; the pause even then.
  await db.sql`select unschedule_job('app:a'), pause_schedule('app:b')`;
  assert.deepEqual(await ensureApp(db.sql, "1", definitions), nothingDone);
  assert.deepEqual(await allSchedules(db.sql), ["app:b"]);
  assert.deepEqual(await ensureApp(db.sql, "2", [...definitions, hourly("app:c")]), {
    scheduled: ["app:a", "app:c"],
    removed: [],
    error: null,
  });
  assert.equal((await schedule(db.sql, "app:b")).paused, true);
  assert.deepEqual(await ensureApp(db.sql, "3", []), {
    scheduled: [],
    removed: ["app:a", "app:b", "app:c"],
    error: null,
  });
});

Deno.test("a digest whose definitions are refused is not taken for done: nothing is changed, and the health says why until it is mended", async () => {
  const health = async () =>
    only(await db.sql`select ok, detail from job_dispatch_health() where item = 'schedules'`);
  await ensureApp(db.sql, "1", [hourly("app:a")]);
  const error = "ensure_schedules: entry 1, 'app:b': hour: 25 is not within 0-23";
  const wrong = [hourly("app:c"), hourly("app:b", { cron: "0 25 * * *" })];
  for (let i = 0; i < 2; i++) {
    assert.deepEqual(await ensureApp(db.sql, "2", wrong), { scheduled: [], removed: [], error });
    assert.deepEqual({ ...await health() }, { ok: false, detail: `failed: _app/schedules.ts (${error})` });
  }
  assert.deepEqual(await allSchedules(db.sql), ["app:a"]);
  // By going back as well as by going on.
  assert.deepEqual(await ensureApp(db.sql, "1", [hourly("app:a")]), nothingDone);
  assert.equal((await health()).ok, true);
  await ensureApp(db.sql, "2", wrong);
  assert.deepEqual((await ensureApp(db.sql, "3", [hourly("app:b")])).scheduled, ["app:b"]);
  assert.equal((await health()).ok, true);
});

Deno.test("who keeps the app's digest locked keeps a worker that starts for a second at most", async () => {
  await ensureApp(db.sql, "1", []);
  const holder = await openTransaction(db);
  await holder.sql`update private.app_schedules set digest = '2' where one`;
  await assert.rejects(ensureApp(db.sql, "3", []), { code: "55P03" });
  await holder.sql`rollback`;
});

Deno.test("of many who bring one digest in step one does it, and after its end; should that roll back, another does", async () => {
  const holder = await openTransaction(db);
  assert.deepEqual((await ensureApp(holder.sql, "1", [hourly("app:a")])).scheduled, ["app:a"]);
  const others = Array.from({ length: 8 }, () => ensureApp(db.sql, "1", [hourly("app:a")]));
  await untilBlocking(db, holder.pid);
  await holder.sql`rollback`;
  const scheduled = (await Promise.all(others)).flatMap(({ scheduled }) => scheduled);
  assert.deepEqual(scheduled, ["app:a"]);
});
