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
