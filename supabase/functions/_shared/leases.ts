import { z } from "zod";
import { callFor } from "./database.ts";
import { errorText, JobError } from "./errors.ts";
import { log } from "./log.ts";
import { sleep, within } from "./timer.ts";

/** Leases: named locks with an end. One function per SQL function, with the same name, and withLease, which uses them. */

export interface LeaseOptions {
  /** How long it is held unless it is extended: 60 by default, 1 to 86,400. */
  seconds?: number;
  /** Keeps apart what has the same key. */
  scope?: string;
}

/** Acquires a lease; gives back its holder, the fencing number that extends and releases it, or null: somebody else has it. */
export const acquireLease = (key: string, options: LeaseOptions = {}): Promise<number | null> =>
  callFor(z.number().nullable(), "acquire_lease", { key, ...options });

/** Extends a lease to so many seconds from now; false when it is lost. */
export const extendLease = (key: string, holder: number, options: LeaseOptions = {}): Promise<boolean> =>
  callFor(z.boolean(), "extend_lease", { key, holder, ...options });

/** Gives a lease back; false when it was lost. */
export const releaseLease = (
  key: string,
  holder: number,
  options: Pick<LeaseOptions, "scope"> = {},
): Promise<boolean> => callFor(z.boolean(), "release_lease", { key, holder, ...options });

/** A lease, to the work that it is for. */
export interface HeldLease {
  key: string;
  /** The fencing number: higher than that of whoever had the lease before. Let what the work writes to refuse lower ones. */
  holder: number;
  /** Aborts when the lease is lost, or could not be extended in time: somebody else may have it. */
  signal: AbortSignal;
  /**
   * Extends it to so many seconds from now, `seconds` of withLease unless given; false when it is lost. Needed only before
   * what lets no timer run; it is extended by itself. Throws JobError.
   */
  extend(seconds?: number): Promise<boolean>;
}

const MIN_POLL_MS = 50;
const MAX_POLL_MS = 1_000;

/**
 * Runs `fn` while it has the lease of that key, and gives back what that gives; or `{ acquired: false }` when somebody else
 * has the lease, after having tried for `wait` seconds (0). The lease is extended as long as `fn` runs, and released when it
 * ends. What `fn` throws goes on to the caller; throws JobError when the lease cannot be asked for.
 */
export async function withLease<Result>(
  key: string,
  fn: (lease: HeldLease) => Result | Promise<Result>,
  { wait = 0, seconds = 60, scope }: LeaseOptions & { wait?: number } = {},
): Promise<{ acquired: true; result: Result } | { acquired: false }> {
  const acquired = await acquireWithin(wait, key, { seconds, scope });
  if (!acquired) return { acquired: false };
  const { holder, calledAt } = acquired;
  const hold = keepHeld(seconds, calledAt, (seconds) => extendLease(key, holder, { seconds, scope }));
  try {
    return {
      acquired: true,
      result: await fn({ key, holder, signal: hold.signal, extend: hold.extend }),
    };
  } finally {
    hold.stop();
    await releaseLease(key, holder, { scope }).then((released) => {
      if (!released) log("error", "lease_lost", { key, holder, error: "it ran out while its work went on" });
    }, (error) => log("error", "lease_not_released", { key, holder, error: errorText(error) }, error));
  }
}

async function acquireWithin(wait: number, key: string, options: LeaseOptions) {
  if (!(wait >= 0)) throw new JobError("22023", "withLease: wait is not a number of seconds");
  const giveUpAt = performance.now() + wait * 1000;
  for (let pauseMs = MIN_POLL_MS;; pauseMs = Math.min(2 * pauseMs, MAX_POLL_MS)) {
    const calledAt = performance.now();
    const holder = await acquireLease(key, options);
    if (holder !== null) return { holder, calledAt };
    const leftMs = giveUpAt - performance.now();
    if (leftMs <= 0) return null;
    // By chance, or those who began to wait at once would go on asking at once.
    await sleep(Math.min(leftMs, pauseMs * (0.5 + Math.random() / 2)));
  }
}

/** What keeps extending something that is held for a time. */
export interface Hold extends Pick<HeldLease, "signal" | "extend"> {
  /** Lets it be. */
  stop(): void;
}

/**
 * Keeps something held that was acquired for so many seconds by a call at `calledAt` (on performance.now()'s clock): extends
 * it whenever a third of its time is over, and again after a third of what is left where that fails, or takes as long.
 */
export function keepHeld(
  seconds: number,
  calledAt: number,
  extend: (seconds: number) => Promise<boolean>,
): Hold {
  const controller = new AbortController();
  let endsAt = calledAt + seconds * 1000;
  let stopped = false;
  let renewal: ReturnType<typeof setTimeout> | undefined;
  let end: ReturnType<typeof setTimeout> | undefined;
  plan();
  return { signal: controller.signal, extend: extendNow, stop };

  function plan(): void {
    clearTimeout(renewal);
    clearTimeout(end);
    if (stopped) return;
    const leftMs = Math.max(0, endsAt - performance.now());
    const third = leftMs / 3;
    // What was extended for longer is not made shorter.
    const renew = () => extendNow(Math.max(seconds, Math.ceil((endsAt - performance.now()) / 1000)));
    renewal = setTimeout(() => within(third, renew(), new Error()).catch(plan), third);
    end = setTimeout(lose, leftMs);
  }

  async function extendNow(wanted = seconds): Promise<boolean> {
    const calledAt = performance.now();
    const held = await extend(wanted);
    if (!held) lose();
    else {
      endsAt = calledAt + wanted * 1000;
      plan();
    }
    return held;
  }

  function lose(): void {
    if (stopped) return;
    stop();
    controller.abort(new JobError("lease_lost", "it has run out, and somebody else may have it"));
  }

  function stop(): void {
    stopped = true;
    plan();
  }
}
