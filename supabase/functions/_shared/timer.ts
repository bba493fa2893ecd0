const LATE_MS = 1_000;

/**
 * Calls back after `ms` milliseconds; gives back what cancels it. When it comes late, a handler has held up the event loop,
 * and whatever else became due or arrived meanwhile gets a second to be heard first: it is not to blame.
 */
export function after(ms: number, callback: () => void): () => void {
  const dueAt = performance.now() + ms;
  let timer = setTimeout(() => {
    if (performance.now() - dueAt < LATE_MS) callback();
    else timer = setTimeout(callback, LATE_MS);
  }, ms);
  return () => clearTimeout(timer);
}
