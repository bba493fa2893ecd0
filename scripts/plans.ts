import postgres from "postgres";
import { join } from "node:path";
import { makeApp } from "../tests/support.ts";
import { pushMigrations } from "./local/migrations.ts";
import { freePort } from "./local/ports.ts";
import { startPostgres } from "./local/postgres.ts";

/**
 * `npm run plans`: what the hot statements read, with a thousand rows and with a million: the plans must be the same, and the
 * buffers within a factor of two; and what the claim costs beside a plain one and beside a million jobs that cannot start.
 * It also times job_stats with a million jobs waiting and a million finished.
 * `npm run plans -- held`: the claim's time before, while and after a transaction is held open for a minute, at 4,000 jobs a
 * second; `-- held mixed`: of four kinds and three priorities, and one more kind that has jobs for its first seconds only.
 * Each ends with 1 when something does not hold.
 */

const projectDir = join(import.meta.dirname ?? ".", "..");
const app = await makeApp();
const server = await startPostgres({
  projectDir,
  port: freePort(),
  temporary: true,
  settings: { max_wal_size: "4GB" },
});
const shapes = ["waiting", "finished", "delayed"];
const clients: postgres.Sql[] = [];
const problems: string[] = [];

/** The usual claim, on the same table: no kinds in turn, no limits, no suspects. */
const plainClaim = (condition: string) => `
  update jobs j
  set status = 'running', attempts = j.attempts + 1, lease_token = j.lease_token + 1, locked_at = clock_timestamp(),
    locked_by = 'w', lease_expires_at = clock_timestamp() + interval '60 s', updated_at = clock_timestamp()
  where j.id = any (array(
    select id from jobs
    where status = 'pending' and concurrency_key is null ${condition} and available_at <= (select clock_timestamp())
    order by priority desc, available_at, id limit 100 for no key update skip locked
  ))
  returning j.id, j.kind, j.payload, j.attempts, j.max_attempts, j.lease_token, j.context, j.concurrency_key,
    j.created_at, j.lease_expires_at`;

try {
  await pushMigrations(app, server.url("postgres"), { PROJECT_URL: "", CRON_SECRET: "" });
  const sql = connect("postgres");
  await sql`select disable_dispatch()`;
  if (Deno.args.includes("held")) await held(sql, Deno.args.includes("mixed"));
  else {
    await plans(sql);
    await claimCosts(sql);
    await statistics(sql);
  }
} finally {
  await Promise.all(clients.map((client) => client.end({ timeout: 1 })));
  await server.stop();
  await Deno.remove(app, { recursive: true });
}
console.log(problems.length > 0 ? `\nDoes not hold:\n${problems.join("\n")}` : "\nAll of it holds.");
Deno.exit(problems.length > 0 ? 1 : 0);

function connect(user: string, onnotice: (notice: postgres.Notice) => void = () => {}): postgres.Sql {
  const client = postgres(server.url(user), { max: 1, onnotice });
  clients.push(client);
  return client;
}

function median(values: number[]): number {
  return quantile(values, 0.5);
}

function quantile(values: number[], q: number): number {
  return values.toSorted((a, b) => a - b)[Math.floor((values.length - 1) * q)] ?? NaN;
}

interface Held {
  id: string;
  lease_token: number;
}

/** Jobs to fill the table with: beside those of a shape there are always a thousand that are due, of each of three kinds. */
async function fill(sql: postgres.Sql, shape: string, rows: number): Promise<void> {
  await sql`truncate jobs cascade`;
  await sql`truncate job_kinds, private.low_water, private.starts`;
  const columns: Record<string, string> = {
    waiting: "'k', 'pending', clock_timestamp(), null, null, null::text",
    finished: "'k', 'succeeded', clock_timestamp(), clock_timestamp(), clock_timestamp(), null",
    delayed: "'k', 'pending', clock_timestamp() + interval '1 day', null, null, null",
    "of another kind": "'other', 'pending', clock_timestamp(), null, null, null",
    "of one busy key": "'other', 'pending', clock_timestamp(), null, null, 'busy'",
  };
  await sql.unsafe(`
    insert into jobs (kind, status, available_at, finished_at, locked_at, concurrency_key)
    select ${columns[shape]} from generate_series(1, ${rows})`);
  await sql`insert into job_kinds (kind, concurrency, rate_limit) values ('limited', 5000, 100000)`;
  await sql`insert into jobs (kind) select unnest(array['k', 'limited']) from generate_series(1, 1000)`;
  await sql`insert into jobs (kind, concurrency_key) select 'keyed', 'key' || n from generate_series(1, 1000) n`;
}

/** Calls each function three times in one session on 100 jobs, and gives back what the third call read, and its plans. */
async function measure(
  rows: number,
  shape: string,
): Promise<Map<string, { buffers: number; plans: string }>> {
  let notices: string[] = [];
  const sql = connect("supabase_admin", ({ message }) => notices.push(message ?? ""));
  await sql.unsafe(`
    load 'auto_explain';
    set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
    set auto_explain.log_analyze = on; set auto_explain.log_buffers = on; set auto_explain.log_timing = off;
    set auto_explain.log_format = json; set client_min_messages = log;
  `).simple();
  const found = new Map<string, { buffers: number; plans: string }>();
  async function call<T>(name: string, query: string, args: postgres.JSONValue[] = []): Promise<T[]> {
    await sql`select setseed(0)`; // one pick in ten is another query
    notices = [];
    const result = await sql.unsafe<T[]>(query, args.map((arg) => sql.json(arg)));
    const logged = notices.filter((notice) => notice.startsWith("duration:"))
      .map((notice) => JSON.parse(notice.slice(notice.indexOf("{"))));
    const outer = logged.at(-1)?.Plan;
    found.set(name, {
      buffers: outer["Shared Hit Blocks"] + outer["Shared Read Blocks"],
      plans: [...new Set(logged.map(({ Plan }) => shapeOf(Plan)))].sort().join("\n"),
    });
    return result;
  }
  const claim = (of = "") =>
    call<Held>(
      `claim_jobs${of && ` of ${of}`}`,
      `select id, lease_token from claim_jobs('w', 100${of && `, kinds => '{${of}}'`})`,
    );
  for (let round = 0; round < 3; round++) {
    const leases = (jobs: Held[]) => jobs.map(({ id, lease_token }) => ({ id, lease_token, error: "x" }));
    await call("complete_jobs", "select complete_jobs($1)", [leases(await claim())]);
    await call("fail_jobs", "select fail_jobs($1)", [leases(await claim("k"))]);
    await call("extend_jobs", "select extend_jobs($1)", [leases(await claim("limited"))]);
    await sql`update jobs set lease_expires_at = clock_timestamp() where status = 'running'`;
    await call("rescue_expired_jobs", "select rescue_expired_jobs()");
    await call("release_jobs", "select release_jobs($1)", [leases(await claim("keyed"))]);
    await call("purge_jobs", "select purge_jobs()");
    await call("ready_jobs", "select private.ready_jobs(500)");
  }
  await sql.end();
  if (found.size < 11) throw new Error(`${rows} rows, ${shape}: measured ${found.size} calls`);
  return found;
}

interface PlanNode {
  "Node Type": string;
  "Index Name"?: string;
  Plans?: PlanNode[];
}

function shapeOf(node: PlanNode): string {
  const index = node["Index Name"] ? ` ${node["Index Name"]}` : "";
  return `${node["Node Type"]}${index}(${(node.Plans ?? []).map(shapeOf).join(", ")})`;
}

async function plans(sql: postgres.Sql): Promise<void> {
  console.log("| call | shape | buffers, 1,000 rows | 1,000,000 rows | ratio | plans |");
  console.log("| --- | --- | --- | --- | --- | --- |");
  await sql`alter table jobs set (autovacuum_enabled = false)`; // the statistics are those of an empty table
  for (const shape of shapes) {
    for (const analyzed of [false, true]) {
      const results = [];
      for (const rows of [1000, 1_000_000]) {
        await fill(sql, shape, rows);
        if (analyzed) await sql`vacuum analyze jobs`;
        results.push(await measure(rows, shape));
      }
      const [few, many] = results;
      for (const [name, small] of few ?? []) {
        const large = many?.get(name);
        if (!large) continue;
        const ratio = large.buffers / small.buffers;
        const same = large.plans === small.plans;
        const label = `${name}, ${shape}${analyzed ? ", analyzed" : ""}`;
        console.log(
          `| ${name} | ${shape}${analyzed ? ", analyzed" : ""} | ${small.buffers} | ${large.buffers} | ${
            ratio.toFixed(2)
          } | ${same ? "same" : "differ"} |`,
        );
        if (!(ratio <= 2)) problems.push(`${label}: ${ratio.toFixed(2)} times the buffers`);
        if (!same) {
          problems.push(
            `${label}: other plans\n--- 1,000 rows\n${small.plans}\n--- 1,000,000\n${large.plans}`,
          );
        }
      }
    }
  }
}

/**
 * The claim and the plain one in turn, a hundred jobs each: without limits at most 1.15 times as long, and beside a million
 * jobs that may not start no more than that beside a thousand of them.
 */
async function claimCosts(sql: postgres.Sql): Promise<void> {
  console.log(
    "\n| a claim of 100 | beside | plain, ms | claim_jobs, ms | ratio |\n| --- | --- | --- | --- | --- |",
  );
  for (const kinds of [1, 20]) {
    const ratio = await claimCost(sql, { kinds, beside: "nothing", shape: "waiting", rows: 0 });
    if (!(ratio <= 1.15)) problems.push(`of ${kinds} kinds: ${ratio.toFixed(2)} times the plain claim`);
  }
  for (
    const [beside, shape, settings] of [
      ["paused", "of another kind", "insert into job_kinds (kind, paused) values ('other', true)"],
      ["saturated", "of another kind", "insert into job_kinds (kind, concurrency) values ('other', 1)"],
      ["delayed", "delayed"],
      ["of one busy key", "of one busy key"],
    ] as const
  ) {
    const few = await claimCost(sql, { kinds: 1, beside, shape, settings, rows: 1000 });
    const many = await claimCost(sql, { kinds: 1, beside, shape, settings, rows: 1_000_000 });
    if (!(many / few <= 1.15)) {
      problems.push(`beside a million ${beside}: ${(many / few).toFixed(2)} times that beside a thousand`);
    }
  }
}

interface ClaimCase {
  kinds: number;
  beside: string;
  shape: string;
  settings?: string;
  rows: number;
}

async function claimCost(sql: postgres.Sql, of: ClaimCase): Promise<number> {
  await fill(sql, of.shape, of.rows);
  await sql`delete from jobs where kind in ('k', 'limited', 'keyed') and available_at <= clock_timestamp()`;
  await sql`insert into jobs (kind) select concat('k', nullif(n % ${of.kinds}::int, 0)) from generate_series(1, 40000) n`;
  // Of many kinds, the plain one needs an index without the kind. It costs a claim nothing, which puts nothing into it.
  await sql`drop index if exists plain_ready`;
  if (of.kinds > 1) {
    await sql`create index plain_ready on jobs (priority desc, available_at, id)
      where status = 'pending' and concurrency_key is null`;
  }
  if (of.settings) await sql.unsafe(of.settings);
  await sql`select from claim_jobs('w', 1, 86400, '{other}')`;
  await sql`vacuum analyze jobs`;
  const queries = {
    plain: plainClaim(of.kinds > 1 ? "" : "and kind = 'k'"),
    claim: "select * from claim_jobs('w', 100)",
  };
  const times: Record<keyof typeof queries, number[]> = { plain: [], claim: [] };
  for (let i = 0; i < 400; i++) {
    const which = i % 2 === 0 ? "plain" : "claim";
    const startedAt = performance.now();
    const jobs = await sql.unsafe(queries[which], [], { prepare: true });
    if (i >= 40) times[which].push(performance.now() - startedAt);
    if (jobs.length !== 100) problems.push(`beside ${of.rows} ${of.beside}: a claim gave ${jobs.length}`);
  }
  const [plain, claim] = [median(times.plain), median(times.claim)];
  const beside = of.rows > 0 ? `${of.rows} ${of.beside}` : of.beside;
  const cells = [
    `${of.kinds} ${of.kinds === 1 ? "kind" : "kinds"}`,
    beside,
    ...[plain, claim, claim / plain].map((n) => n.toFixed(2)),
  ];
  console.log(`| ${cells.join(" | ")} |`);
  return claim / plain;
}

/** job_stats with a million jobs waiting and a million finished: under 50 ms, also before anything was analyzed. */
async function statistics(sql: postgres.Sql): Promise<void> {
  await fill(sql, "waiting", 1_000_000);
  await sql`
    insert into jobs (kind, status, locked_at, finished_at)
    select 'k', 'succeeded', clock_timestamp() - interval '1 second', clock_timestamp() from generate_series(1, 1000000)`;
  console.log("\n| a million waiting, a million finished | median, ms | slowest, ms |\n| --- | --- | --- |");
  for (const analyzed of [false, true]) {
    if (analyzed) await sql`vacuum analyze jobs`;
    for (const query of ["select * from job_stats()", "select * from job_health"]) {
      const times: number[] = [];
      for (let i = 0; i < 10; i++) {
        const startedAt = performance.now();
        await sql.unsafe(query);
        times.push(performance.now() - startedAt);
      }
      const name = `${query}${analyzed ? ", analyzed" : ""}`;
      console.log(`| ${name} | ${[0.5, 1].map((q) => quantile(times, q).toFixed(1)).join(" | ")} |`);
      if (!(median(times) < 50)) problems.push(`${name}: ${median(times).toFixed(1)} ms`);
    }
  }
}

async function held(sql: postgres.Sql, mixed: boolean): Promise<void> {
  await sql`truncate jobs cascade`;
  const samples: { at: number; ms: number; jobs: number; completeMs: number }[] = [];
  const startedAt = performance.now();
  const seconds = () => (performance.now() - startedAt) / 1000;
  let stopped = false;
  let claims = 0; // to be made: as many as fill up, since a claim of few jobs takes less
  const batch = (drained: boolean) =>
    Array.from({ length: 400 }, (_, i) => ({
      kind: drained && i % 4 === 0 ? "drained" : `k${mixed ? i % 4 : ""}`,
      priority: mixed ? i % 3 : 0,
    }));
  const enqueuing = (async () => {
    const client = connect("postgres");
    for (let sent = 0; !stopped; sent++) {
      await client`select count(*) from enqueue_jobs(${client.json(batch(mixed && seconds() < 30))})`;
      claims += 4;
      const ahead = (sent + 1) / 10 - seconds();
      if (ahead > 0) await new Promise((resolve) => setTimeout(resolve, ahead * 1000));
    }
  })();
  const claiming = [0, 1].map(async () => {
    const client = connect("postgres");
    while (!stopped) {
      if (claims < 1) {
        await new Promise((resolve) => setTimeout(resolve, 5));
        continue;
      }
      claims--;
      const at = seconds();
      const jobs = await client<Held[]>`select id, lease_token from claim_jobs('w', 100)`;
      const claimed = seconds();
      claims += 1 - jobs.length / 100;
      const leases = jobs.map(({ id, lease_token }) => ({ id, lease_token }));
      if (jobs.length > 0) await client`select complete_jobs(${client.json(leases)})`;
      const ms = (claimed - at) * 1000;
      samples.push({ at, ms, jobs: jobs.length, completeMs: (seconds() - claimed) * 1000 });
    }
  });
  const wait = (until: number) => new Promise((resolve) => setTimeout(resolve, (until - seconds()) * 1000));
  await wait(20);
  const holder = connect("postgres");
  await holder`begin isolation level repeatable read`;
  await holder`create temporary table held (one int)`;
  await holder`select count(*) from jobs`;
  await wait(80);
  await holder`rollback`;
  await wait(140);
  stopped = true;
  await Promise.all([enqueuing, ...claiming]);

  console.log(
    "| seconds | claims | jobs | median, ms | p99, ms | slowest, ms | complete_jobs, ms |\n| --- | --- | --- | --- | --- | --- | --- |",
  );
  const within = (from: number, to: number) => samples.filter(({ at }) => at >= from && at < to);
  const between = (from: number, to: number) => within(from, to).map(({ ms }) => ms);
  for (let from = 0; from < 140; from += 10) {
    const ms = between(from, from + 10);
    console.log(
      `| ${from}–${from + 10} | ${ms.length} | ${
        within(from, from + 10).reduce((sum, { jobs }) => sum + jobs, 0)
      } | ${[0.5, 0.99, 1].map((q) => quantile(ms, q).toFixed(1)).join(" | ")} | ${
        median(within(from, from + 10).map(({ completeMs }) => completeMs)).toFixed(1)
      } |`,
    );
  }
  const before = median(between(10, 20));
  for (let from = 20; from < 80; from += 10) {
    const ratio = median(between(from, from + 10)) / before;
    if (!(ratio <= 4)) {
      problems.push(`${from - 20} s into the held transaction: ${ratio.toFixed(1)} times the median`);
    }
  }
  const after = median(between(110, 140)) / before;
  if (!(after <= 1.5)) problems.push(`30 s after the held transaction: ${after.toFixed(1)} times the median`);
  const [left] = await sql`select count(*)::int as jobs from jobs where status <> 'succeeded'`;
  console.log(`\n${samples.length} claims, ${left?.jobs} jobs left at the end`);
}
