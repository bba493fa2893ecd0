import { z } from "zod";
import { callDatabase } from "./database.ts";
import type { KindDeclarations } from "./kinds.ts";

/** One function per SQL function of the queue, with the same name. All throw JobError; durations are in seconds. */

const claimedJob = z.object({ id: z.string(), kind: z.string(), payload: z.unknown(), suspect: z.boolean() })
  .extend({ attempts: z.number(), max_attempts: z.number(), lease_token: z.number(), timeout_ms: z.number() })
  .extend({ context: z.unknown(), concurrency_key: z.string().nullable() })
  .extend({ created_at: z.string(), lease_expires_at: z.string() })
  .transform((
    { max_attempts, lease_token, timeout_ms, concurrency_key, created_at, lease_expires_at, ...row },
  ) => ({
    ...row,
    maxAttempts: max_attempts,
    leaseToken: lease_token,
    timeoutMs: timeout_ms,
    concurrencyKey: concurrency_key,
    createdAt: created_at,
    leaseExpiresAt: lease_expires_at,
  }));
const ids = z.array(z.string());

/** A claimed job: `leaseToken` is what every settle call must name. */
export type ClaimedJob = z.output<typeof claimedJob>;

/** Names one claim. */
export interface Lease {
  id: string;
  leaseToken: number;
}

/** Claims up to `maxJobs` (10) due jobs for `leaseSeconds` (60), in the order in which they are to start. */
export async function claimJobs(
  worker: string,
  options: {
    maxJobs?: number;
    leaseSeconds?: number;
    kinds?: string[];
    exceptKinds?: string[];
    awakeForSeconds?: number;
  } = {},
): Promise<ClaimedJob[]> {
  const rows = await callDatabase("claim_jobs", {
    worker,
    max_jobs: options.maxJobs ?? 10,
    lease_seconds: options.leaseSeconds ?? 60,
    kinds: options.kinds,
    except_kinds: options.exceptKinds,
    awake_for: interval(options.awakeForSeconds),
  });
  return z.array(claimedJob).parse(rows);
}

/** Completes jobs, storing their results; gives back the ids that were still held. Safe to repeat. */
export async function completeJobs(completions: (Lease & { result?: unknown })[]): Promise<string[]> {
  return ids.parse(
    await callDatabase("complete_jobs", {
      completions: completions.map(({ id, leaseToken, result }) => ({ id, lease_token: leaseToken, result })),
    }),
  );
}

/** Completes one job; false when it was not held. */
export async function completeJob(id: string, leaseToken: number, result?: unknown): Promise<boolean> {
  return z.boolean().parse(
    await callDatabase("complete_job", { id, lease_token: leaseToken, result: result ?? null }),
  );
}

export interface Failure extends Lease {
  error: string;
  /** Seconds until the next attempt; the kind's backoff when left out. */
  retryIn?: number;
  permanent?: boolean;
}

const failed = z.object({
  id: z.string(),
  status: z.enum(["pending", "dead", "cancelled"]),
  available_at: z.string().nullable(),
});
/** `cancelled`: a newer job holds its dedupe key. */
type FailedStatus = z.output<typeof failed>["status"];

/** Ends attempts as failed; gives back what became of the jobs that were still held. */
export async function failJobs(
  failures: Failure[],
): Promise<{ id: string; status: FailedStatus; availableAt: string | null }[]> {
  const rows = await callDatabase("fail_jobs", {
    failures: failures.map((failure) => ({
      id: failure.id,
      lease_token: failure.leaseToken,
      error: failure.error,
      retry_in: interval(failure.retryIn),
      permanent: failure.permanent ?? false,
    })),
  });
  return z.array(failed).parse(rows).map((row) => ({
    id: row.id,
    status: row.status,
    availableAt: row.available_at,
  }));
}

/** Ends one attempt as failed: what then became of the job, null when it was not held. */
export async function failJob(
  id: string,
  leaseToken: number,
  error: string,
  options: { retryIn?: number; permanent?: boolean } = {},
): Promise<FailedStatus | null> {
  const [row] = await failJobs([{ id, leaseToken, error, ...options }]);
  return row?.status ?? null;
}

/** Gives jobs back without counting the attempt, to be claimed after `delay` seconds; the ids that were still held. */
export async function releaseJobs(releases: (Lease & { delay?: number })[]): Promise<string[]> {
  return ids.parse(
    await callDatabase("release_jobs", {
      releases: releases.map(({ id, leaseToken, delay }) => ({
        id,
        lease_token: leaseToken,
        delay: interval(delay),
      })),
    }),
  );
}

/** Extends leases to `leaseSeconds` (60) from now; the ids that are still held. A missing one is lost. */
export async function extendJobs(leases: Lease[], leaseSeconds = 60): Promise<string[]> {
  const rows = await callDatabase("extend_jobs", {
    leases: leases.map(({ id, leaseToken }) => ({ id, lease_token: leaseToken })),
    lease_seconds: leaseSeconds,
  });
  return z.array(z.object({ id: z.string() })).parse(rows).map((row) => row.id);
}

/** Ends the attempts whose lease has run out as failed; gives back how many. */
export async function rescueExpiredJobs(maxJobs = 1000): Promise<number> {
  return z.number().parse(await callDatabase("rescue_expired_jobs", { max_jobs: maxJobs }));
}

/** Cancels jobs that wait or run; gives back their ids. A running one's handler is told by its signal. */
export async function cancelJobs(jobs: string[]): Promise<string[]> {
  return ids.parse(await callDatabase("cancel_jobs", { ids: jobs }));
}

/** Puts dead jobs back, or cancelled ones by their ids, with all their attempts; the ids of those that now wait. */
export async function retryJobs(
  which: { ids?: string[]; kind?: string; maxJobs?: number },
): Promise<string[]> {
  return ids.parse(
    await callDatabase("retry_jobs", { ids: which.ids, kind: which.kind, max_jobs: which.maxJobs }),
  );
}

/** Deletes what has ended and whose time is over, as the tick does; gives back how many. */
export async function purgeJobs(maxJobs = 10_000): Promise<number> {
  return z.number().parse(await callDatabase("purge_jobs", { max_jobs: maxJobs }));
}

const lostAttempt = z.object({
  job_id: z.string(),
  kind: z.string(),
  attempt: z.number(),
  error: z.string(),
});

/** Attempts that ended with their lease, each given to one caller: nobody has reported them yet. */
export async function takeLostAttempts(
  maxAttempts = 100,
): Promise<{ id: string; kind: string; attempt: number; error: string }[]> {
  const rows = await callDatabase("take_lost_attempts", { max_attempts: maxAttempts });
  return z.array(lostAttempt).parse(rows).map(({ job_id, ...rest }) => ({ id: job_id, ...rest }));
}

const kindSettings = z.object({ kind: z.string(), max_attempts: z.number(), timeout_ms: z.number() });

/** Writes what the code declares to job_kinds, and gives back how long an attempt of each kind may run, in ms. */
export async function declareJobKinds(kinds: KindDeclarations): Promise<Map<string, number>> {
  const rows = await callDatabase("declare_job_kinds", {
    declarations: Object.entries(kinds).map(([kind, { maxAttempts, timeoutMs, backoff, ...declared }]) => ({
      kind,
      max_attempts: maxAttempts,
      timeout_ms: timeoutMs,
      backoff_base: interval(backoff?.baseSeconds),
      backoff_factor: backoff?.factor,
      backoff_cap: interval(backoff?.capSeconds),
      backoff_jitter: backoff?.jitter,
      concurrency: declared.concurrency,
      key_concurrency: declared.keyConcurrency,
      rate_limit: declared.rateLimit,
      rate_period: interval(declared.ratePeriodSeconds),
      keep_succeeded: interval(declared.keepSucceededSeconds),
      keep_dead: interval(declared.keepDeadSeconds),
      keep_cancelled: interval(declared.keepCancelledSeconds),
    })),
  });
  return new Map(z.array(kindSettings).parse(rows).map((row) => [row.kind, row.timeout_ms]));
}

/** An interval as Postgres prints it, such as "1 day 02:03:04.5", in seconds. */
const printedInterval = z.string().regex(/^(-?\d+ days? ?)?([-\d:.]+)?$/).transform((text) => {
  const [, days, time = "0"] = /^(?:(-?\d+) days? ?)?(.+)?$/.exec(text) ?? [];
  return Number(days ?? 0) * 86_400 + time.split(":").reduce((sum, part) => sum * 60 + Number(part), 0);
}).nullable();

const count = z.string();
const kindStats = z.object({ kind: z.string(), paused: z.boolean(), limited: z.boolean() })
  .extend({ ready: count, delayed: count, retrying: count, running: count, dead: count })
  .extend({ succeeded_last_hour: count, failed_last_hour: count })
  .extend({
    oldest_ready_age: printedInterval,
    median_run_time: printedInterval,
    p95_run_time: printedInterval,
  })
  .transform((
    { succeeded_last_hour, failed_last_hour, oldest_ready_age, median_run_time, p95_run_time, ...row },
  ) => ({
    ...row,
    succeededLastHour: succeeded_last_hour,
    failedLastHour: failed_last_hour,
    oldestReadyAge: oldest_ready_age,
    medianRunTime: median_run_time,
    p95RunTime: p95_run_time,
  }));

/** What waits, runs and has ended, for each of these kinds or for all. Counts are exact to "10000", then "10000+". */
export async function jobStats(kinds?: string[]): Promise<z.output<typeof kindStats>[]> {
  return z.array(kindStats).parse(await callDatabase("job_stats", { kinds }));
}

/** As Postgres reads an interval. What is no number of seconds from 0 to ten years becomes the nearest that is. */
function interval(value: number | undefined): string | undefined {
  if (value === undefined) return undefined;
  const bounded = Math.min(Math.max(Number.isNaN(value) ? 0 : value, 0), 315_360_000);
  return `${bounded.toFixed(3)} seconds`;
}
