import { type Held, NOT_STORABLE, stop, storableJson } from "./attempt.ts";
import { errorText, JobError, PermanentError } from "./errors.ts";
import type { Job, Stored } from "./kinds.ts";
import { log } from "./log.ts";
import { checkpointJob } from "./queue.ts";
import { isAboutWhatWasSent, isRefused } from "./settler.ts";
import { sleep } from "./timer.ts";

const MAX_NAME_LENGTH = 200;
/** For how long the lease is taken to hold after the database has said so. */
const SURE_MS = 1_000;

/** The parts of the Job that its handler gets, and their end. */
export type Progress = Pick<Job, "progress" | "checkpoint" | "step"> & { end(): Promise<void> };

/**
 * What a job keeps from one attempt to the next. `heldAt`: when its lease was last known to hold, on performance.now()'s
 * clock.
 */
export function createProgress(entry: Held, heldAt: number): Progress {
  const { job: { id, kind, leaseToken, progress }, controller: { signal } } = entry;
  const { steps, ...fields } = isObject(progress) ? progress : {};
  const completed = new Map(Object.entries(isObject(steps) ? steps : {}));
  const used = new Set<string>();
  let kept: Record<string, unknown> = fields;
  /** One call after the other, so that the last is what stays. */
  let calls: Promise<unknown> = Promise.resolve();
  let looking: Promise<void> | undefined;
  const underWay = new Set<Promise<unknown>>();
  let ended = false;

  return {
    get progress() {
      return kept;
    },

    async checkpoint(given) {
      assertGoesOn();
      if (!isObject(given) || Object.hasOwn(given, "steps")) {
        const hint = "Give an object; its field steps is for job.step.";
        throw new JobError("22023", "job.checkpoint: these are no fields", hint);
      }
      const copy = jsonCopy(given, "job.checkpoint: fields");
      await store(copy);
      kept = { ...kept, ...copy };
    },

    async step<T>(name: string, run: () => T | Promise<T>): Promise<Stored<T>> {
      assertGoesOn();
      assertName(name);
      used.add(name);
      // What it gave in an earlier attempt: the same step, if the name is.
      if (completed.has(name)) return completed.get(name) as Stored<T>;
      const step = runStep(name, run);
      underWay.add(step);
      try {
        return await step;
      } finally {
        underWay.delete(step);
      }
    },

    /** To be called when the handler has ended: no step begins any more. Resolves when what is under way is over and stored. */
    async end(): Promise<void> {
      ended = true;
      while (underWay.size > 0) await Promise.allSettled(underWay);
      await calls;
    },
  };

  async function runStep<T>(name: string, run: () => T | Promise<T>): Promise<Stored<T>> {
    // A job that was cancelled, or is another worker's by now, is not to have it done.
    if (performance.now() - heldAt > SURE_MS) {
      // One look for all that begin side by side.
      await (looking ??= store({}).finally(() => looking = undefined));
    }
    let value: T | null;
    try {
      value = await run() ?? null;
    } catch (error) {
      used.delete(name); // it may be tried again
      throw error;
    }
    try {
      const copy = jsonCopy(value, `job.step: what ${JSON.stringify(name)} gave`);
      await store({ steps: { [name]: copy } });
      return copy as Stored<T>; // equal to it, as jsonCopy has made sure
    } catch (error) {
      if (!isAboutWhatWasSent(error)) throw error;
      // What it did is done, and another attempt would do it again.
      throw new PermanentError(`the step cannot be stored: ${errorText(error)}`, { cause: error });
    }
  }

  function assertGoesOn(): void {
    signal.throwIfAborted();
    if (ended) throw new Error(`the handler of job ${id} has ended, and nothing more is kept of it`);
  }

  function assertName(name: string): void {
    let wrong: string | undefined;
    if (typeof name !== "string" || name === "" || name.length > MAX_NAME_LENGTH) {
      wrong = `a step's name has 1 to ${MAX_NAME_LENGTH} characters`;
    } else if (storableJson(JSON.stringify(name)) !== JSON.stringify(name)) {
      wrong = `a step's name ${NOT_STORABLE}`;
    } else if (used.has(name)) wrong = `this attempt has a step ${JSON.stringify(name)} already`;
    if (wrong) {
      const hint = "Each step has a name of its own: in a loop, name what it is about, such as the row's id.";
      throw new JobError("22023", `job.step: ${wrong}`, hint);
    }
  }

  /** Repeats a call that fails while the attempt lasts: to lose what a step gave would be to do it again. */
  function store(given: Record<string, unknown>): Promise<void> {
    const call = calls.then(async () => {
      for (let delayMs = 100;; delayMs = Math.min(delayMs * 2, 5_000)) {
        try {
          const calledAt = performance.now();
          if (!await checkpointJob(id, leaseToken, given)) stop(entry, "lost");
          else {
            heldAt = calledAt;
            return;
          }
        } catch (error) {
          if (isRefused(error)) throw error;
          if (delayMs === 100) {
            log("error", "checkpoint_repeated", { id, kind, error: errorText(error) }, error);
          }
          if (!signal.aborted) await sleep(delayMs);
        }
        signal.throwIfAborted();
      }
    });
    calls = call.catch(() => {});
    return call;
  }
}

/** A copy by way of JSON. Throws JobError 22023, naming the place, for what would come back as something else. */
function jsonCopy<T>(value: T, what: string): T {
  let changed: string | undefined;
  let json = "";
  try {
    json = JSON.stringify(value);
    changed = changedByJson(value, "");
  } catch (error) {
    changed = ` has no JSON: ${errorText(error)}`;
  }
  const hint = "Give what JSON holds, such as a date as its text.";
  if (changed) throw new JobError("22023", what + changed, hint);
  return JSON.parse(json);
}

function changedByJson(value: unknown, path: string): string | undefined {
  if (typeof value === "string") {
    const json = JSON.stringify(value);
    return storableJson(json) === json ? undefined : `${path} ${NOT_STORABLE}`;
  }
  if (value === null || typeof value === "boolean" || Number.isFinite(value)) return undefined;
  if (Array.isArray(value)) {
    return [...value].map((item, n) => changedByJson(item, `${path}[${n}]`)).find((found) => found);
  }
  if (isObject(value) && [Object.prototype, null].includes(Object.getPrototypeOf(value))) {
    return Object.entries(value)
      .map(([key, item]) => item === undefined ? undefined : changedByJson(item, `${path}.${key}`))
      .find((found) => found);
  }
  const what = isObject(value) ? value.constructor?.name : value;
  return `${path} is ${what}, which JSON does not give back as it was`;
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);
