import { errorText } from "../_shared/errors.ts";
import {
  enqueueDueSchedules,
  jobStats,
  loadApp,
  purgeExpiredKeys,
  purgeJobs,
  rescueExpiredJobs,
  workJobs,
} from "../_shared/jobs.ts";
import { log, logWatch } from "../_shared/log.ts";
import { within } from "../_shared/timer.ts";
import { timeoutOf } from "../_shared/worker.ts";
import { ensureAppSchedules } from "./app.ts";

/** What an outside scheduler starts: everything that is due, in one call. */

/** An isolate on Free has 75 s. */
const LIFETIME_MS = 70_000;
/** How long a hook may take. */
const HOOK_MS = 5_000;
/** enqueue_due_schedules() leaves off after three seconds. */
const LEAVES_OFF_MS = 2_900;
/** What of the rest of the log is an error to a drain, whose caller may wonder why a job is in no count. */
const LEASE_LOST = new Set(["lease_lost", "settled_before_or_lease_lost"]);

/** How a drain ends: the answer to its caller. */
export interface DrainReport {
  /** Jobs enqueued for schedules that were due. */
  schedules: number;
  /** Attempts by kind. `failed`: the job is to be tried again, or was superseded by a newer one. */
  queues: Record<string, { succeeded: number; failed: number; dead: number }>;
  /** Jobs are left that are ready to run. */
  budgetExhausted: boolean;
  /** What went wrong in the drain itself: failed attempts are none of these, lost leases are. */
  errors: number;
}

/** One drain, to its hooks. `id`: 32 hexadecimal digits. */
export interface Drain {
  id: string;
  startedAt: Date;
}

/** Called round each drain whose caller sent CRON_SECRET: `started`, then either `finished` or, when drain() throws, `failed`. */
export interface DrainMonitor {
  started?(drain: Drain): unknown;
  finished?(report: DrainReport, drain: Drain): unknown;
  failed?(error: unknown, drain: Drain): unknown;
}

/**
 * What an app does about drains beside them. A hook that throws is a line in the log, and nobody waits for one longer than five
 * seconds after the work is done.
 */
export interface DrainHooks {
  /** Called for each thing that goes wrong in a drain, and for each failed attempt, with its job. */
  onError?(error: unknown, job?: { id: string; kind: string; attempt: number }): unknown;
  monitor?: DrainMonitor;
}

export interface DrainOptions {
  /** When the request came, on performance.now()'s clock. */
  arrivedAt: number;
  /** Nothing is claimed later than this; what was claimed is finished. */
  budgetMs: number;
  /** Only these kinds; all by default. */
  kinds?: string[];
  /** The isolate is about to end, or gets no more requests. */
  signal: AbortSignal;
  retirement: AbortSignal;
}

/**
 * Brings the app's schedules in step, enqueues what is due, rescues what a lost worker had, works until nothing is ready or the
 * budget is spent, and purges. What fails of that stops nothing else. Safe beside other drains and workers. Throws when it could
 * not look for jobs: the database refused to tell its kinds or five claims in a row, or all that came before it had time to.
 */
export async function drain(options: DrainOptions, hooks: DrainHooks): Promise<DrainReport> {
  const { monitor } = hooks;
  const about: Drain = { id: crypto.randomUUID().replaceAll("-", ""), startedAt: new Date() };
  const report: DrainReport = { schedules: 0, queues: {}, budgetExhausted: false, errors: 0 };
  const calls: Promise<void>[] = [];
  const started = call("monitor.started", () => monitor?.started?.(about));
  try {
    await logWatch.run(watch, () => runSteps(report, options));
    const told = structuredClone(report);
    calls.push(started.then(() => call("monitor.finished", () => monitor?.finished?.(told, about))));
    return report;
  } catch (error) {
    calls.push(started.then(() => call("monitor.failed", () => monitor?.failed?.(error, about))));
    throw error;
  } finally {
    const all = Promise.all(calls);
    EdgeRuntime.waitUntil(all);
    await within(HOOK_MS, all, late()).catch(() => {}); // each says it by itself
  }

  /** Hears what is logged in this drain. */
  function watch(...[level, event, fields = {}, thrown]: Parameters<typeof log>): void {
    if (level !== "error" && !LEASE_LOST.has(event)) return;
    if (event !== "attempt_failed") report.errors++;
    const { id, kind, attempt, error, todo } = fields;
    const job = id === undefined
      ? undefined
      : { id: String(id), kind: String(kind), attempt: Number(attempt) };
    const why = thrown ?? new Error([event, error ?? todo].filter(Boolean).join(": "));
    calls.push(call("onError", () => hooks.onError?.(why, job)));
  }
}

const late = () => new Error(`it was not over after ${HOOK_MS / 1000} s`);

/** Calls a hook, whose own errors are none of the drain's. */
function call(hook: string, run: () => unknown): Promise<void> {
  return logWatch.run(undefined, async () => {
    try {
      await within(HOOK_MS, (async () => await run())(), late());
    } catch (error) {
      log("error", "drain_hook_failed", { hook, error: errorText(error) }, error);
    }
  });
}

async function runSteps(report: DrainReport, options: DrainOptions): Promise<void> {
  const { arrivedAt, budgetMs, kinds, signal, retirement } = options;
  const failed = new Map<string, unknown>();
  await step("app_schedules", ensureAppSchedules);
  await step("schedules", async () => {
    let calledAt: number;
    do {
      calledAt = performance.now();
      report.schedules += await enqueueDueSchedules();
    } while (performance.now() > calledAt + LEAVES_OFF_MS && hasTime()); // else it was all, but for what has come due since
  });
  await step("rescue", async () => {
    while (await rescueExpiredJobs() > 0 && hasTime());
  });
  // Beside the work, since behind it there may be no time left; and for no longer than that takes.
  let working = true;
  const purging = Promise.all([
    step("purge", async () => {
      while (await purgeJobs() > 0 && working);
    }),
    step("expired_keys", async () => {
      while (await purgeExpiredKeys() > 0 && working);
    }),
  ]);
  await step("work", work);
  working = false;
  await purging;
  if (failed.has("work")) throw failed.get("work");
  // A short budget may end before the claims are given up.
  const didNothing = ["schedules", "rescue", "purge"].every((name) => failed.has(name));
  if (didNothing && Object.keys(report.queues).length === 0) throw failed.get("rescue");

  async function step(name: string, run: () => Promise<void>): Promise<void> {
    try {
      await run();
    } catch (error) {
      failed.set(name, error);
      log("error", "drain_step_failed", { step: name, error: errorText(error) }, error);
    }
  }

  function hasTime(): boolean {
    return performance.now() < arrivedAt + budgetMs;
  }

  async function work(): Promise<void> {
    const limits = { startedAt: arrivedAt, budgetMs, lifetimeMs: LIFETIME_MS, maxJobs: Infinity };
    const { results, backlog } = await workJobs({ kinds, ...limits, signal, retirement });
    const queues = new Map<string, DrainReport["queues"][string]>(); // a kind may be called constructor
    for (const { kind, status } of results) {
      const queue = queues.get(kind) ?? { succeeded: 0, failed: 0, dead: 0 };
      queues.set(kind, queue);
      if (status === "succeeded") queue.succeeded++;
      else if (status === "pending" || status === "cancelled") queue.failed++;
      else if (status === "dead") queue.dead++;
    }
    report.queues = Object.fromEntries(queues);
    // Of a kind for which there was no time any more nobody has looked for jobs.
    const left = arrivedAt + LIFETIME_MS - performance.now();
    const mine = (kind: string) => timeoutOf(kind) <= LIFETIME_MS;
    const sought = kinds ?? Object.keys((await loadApp()).kinds);
    report.budgetExhausted = backlog || sought.some((kind) => mine(kind) && timeoutOf(kind) > left);
    if (!report.budgetExhausted || signal.aborted || retirement.aborted) return;
    await step("look", async () => {
      const stats = await jobStats(kinds);
      report.budgetExhausted = stats.some(({ kind, ready, paused, limited }) =>
        ready !== "0" && !paused && !limited && mine(kind)
      );
    });
  }
}
