import postgres from "postgres";
import { join } from "node:path";
import { freePort } from "../../scripts/local/ports.ts";
import { startStack } from "../../scripts/local/stack.ts";
import { makeApp, projectDir, seeded, shortLease } from "../support.ts";
import { type Fault, faults, killWorker, sleep, type Stack } from "./faults.ts";
import { type Load, startAudit, startLoad } from "./load.ts";

/**
 * The whole stack, on a Postgres with the settings of `npm start`, under a steady load, with one fault after another. What
 * was acknowledged must end, once, within the lease and 15 seconds; then the worker is killed every few seconds.
 */

export interface ChaosOptions {
  seed: number;
  /** For the faults, in an order that comes from the seed, each of them once before any comes again. */
  faultSeconds?: number;
  /** These, by name and each once in this order, instead. */
  faults?: string[];
  /** Then the worker is killed every two to four seconds for as long as this. */
  stormSeconds: number;
  /** 60: the files as they are shipped. Else the engine's lease is changed, and its heartbeat to a third. */
  leaseSeconds: number;
  /** The tick's own ten seconds unless given. */
  tickSeconds?: number;
  /** Ends it early, with the report of what has been done. */
  signal?: AbortSignal;
  /** Hears of each fault as it happens. */
  log: (line: string) => void;
  /** Hears what the stack prints. */
  stackLog?: (line: string) => void;
}

/** One line of the table. */
interface Tally {
  fault: string;
  injected: number;
  lost: number;
  doubled: number;
  slowestMs: number;
}

export interface ChaosReport {
  /** Acknowledged enqueues. */
  enqueued: number;
  completed: number;
  /** Acknowledged, but not there, or not ended. */
  lost: number;
  /** Completed more than once. */
  doubled: number;
  slowestMs: number;
  faults: Tally[];
  /** What should not be, in words; nothing when all went well. */
  problems: string[];
}

const TOLERANCE_MS = 15_000;
const GIVE_UP_MS = 90_000;
const POLL_MS = 100;
const STORM = "SIGKILL worker every 2 to 4 s";

/** Runs it all. Throws when the stack does not start or a fault cannot be inflicted; what goes wrong is in the report. */
export async function runChaos(options: ChaosOptions): Promise<ChaosReport> {
  const { leaseSeconds, tickSeconds } = options;
  const appDir = await makeApp();
  let dataDir = "";
  try {
    await Deno.symlink(join(projectDir, "node_modules"), join(appDir, "node_modules"));
    if (leaseSeconds !== 60) await shortLease(leaseSeconds, Math.round(leaseSeconds * 1000 / 3))(appDir);
    const stack = await startStack({
      projectDir: appDir,
      ports: { api: freePort(), database: freePort(), mail: freePort() },
      log: options.stackLog ?? (() => {}),
    });
    dataDir = stack.dataDir;
    const sql = postgres(stack.databaseUrl, {
      max: 1,
      connect_timeout: 5,
      backoff: () => 0.2,
      onnotice: () => {},
    });
    try {
      await startAudit(sql);
      if (tickSeconds) {
        await sql`select cron.schedule('nightshift_tick', ${`${tickSeconds} seconds`}, 'select private.tick()')`;
      }
      return await torment(stack, sql, options);
    } finally {
      await sql.end({ timeout: 1 });
      await stack.stop();
    }
  } finally {
    await Deno.remove(appDir, { recursive: true });
    // As root the data is not in the app's folder.
    if (dataDir.startsWith("/var/lib/nightshift/")) {
      await Deno.remove(join(dataDir, "../.."), { recursive: true });
    }
  }
}

async function torment(stack: Stack, sql: postgres.Sql, options: ChaosOptions): Promise<ChaosReport> {
  const { seed, faultSeconds = Infinity, stormSeconds, leaseSeconds, log, signal } = options;
  const random = seeded(seed);
  const tallies = new Map<string, Tally>();
  const problems: string[] = [];
  let kills = 0;
  const load = startLoad(stack.databaseUrl, seed);
  try {
    const faultsEnd = performance.now() + faultSeconds * 1000;
    for (const fault of options.faults ? named(options.faults) : inTurn(random)) {
      await sleep(500 + 1_000 * random());
      if (performance.now() >= faultsEnd || signal?.aborted) break;
      await inflict(fault);
    }
    await inflict({ name: STORM, strike: storm, fromItsEnd: true });
  } finally {
    await load.stop();
  }
  log("no more is enqueued: waiting for everything to end");
  await untilEnded(sql, load.open);
  // An enqueue whose answer was lost may have made a job as well, which is to end like the others.
  await untilNoneIsLeft(sql);
  return await judge(sql, load, [...tallies.values()], problems);

  async function inflict({ name, strike, fromItsEnd }: Fault): Promise<void> {
    const startedAt = performance.now();
    log(name);
    const said = await strike(stack, leaseSeconds);
    const endedAt = performance.now();
    const open = new Set(load.open);
    const lost = await untilEnded(sql, open);
    const tookMs = performance.now() - (fromItsEnd ? endedAt : startedAt);
    for (const id of open) load.open.delete(id);
    const took = `${(tookMs / 1000).toFixed(1)} s`;
    log(`  recovered in ${took}${said ? `; ${said}` : ""}`);
    if (tookMs > leaseSeconds * 1000 + TOLERANCE_MS) {
      problems.push(`${name}: it took ${took} to recover, more than the lease and ${TOLERANCE_MS / 1000} s`);
    }

    const tally = tallies.get(name) ?? { fault: name, injected: 0, lost: 0, doubled: 0, slowestMs: 0 };
    tallies.set(name, tally);
    const before = [...tallies.values()].reduce((sum, { doubled }) => sum + doubled, 0);
    tally.injected += name === STORM ? kills : 1;
    tally.lost += lost.length;
    tally.doubled += (await doubledJobs(sql)).length - before;
    tally.slowestMs = Math.max(tally.slowestMs, tookMs);
  }

  async function storm(): Promise<void> {
    const stormEnd = performance.now() + stormSeconds * 1000;
    while (performance.now() < stormEnd && !signal?.aborted) {
      await killWorker(stack);
      kills++;
      await sleep(2_000 + 2_000 * random());
    }
  }
}

function named(names: string[]): Fault[] {
  return names.map((name) => {
    const fault = faults.find((each) => each.name === name);
    if (!fault) throw new Error(`there is no fault "${name}"`);
    return fault;
  });
}

/** Every fault once, in an order that comes from the seed, then again in another. */
function* inTurn(random: () => number): Generator<Fault> {
  for (let left: Fault[] = [];;) {
    if (left.length === 0) left = [...faults];
    yield* left.splice(Math.floor(random() * left.length), 1);
  }
}

/** Waits until these jobs have ended, and gives back those that never do: they are not in the table, or it takes too long. */
async function untilEnded(sql: postgres.Sql, jobs: Set<string>): Promise<string[]> {
  const left = new Set(jobs);
  const absent: string[] = [];
  for (const deadline = performance.now() + GIVE_UP_MS; left.size > 0 && performance.now() < deadline;) {
    const asked = [...left];
    const rows = await sql`select id, finished_at is null as open from jobs where id = any(${asked})`.catch(
      () => null,
    );
    const found = new Map(rows?.map(({ id, open }) => [id, open]));
    for (const id of rows ? asked : []) {
      if (found.get(id)) continue;
      if (!found.has(id)) absent.push(id);
      left.delete(id);
    }
    if (left.size > 0) await sleep(POLL_MS);
  }
  return [...absent, ...left];
}

async function untilNoneIsLeft(sql: postgres.Sql): Promise<void> {
  for (const deadline = performance.now() + GIVE_UP_MS; performance.now() < deadline;) {
    const left = await ask(() => sql`select from jobs where finished_at is null limit 1`);
    if (left.length === 0) return;
    await sleep(POLL_MS);
  }
}

async function doubledJobs(sql: postgres.Sql): Promise<string[]> {
  const rows = await ask(() =>
    sql`select job_id from audit where status = 'succeeded' group by job_id having count(*) > 1`
  );
  return rows.map((row) => row.job_id);
}

/** What a query answers, asked again when its connection ends under it: a killed Postgres may answer once more before it goes. */
async function ask<T>(query: () => PromiseLike<T>): Promise<T> {
  for (const deadline = performance.now() + GIVE_UP_MS;;) {
    try {
      return await query();
    } catch (error) {
      if (performance.now() > deadline) throw error;
      await sleep(POLL_MS);
    }
  }
}

async function judge(
  sql: postgres.Sql,
  { acknowledged }: Load,
  faults: Tally[],
  problems: string[],
): Promise<ChaosReport> {
  const rows = await ask(() =>
    sql`
      select id, status, attempts, last_error, finished_at is null as open,
        (select count(*)::int from job_failures f where f.job_id = j.id) as failures
      from jobs j`
  );
  const found = new Map(rows.map((row) => [row.id, row]));
  const lost = acknowledged.filter((id) => found.get(id)?.open !== false);
  const doubled = await doubledJobs(sql);
  const complain = (what: string, ids: string[]) => {
    if (ids.length > 0) problems.push(`${ids.length} ${what}: ${ids.slice(0, 5).join(", ")}`);
  };
  const ids = (test: (row: postgres.Row) => boolean) => rows.filter(test).map(({ id }) => id);
  complain("jobs are lost", lost);
  complain("jobs were completed more than once", doubled);
  complain("jobs have not ended", ids(({ open }) => open));
  complain("jobs ended otherwise than succeeded", ids(({ open, status }) => !open && status !== "succeeded"));
  complain(
    "succeeded jobs have other attempts than one more than their failures",
    ids(({ status, attempts, failures }) => status === "succeeded" && attempts !== failures + 1),
  );
  return {
    enqueued: acknowledged.length,
    completed: acknowledged.filter((id) => found.get(id)?.status === "succeeded").length,
    lost: lost.length,
    doubled: doubled.length,
    slowestMs: Math.max(...faults.map(({ slowestMs }) => slowestMs)),
    faults,
    problems,
  };
}

/** The report as text: a table with a line for each fault, the sums, and what should not be. */
export function describeReport(report: ChaosReport): string {
  const seconds = (ms: number) => `${(ms / 1000).toFixed(1)} s`;
  const lines = [["fault", "injected", "lost", "doubled", "slowest recovery"]];
  for (const { fault, injected, lost, doubled, slowestMs } of report.faults) {
    lines.push([fault, String(injected), String(lost), String(doubled), seconds(slowestMs)]);
  }
  const width = Math.max(...lines.map(([fault = ""]) => fault.length));
  const { enqueued, completed, lost, doubled, slowestMs, problems } = report;
  return [
    ...lines.map(([fault = "", ...rest]) =>
      [fault.padEnd(width), ...rest.map((text) => text.padStart(9))].join("  ")
    ),
    "",
    `jobs enqueued ${enqueued}, completed ${completed}, lost ${lost}, doubled ${doubled}, slowest recovery ${
      seconds(slowestMs)
    }`,
    ...problems.map((problem) => `PROBLEM: ${problem}`),
  ].join("\n");
}
