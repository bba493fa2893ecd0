import { cannotStore, type Held, type Outcome } from "./attempt.ts";
import { errorText, JobError } from "./errors.ts";
import { log } from "./log.ts";
import { type ClaimedJob, completeJobs, failJobs, type Failure, releaseJobs } from "./queue.ts";

/**
 * `lost`: the lease was, so what the handler did was refused. `cancelled`: superseded by a newer job. `released`: given back,
 * the attempt not counted.
 */
type JobStatus = "succeeded" | "pending" | "dead" | "cancelled" | "released" | "lost";

/** A job whose attempt a worker has ended, and what became of it. */
export interface Settled {
  id: string;
  kind: string;
  status: Exclude<JobStatus, "released">;
}

interface Completion {
  entry: Held;
  result: unknown;
}

interface Failing {
  entry: Held;
  failed: Omit<Failure, "id" | "leaseToken">;
  thrown?: unknown;
}

/** A batch that takes longer than this no longer holds up the next. */
const PATIENCE_MS = 1_000;

/** Settles what has ended in batches, each told to `onSettled`, and repeats calls that fail until the leases are over. */
export function createSettler(held: Set<Held>, results: Settled[], onSettled = () => {}) {
  let waiting: { entry: Held; outcome: Outcome }[] = [];
  let flushing: Promise<void> | undefined;
  const settling = new Set<Promise<unknown>>();

  return {
    settle(entry: Held, outcome: Outcome): void {
      waiting.push({ entry, outcome });
      flushing ??= flush();
    },
    async idle(): Promise<void> {
      while (flushing || settling.size > 0) await Promise.all([flushing, ...settling]);
    },
  };

  async function flush(): Promise<void> {
    // Those that end in the same turn of the event loop go together.
    await sleep(0);
    while (waiting.length > 0) {
      const batch = waiting;
      waiting = [];
      const completions: Completion[] = [];
      const failures: Failing[] = [];
      const releases: { entry: Held; delay?: number }[] = [];
      for (const { entry, outcome } of batch) {
        if ("completed" in outcome) completions.push({ entry, result: outcome.completed });
        else if ("failed" in outcome) failures.push({ entry, ...outcome });
        else if (outcome.stopped === "released") releases.push({ entry, delay: outcome.delay });
        else settled(entry, "lost");
      }
      const calls = Promise.all([complete(completions), fail(failures), release(releases)]);
      settling.add(calls);
      calls.finally(() => settling.delete(calls));
      await Promise.race([calls, sleep(PATIENCE_MS)]);
    }
    // Together with the look above: whatever ends later starts a new flush.
    flushing = undefined;
  }

  function complete(batch: Completion[]): Promise<void> {
    return call(
      batch,
      (some) => completeJobs(some.map(({ entry: { job }, result }) => ({ ...leaseOf(job), result }))),
      (ids) => (id) => ids.includes(id) ? "succeeded" : "lost",
      ({ entry }, error) =>
        isAboutWhatWasSent(error) ? fail([{ entry, failed: cannotStore(error) }]) : settled(entry, "lost"),
    );
  }

  function fail(batch: Failing[]): Promise<void> {
    for (const { entry: { job }, failed, thrown } of batch) {
      log("error", "attempt_failed", {
        id: job.id,
        kind: job.kind,
        attempt: job.attempts,
        error: failed.error,
      }, thrown);
    }
    return call(
      batch,
      (some) => failJobs(some.map(({ entry: { job }, failed }) => ({ ...failed, ...leaseOf(job) }))),
      (rows) => (id) => rows.find((row) => row.id === id)?.status ?? "lost",
      ({ entry }) => settled(entry, "lost"),
    );
  }

  function release(batch: { entry: Held; delay?: number }[]): Promise<void> {
    return call(
      batch,
      (some) => releaseJobs(some.map(({ entry: { job }, delay }) => ({ ...leaseOf(job), delay }))),
      (ids) => (id) => ids.includes(id) ? "released" : "lost",
      ({ entry }) => settled(entry, "lost"),
    );
  }

  /**
   * Makes one settle call for a batch. When it is refused for what is in it, or for a row that somebody keeps locked, the
   * batch is halved, so that one job holds up no other; when it fails otherwise, it is repeated: the token makes that safe.
   */
  async function call<E extends { entry: Held }, T>(
    batch: E[],
    send: (batch: E[]) => Promise<T>,
    read: (answer: T) => (id: string) => JobStatus,
    giveUp: (one: E, error: unknown) => Promise<void> | void,
  ): Promise<void> {
    if (batch.length === 0) return;
    for (let delayMs = 100;; delayMs = Math.min(delayMs * 2, 5_000)) {
      try {
        const status = read(await send(batch));
        for (const { entry } of batch) settled(entry, status(entry.job.id), delayMs > 100);
        return;
      } catch (error) {
        if (batch.length > 1 && (isAboutWhatWasSent(error) || isBlocked(error))) {
          await Promise.all(halves(batch).map((half) => call(half, send, read, giveUp)));
          return;
        }
        if (isAboutWhatWasSent(error) || batch.every(({ entry }) => performance.now() >= entry.leaseEndsAt)) {
          log("error", "settle_given_up", {
            ids: batch.map(({ entry }) => entry.job.id),
            error: errorText(error),
          }, error);
          for (const one of batch) await giveUp(one, error);
          return;
        }
        log("error", "settle_repeated", {
          ids: batch.map(({ entry }) => entry.job.id),
          error: errorText(error),
        }, error);
        await sleep(delayMs);
      }
    }
  }

  /** `repeated`: an earlier call may have settled it already, and only its answer was lost. */
  function settled(entry: Held, status: JobStatus, repeated = false): void {
    if (held.delete(entry)) onSettled();
    if (status !== "released") results.push({ id: entry.job.id, kind: entry.job.kind, status });
    if (status === "lost") {
      const { id, kind, attempts: attempt } = entry.job;
      log("error", repeated ? "settled_before_or_lease_lost" : "lease_lost", { id, kind, attempt });
    }
  }
}

/** Somebody keeps a row locked: the call ran into a lock timeout or a statement timeout. */
export function isBlocked(error: unknown): boolean {
  return error instanceof JobError && (error.code === "55P03" || error.code === "57014");
}

/** Two halves of a list. */
export function halves<T>(list: T[]): [T[], T[]] {
  const middle = Math.ceil(list.length / 2);
  return [list.slice(0, middle), list.slice(middle)];
}

/** An error of class 22, 23 or 54, or a body that is too large for the API: it would come again. */
function isAboutWhatWasSent(error: unknown): boolean {
  return error instanceof JobError && /^(22|23|54|too_large)/.test(error.code);
}

const leaseOf = ({ id, leaseToken }: ClaimedJob) => ({ id, leaseToken });

export const sleep = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));
