import { type Handlers, PermanentError, RetryAfterError } from "../_shared/jobs.ts";

const append = (file: string, line: string) => Deno.writeTextFile(file, `${line}\n`, { append: true });

const untilAborted = (signal: AbortSignal) =>
  new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve(), { once: true }));

export const handlers: Handlers = {
  echo: (payload) => payload,
  async append({ file, ms }, job) {
    await append(file, job.id);
    await new Promise((resolve) => setTimeout(resolve, ms));
    return { attempt: job.attempts };
  },
  fail({ how, message }) {
    if (how === "permanent") throw new PermanentError(message);
    if (how === "retry_after") throw new RetryAfterError(120, message);
    throw new Error(message);
  },
  async hang({ file }, job) {
    await untilAborted(job.signal);
    await append(file, `${job.id} aborted`);
    return await new Promise(() => {});
  },
  async wait_for_signal({ file }, job) {
    await append(file, job.id);
    await untilAborted(job.signal);
    await append(file, `${job.id} aborted`);
    return "too late";
  },
  unstorable({ what }) {
    if (what === "bigint") return 1n;
    if (what === "nul") return "a\u0000b";
    const circular: Record<string, unknown> = {};
    circular.self = circular;
    return circular;
  },
};
