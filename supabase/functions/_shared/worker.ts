import { errorText, JobError, PermanentError, RetryAfterError } from "./errors.ts";
import type { Handler, Job, KindDeclarations } from "./kinds.ts";
import { log } from "./log.ts";
import {
  type ClaimedJob,
  claimJobs,
  completeJobs,
  declareJobKinds,
  extendJobs,
  failJobs,
  type Failure,
  releaseJobs,
} from "./queue.ts";

const LEASE_SECONDS = 60;
/** A third of the lease: two heartbeats may be lost before the lease is. */
const HEARTBEAT_MS = 20_000;
/** pg_net pauses a second after each send; a worker that goes on looking meanwhile needs no poke. */
const LINGER_MS = 2_000;
const POLL_MS = 50;
const AWAKE_FOR_SECONDS = 1;
/** How long the jobs at hand may take to end once the worker is told to stop. */
const STOP_MS = 2_000;

/** The app as the engine sees it. */
export interface App {
  kinds: KindDeclarations;
  handlers: Record<string, Handler<never>>;
}

export interface WorkOptions {
  /** Only these kinds; all by default. */
  kinds?: string[];
  /** Jobs at once; 10 by default. */
  slots?: number;
  /** A job is claimed only if its kind's timeout still fits into this; 70,000 by default. */
  lifetimeMs?: number;
  /** At most this many jobs; 500 by default. */
  maxJobs?: number;
  /** When it aborts, nothing more is claimed, and what does not end within two seconds is given back uncounted. */
  signal?: AbortSignal;
  /** Goes on looking for two seconds after the last job; else it ends as soon as nothing is ready. */
  linger?: boolean;
}

/** `lost`: the lease was, so what the handler did was refused. `released`: given back, the attempt not counted. */
export type JobStatus = "succeeded" | "pending" | "dead" | "released" | "lost";

export interface WorkReport {
  results: { id: string; kind: string; status: JobStatus }[];
  /** Ended by lifetime, cap or signal while jobs were ready, or were expected by a worker that lingers. */
  backlog: boolean;
}

/** A claimed job until it is settled. */
interface Held {
  job: ClaimedJob;
  controller: AbortController;
  /** When the lease ends as far as this worker knows, on performance.now()'s clock. */
  leaseEndsAt: number;
  /** Why the handler was stopped, when it was not the handler's own doing. */
  stopped?: "timeout" | "lost" | "released";
  /** Only its settling is left: no heartbeat extends it, so that one that cannot be settled is given up with its lease. */
  ended?: true;
}

type Outcome = { completed: unknown } | { failed: Omit<Failure, "id" | "leaseToken"> } | {
  stopped: "lost" | "released";
};

interface Pool {
  hasRoom(): boolean;
  nudge(): void;
}
const pools = new Set<Pool>();
const MAX_POOLS = 4;

/**
 * For a poke: has a running pool of this isolate look now, or starts another when all are full and fewer than four run.
 * Gives back that pool's report, or null when none was started.
 */
export function wakeWorker(app: App, options: WorkOptions): Promise<WorkReport> | null {
  for (const pool of pools) {
    if (pool.hasRoom()) {
      pool.nudge();
      return null;
    }
  }
  return pools.size < MAX_POOLS ? work(app, { ...options, linger: true }) : null;
}

let settings: Map<string, number> | undefined;

/** Claims jobs into a pool of slots, runs their handlers and settles them, until nothing is ready. Never throws for a job. */
export async function work(app: App, options: WorkOptions): Promise<WorkReport> {
  const { slots = 10, lifetimeMs = 70_000, maxJobs = 500, signal, linger = false } = options;
  const worker = `edge-${crypto.randomUUID().slice(0, 8)}`;
  const endsAt = performance.now() + lifetimeMs;
  const held = new Set<Held>();
  const results: WorkReport["results"] = [];
  const bell = createBell();
  let running = 0;
  let claimed = 0;
  let accepting = true;
  let takesAll = true;

  const pool: Pool = {
    hasRoom: () => accepting && takesAll && running < slots && claimed < maxJobs && !options.kinds,
    nudge: () => bell.ring(),
  };
  pools.add(pool);
  signal?.addEventListener("abort", bell.ring);
  const settler = createSettler(held, results);
  const heartbeat = setInterval(() => extendLeases(held), HEARTBEAT_MS);
  try {
    const refreshed = declareJobKinds(app.kinds).then((fresh) => settings = fresh);
    if (settings) {
      refreshed.catch((error) => log("error", "declare_job_kinds_failed", { error: errorText(error) }));
    } else await refreshed;

    const backlog = await claimUntilIdle();
    accepting = false;
    await finish();
    await settler.idle();
    return { results, backlog };
  } finally {
    accepting = false;
    clearInterval(heartbeat);
    signal?.removeEventListener("abort", bell.ring);
    pools.delete(pool);
  }

  /** Keeps the slots full. True when it ended with jobs left. */
  async function claimUntilIdle(): Promise<boolean> {
    let lastWork = performance.now();
    let full = false;
    let looksLeft = 2;
    let failures = 0;
    while (true) {
      if (signal?.aborted || claimed >= maxJobs) return full;
      const kinds = kindsThatFit();
      const lingers = linger && performance.now() - lastWork < LINGER_MS;
      takesAll = kinds === undefined;
      // While its promise stands nobody pokes, so a successor takes over; but not from one that had nothing to do.
      if (kinds?.length === 0) return full || (lingers && claimed > 0);
      if (running >= slots) {
        await bell.wait();
        continue;
      }

      const room = Math.min(slots - running, maxJobs - claimed);
      const calledAt = performance.now();
      let jobs: ClaimedJob[];
      try {
        jobs = await claimJobs(worker, {
          maxJobs: room,
          leaseSeconds: LEASE_SECONDS,
          kinds,
          // A promise holds for any kind, so one that does not take all kinds may not make it.
          awakeForSeconds: lingers && !kinds ? AWAKE_FOR_SECONDS : undefined,
        });
        failures = 0;
      } catch (error) {
        log("error", "claim_failed", { worker, error: errorText(error) });
        if (++failures === 5) return false;
        await bell.wait(100 * 2 ** failures);
        continue;
      }
      for (const job of jobs) start(job, calledAt);
      claimed += jobs.length;
      full = jobs.length === room;
      if (jobs.length > 0) {
        lastWork = performance.now();
        looksLeft = 2;
        continue;
      }

      let waitMs: number | undefined;
      if (lingers) {
        waitMs = POLL_MS;
        looksLeft = 2;
      } else if (linger && --looksLeft > 0) {
        // The promise is taken back by now; an enqueue that relied on it may be about to commit.
        waitMs = 2 * POLL_MS;
      } else if (running === 0 && !bell.rung()) {
        return false;
      }
      if (await bell.wait(waitMs)) lastWork = performance.now();
    }
  }

  /** Undefined for all kinds, else those whose timeout fits into what is left of the lifetime. */
  function kindsThatFit(): string[] | undefined {
    const left = endsAt - performance.now();
    const known = options.kinds ?? Object.keys(app.kinds);
    const fitting = known.filter((kind) => (settings?.get(kind) ?? 0) <= left);
    if (left <= 0) return [];
    return options.kinds === undefined && fitting.length === known.length ? undefined : fitting;
  }

  async function start(job: ClaimedJob, calledAt: number): Promise<void> {
    const entry: Held = {
      job,
      controller: new AbortController(),
      leaseEndsAt: calledAt + LEASE_SECONDS * 1000,
    };
    // Lost, rescued and claimed again by this very pool: the earlier attempt is over.
    for (const earlier of held) if (earlier.job.id === job.id) stop(earlier, "lost");
    held.add(entry);
    running++;
    const outcome = await attempt(app, entry);
    entry.ended = true;
    running--;
    bell.ring();
    settler.settle(entry, outcome);
  }

  /** Waits for the jobs at hand; once told to stop, gives back what does not end in time. */
  async function finish(): Promise<void> {
    let stopAt = Infinity;
    while (running > 0) {
      if (signal?.aborted) stopAt = Math.min(stopAt, performance.now() + STOP_MS);
      if (performance.now() >= stopAt) {
        for (const entry of held) stop(entry, "released");
        stopAt = Infinity;
      }
      await bell.wait(Number.isFinite(stopAt) ? stopAt - performance.now() : undefined);
    }
  }
}

/** One run of one handler, from payload to outcome. Never throws. */
async function attempt(app: App, entry: Held): Promise<Outcome> {
  const { job, controller } = entry;
  const kind = app.kinds[job.kind];
  const handler = app.handlers[job.kind];
  // A job may also name what every object inherits, such as "constructor".
  if (!kind || !handler || !Object.hasOwn(app.kinds, job.kind)) {
    return { failed: { error: `unknown_kind: ${job.kind}`, permanent: true } };
  }
  const timeoutMs = settings?.get(job.kind) ?? 45_000;
  const timer = setTimeout(() => stop(entry, "timeout"), timeoutMs);
  try {
    const parsed = await kind.schema.safeParseAsync(job.payload);
    if (!parsed.success) {
      return {
        failed: { error: `invalid_payload: ${describeIssue(parsed.error.issues[0])}`, permanent: true },
      };
    }
    const described: Job = {
      id: job.id,
      kind: job.kind,
      attempts: job.attempts,
      maxAttempts: job.maxAttempts,
      isLastAttempt: job.attempts >= job.maxAttempts,
      context: job.context,
      createdAt: new Date(job.createdAt),
      signal: controller.signal,
    };
    const stopped = new Promise<never>((_, reject) => {
      controller.signal.addEventListener("abort", () => reject(controller.signal.reason), { once: true });
    });
    // The schema gave the payload its handler's type; the map over all kinds has lost which is which.
    const result = await Promise.race([(handler as Handler<unknown>)(parsed.data, described), stopped]);
    const unstorable = whyNotJson(result);
    return unstorable ? { failed: { error: unstorable } } : { completed: result };
  } catch (error) {
    if (entry.stopped === "timeout") {
      return { failed: { error: `handler_timeout: the handler was still running after ${timeoutMs} ms` } };
    }
    if (entry.stopped) return { stopped: entry.stopped };
    return {
      failed: {
        error: errorText(error),
        permanent: error instanceof PermanentError,
        retryIn: error instanceof RetryAfterError ? error.seconds : undefined,
      },
    };
  } finally {
    clearTimeout(timer);
  }
}

/** What is wrong with a result that JSON cannot hold: inside the settle call it would look like a failure of the network. */
function whyNotJson(result: unknown): string | undefined {
  try {
    JSON.stringify(result);
  } catch (error) {
    return cannotStore(error);
  }
}

const cannotStore = (error: unknown) => `the result cannot be stored: ${errorText(error)}`;

/** Where and why a payload does not fit its schema. */
export function describeIssue(issue: { path: PropertyKey[]; message: string } | undefined): string {
  if (!issue) return "(payload): does not fit its schema";
  return `${issue.path.length > 0 ? issue.path.map(String).join(".") : "(payload)"}: ${issue.message}`;
}

function stop(entry: Held, why: NonNullable<Held["stopped"]>): void {
  if (entry.controller.signal.aborted) return;
  entry.stopped = why;
  entry.controller.abort(new Error(`the job was stopped: ${why}`));
}

/** One heartbeat for all leases. A handler whose lease is lost is stopped. */
async function extendLeases(held: Set<Held>): Promise<void> {
  const entries = [...held].filter((entry) => !entry.ended);
  if (entries.length === 0) return;
  const calledAt = performance.now();
  try {
    const still = new Set(
      await extendJobs(entries.map(({ job }) => job), LEASE_SECONDS),
    );
    for (const entry of entries) {
      if (still.has(entry.job.id)) entry.leaseEndsAt = calledAt + LEASE_SECONDS * 1000;
      else if (held.has(entry)) stop(entry, "lost");
    }
  } catch (error) {
    log("error", "heartbeat_failed", { jobs: entries.length, error: errorText(error) });
    for (const entry of entries) {
      if (performance.now() >= entry.leaseEndsAt) stop(entry, "lost");
    }
  }
}

/** Settles what has ended in batches, one call of a sort at a time, and repeats calls that fail. */
function createSettler(held: Set<Held>, results: WorkReport["results"]) {
  let waiting: { entry: Held; outcome: Outcome }[] = [];
  let flushing: Promise<void> | undefined;

  return {
    settle(entry: Held, outcome: Outcome): void {
      waiting.push({ entry, outcome });
      flushing ??= flush().finally(() => flushing = undefined);
    },
    async idle(): Promise<void> {
      while (flushing) await flushing;
    },
  };

  async function flush(): Promise<void> {
    // Those that end in the same turn of the event loop go together.
    await new Promise((resolve) => setTimeout(resolve, 0));
    while (waiting.length > 0) {
      const batch = waiting;
      waiting = [];
      const completions: { entry: Held; result: unknown }[] = [];
      const failures: { entry: Held; failed: Omit<Failure, "id" | "leaseToken"> }[] = [];
      const releases: Held[] = [];
      for (const { entry, outcome } of batch) {
        if ("completed" in outcome) completions.push({ entry, result: outcome.completed });
        else if ("failed" in outcome) failures.push({ entry, failed: outcome.failed });
        else if (outcome.stopped === "released") releases.push(entry);
        else settled(entry, "lost");
      }
      await Promise.all([complete(completions), fail(failures), release(releases)]);
    }
  }

  async function complete(batch: { entry: Held; result: unknown }[]): Promise<void> {
    if (batch.length === 0) return;
    try {
      const done = new Set(
        await repeatWhileHeld(
          batch,
          () =>
            completeJobs(
              batch.map(({ entry: { job }, result }) => ({ id: job.id, leaseToken: job.leaseToken, result })),
            ),
        ),
      );
      for (const { entry } of batch) settled(entry, done.has(entry.job.id) ? "succeeded" : "lost");
    } catch (error) {
      // One result that cannot be stored refuses the whole call: each is then tried alone, and the bad one's attempt fails.
      if (batch.length > 1) {
        for (const one of batch) await complete([one]);
        return;
      }
      const failed = { error: cannotStore(error) };
      await fail(batch.map(({ entry }) => ({ entry, failed })));
    }
  }

  async function fail(batch: { entry: Held; failed: Omit<Failure, "id" | "leaseToken"> }[]): Promise<void> {
    if (batch.length === 0) return;
    for (const { entry: { job }, failed } of batch) {
      log("error", "attempt_failed", {
        id: job.id,
        kind: job.kind,
        attempt: job.attempts,
        error: failed.error,
      });
    }
    try {
      const rows = await repeatWhileHeld(
        batch,
        () =>
          failJobs(
            batch.map(({ entry: { job }, failed }) => ({
              ...failed,
              id: job.id,
              leaseToken: job.leaseToken,
            })),
          ),
      );
      const became = new Map(rows.map((row) => [row.id, row.status]));
      for (const { entry } of batch) settled(entry, became.get(entry.job.id) ?? "lost");
    } catch (error) {
      log("error", "settle_failed", { ids: batch.map(({ entry }) => entry.job.id), error: errorText(error) });
      for (const { entry } of batch) settled(entry, "lost");
    }
  }

  async function release(batch: Held[]): Promise<void> {
    if (batch.length === 0) return;
    try {
      const done = new Set(await releaseJobs(batch.map(({ job }) => job)));
      for (const entry of batch) settled(entry, done.has(entry.job.id) ? "released" : "lost");
    } catch (error) {
      log("error", "release_failed", { ids: batch.map(({ job }) => job.id), error: errorText(error) });
      for (const entry of batch) settled(entry, "lost");
    }
  }

  function settled(entry: Held, status: JobStatus): void {
    held.delete(entry);
    results.push({ id: entry.job.id, kind: entry.job.kind, status });
    if (status === "lost") {
      log("error", "lease_lost", { id: entry.job.id, kind: entry.job.kind, attempt: entry.job.attempts });
    }
  }
}

/** Repeats a settle call that got no answer until the leases are over: the token makes repeating safe. */
async function repeatWhileHeld<T>(batch: { entry: Held }[], call: () => Promise<T>): Promise<T> {
  for (let delayMs = 100;; delayMs = Math.min(delayMs * 2, 5_000)) {
    try {
      return await call();
    } catch (error) {
      // An error of class 22 or 23 is about the values: it would be the same next time.
      const hopeless = error instanceof JobError && /^2[23]/.test(error.code);
      if (hopeless || batch.every(({ entry }) => performance.now() >= entry.leaseEndsAt)) throw error;
      log("error", "settle_repeated", { error: errorText(error) });
      await new Promise((resolve) => setTimeout(resolve, delayMs));
    }
  }
}

/** Something to wait for: `wait` resolves when it is rung (true), or has been since the last wait, or after `ms` (false). */
function createBell() {
  let isRung = false;
  let wake: (() => void) | undefined;
  return {
    ring(): void {
      isRung = true;
      wake?.();
    },
    rung: () => isRung,
    wait(ms?: number): Promise<boolean> {
      return new Promise((resolve) => {
        let timer: ReturnType<typeof setTimeout> | undefined;
        const done = () => {
          clearTimeout(timer);
          wake = undefined;
          const was = isRung;
          isRung = false;
          resolve(was);
        };
        if (isRung) return done();
        wake = done;
        if (ms !== undefined) timer = setTimeout(done, Math.max(0, ms));
      });
    },
  };
}
