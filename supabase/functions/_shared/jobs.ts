import { z } from "zod";
import { kinds } from "../_app/kinds.ts";
import { type App, assertJson, describeIssue } from "./attempt.ts";
import { callDatabase, callFor, inSnakeCase, instant } from "./database.ts";
import { JobError } from "./errors.ts";
import type { Handler, HandlersOf } from "./kinds.ts";
import { withWebhooks } from "../_webhooks/sources.ts";
import { wakeWorker, work, type WorkOptions, type WorkReport } from "./worker.ts";

/** The queue as this app uses it: the engine bound to the kinds declared in _app/kinds.ts. */

export { asUser, type Context, contextOf } from "./context.ts";
export { serviceClient } from "./database.ts";
export * from "./idempotency.ts";
export { JobError, PermanentError, RetryAfterError, SnoozeError } from "./errors.ts";
export type { Job } from "./kinds.ts";
export {
  acquireLease,
  extendLease,
  type HeldLease,
  type LeaseOptions,
  releaseLease,
  withLease,
} from "./leases.ts";
export * from "./queue.ts";
export { retryAfterSeconds } from "./retry_after.ts";
export * from "../_schedules/schedules.ts";
export { defineWebhookSource, receiveWebhook, type WebhookMessage } from "../_webhooks/sources.ts";

type Kinds = typeof kinds;

/** A kind that this app declares. */
export type Kind = keyof Kinds;

/** The type of a kind's handler. */
export type HandlerOf<K extends Kind> = Handler<z.output<Kinds[K]["schema"]>>;

/** One handler for each kind that this app declares. */
export type Handlers = HandlersOf<Kinds>;

export interface EnqueueOptions {
  /** Seconds to wait before the first attempt, by the database's clock. */
  delay?: number;
  /** Not before this time; in place of `delay`. */
  availableAt?: Date;
  /** -100 to 100, higher first within the kind; 0 by default. */
  priority?: number;
  /** Attempts before the job is dead; what job_kinds or the kind's declaration says by default. */
  maxAttempts?: number;
  /** While another job of the kind holds this key, nothing is enqueued and that one's id is given back. */
  dedupeKey?: string;
  /**
   * Until when a job holds its key: while it waits or runs (`active`, the default), while it waits (`waiting`; `replace`:
   * and it takes the newest payload, time and settings), while there is a row (`once`).
   */
  dedupe?: "active" | "waiting" | "replace" | "once";
  /** Of the kind's jobs with this key one runs at a time, or as many as the kind's keyConcurrency says. */
  concurrencyKey?: string;
  /** Handed to the handler as job.context. */
  context?: unknown;
}

/** A job to enqueue: its kind, a payload that fits, and options. */
export type NewJob = {
  [K in Kind]: { kind: K; payload: z.input<Kinds[K]["schema"]> } & EnqueueOptions;
}[Kind];

/**
 * Enqueues a job and gives back its id. The payload is checked by the kind's schema before anything is written: throws
 * JobError `unknown_kind`, or `invalid_payload` naming the field; and what the database refuses, by its SQLSTATE.
 */
export async function enqueueJob<K extends Kind>(
  kind: K,
  payload: z.input<Kinds[K]["schema"]>,
  options: EnqueueOptions = {},
): Promise<string> {
  return String(await callDatabase("enqueue_job", await toArguments("enqueueJob", kind, payload, options)));
}

/**
 * Enqueues jobs, all of them or none, and gives back for each in order its id and whether it was created: false with the id
 * of the job that holds its dedupe key. Takes thousands, in one transaction of the database. Throws as enqueueJob does,
 * naming the entry, from 0 on.
 */
export async function enqueueJobs(jobs: NewJob[]): Promise<{ id: string; created: boolean }[]> {
  const entries = [];
  for (const [n, { kind, payload, ...options }] of jobs.entries()) {
    entries.push(await toArguments(`enqueueJobs: entry ${n}`, kind, payload, options));
  }
  return await callFor(enqueued, "enqueue_jobs_as_json", { jobs: entries });
}

const enqueued = z.array(z.object({ id: z.string(), created: z.boolean() }));

/** The arguments of enqueue_job, once the payload fits. Throws as enqueueJob does, `where` first. */
export async function toArguments(where: string, kind: Kind, payload: unknown, options: EnqueueOptions) {
  if (!Object.hasOwn(kinds, kind)) {
    const detail = `${where}: no kind ${JSON.stringify(kind)}`;
    throw new JobError("unknown_kind", detail, "Declare it in _app/kinds.ts.");
  }
  const parsed = await kinds[kind].schema.safeParseAsync(payload);
  if (!parsed.success) {
    const detail = `${where}: payload of ${kind}: ${describeIssue(parsed.error.issues[0])}`;
    throw new JobError("invalid_payload", detail);
  }
  assertJson(payload, `${where}: payload of ${kind}`);
  assertJson(options.context, `${where}: context`);
  const { delay, availableAt } = options;
  if (delay !== undefined && !Number.isFinite(delay)) {
    throw new JobError("22023", `${where}: delay is not a number of seconds`);
  }
  // As given, not as parsed: the worker parses it again, and a schema that transforms would do so twice.
  return inSnakeCase({
    ...options,
    kind,
    payload,
    delay: delay === undefined ? undefined : `${delay} seconds`,
    availableAt: instant(`${where}: availableAt`, availableAt),
  });
}

/** Runs ready jobs until there are none, or the lifetime, the cap or the signal ends it; gives back what became of each. */
export const workJobs = async (options: WorkOptions = {}): Promise<WorkReport> =>
  work(await loadApp(), options);

/** What a poke does: starts a worker that lingers, or has the running one look now; its report, or null if it only looked. */
export const wakeJobWorker = async (options: WorkOptions = {}): Promise<WorkReport | null> =>
  wakeWorker(await loadApp(), options);

let app: Promise<App> | undefined;

/** The app, put together at the first call. Handlers are not loaded above, so that a function that only enqueues does not load them. */
export const loadApp = (): Promise<App> => app ??= composeApp();

async function composeApp(): Promise<App> {
  const [{ handlers }, { webhooks }] = await Promise.all([
    import("../_app/handlers.ts"),
    import("../_app/webhooks.ts"),
  ]);
  return withWebhooks({ kinds, handlers }, webhooks);
}
