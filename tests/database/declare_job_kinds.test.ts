import assert from "node:assert/strict";
import postgres from "postgres";
import { only, openTransaction, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

interface Declaration {
  max_attempts?: number | null;
  timeout_ms?: number | null;
  backoff_base?: string;
  backoff_factor?: number;
  backoff_cap?: string;
  backoff_jitter?: number;
}

/** Declares the kind `test` and gives back what holds for it. */
async function declare(sql: postgres.Sql, declaration: Declaration) {
  const declarations = [{ kind: "test", ...declaration }];
  const { kind, ...settings } = only(await sql`select * from declare_job_kinds(${sql.json(declarations)})`);
  assert.equal(kind, "test");
  return settings;
}

Deno.test("what the code declares holds, and what it leaves out is the default", async () => {
  assert.deepEqual(await declare(db.sql, {}), { max_attempts: 5, timeout_ms: 45_000 });
  assert.deepEqual(await declare(db.sql, { max_attempts: 8 }), { max_attempts: 8, timeout_ms: 45_000 });
  const all = {
    max_attempts: 2,
    timeout_ms: 10,
    backoff_base: "90 s",
    backoff_factor: 1.5,
    backoff_jitter: 0,
  };
  assert.deepEqual(await declare(db.sql, { ...all, backoff_cap: "1 day" }), {
    max_attempts: 2,
    timeout_ms: 10,
  });
  const { kind: _, declared: __, ...stored } = only(await db.sql`select * from job_kinds`);
  assert.deepEqual(stored, { ...all, backoff_base: "00:01:30", backoff_cap: "1 day" });
});

Deno.test("several kinds are declared at once, each with its own", async () => {
  await db.sql`insert into job_kinds (kind, max_attempts) values ('elsewhere', 3)`;
  const declarations = [{ kind: "b", timeout_ms: 7 }, { kind: "a", max_attempts: 1 }];
  const rows = await db.sql`select * from declare_job_kinds(${db.sql.json(declarations)}) order by kind`;
  assert.deepEqual(rows.map((row) => ({ ...row })), [
    { kind: "a", max_attempts: 1, timeout_ms: 45_000 },
    { kind: "b", max_attempts: 5, timeout_ms: 7 },
  ]);
  assert.equal((await db.sql`select * from declare_job_kinds('[]')`).count, 0);
});

Deno.test("a declaration that changes in the code changes here, and one that goes leaves the default", async () => {
  await declare(db.sql, { max_attempts: 8, timeout_ms: 1000 });
  assert.deepEqual(await declare(db.sql, { max_attempts: 9 }), { max_attempts: 9, timeout_ms: 45_000 });
  assert.deepEqual(await declare(db.sql, {}), { max_attempts: 5, timeout_ms: 45_000 });
});

Deno.test("a value that an operator set stays, whatever the code declares before or after", async () => {
  await db.sql`insert into job_kinds (kind, max_attempts) values ('test', 20)`;
  assert.deepEqual(await declare(db.sql, { max_attempts: 8, timeout_ms: 1000 }), {
    max_attempts: 20,
    timeout_ms: 1000,
  });
  await db.sql`update job_kinds set timeout_ms = 77 where kind = 'test'`;
  for (const timeout_ms of [1000, 2000, null]) {
    assert.deepEqual(await declare(db.sql, { max_attempts: 9, timeout_ms }), {
      max_attempts: 20,
      timeout_ms: 77,
    });
  }
});

Deno.test("an operator's null means the default, and not the declared value", async () => {
  await declare(db.sql, { max_attempts: 8, timeout_ms: 1000 });
  await db.sql`update job_kinds set max_attempts = null where kind = 'test'`;
  assert.deepEqual(await declare(db.sql, { max_attempts: 9, timeout_ms: 1000 }), {
    max_attempts: 5,
    timeout_ms: 1000,
  });
});

Deno.test("an operator who sets the declared value again has given the kind back to the code", async () => {
  await declare(db.sql, { max_attempts: 8 });
  await db.sql`update job_kinds set max_attempts = 20 where kind = 'test'`;
  await db.sql`update job_kinds set max_attempts = 8 where kind = 'test'`;
  assert.equal((await declare(db.sql, { max_attempts: 9 })).max_attempts, 9);
});

Deno.test("a declaration that is out of range is refused, and changes nothing", async () => {
  await declare(db.sql, { max_attempts: 8 });
  await assert.rejects(declare(db.sql, { max_attempts: 0 }), { code: "23514" });
  assert.equal(only(await db.sql`select max_attempts from job_kinds`).max_attempts, 8);
});

Deno.test("workers that start at once declare the same kinds without waiting in circles", async () => {
  const kinds = ["a", "b", "c", "d"].map((kind) => ({ kind, max_attempts: 3 }));
  const declarations = Array.from({ length: 10 }, (_, i) => db.sql.json(i % 2 ? kinds : kinds.toReversed()));
  const answers = await Promise.all(
    declarations.map((each) => db.sql`select * from declare_job_kinds(${each})`),
  );
  assert.deepEqual(answers.map((rows) => rows.length), Array(10).fill(4));
});

Deno.test("an operator's open transaction holds up no worker that declares what it did before", async () => {
  await declare(db.sql, { max_attempts: 8 });
  const operator = await openTransaction(db);
  await operator.sql`update job_kinds set max_attempts = 20 where kind = 'test'`;
  const hurried = db.connect("postgres", { max: 1, connection: { statement_timeout: 2000 } });
  assert.equal((await declare(hurried, { max_attempts: 8 })).max_attempts, 8);
  await operator.sql`commit`;
  assert.equal((await declare(hurried, { max_attempts: 8 })).max_attempts, 20);
});
