import { cannotStore, type Held, type Outcome } from "./attempt.ts";
import { errorText, JobError } from "./errors.ts";
import { log } from "./log.ts";
import { completeJobs, failJobs, type Failure, type Lease, releaseJobs } from "./queue.ts";
import { sleep } from "./timer.ts";

/**
 * `lost`: the lease was, or the job was cancelled, so what the handler did was refused. `cancelled`: superseded by a newer
 * job. `snoozed`: by its handler; `released`: given back by the worker; neither attempt is counted.
 */
type JobStatus = "succeeded" | "pending" | "dead" | "cancelled" | "snoozed" | "released" | "lost";

/** A job whose attempt a worker has ended, and what became of it. */
export type Settled = { id: string; kind: string; status: Exclude<JobStatus, "released"> };

/** An attempt that has ended, and what a settle call is to be told of it. */
type Ended<Told> = { entry: Held; told: Told };

type Answer = Map<string, JobStatus>;

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
      const completions: Ended<Lease & { result: unknown }>[] = [];
      const failures: Ended<Failure>[] = [];
      const releases: Ended<Lease & { delay?: number }>[] = [];
      const snoozes: typeof releases = [];
      for (const { entry, outcome } of batch) {
        const lease = leaseOf(entry);
        if ("completed" in outcome) {
          completions.push({ entry, told: { ...lease, result: outcome.completed } });
        } else if ("failed" in outcome) failures.push(failed(entry, outcome.failed, outcome.thrown));
        else if ("snoozed" in outcome) {
          const { id, kind } = entry.job;
          log("info", "snoozed", { id, kind, seconds: outcome.snoozed });
          snoozes.push({ entry, told: { ...lease, delay: outcome.snoozed } });
        } else if (outcome.stopped === "released") {
          releases.push({ entry, told: { ...lease, delay: outcome.delay } });
        } else settled(entry, "lost");
      }
      const calls = Promise.all([
        call(
          completions,
          async (told) => all("succeeded", await completeJobs(told)),
          async (entry, error) => {
            if (!isRefused(error)) return settled(entry, "lost");
            // What a trigger raises may be over when the job is tried again.
            const failure = { ...cannotStore(error), permanent: hasCode(error, /^(22|54|too_large)/) };
            await call([failed(entry, failure)], fail);
          },
        ),
        call(failures, fail),
        call(releases, async (told) => all("released", await releaseJobs(told))),
        call(snoozes, async (told) => all("snoozed", await releaseJobs(told))),
      ]);
      settling.add(calls);
      calls.finally(() => settling.delete(calls));
      await Promise.race([calls, sleep(PATIENCE_MS)]);
    }
    // Together with the look above: whatever ends later starts a new flush.
    flushing = undefined;
  }

  /**
   * Makes one settle call for a batch. When it is refused for what is in it, or for a row that somebody keeps locked, the
   * batch is halved, so that one job holds up no other; when it fails otherwise, it is repeated, which the token makes safe,
   * and halved when the database refuses it again.
   */
  async function call<Told>(
    batch: Ended<Told>[],
    send: (told: Told[]) => Promise<Answer>,
    giveUp: (entry: Held, error: unknown) => Promise<void> | void = (entry) => settled(entry, "lost"),
  ): Promise<void> {
    if (batch.length === 0) return;
    for (let delayMs = 100;; delayMs = Math.min(delayMs * 2, 5_000)) {
      const repeated = delayMs > 100;
      try {
        const answer = await send(batch.map(({ told }) => told));
        for (const { entry } of batch) settled(entry, answer.get(entry.job.id) ?? "lost", repeated);
        return;
      } catch (error) {
        const fromDatabase = hasCode(error, /^[0-9A-Z]{5}$/); // and not from its API
        if (batch.length > 1 && (isRefused(error) || isBlocked(error) || repeated && fromDatabase)) {
          await Promise.all(halves(batch).map((half) => call(half, send, giveUp)));
          return;
        }
        const isOver = isRefused(error) ||
          batch.every(({ entry }) => performance.now() >= entry.leaseEndsAt);
        const ids = batch.map(({ entry }) => entry.job.id);
        log("error", isOver ? "settle_given_up" : "settle_repeated", { ids, error: errorText(error) }, error);
        if (isOver) {
          for (const { entry } of batch) await giveUp(entry, error);
          return;
        }
        await sleep(delayMs);
      }
    }
  }

  /** `repeated`: an earlier call may have settled it already, and only its answer was lost. */
  function settled(entry: Held, status: JobStatus, repeated = false): void {
    if (held.delete(entry)) onSettled();
    const { id, kind, attempts: attempt } = entry.job;
    if (status !== "released") results.push({ id, kind, status });
    if (status === "lost") {
      // No error: the job was cancelled, or its attempt is reported as failed by whoever finds the lease to be over.
      log("info", repeated ? "settled_before_or_lease_lost" : "lease_lost", { id, kind, attempt });
    }
  }
}

const leaseOf = ({ job: { id, leaseToken } }: Held): Lease => ({ id, leaseToken });

const all = (status: JobStatus, ids: string[]): Answer => new Map(ids.map((id) => [id, status]));

const fail = async (told: Failure[]): Promise<Answer> =>
  new Map((await failJobs(told)).map(({ id, status }) => [id, status]));

function failed(entry: Held, failure: Omit<Failure, keyof Lease>, thrown?: unknown): Ended<Failure> {
  const { id, kind, attempts: attempt } = entry.job;
  log("error", "attempt_failed", { id, kind, attempt, error: failure.error }, thrown);
  return { entry, told: { ...failure, ...leaseOf(entry) } };
}

/** Somebody keeps a row locked: the call ran into a lock timeout or a statement timeout. */
export const isBlocked = (error: unknown) => hasCode(error, /^(55P03|57014)$/);

/** Two halves of a list. */
export function halves<T>(list: T[]): [T[], T[]] {
  const middle = Math.ceil(list.length / 2);
  return [list.slice(0, middle), list.slice(middle)];
}

/** An error of class 22, 23 or 54, or a body that is too large for the API. */
export const isAboutWhatWasSent = (error: unknown) => hasCode(error, /^(22|23|54|too_large)/);

/** What would come again: the above, and what triggers and checks of the app raise (09, 27, 44, P0 and codes of its own). */
export const isRefused = (error: unknown) =>
  isAboutWhatWasSent(error) || hasCode(error, /^(09|27|44|[I-WYZ][0-9A-Z])[0-9A-Z]{3}$/);

const hasCode = (error: unknown, codes: RegExp) => error instanceof JobError && codes.test(error.code);
