import { type App, attempt, type Held, type Outcome, stop } from "./attempt.ts";
import { errorText, passes } from "./errors.ts";
import type { KindDeclarations } from "./kinds.ts";
import { log } from "./log.ts";
import { type ClaimedJob, claimJobs, declareJobKinds, extendJobs, takeLostAttempts } from "./queue.ts";
import { createSettler, halves, isAboutWhatWasSent, isBlocked, type Settled } from "./settler.ts";
import { after, sleep } from "./timer.ts";

const LEASE_SECONDS = 60;
/** A third of the lease: two heartbeats may be lost before the lease is. */
const HEARTBEAT_MS = 20_000;
/** pg_net pauses a second after each send; a worker that goes on looking meanwhile needs no poke. */
const LINGER_MS = 2_000;
const POLL_MS = 50;
const AWAKE_FOR_SECONDS = 1;
/**
 * How long the jobs at hand may take to end once the worker is told to stop. An isolate whose wall clock runs out is told
 * when a tenth of it is left: 15 s on Free, 40 s on paid plans.
 */
const STOP_MS = 2_000;
const WALL_CLOCK_STOP_MS = 10_000;
/** A long-running worker that finds nothing looks again after this, doubled each time up to `MAX_IDLE_MS`. */
const MIN_IDLE_MS = 1_000;
const MAX_IDLE_MS = 30_000;
/** How long it tries to settle what has ended, when its claims are refused for good. */
const LAST_SETTLE_MS = 1_000;
/**
 * In a long-running worker a suspect waits this long to be alone, and nothing else is claimed for as long again: jobs may run
 * for hours there.
 */
const SUSPECT_PATIENCE_MS = 10_000;
/** For how long a suspect is given back when this isolate has another, or no time for it. */
const SUSPECT_DELAY_SECONDS = 1;
/** By how much it may outlast the lifetime, after which an isolate has five seconds left on Free. */
const SUSPECT_GRACE_MS = 4_000;

export interface WorkOptions {
  /** Only these kinds; all by default. */
  kinds?: string[];
  /** Jobs at once; 10 by default. */
  slots?: number;
  /** A job is claimed only if its kind's timeout still fits into this; 70,000 by default. */
  lifetimeMs?: number;
  /** Nothing is claimed after this; its lifetime by default. */
  budgetMs?: number;
  /** From when lifetime and budget count, on performance.now()'s clock; now by default. */
  startedAt?: number;
  /** At most this many jobs; 500 by default. */
  maxJobs?: number;
  /**
   * When it aborts, nothing more is claimed, and what does not end within two seconds (ten when the reason is `wall_clock`)
   * is given back uncounted.
   */
  signal?: AbortSignal;
  /** When it aborts, nothing more is claimed; the jobs at hand go on to their ends. */
  retirement?: AbortSignal;
  /** Called when it takes no more although jobs are left, before those at hand have ended. */
  onBacklog?: () => void;
  /** Goes on looking for two seconds after the last job; else it ends as soon as nothing is ready. */
  linger?: boolean;
  /**
   * For a process of its own: no lifetime and no cap, it polls while nothing is ready, and repeats claims that fail for a
   * reason that passes. It ends when `signal` aborts, jobs at hand having `stopMs` to end, or throws when a claim is refused
   * for good. `worker` is its name. It gives back no results.
   */
  longRunning?: { worker: string; stopMs: number };
}

export interface WorkReport {
  results: Settled[];
  /** Ended by budget or signal, or by lifetime or cap while jobs were ready, or were expected by a worker that lingers. */
  backlog: boolean;
}

interface Pool {
  hasRoom(): boolean;
  nudge(): void;
  /** Whether it has claimed anything beside this job, or is about to. */
  isBusyBeside(entry: Held): boolean;
}
const pools = new Set<Pool>();
const MAX_POOLS = 4;

/** The job that may be what ends workers, while it waits to be alone in this isolate or runs: nothing else is claimed then. */
let suspect: Held | undefined;

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

/** How long an attempt of each kind may run, in ms, as this isolate last heard; the claim says it exactly. */
let timeouts: Map<string, number> | undefined;
/** The same of one kind; 0 for one that is not known yet. */
export const timeoutOf = (kind: string) => timeouts?.get(kind) ?? 0;

/**
 * Claims jobs into a pool of slots, runs their handlers and settles them, until nothing is ready. Never throws for a job, but
 * for a database that refuses five claims in a row before one job was done: nothing to do must not look the same.
 */
export async function work(app: App, options: WorkOptions): Promise<WorkReport> {
  const { slots = 10, signal, retirement, linger = false, longRunning } = options;
  const { lifetimeMs = longRunning ? Infinity : 70_000, maxJobs = longRunning ? Infinity : 500 } = options;
  const worker = longRunning?.worker ?? `edge-${crypto.randomUUID().slice(0, 8)}`;
  const { startedAt = performance.now(), budgetMs = Infinity } = options;
  const endsAt = startedAt + lifetimeMs;
  const held = new Set<Held>();
  const results: Settled[] = [];
  const bell = createBell();
  let running = 0;
  let claimed = 0;
  let accepting = true;
  let claiming = false;
  let gaveUp: unknown;
  /** When the jobs at hand are given back. */
  let stopAt = Infinity;

  // But for kinds that no worker of this sort takes.
  const takesAll = () => claimable()?.exceptKinds?.every((kind) => timeoutOf(kind) > lifetimeMs) ?? false;
  const isTold = () => signal?.aborted || retirement?.aborted;
  const pool: Pool = {
    hasRoom: () => accepting && !isTold() && takesAll() && running < slots && claimed < maxJobs,
    nudge: () => bell.ring(),
    isBusyBeside: (entry) => claiming || held.size > (held.has(entry) ? 1 : 0),
  };
  pools.add(pool);
  signal?.addEventListener("abort", startStopping);
  retirement?.addEventListener("abort", bell.ring);
  const settler = createSettler(held, results, () => {
    if (longRunning) results.length = 0; // they would pile up
    bell.ring();
  });
  // One at a time: while somebody keeps a row locked, a heartbeat takes its time.
  let beating: Promise<void> | undefined;
  const heartbeat = setInterval(() => {
    beating ??= extendLeases([...held].filter(({ ended }) => !ended)).finally(() => beating = undefined);
  }, HEARTBEAT_MS);
  try {
    const declared = declare(app.kinds).then(hear);
    if (timeouts) {
      declared.catch((error) => log("error", "declare_job_kinds_failed", { error: errorText(error) }, error));
    } else await declared;

    const reporting = longRunning ? undefined : reportLostAttempts();
    const backlog = await claimUntilIdle();
    accepting = false;
    if (backlog) options.onBacklog?.();
    await finish();
    // A database that refuses claims for good may never settle them.
    await (longRunning && gaveUp ? Promise.race([settler.idle(), sleep(LAST_SETTLE_MS)]) : settler.idle());
    if (!longRunning) {
      await reporting;
      await reportLostAttempts(); // of which the tick has found out meanwhile
    }
    if (gaveUp && (longRunning || results.length === 0)) throw gaveUp;
    return { results, backlog };
  } finally {
    accepting = false;
    clearInterval(heartbeat);
    signal?.removeEventListener("abort", startStopping);
    retirement?.removeEventListener("abort", bell.ring);
    pools.delete(pool);
  }

  /** Takes the timeouts over, and says of a kind once that it has no time for it. */
  function hear(fresh: Map<string, number>): void {
    for (const [kind, timeoutMs] of fresh) {
      if (timeoutMs <= lifetimeMs || timeoutMs === Infinity || timeouts?.get(kind) === timeoutMs) continue;
      const todo = "Run it with npm run worker, or give the kind a shorter timeout.";
      log("info", "kind_not_claimed", { kind, timeoutMs, lifetimeMs, todo });
    }
    timeouts = fresh;
  }

  /** Keeps the slots full. True when it ended with jobs left. */
  async function claimUntilIdle(): Promise<boolean> {
    let lastWork = performance.now();
    let full = false;
    let looksLeft = 2;
    let failures = 0;
    let idleMs = MIN_IDLE_MS;
    while (true) {
      if (isTold()) {
        // Nobody pokes while the promise stands. A claim of no kinds takes it back.
        if (linger) await claimJobs(worker, { kinds: [] }).catch(() => {});
        // Whoever waits for the report is told that there may be more.
        return full || !linger;
      }
      if (performance.now() >= startedAt + budgetMs) return true;
      if (claimed >= maxJobs) return full;
      const claims = claimable();
      const lingers = linger && performance.now() - lastWork < LINGER_MS;
      // While its promise stands nobody pokes, so a successor takes over; but not from one that had nothing to do.
      if (!claims) return full || (lingers && claimed > 0);
      if (running >= slots || suspect) {
        await bell.wait();
        continue;
      }

      const room = Math.min(slots - running, maxJobs - claimed);
      const calledAt = performance.now();
      let jobs: ClaimedJob[];
      claiming = true;
      try {
        jobs = await claimJobs(worker, {
          maxJobs: room,
          leaseSeconds: LEASE_SECONDS,
          ...claims,
          // A promise holds for any kind, so one that does not take all kinds may not make it.
          awakeForSeconds: linger ? (lingers && takesAll() ? AWAKE_FOR_SECONDS : 0) : undefined,
        });
        failures = 0;
      } catch (error) {
        log("error", "claim_failed", { worker, error: errorText(error) }, error);
        failures++;
        if (longRunning ? !passes(error) : failures === 5) {
          gaveUp = error;
          if (longRunning) startStopping();
          return false;
        }
        await bell.wait(Math.min(100 * 2 ** failures, MAX_IDLE_MS));
        continue;
      } finally {
        claiming = false;
      }
      for (const job of jobs) start(job, calledAt);
      claimed += jobs.length;
      full = jobs.length === room;
      if (jobs.length > 0) {
        lastWork = performance.now();
        looksLeft = 2;
        idleMs = MIN_IDLE_MS;
        continue;
      }

      let waitMs: number | undefined;
      if (longRunning) {
        waitMs = idleMs;
        idleMs = Math.min(idleMs * 2, MAX_IDLE_MS);
      } else if (lingers) {
        waitMs = POLL_MS;
        looksLeft = 2;
      } else if (linger && --looksLeft > 0) {
        // The promise is taken back by now; an enqueue that relied on it may be about to commit.
        waitMs = 2 * POLL_MS;
      } else if (running === 0 && held.size === 0 && !bell.rung()) {
        return false; // not before: what is not settled yet still has its place in its kind's limits
      }
      if (await bell.wait(waitMs)) {
        lastWork = performance.now();
        idleMs = MIN_IDLE_MS;
      }
    }
  }

  /**
   * Of which kinds to claim: those whose timeout fits into what is left of the lifetime, and unknown ones; null when that is
   * none.
   */
  function claimable(): { kinds?: string[]; exceptKinds?: string[] } | null {
    // By the second, or a kind that takes the whole lifetime would fit at no time.
    const left = Math.ceil((endsAt - performance.now()) / 1000) * 1000;
    const known = options.kinds ?? Object.keys(app.kinds);
    const fits = (kind: string) => timeoutOf(kind) <= left && timeoutOf(kind) !== Infinity;
    if (left <= 0 || (known.length > 0 && !known.some(fits))) return null;
    return options.kinds
      ? { kinds: known.filter(fits) }
      : { exceptKinds: known.filter((kind) => !fits(kind)) };
  }

  async function start(job: ClaimedJob, calledAt: number): Promise<void> {
    const leaseEndsAt = calledAt + LEASE_SECONDS * 1000;
    const entry: Held = { job, controller: new AbortController(), leaseEndsAt };
    // Lost, rescued and claimed again by this very pool: the earlier attempt is over.
    for (const earlier of held) if (earlier.job.id === job.id) stop(earlier, "lost");
    held.add(entry);
    running++;
    const outcome = job.suspect ? await attemptSuspect(entry) : await attempt(app, entry);
    entry.ended = true;
    running--;
    bell.ring();
    settler.settle(entry, outcome);
  }

  /**
   * Runs a job that may be what ends workers when all else in this isolate is over and settled: should it do so again, it
   * takes nothing with it. It is given back when its timeout no longer fits into what that leaves of the lifetime. A
   * long-running worker waits for that no longer than it may.
   */
  async function attemptSuspect(entry: Held): Promise<Outcome> {
    if (suspect) return giveBack();
    suspect = entry;
    const { id, kind } = entry.job;
    log("info", "suspect_waits_to_be_alone", { id, kind, attempt: entry.job.attempts });
    const patientUntil = longRunning ? performance.now() + SUSPECT_PATIENCE_MS : Infinity;
    let cancel = () => {};
    try {
      do {
        await sleep(POLL_MS);
        if (performance.now() + entry.job.timeoutMs > endsAt + SUSPECT_GRACE_MS) return giveBack();
      } while (
        !entry.stopped && performance.now() < patientUntil &&
        [...pools].some((each) => each.isBusyBeside(entry))
      );
      if (longRunning) cancel = after(SUSPECT_PATIENCE_MS, letOthersIn);
      return await attempt(app, entry);
    } finally {
      cancel();
      letOthersIn();
    }

    function letOthersIn(): void {
      if (suspect === entry) suspect = undefined;
      for (const each of pools) each.nudge();
    }

    function giveBack(): Outcome {
      claimed--;
      return { stopped: "released", delay: SUSPECT_DELAY_SECONDS };
    }
  }

  function startStopping(): void {
    const stopMs = longRunning?.stopMs ?? (signal?.reason === "wall_clock" ? WALL_CLOCK_STOP_MS : STOP_MS);
    stopAt = performance.now() + stopMs;
    bell.ring();
  }

  /** Waits for the jobs at hand; once told to stop, gives back what does not end in time. */
  async function finish(): Promise<void> {
    while (running > 0) {
      if (performance.now() >= stopAt) {
        for (const entry of held) stop(entry, "released");
        stopAt = Infinity;
      }
      await bell.wait(Number.isFinite(stopAt) ? stopAt - performance.now() : undefined);
    }
  }
}

/**
 * Declares the kinds, one by one when that is refused, so that a wrong setting of one stops no other. That one's jobs wait:
 * no lifetime is long enough for them.
 */
async function declare(kinds: KindDeclarations): Promise<Map<string, number>> {
  try {
    return await declareJobKinds(kinds);
  } catch (error) {
    if (!isAboutWhatWasSent(error)) throw error;
    const [kind = "", ...others] = Object.keys(kinds);
    if (others.length > 0) {
      const entries = Object.entries(kinds);
      const each = await Promise.all(entries.map(([kind, declaration]) => declare({ [kind]: declaration })));
      return new Map(each.flatMap((declared) => [...declared]));
    }
    const todo = "Correct what _app declares for it: its jobs wait.";
    log("error", "kind_not_declared", { kind, error: errorText(error), todo }, error);
    return new Map([[kind, Infinity]]);
  }
}

/** Says of attempts whose worker was lost that they have failed, since that worker cannot. */
export async function reportLostAttempts(): Promise<void> {
  try {
    for (const { jobId: id, ...lost } of await takeLostAttempts()) {
      log("error", "attempt_failed", { id, ...lost });
    }
  } catch (error) {
    log("error", "take_lost_attempts_failed", { error: errorText(error) }, error);
  }
}

/** One heartbeat for these leases. A handler whose lease is lost is stopped. */
async function extendLeases(entries: Held[]): Promise<void> {
  if (entries.length === 0) return;
  const calledAt = performance.now();
  try {
    const still = new Set(await extendJobs(entries.map(({ job }) => job), LEASE_SECONDS));
    for (const entry of entries) {
      if (still.has(entry.job.id)) entry.leaseEndsAt = calledAt + LEASE_SECONDS * 1000;
      else if (!entry.ended) stop(entry, "lost");
    }
  } catch (error) {
    if (entries.length > 1 && isBlocked(error)) {
      await Promise.all(halves(entries).map(extendLeases));
      return;
    }
    const ids = entries.map(({ job }) => job.id);
    log("error", "heartbeat_failed", { ids, error: errorText(error) }, error);
    for (const entry of entries) if (performance.now() >= entry.leaseEndsAt) stop(entry, "lost");
  }
}

/** Something to wait for: `wait` resolves when it is rung (true), or has been since the last wait, or after `ms` (false). */
function createBell() {
  let next = Promise.withResolvers<void>();
  let isRung = false;
  return {
    ring(): void {
      isRung = true;
      next.resolve();
    },
    rung: () => isRung,
    async wait(ms?: number): Promise<boolean> {
      if (!isRung) next = Promise.withResolvers();
      const timer = ms === undefined ? undefined : setTimeout(next.resolve, Math.max(0, ms));
      await next.promise;
      clearTimeout(timer);
      const was = isRung;
      isRung = false;
      return was;
    },
  };
}
