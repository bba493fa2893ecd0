import { errorText } from "./errors.ts";
import { log } from "./log.ts";

declare global {
  /** Keeps an isolate alive after its answer until the promise settles: native promises only. */
  const EdgeRuntime: { waitUntil<T>(promise: Promise<T>): void };
}

/** Aborts when the runtime announces that this isolate is about to end (`beforeunload`, with its reason). */
export const shutdown: AbortSignal = (() => {
  const controller = new AbortController();
  addEventListener("beforeunload", () => controller.abort());
  return controller.signal;
})();

/**
 * Logs an error that nothing caught, such as a promise that a handler did not await, instead of letting it end the isolate
 * and with it every job that runs there.
 */
export function surviveUncaughtErrors(): void {
  addEventListener("unhandledrejection", (event) => {
    event.preventDefault();
    log("error", "unhandled_rejection", { error: errorText(event.reason) });
  });
  addEventListener("error", (event) => {
    event.preventDefault();
    log("error", "uncaught_error", { error: errorText(event.error) });
  });
}
