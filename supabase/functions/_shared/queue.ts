import { z } from "zod";
import { callFor, inSnakeCase, rowsOf } from "./database.ts";
import type { KindDeclarations } from "./kinds.ts";

/** One function per SQL function of the queue, with the same name. All throw JobError; durations are in seconds. */

const ids = z.array(z.string());
const claimedJobs = rowsOf({
  id: z.string(),
  kind: z.string(),
  payload: z.unknown(),
  attempts: z.number(),
  maxAttempts: z.number(),
  leaseToken: z.number(),
  context: z.unknown(),
  progress: z.unknown(),
  concurrencyKey: z.string().nullable(),
  schedule: z.string().nullable(),
  dueAt: z.string().nullable(),
  createdAt: z.string(),
  leaseExpiresAt: z.string(),
  timeoutMs: z.number(),
  suspect: z.boolean(),
});

/** A claimed job: `leaseToken` is what every settle call must name. */
export type ClaimedJob = z.output<typeof claimedJobs>[number];

/** Names one claim. */
export type Lease = { id: string; leaseToken: number };

/** Claims up to `maxJobs` (10) due jobs for `leaseSeconds` (60), in the order in which they are to start. */
export const claimJobs = (
  worker: string,
  { awakeForSeconds, ...options }: {
    maxJobs?: number;
    leaseSeconds?: number;
    kinds?: string[];
    exceptKinds?: string[];
    awakeForSeconds?: number;
  } = {},
): Promise<ClaimedJob[]> =>
  callFor(claimedJobs, "claim_jobs", { worker, ...options, awakeFor: interval(awakeForSeconds) });

/** Completes jobs, storing their results; gives back the ids that were still held. Safe to repeat. */
export const completeJobs = (completions: (Lease & { result?: unknown })[]): Promise<string[]> =>
  callFor(ids, "complete_jobs", { completions: completions.map(inSnakeCase) });

/** Completes one job; false when it was not held. */
export const completeJob = (id: string, leaseToken: number, result?: unknown): Promise<boolean> =>
  callFor(z.boolean(), "complete_job", { id, leaseToken, result: result ?? null });

export interface Failure extends Lease {
  error: string;
  /** Seconds until the next attempt; the kind's backoff when left out. */
  retryIn?: number;
  permanent?: boolean;
}

const failedJobs = rowsOf({
  id: z.string(),
  /** `cancelled`: a newer job holds its dedupe key. */
  status: z.enum(["pending", "dead", "cancelled"]),
  availableAt: z.string().nullable(),
});
type FailedJob = z.output<typeof failedJobs>[number];

/** Ends attempts as failed; gives back what became of the jobs that were still held. */
export const failJobs = (failures: Failure[]): Promise<FailedJob[]> =>
  callFor(failedJobs, "fail_jobs", {
    failures: failures.map(({ retryIn, ...rest }) => inSnakeCase({ ...rest, retryIn: interval(retryIn) })),
  });

/** Ends one attempt as failed: what then became of the job, null when it was not held. */
export async function failJob(
  id: string,
  leaseToken: number,
  error: string,
  options: { retryIn?: number; permanent?: boolean } = {},
): Promise<FailedJob["status"] | null> {
  const [row] = await failJobs([{ id, leaseToken, error, ...options }]);
  return row?.status ?? null;
}

/** Gives jobs back without counting the attempt, to be claimed after `delay` seconds; the ids that were still held. */
export const releaseJobs = (releases: (Lease & { delay?: number })[]): Promise<string[]> =>
  callFor(ids, "release_jobs", {
    releases: releases.map(({ delay, ...lease }) => inSnakeCase({ ...lease, delay: interval(delay) })),
  });

/** Extends leases to `leaseSeconds` (60) from now; the ids that are still held. A missing one is lost. */
export async function extendJobs(leases: Lease[], leaseSeconds = 60): Promise<string[]> {
  const given = leases.map(({ id, leaseToken }) => inSnakeCase({ id, leaseToken }));
  const rows = await callFor(rowsOf({ id: z.string() }), "extend_jobs", { leases: given, leaseSeconds });
  return rows.map(({ id }) => id);
}

/** Merges fields into the progress of a job, and those of `steps` into its steps; false when it was not held. Safe to repeat. */
export const checkpointJob = (id: string, leaseToken: number, fields: Record<string, unknown>) =>
  callFor(z.boolean(), "checkpoint_job", { id, leaseToken, fields });

/** Ends the attempts whose lease has run out as failed; gives back how many. */
export const rescueExpiredJobs = (maxJobs = 1000): Promise<number> =>
  callFor(z.number(), "rescue_expired_jobs", { maxJobs });

/** Cancels jobs that wait or run; gives back their ids. A running one's handler is told by its signal. */
export const cancelJobs = (jobs: string[]): Promise<string[]> => callFor(ids, "cancel_jobs", { ids: jobs });

/** Sets when waiting jobs are due, a time that has passed meaning now; the ids of those that wait for it. */
export const rescheduleJobs = (jobs: string[], availableAt: Date): Promise<string[]> =>
  callFor(ids, "reschedule_jobs", { ids: jobs, availableAt });

const deadJobs = rowsOf({
  id: z.string(),
  kind: z.string(),
  payload: z.unknown(),
  attempts: z.number(),
  lastError: z.string().nullable(),
  context: z.unknown(),
  progress: z.unknown(),
  createdAt: z.string(),
  finishedAt: z.string(),
});

/** Dead jobs, the last to die first: of a kind or of all, at most `maxJobs` (50), and after the job `before` of the last page. */
export const listDeadJobs = (options: { kind?: string; maxJobs?: number; before?: string } = {}) =>
  callFor(deadJobs, "list_dead_jobs", options);

/**
 * Puts dead jobs of a kind back, or dead and cancelled ones by their ids, with all their attempts; the ids of those that now
 * wait. Throws JobError 22023 when neither is given.
 */
export const retryJobs = (
  { ids: jobs, kind, maxJobs }: { ids?: string[]; kind?: string; maxJobs?: number },
): Promise<string[]> =>
  // Null, where leaving it out would mean any job.
  callFor(ids, "retry_jobs", { ids: jobs ?? null, kind: kind ?? null, maxJobs });

/** Deletes what has ended and whose time is over, as the tick does; gives back how many. */
export const purgeJobs = (maxJobs = 10_000): Promise<number> =>
  callFor(z.number(), "purge_jobs", { maxJobs });

const lostAttempts = rowsOf({ jobId: z.string(), kind: z.string(), attempt: z.number(), error: z.string() });

/** Attempts that ended with their lease, each given to one caller: nobody has reported them yet. */
export const takeLostAttempts = (maxAttempts = 100) =>
  callFor(lostAttempts, "take_lost_attempts", { maxAttempts });

const kindSettings = rowsOf({ kind: z.string(), timeoutMs: z.number() });

/** Writes what the code declares to job_kinds, and gives back how long an attempt of each kind may run, in ms. */
export async function declareJobKinds(kinds: KindDeclarations): Promise<Map<string, number>> {
  const rows = await callFor(kindSettings, "declare_job_kinds", {
    declarations: Object.entries(kinds).map(([kind, { schema: _, backoff, ...declared }]) =>
      inSnakeCase({
        ...declared,
        kind,
        backoffBase: interval(backoff?.baseSeconds),
        backoffFactor: backoff?.factor,
        backoffCap: interval(backoff?.capSeconds),
        backoffJitter: backoff?.jitter,
        ratePeriod: interval(declared.ratePeriodSeconds),
        keepSucceeded: interval(declared.keepSucceededSeconds),
        keepDead: interval(declared.keepDeadSeconds),
        keepCancelled: interval(declared.keepCancelledSeconds),
      })
    ),
  });
  return new Map(rows.map(({ kind, timeoutMs }) => [kind, timeoutMs]));
}

/** An interval as Postgres prints it, such as "1 day 02:03:04.5", in seconds. */
const printedInterval = z.string().regex(/^(-?\d+ days? ?)?([-\d:.]+)?$/).transform((text) => {
  const [, days, time = "0"] = /^(?:(-?\d+) days? ?)?(.+)?$/.exec(text) ?? [];
  return Number(days ?? 0) * 86_400 + time.split(":").reduce((sum, part) => sum * 60 + Number(part), 0);
}).nullable();

const count = z.string();
const kindStats = rowsOf({
  kind: z.string(),
  ready: count,
  delayed: count,
  retrying: count,
  running: count,
  dead: count,
  oldestReadyAge: printedInterval,
  succeededLastHour: count,
  failedLastHour: count,
  medianRunTime: printedInterval,
  p95RunTime: printedInterval,
  paused: z.boolean(),
  limited: z.boolean(),
});

/** What waits, runs and has ended, for each of these kinds or for all. Counts are exact to "10000", then "10000+". */
export const jobStats = (kinds?: string[]) => callFor(kindStats, "job_stats", { kinds });

/** As Postgres reads an interval. What is no number of seconds from 0 to ten years becomes the nearest that is. */
export function interval(value: number | undefined): string | undefined {
  if (value === undefined) return undefined;
  const bounded = Math.min(Math.max(Number.isNaN(value) ? 0 : value, 0), 315_360_000);
  return `${bounded.toFixed(3)} seconds`;
}

const storedWebhooks = rowsOf({
  messageId: z.string(),
  type: z.string().nullable(),
  tenant: z.string().nullable(),
  headers: z.record(z.string(), z.string()),
  body: z.string(),
  receivedAt: z.string(),
});

/** The webhook message of a job, its body in base64; undefined when it has none. */
export const readWebhook = async (id: string) =>
  (await callFor(storedWebhooks, "read_webhook", { id })).at(0);

const status = z.enum(["pending", "running", "succeeded", "dead", "cancelled"]);
const listedWebhooks = rowsOf({
  id: z.string(),
  source: z.string(),
  tenant: z.string().nullable(),
  messageId: z.string(),
  type: z.string().nullable(),
  status,
  attempts: z.number(),
  lastError: z.string().nullable(),
  otherBodies: z.number(),
  receivedAt: z.string(),
  finishedAt: z.string().nullable(),
});

/** Webhook messages, the newest first: at most `maxRows` (50), and after the message `before` of the last page. */
export const listWebhooks = (
  options: {
    source?: string;
    tenant?: string;
    status?: z.output<typeof status>;
    maxRows?: number;
    before?: string;
  } = {},
) => callFor(listedWebhooks, "list_webhooks", options);

/** Puts dead messages of a source back, or dead and cancelled ones by their ids; the ids of those that now wait. */
export const retryWebhooks = (
  options: { source?: string; tenant?: string; ids?: string[]; maxRows?: number },
): Promise<string[]> => callFor(ids, "retry_webhooks", options);

/** Deletes messages, and their jobs whatever they do, older than `olderThan` seconds (0); gives back how many: call it until 0. */
export const purgeWebhooks = (
  { olderThan, ...options }: { source?: string; tenant?: string; olderThan?: number; maxRows?: number },
): Promise<number> => callFor(z.number(), "purge_webhooks", { ...options, olderThan: interval(olderThan) });
