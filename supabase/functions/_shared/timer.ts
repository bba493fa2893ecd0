const LATE_MS = 1_000;
/** What else is due, or has arrived meanwhile, has this long to be heard first. */
const GRACE_MS = 5_000;

/**
 * Calls back after `ms` milliseconds; gives back what cancels it. When it comes late, a handler has held up the event loop,
 * and whatever else became due or arrived meanwhile goes first: it is not to blame.
 */
export function after(ms: number, callback: () => void): () => void {
  const dueAt = performance.now() + ms;
  let timer = setTimeout(() => {
    if (performance.now() - dueAt < LATE_MS) callback();
    else timer = setTimeout(callback, GRACE_MS);
  }, ms);
  return () => clearTimeout(timer);
}

export const sleep = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

/** What a promise gives within `ms` milliseconds; later it throws `late`. */
export async function within<T>(ms: number, promise: PromiseLike<T>, late: Error): Promise<T> {
  const end = Promise.withResolvers<never>();
  const timer = setTimeout(() => end.reject(late), ms);
  try {
    return await Promise.race([promise, end.promise]);
  } finally {
    clearTimeout(timer);
  }
}
