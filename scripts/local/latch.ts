// What the two players share: sleeping until something happens, and hearing it from the database.

import type postgres from "postgres";

export interface Latch {
  set(): void;
  /** Resolves once the latch is set, or after `ms`; the latch is down again then. */
  wait(ms?: number): Promise<void>;
}

/** One sleeper, any number of wakers; a latch that is set while nobody waits ends the next wait at once. */
export function createLatch(): Latch {
  let isSet = false;
  let wakeUp = () => {};
  return {
    set() {
      isSet = true;
      wakeUp();
    },
    async wait(ms) {
      if (!isSet) {
        let timer: ReturnType<typeof setTimeout> | undefined;
        await new Promise<void>((resolve) => {
          wakeUp = resolve;
          if (ms !== undefined) timer = setTimeout(resolve, ms);
        });
        clearTimeout(timer);
        wakeUp = () => {};
      }
      isSet = false;
    },
  };
}

/**
 * Listens on a channel until `signal`, through restarts of the server: postgres.js listens again by itself once it has
 * been connected, so only the first time needs repeating. `onListen` is called at every (re)connection, since whatever
 * was said in between was missed.
 */
export async function listenAlways(
  sql: postgres.Sql,
  channel: string,
  signal: AbortSignal,
  onNotify: () => void,
  onListen: () => void,
): Promise<void> {
  while (!signal.aborted) {
    try {
      await sql.listen(channel, onNotify, onListen);
      return;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
}

/** What an error says, for a log line. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Leaves out a line that only repeats the last one: a server that is away is worth saying once. */
export function withoutRepeats(log: (line: string) => void): (line: string) => void {
  let last = "";
  return (line) => {
    if (line !== last) log(line);
    last = line;
  };
}
