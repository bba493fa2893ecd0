import { callDatabase } from "../_shared/database.ts";
import {
  asUser,
  type Handlers,
  type Job,
  JobError,
  PermanentError,
  receiveWebhook,
  RetryAfterError,
  SnoozeError,
} from "../_shared/jobs.ts";
import { dieOnce } from "./die_once.ts";
import { trusted } from "./webhooks.ts";

/** At once, so that the lines stand in the order in which the handlers were entered. */
const append = (file: string, line: string) => Deno.writeTextFileSync(file, `${line}\n`, { append: true });

const untilAborted = (signal: AbortSignal) =>
  new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve(), { once: true }));

const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

async function untilGateOf(file: string): Promise<void> {
  while (!await Deno.stat(`${file}.gate`).then(() => true, () => false)) await pause(10);
}

function circular(): Record<string, unknown> {
  const value: Record<string, unknown> = {};
  value.self = value;
  return value;
}

function deep(levels: number): unknown {
  let value: unknown = 1;
  for (let level = 0; level < levels; level++) value = [value];
  return value;
}

/** Each is made anew for its job. */
const poisonousResults: Record<string, () => unknown> = {
  nul: () => ({ "key\u0000": "a\u0000b", kept: "\\u0000 in text" }),
  surrogates: () => ["half \ud83d", "\udc00", "whole 😀"],
  nothing: () => undefined,
  function: () => () => {},
  megabyte: () => "é".repeat(999_000),
  "20 megabytes": () => "x".repeat(20_000_000),
  "nested 3,000 deep": () => deep(3_000),
  "nested 200,000 deep": () => deep(200_000),
  bigint: () => ({ n: 1n }),
  circular,
  "json once": () => {
    let calls = 0;
    return {
      toJSON() {
        if (++calls > 1) throw new Error("JSON was asked for twice");
        return "once";
      },
    };
  },
  unreadable: () => ({
    get x() {
      throw new Error("no entry");
    },
  }),
};

const theSame = new Error("always the same");

const poisonousErrors: Record<string, () => unknown> = {
  "the same": () => theSame,
  "not even itself": () => {
    const { proxy, revoke } = Proxy.revocable({}, {});
    revoke();
    return proxy;
  },
  "later, but when?": () => new RetryAfterError(NaN, "later"),
  text: () => "just text",
  null: () => null,
  undefined: () => undefined,
  bigint: () => 1n,
  circular,
  nul: () => new Error("a\u0000b"),
  surrogate: () => new Error("half \ud83d"),
  megabyte: () => new Error("x".repeat(1_000_000)),
  unreadable: () =>
    Object.defineProperty(new Error(), "message", {
      get() {
        throw new Error("no entry");
      },
    }),
};

const again = () => new RetryAfterError(0, "again");

const keepers: Record<string, (job: Job, file: string) => unknown> = {
  async "three steps, killed after each"(job, file) {
    const values: unknown[] = [];
    for (const name of ["reserve", "charge", "send"]) {
      values.push(
        await job.step(name, () => {
          append(file, name);
          return { name, attempt: job.attempts };
        }),
      );
      dieOnce(`${file}.${name}`);
    }
    return values;
  },
  async "all sorts of values"(job) {
    const given = [1.5, "ü\n", null, undefined, true, [], {}, { a: [{ b: null, c: undefined }] }, 2 ** 53];
    const values = await Promise.all(given.map((value, n) => job.step(`value ${n}`, () => value)));
    if (job.attempts > 1) return { first: job.progress.values, second: values };
    await job.checkpoint({ values });
    throw again();
  },
  async "checkpoints"(job) {
    if (job.attempts === 1) {
      await job.checkpoint({ page: 1, of: 3 });
      // Not awaited one by one: the last is what stays.
      await Promise.all([2, 3].map((page) => job.checkpoint({ page })));
      throw new RetryAfterError(0, `in this attempt: ${JSON.stringify(job.progress)}`);
    }
    return job.progress;
  },
  async "a step that fails"(job, file) {
    await job.step("first", () => append(file, "first"));
    await job.step("second", () => {
      append(file, "second");
      if (job.attempts < 3) throw again();
    });
  },
  async "a step that is tried again at once"(job, file) {
    let calls = 0;
    const page = () =>
      job.step("page", () => {
        append(file, String(++calls));
        if (calls === 1) throw again();
        return calls;
      });
    return await page().catch(page);
  },
  async "awkward names"(job) {
    const names = ["__proto__", "constructor", "steps", "ü \u{1f600} '\"", "x".repeat(200)];
    for (const name of names) await job.step(name, () => name);
    if (job.attempts === 1) throw again();
  },
  async "a name twice"(job, file) {
    await job.step("page", () => append(file, "page"));
    await job.step("page", () => append(file, "page"));
  },
  "an empty name": (job) => job.step("", () => 1),
  "a long name": (job) => job.step("x".repeat(201), () => 1),
  "a name with U+0000": (job) => job.step("a\0b", () => 1),
  "a date": (job) => job.step("date", () => ({ at: [new Date(0)] })),
  "a bigint": (job) => job.step("bigint", () => 1n),
  "not a number": (job) => job.step("nan", () => ({ n: NaN })),
  "a response": (job) => job.step("response", () => new Response("x")),
  "U+0000 in a value": (job) => job.step("nul", () => ["a\0b"]),
  "a circle": (job) => job.step("circle", circular),
  "five megabytes": (job) => job.step("large", () => "x".repeat(5_000_000)),
  "a checkpoint of steps": (job) => job.checkpoint({ steps: {} }),
  "a checkpoint of a date": (job) => job.checkpoint({ at: new Date(0) }),
  async "a checkpoint that is too large, caught"(job) {
    await job.checkpoint({ page: 1 });
    try {
      await job.checkpoint({ text: "x".repeat(5_000_000) });
    } catch (error) {
      return { error: String(error), progress: job.progress };
    }
  },
  async "a step, and another after the gate"(job, file) {
    await job.step("first", () => append(file, `first of attempt ${job.attempts}`));
    if (job.attempts === 1) {
      job.signal.addEventListener("abort", () => append(file, `aborted: ${job.signal.reason}`));
      await untilGateOf(file);
    }
    try {
      await job.step("second", () => append(file, `second of attempt ${job.attempts}`));
    } catch (error) {
      append(file, `refused: ${error === job.signal.reason}`);
    }
    await job.step("third", () => append(file, `third of attempt ${job.attempts}`));
    return job.attempts;
  },
  async "a step after the gate"(job, file) {
    append(file, "begun");
    while (!await Deno.stat(`${file}.gate`).then(() => true, () => false)) await pause(10);
    const step = job.step("only", () => append(file, "done"));
    await step.catch((error) => append(file, `refused: ${error === job.signal.reason}`));
  },
  async "a step in which it waits for the gate"(job, file) {
    const step = job.step("only", async () => {
      append(file, "begun");
      await untilGateOf(file);
      append(file, "done");
    });
    await step.catch((error) => append(file, `refused: ${error === job.signal.reason}`));
  },
  async "steps side by side, of which one fails"(job, file) {
    const charge = async () => {
      await job.step("charge", async () => {
        await pause(200);
        append(file, "charge");
      });
      await job.step("send", () => append(file, "send"));
    };
    const fail = () => {
      if (job.attempts === 1) throw again();
    };
    await Promise.all([job.step("fail", fail), charge()]);
  },
  async "what is not awaited"(job, file) {
    job.step("step", async () => {
      await pause(100);
      append(file, "step");
    });
    job.checkpoint({ kept: true });
    await pause(0);
    return "done";
  },
  async "a failure beside a step that never ends"(job) {
    await Promise.all([
      job.step("hangs", () => new Promise(() => {})),
      Promise.reject(new Error("the failure that counts")),
    ]);
  },
  "an error of its own when it is aborted": (job) =>
    new Promise((_, reject) => {
      job.signal.addEventListener("abort", () => reject(new PermanentError("aborted")), { once: true });
    }),
  async "steps side by side after a while"(job) {
    await pause(1_001);
    let begun = 0;
    const step = async () => {
      begun++;
      await pause(0);
      return begun;
    };
    return await Promise.all(["a", "b", "c", "d"].map((name) => job.step(name, step)));
  },
  async "a snooze"(job) {
    if (job.progress.snoozed) return `attempt ${job.attempts}`;
    await job.checkpoint({ snoozed: true });
    throw new SnoozeError(100);
  },
  "a snooze for no time"() {
    throw new SnoozeError(0);
  },
  "a snooze for NaN"() {
    throw new SnoozeError(NaN);
  },
};

/** Gives back when it was at work. */
async function appendAndPause({ file, ms }: { file: string; ms: number }, job: Job) {
  const from = performance.now();
  append(file, job.id);
  await pause(ms);
  return { from, to: performance.now() };
}

export const handlers: Handlers = {
  echo: (payload) => payload,
  describe: ({ amount }, { signal, ...job }) => ({ ...job, amount, aborted: signal.aborted }),
  append: appendAndPause,
  limited: appendAndPause,
  async wait_for_gate({ file }, job) {
    append(file, job.id);
    await untilGateOf(file);
  },
  leave_behind({ file }) {
    const late = async () => {
      await untilGateOf(file);
      throw new Error("left behind");
    };
    EdgeRuntime.waitUntil(late());
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
  poisonous_result: ({ what }) => poisonousResults[what]?.(),
  poisonous_error({ what }) {
    throw poisonousErrors[what]?.();
  },
  block({ ms }) {
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
  },
  ask: async ({ url }, job) => await (await fetch(url, { signal: job.signal })).text(),
  exit: () => Deno.exit(1),
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
  unload({ reason }) {
    dispatchEvent(
      reason === "drain" ? new Event("drain") : new CustomEvent("beforeunload", { detail: { reason } }),
    );
  },
  keep: ({ file, what }, job) => keepers[what]?.(job, file),
  pause: ({ ms }) => pause(ms),
  async call({ name, args }) {
    try {
      return { answer: await callDatabase(name, args) };
    } catch (error) {
      if (!(error instanceof JobError)) throw error;
      const { code, detail, hint } = error;
      return { code, detail, hint };
    }
  },
  async receive({ payload, facts }) {
    try {
      return await receiveWebhook(trusted, payload, facts);
    } catch (error) {
      if (!(error instanceof JobError)) throw error;
      return { code: error.code, detail: error.detail };
    }
  },
  fail_first({ times }, job) {
    if (job.attempts <= times) throw new RetryAfterError(0.5, `attempt ${job.attempts} fails`);
  },
  async read_as_user({ table }, job) {
    const user = asUser(job.context);
    const [rows, claims] = await Promise.all([user.from(table).select(), user.rpc("my_claims")]);
    if (rows.error ?? claims.error) throw rows.error ?? claims.error;
    return { rows: rows.data, claims: claims.data };
  },
  async tell({ reversed, where }) {
    const text = [...reversed].reverse().join("");
    const error = new Error("has something to tell");
    if (where === "message") error.message += `: ${text}`;
    if (where === "end of a long message") error.message = `${"x".repeat(9_980)}${text}${"x".repeat(9_980)}`;
    if (where === "again and again") error.message = text.repeat(2_000);
    if (where === "cause") error.cause = new TypeError("is the cause", { cause: `${text} is its cause` });
    if (where === "name") error.name = text;
    if (where === "stack") {
      error.stack = `Error\n    at ${text} (file:///${text}.ts:1:1)\n    at (${text})`;
    }
    if (where === "text") throw text;
    if (where === "object") throw { headers: { authorization: `Bearer ${text}` } };
    if (where === "base64") throw new Error(btoa(`user:${text}`));
    if (where === "url") await fetch(`http://127.0.0.1:2/?token=${encodeURIComponent(text)}`);
    if (where === "nobody's promise") Promise.reject(new Error(text));
    throw error;
  },
};
