import { cannotStore, type Held, type Outcome } from "./attempt.ts";
import { errorText, JobError } from "./errors.ts";
import { log } from "./log.ts";
import { completeJobs, failJobs, type Failure, releaseJobs } from "./queue.ts";

/** `lost`: the lease was, so what the handler did was refused. `released`: given back, the attempt not counted. */
export type JobStatus = "succeeded" | "pending" | "dead" | "released" | "lost";

/** A job that a worker has settled, and what became of it. */
export interface Settled {
  id: string;
  kind: string;
  status: JobStatus;
}

/** Settles what has ended in batches, one call of a sort at a time, and repeats calls that fail. */
export function createSettler(held: Set<Held>, results: Settled[]) {
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
      // An error of class 22, 23 or 54, or a body too large for the API, is about what was sent: it would come again.
      const hopeless = error instanceof JobError && /^(22|23|54|LOCAL413)/.test(error.code);
      if (hopeless || batch.every(({ entry }) => performance.now() >= entry.leaseEndsAt)) throw error;
      log("error", "settle_repeated", {
        ids: batch.map(({ entry }) => entry.job.id),
        error: errorText(error),
      });
      await new Promise((resolve) => setTimeout(resolve, delayMs));
    }
  }
}
