/** Hosted, a handler that never yields is ended after two seconds of CPU. Here it gets as long as a lease, which it loses then. */
const STUCK_SECONDS = Number(Deno.env.get("LOCAL_STUCK_SECONDS") ?? 60);

/**
 * Ends this process, with a line that says why, when nothing else can run in it for that long. A second thread hears from this
 * one ten times in that while. It counts, so that the sleep of the machine is none.
 */
export function endWhenStuck(): void {
  const everyMs = STUCK_SECONDS * 100;
  const thread = `
    let missed = 0;
    onmessage = () => missed = 0;
    setInterval(() => {
      if (++missed <= 10) return;
      console.error("nothing else could run for ${STUCK_SECONDS} s: a handler does not yield. The process is ended.");
      Deno.kill(Deno.pid, "SIGKILL");
    }, ${everyMs});`;
  const watch = new Worker(`data:application/javascript,${encodeURIComponent(thread)}`, { type: "module" });
  setInterval(() => watch.postMessage("alive"), everyMs);
}
