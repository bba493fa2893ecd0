import { errorText } from "./errors.ts";
import { log } from "./log.ts";

declare global {
  /** Keeps an isolate alive after its answer until the promise settles: native promises only. */
  const EdgeRuntime: { waitUntil<T>(promise: Promise<T>): void };
}

/** Keeps the isolate alive until a promise settles. Another runtime than Supabase's has no isolate to keep. */
export function waitUntil(promise: Promise<unknown>): void {
  if (typeof EdgeRuntime !== "undefined") EdgeRuntime.waitUntil(promise);
}

let unload = new AbortController();
const drain = new AbortController();

/**
 * Aborts when the runtime announces that this isolate is about to end (`beforeunload`). The signal's reason is the
 * runtime's: cpu, memory, wall_clock, early_drop or termination. An isolate whose memory ran short may live on once some is
 * free again, and is sent requests: those get another signal.
 */
export const shutdown = (): AbortSignal => unload.signal;

/** Aborts when the runtime sends this isolate no more requests, and waits for what it still does (`drain`). */
export const retirement: AbortSignal = drain.signal;

addEventListener("beforeunload", (event) => {
  const reason = event instanceof CustomEvent ? event.detail?.reason : undefined;
  unload.abort(reason);
  if (reason === "memory") unload = new AbortController();
});
addEventListener("drain", () => drain.abort());

/**
 * Logs an error that nothing caught, such as a promise that a handler did not await, instead of letting it end the isolate
 * and with it every job that runs there.
 */
export function surviveUncaughtErrors(): void {
  const survive = (event: Event, name: string, thrown: unknown) => {
    event.preventDefault();
    log("error", name, { error: errorText(thrown) }, thrown);
  };
  addEventListener("unhandledrejection", (event) => survive(event, "unhandled_rejection", event.reason));
  addEventListener("error", (event) => survive(event, "uncaught_error", event.error));
}
