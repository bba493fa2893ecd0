import assert from "node:assert/strict";
import postgres from "postgres";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import { createDatabase, cronSecret, type TestDatabase, until } from "../support.ts";

/** What the tests of the SQL say often. */

export type Database = Omit<TestDatabase, typeof Symbol.asyncDispose>;

/**
 * One database for the tests of a file, since making one takes longer than most of them. Each finds it as the migrations
 * leave it: no jobs, no settings, no secrets, nothing queued, dispatch on. A test that changes more makes its own.
 */
export function sharedDatabase(): Database {
  let made: TestDatabase | undefined;
  const db = () => {
    assert.ok(made, "the database exists while tests run");
    return made;
  };
  Deno.test.beforeAll(async () => {
    made = await createDatabase();
  });
  Deno.test.beforeEach(() => reset(db().sql));
  Deno.test.afterAll(async () => await db()[Symbol.asyncDispose]());
  return {
    get sql() {
      return db().sql;
    },
    url: (user) => db().url(user),
    connect: (user, options) => db().connect(user, options),
  };
}

async function reset(sql: postgres.Sql): Promise<void> {
  await sql.unsafe(`
    -- What a failed test has left open must not hold up the next.
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and usename = 'postgres' and pid <> pg_backend_pid() and xact_start is not null;
    truncate public.jobs, public.job_failures, public.webhook_inbox, public.job_kinds, public.schedules, public.idempotency_keys, public.leases, private.app_schedules, private.turns, private.starts, private.low_water, private.awake_workers, private.pokes,
      net.http_request_queue, net._http_response;
    insert into private.turns values ('');
    -- A worker has just been poked: the tick is not to do it lest the app's schedules have changed.
    insert into private.pokes values (0, 'schedules');
    delete from vault.secrets where true;
    delete from cron.job_run_details where true;
    select enable_dispatch();
  `).simple();
}

/** The one row of a result; fails when there are more or none. */
export function only<T>(rows: readonly T[]): T {
  assert.equal(rows.length, 1, `expected one row, got ${rows.length}`);
  const [row] = rows;
  assert.ok(row);
  return row;
}

/** Enqueues a job of that kind, due at once, and gives back its id. */
export async function enqueue(sql: postgres.Sql, kind = "test"): Promise<string> {
  return only(await sql<{ id: string }[]>`select enqueue_job(${kind}) as id`).id;
}

export interface Claim {
  id: string;
  kind: string;
  attempts: number;
  max_attempts: number;
  lease_token: number;
  timeout_ms: number;
}

/** Claims up to `maxJobs` jobs as `worker`. */
export async function claim(sql: postgres.Sql, maxJobs = 10, worker = "w"): Promise<Claim[]> {
  return [...await sql<Claim[]>`select * from claim_jobs(${worker}, ${maxJobs})`];
}

/** Enqueues a job and claims it; fails when something else was claimed. */
export async function enqueueAndClaim(sql: postgres.Sql, kind = "test"): Promise<Claim> {
  const id = await enqueue(sql, kind);
  const claimed = only(await sql<Claim[]>`select * from claim_jobs('w', 1, kinds => ${[kind]})`);
  assert.equal(claimed.id, id);
  return claimed;
}

/** A job's row. */
export async function job(sql: postgres.Sql, id: string): Promise<postgres.Row> {
  return only(await sql`select * from jobs where id = ${id}`);
}

/** The whole row as text, to see that nothing of it has changed. */
export async function rowText(sql: postgres.Sql, id: string): Promise<string> {
  return only(await sql<{ text: string }[]>`select j::text as text from jobs j where id = ${id}`).text;
}

/** An interval that no time can be moved by: Postgres has infinite ones since version 17. */
export async function endlessInterval(sql: postgres.Sql): Promise<string> {
  const { version } = only(await sql`select current_setting('server_version_num')::int as version`);
  return version >= 170000 ? "infinity" : "178000000 years";
}

/** Moves the leases of all running jobs so that they have run out. */
export async function expireLeases(sql: postgres.Sql): Promise<void> {
  await sql`update jobs set lease_expires_at = clock_timestamp() - interval '1 second' where status = 'running'`;
}

/** A connection for a transaction that is left open, and its process id. */
export async function openTransaction(db: Database): Promise<{ sql: postgres.Sql; pid: number }> {
  const sql = db.connect("postgres", { max: 1 });
  await sql`begin`;
  return { sql, pid: only(await sql<{ pid: number }[]>`select pg_backend_pid() as pid`).pid };
}

/** Waits until that process holds a lock that another waits for. */
export async function untilBlocking(db: Database, pid: number): Promise<void> {
  await until(
    "a session that waits for the other",
    async () =>
      (await db.sql`
        select from pg_stat_activity
        where datname = current_database() and ${pid}::int = any (pg_blocking_pids(pid))`).count,
  );
}

export const projectUrl = "http://127.0.0.1:9";
export const workerUrl = `${projectUrl}/functions/v1/job-worker`;

/** Writes to Vault what dispatch needs, so that pokes are queued. Nothing sends them in a database of a test. */
export async function setUpDispatch(db: Database): Promise<void> {
  await setVaultSecrets(db.url("postgres"), { project_url: projectUrl, cron_secret: cronSecret });
}

/** How many pokes are queued. */
export async function queuedPokes(sql: postgres.Sql): Promise<number> {
  return (await sql`select from net.http_request_queue where url = ${workerUrl}`).count;
}

/** Does what pg_net does with queued requests, but for sending them. */
export async function emptyNetQueue(sql: postgres.Sql): Promise<void> {
  await sql`delete from net.http_request_queue where true`;
}

/** How many rows and buffers a query takes, functions that it calls included. */
export async function cost(sql: postgres.Sql, query: string): Promise<{ rows: number; buffers: number }> {
  const explained = only(await sql.unsafe(`explain (analyze, buffers, format json) ${query}`));
  const plan = explained["QUERY PLAN"][0].Plan;
  return { rows: plan["Actual Rows"], buffers: plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] };
}
