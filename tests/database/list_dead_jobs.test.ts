import assert from "node:assert/strict";
import { cost, enqueue, only, rowText, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

/** That many dead jobs, one a second, of two kinds in turn; the last to die first. */
async function makeDead(count: number): Promise<{ id: string; kind: string }[]> {
  return await db.sql<{ id: string; kind: string }[]>`
    insert into jobs (kind, status, finished_at, last_error)
    select 'kind_' || n % 2, 'dead', clock_timestamp() - make_interval(secs => n), 'x' from generate_series(1, ${count}) n
    returning id, kind`;
}

async function list(kind: string | null, maxJobs: number, before: string | null = null): Promise<string[]> {
  const rows = await db.sql`select id from list_dead_jobs(${kind}, ${maxJobs}, ${before})`;
  return rows.map(({ id }) => id);
}

Deno.test("dead jobs are listed with all that is known of them, the last to die first, of a kind or of all", async () => {
  const dead = await makeDead(6);
  await enqueue(db.sql);
  await db
    .sql`insert into jobs (kind, status, finished_at) values ('kind_0', 'succeeded', clock_timestamp())`;
  const ids = dead.map(({ id }) => id);
  assert.deepEqual((await db.sql`select id from list_dead_jobs()`).map(({ id }) => id), ids);
  const ofKind = dead.filter(({ kind }) => kind === "kind_1").map(({ id }) => id);
  assert.deepEqual(await list("kind_1", 50), ofKind);
  assert.deepEqual(await list("no_such_kind", 50), []);
  const listed = only(await db.sql`select l::text as text from list_dead_jobs(max_jobs => 1) l`).text;
  assert.equal(listed, await rowText(db.sql, ids[0] ?? ""));
});

Deno.test("page by page each comes once, also when the last one of a page was put back meanwhile, and jobs die while somebody reads", async () => {
  const ids = (await makeDead(25)).map(({ id }) => id);
  await db.sql`insert into job_failures (job_id, kind, attempt, lease_token, error, failed_at)
    select id, kind, 1, 1, 'x', finished_at from jobs`;
  const seen: string[] = [];
  for (let before: string | null = null;;) {
    const page = await list(null, 10, before);
    seen.push(...page);
    before = page.at(-1) ?? null;
    if (!before) break;
    await db.sql`select retry_jobs(array[${before}::uuid])`;
    await db.sql`insert into jobs (kind, status, finished_at) values ('kind_9', 'dead', clock_timestamp())`;
  }
  assert.deepEqual(seen, ids);
});

Deno.test("jobs that died in one call come once each, also when the last one of a page was put back", async () => {
  await db.sql`select enqueue_jobs(jsonb_agg('{"kind": "test"}'::jsonb)) from generate_series(1, 20)`;
  await db.sql`
    select fail_jobs(jsonb_agg(jsonb_build_object('id', id, 'lease_token', lease_token, 'permanent', true)))
    from claim_jobs('w', 20)`;
  const first = await list(null, 10);
  await db.sql`select retry_jobs(array[${first.at(-1) ?? ""}::uuid])`;
  const second = await list(null, 10, first.at(-1));
  assert.equal(new Set([...first, ...second]).size, 20);
});

Deno.test("what is no page is refused: a number beyond 1 to 1000, and a job that has not died", async () => {
  for (const maxJobs of [0, 1001, -1]) {
    await assert.rejects(() => list(null, maxJobs), { code: "22023", message: /between 1 and 1000/ });
  }
  for (const before of [await enqueue(db.sql), crypto.randomUUID()]) {
    await assert.rejects(() => list(null, 10, before), { code: "22023", message: /has not died/ });
  }
});

Deno.test("a page costs no more beside 20,000 dead jobs than beside 200", async () => {
  await makeDead(200);
  const query = "select * from list_dead_jobs('kind_0', 20)";
  await cost(db.sql, query);
  const few = await cost(db.sql, query);
  await makeDead(20_000);
  const many = await cost(db.sql, query);
  assert.equal(many.rows, 20);
  assert.ok(many.buffers < few.buffers * 2 + 20, `${few.buffers} -> ${many.buffers}`);
});
