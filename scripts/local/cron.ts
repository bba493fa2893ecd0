// Plays pg_cron's background worker: runs the jobs of cron.job at their times and records them in cron.job_run_details.

import postgres from "postgres";
import { createLatch, listenAlways, messageOf, withoutRepeats } from "./latch.ts";

const MAX_RUNNING = 32; // cron.max_running_jobs
const MINUTE_MS = 60_000;

export interface PlayCronOptions {
  /** A superuser's connection string. */
  url: string;
  signal: AbortSignal;
  log: (line: string) => void;
}

/** What cron._parse_schedule makes of a schedule: seconds, or what each of the five fields allows. */
export interface Schedule {
  seconds?: number;
  reboot?: boolean;
  minute?: number[];
  hour?: number[];
  day?: number[];
  month?: number[];
  weekday?: number[];
  lastDay?: boolean;
  dayStar?: boolean;
  weekdayStar?: boolean;
}

interface Job {
  jobid: string;
  command: string;
  database: string;
  username: string;
  active: boolean;
  schedule: Schedule | null;
}

interface Task {
  job: Job;
  /** When the last run started, or when the job was first seen; in ms since 1970. */
  lastStart: number;
  /** Runs that are due and not started: a job that takes longer than its interval runs late, never beside itself. */
  pending: number;
  /** Ends the run that is under way. */
  cancel?: () => void;
}

/**
 * Runs scheduled jobs until `signal`: cron syntax in GMT, "N seconds" counted from the start of the last run. Each run has
 * its own connection, as the job's user. Changes of cron.job are heard, not polled. Runs that were due while the server
 * was away are not made up for; a clock that skips up to five minutes is. Never throws for a lost connection.
 */
export async function playCron({ url, signal, log }: PlayCronOptions): Promise<void> {
  const sql = postgres(url, {
    max: 1,
    backoff: () => 0.2,
    fetch_types: false,
    onnotice: () => {},
    connection: { application_name: "pg_cron scheduler", statement_timeout: 0 },
  });
  const say = withoutRepeats(log);
  const latch = createLatch();
  signal.addEventListener("abort", latch.set);
  const tasks = new Map<string, Task>();
  const runs = new Set<Promise<void>>();
  let stale = true;
  let connectedAnew = true;
  let started = false;
  let lastMinute = Math.floor(Date.now() / MINUTE_MS);

  const start = (task: Task) => {
    task.pending -= 1;
    const run = runJob(sql, url, task, log).catch((error) => {
      // The extension was dropped, or the server went away: look at the jobs again.
      if (!signal.aborted) say(`pg_cron: job ${task.job.jobid}: ${messageOf(error)}`);
      stale = true;
    }).finally(() => {
      task.cancel = undefined;
      runs.delete(run);
      latch.set();
    });
    runs.add(run);
  };

  await listenAlways(sql, "pg_cron_job", signal, () => {
    stale = true;
    latch.set();
  }, () => {
    stale = connectedAnew = true;
    lastMinute = Math.floor(Date.now() / MINUTE_MS);
    latch.set();
  });

  while (!signal.aborted) {
    if (stale) {
      stale = false;
      try {
        if (connectedAnew) await failInterruptedRuns(sql);
        connectedAnew = false;
        takeJobs(tasks, await readJobs(sql), !started);
        started = true;
      } catch (error) {
        if (signal.aborted) break;
        say(`pg_cron: ${messageOf(error)}`);
        stale = true;
        await latch.wait(200);
        continue;
      }
    }

    const now = Date.now();
    const minute = Math.floor(now / MINUTE_MS);
    for (const task of tasks.values()) {
      if (!task.job.active || !task.job.schedule) continue;
      const { seconds } = task.job.schedule;
      if (seconds) {
        if (!task.pending && now - task.lastStart >= seconds * 1000) task.pending = 1;
        continue;
      }
      const first = minute - lastMinute > 5 ? minute : lastMinute + 1;
      for (let m = first; m <= minute; m++) {
        if (isDue(task.job.schedule, new Date(m * MINUTE_MS))) task.pending += 1;
      }
    }
    lastMinute = minute;

    let next = (minute + 1) * MINUTE_MS;
    for (const task of tasks.values()) {
      if (task.cancel) continue; // its end sets the latch
      if (task.pending && runs.size < MAX_RUNNING) start(task);
      else if (task.job.active && task.job.schedule?.seconds) {
        next = Math.min(next, task.lastStart + task.job.schedule.seconds * 1000);
      }
    }
    await latch.wait(Math.max(1, next - Date.now()));
  }

  for (const task of tasks.values()) task.cancel?.();
  await Promise.allSettled(runs);
  await sql.end({ timeout: 1 });
}

async function readJobs(sql: postgres.Sql): Promise<Job[]> {
  const [{ installed }] = await sql`select to_regclass('cron.job') is not null as installed`;
  if (!installed) return [];
  return await sql<Job[]>`
    select jobid, command, database, username, active, cron._parse_schedule(schedule) as schedule from cron.job`;
}

/** Brings the tasks up to date. A job that is gone or paused loses what is pending, and the run that is under way. */
function takeJobs(tasks: Map<string, Task>, jobs: Job[], atStart: boolean): void {
  for (const job of jobs) {
    const task = tasks.get(job.jobid) ??
      { job, lastStart: Date.now(), pending: atStart && job.schedule?.reboot ? 1 : 0 };
    task.job = job;
    tasks.set(job.jobid, task);
  }
  const active = new Set(jobs.filter((job) => job.active).map((job) => job.jobid));
  const present = new Set(jobs.map((job) => job.jobid));
  for (const [id, task] of tasks) {
    if (active.has(id)) continue;
    task.pending = 0;
    task.cancel?.();
    if (!present.has(id)) tasks.delete(id);
  }
}

/** Whether a schedule names this minute. As in every cron, day and weekday add up unless one of them is a star. */
export function isDue(schedule: Schedule, at: Date): boolean {
  const { minute, hour, month, day, weekday, lastDay, dayStar, weekdayStar } = schedule;
  if (!minute?.includes(at.getUTCMinutes()) || !hour?.includes(at.getUTCHours())) return false;
  if (!month?.includes(at.getUTCMonth() + 1)) return false;
  const isLastDay = new Date(at.getTime() + 24 * 60 * MINUTE_MS).getUTCDate() === 1;
  const onDay = day?.includes(at.getUTCDate()) || (lastDay === true && isLastDay);
  const onWeekday = weekday?.includes(at.getUTCDay()) || (weekday?.includes(7) && at.getUTCDay() === 0);
  return Boolean(dayStar || weekdayStar ? onDay && onWeekday : onDay || onWeekday);
}

/** Runs whose end nobody saw; the real worker does this when it starts. */
async function failInterruptedRuns(sql: postgres.Sql): Promise<void> {
  const [{ installed }] = await sql`select to_regclass('cron.job_run_details') is not null as installed`;
  if (!installed) return;
  await sql`
    update cron.job_run_details set status = 'failed', return_message = 'server restarted'
     where status in ('starting', 'running')`;
}

/** Runs a job once and records it. Throws only when the record cannot be written. */
async function runJob(
  sql: postgres.Sql,
  url: string,
  task: Task,
  log: (line: string) => void,
): Promise<void> {
  const { jobid, database, username, command } = task.job;
  let canceled = false;
  let connection: postgres.Sql | undefined;
  task.lastStart = Date.now();
  task.cancel = () => {
    canceled = true;
    connection?.end({ timeout: 0 });
  };

  const [{ runid }] = await sql`
    insert into cron.job_run_details (jobid, database, username, command, status)
    values (${jobid}, ${database}, ${username}, ${command}, 'starting') returning runid`;
  let outcome: { status: string; message: string };
  try {
    connection = await connectAs(sql, url, database, username);
    const [{ pid }] = await connection`select pg_backend_pid() as pid`;
    task.lastStart = Date.now();
    await sql`update cron.job_run_details set job_pid = ${pid}, status = 'running',
                     start_time = ${new Date(task.lastStart)} where runid = ${runid}`;
    if (canceled) throw new Error("job canceled");
    outcome = { status: "succeeded", message: describe(await connection.unsafe(command).simple()) };
  } catch (error) {
    outcome = { status: "failed", message: canceled ? "job canceled" : describeError(error) };
    log(`pg_cron: job ${jobid} failed: ${outcome.message.trim()}`);
  } finally {
    await connection?.end({ timeout: 0 });
  }
  await sql`
    update cron.job_run_details
       set status = ${outcome.status}, return_message = ${outcome.message}, end_time = ${new Date()},
           start_time = coalesce(start_time, ${new Date(task.lastStart)})
     where runid = ${runid}`;
}

/** Opens a connection that is what the job's user would get: its rights, and the settings of role and database. */
async function connectAs(
  sql: postgres.Sql,
  url: string,
  database: string,
  username: string,
): Promise<postgres.Sql> {
  const settings = await sql`
    select split_part(setting, '=', 1) as name, substr(setting, strpos(setting, '=') + 1) as value
      from pg_db_role_setting s, unnest(setconfig) setting
     where (setrole = 0 or setrole = (select oid from pg_roles where rolname = ${username}))
       and (setdatabase = 0 or setdatabase = (select oid from pg_database where datname = ${database}))
     order by setrole, setdatabase`;
  const target = new URL(url);
  target.pathname = `/${encodeURIComponent(database)}`;
  const connection = postgres(target.href, {
    max: 1,
    fetch_types: false,
    connect_timeout: 10,
    onnotice: () => {},
    // With the role in the startup packet there is no moment in which the job could run as the superuser.
    connection: {
      ...Object.fromEntries(settings.map(({ name, value }) => [name, value])),
      application_name: "pg_cron",
      role: username,
    },
  });
  try {
    await connection`set session authorization ${connection(username)}`;
  } catch (error) {
    await connection.end({ timeout: 0 });
    throw new Error("connection failed", { cause: error });
  }
  return connection;
}

interface Outcome {
  command: string;
  count: number | null;
  columns?: unknown;
}

function isOutcome(value: unknown): value is Outcome {
  return Array.isArray(value) && "command" in value;
}

/** The return message of a run: the last statement's rows or command tag, as libpq prints them. */
function describe(result: postgres.RowList<postgres.Row[]>): string {
  const final = result.at(-1); // several statements give an array of results
  const { command, count, columns }: Outcome = isOutcome(final) ? final : result;
  if (columns) return count === 1 ? "1 row" : `${count} rows`;
  return [command, command === "INSERT" ? 0 : null, count].filter((part) => part !== null).join(" ");
}

function describeError(error: unknown): string {
  if (!(error instanceof postgres.PostgresError)) return messageOf(error);
  const parts = { DETAIL: error.detail, HINT: error.hint, CONTEXT: error.where };
  const more = Object.entries(parts).map(([label, text]) => text ? `${label}:  ${text}\n` : "");
  return `${error.severity}:  ${error.message}\n${more.join("")}`;
}
