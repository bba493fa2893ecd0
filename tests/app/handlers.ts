import { type Handlers, PermanentError, RetryAfterError } from "../_shared/jobs.ts";
import { dieOnce } from "./die_once.ts";

/** At once, so that the lines stand in the order in which the handlers were entered. */
const append = (file: string, line: string) => Deno.writeTextFileSync(file, `${line}\n`, { append: true });

const untilAborted = (signal: AbortSignal) =>
  new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve(), { once: true }));

const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

export const handlers: Handlers = {
  echo: (payload) => payload,
  describe: ({ amount }, { signal, ...job }) => ({ ...job, amount, aborted: signal.aborted }),
  async append({ file, ms }, job) {
    const from = performance.now();
    append(file, job.id);
    await pause(ms);
    return { from, to: performance.now() };
  },
  async wait_for_gate({ file }, job) {
    append(file, job.id);
    while (!await Deno.stat(`${file}.gate`).then(() => true, () => false)) await pause(10);
  },
  fail({ how, message }) {
    if (how === "permanent") throw new PermanentError(message);
    if (how === "retry_after") throw new RetryAfterError(120, message);
    throw new Error(message);
  },
  async hang({ file }, job) {
    await untilAborted(job.signal);
    append(file, `${job.id} aborted`);
    return await new Promise(() => {});
  },
  async wait_for_signal({ file }, job) {
    append(file, job.id);
    await untilAborted(job.signal);
    append(file, `${job.id} aborted`);
    return "too late";
  },
  unstorable({ what }) {
    if (what === "bigint") return 1n;
    if (what === "nul") return "a\u0000b";
    if (what === "surrogate") return "a\ud800b";
    if (what === "large") return "x".repeat(20_000_000);
    const circular: Record<string, unknown> = {};
    circular.self = circular;
    return circular;
  },
  slow_schema: () => new Promise(() => {}),
  async careless() {
    Promise.reject(new Error("nobody waits for this promise"));
    setTimeout(() => {
      throw new Error("nobody waits for this timer");
    });
    await new Promise((resolve) => setTimeout(resolve, 50));
  },
  die_once({ file, when }, job) {
    if (when === "inside") dieOnce(file);
    return when === "returned"
      ? {
        toJSON() {
          dieOnce(file);
          return job.attempts;
        },
      }
      : job.attempts;
  },
  unload: ({ reason }) => void dispatchEvent(new CustomEvent("beforeunload", { detail: { reason } })),
  pause: ({ ms }) => pause(ms),
  fail_first({ times }, job) {
    if (job.attempts <= times) throw new RetryAfterError(0.5, `attempt ${job.attempts} fails`);
  },
};
