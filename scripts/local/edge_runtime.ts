// Loaded into each function's process before the function: what hosted Supabase's runtime adds to Deno. It defines
// EdgeRuntime.waitUntil, turns SIGTERM, or the end of the process that started it, into `beforeunload`, and ends a process
// in which nothing else can run any more.

import { endWhenStuck } from "./stuck.ts";

const SHUTDOWN_MS = 5_000;
const pending = new Set<Promise<unknown>>();

Object.defineProperty(globalThis, "EdgeRuntime", {
  value: {
    /** Counts native promises only, as hosted: another thenable is not waited for. */
    waitUntil(promise: unknown): void {
      if (!(promise instanceof Promise)) return;
      pending.add(promise);
      promise.catch((error) => console.error(error)).finally(() => pending.delete(promise));
    },
  },
});

let ending = false;
async function end(): Promise<void> {
  if (ending) return;
  ending = true;
  dispatchEvent(new CustomEvent("beforeunload", { detail: { reason: "termination" } }));
  const late = new Promise((resolve) => setTimeout(resolve, SHUTDOWN_MS));
  // What has been received is answered; what comes now waits for the next process.
  await Promise.race([Promise.all([server?.shutdown(), settled()]), late]);
  Deno.exit(0);
}

/** Also what is handed to waitUntil meanwhile is waited for. */
async function settled(): Promise<void> {
  while (pending.size > 0) await Promise.allSettled(pending);
}

Deno.addSignalListener("SIGTERM", end);
// Ctrl-C in the terminal and its end reach every process; whoever started this one decides when it ends.
for (const signal of ["SIGINT", "SIGHUP"] as const) Deno.addSignalListener(signal, () => {});
// Deno loads the function when this file has nothing left to do, and a read of standard input would be something: were it
// begun any earlier, the function would now and then not be loaded at all.
const { serve } = Deno;
let server: Deno.HttpServer | undefined;
Object.defineProperty(Deno, "serve", {
  value(...args: Parameters<typeof serve>) {
    endWithParent();
    endWhenStuck();
    return server = serve(...args);
  },
});

async function endWithParent(): Promise<void> {
  for await (const _ of Deno.stdin.readable);
  await end();
}
