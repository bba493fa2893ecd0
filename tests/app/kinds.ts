import { z } from "zod";
import type { KindDeclarations } from "../_shared/kinds.ts";
import { dieOnce } from "./die_once.ts";

const file = z.string();

/** Kinds for tests: this file and handlers.ts stand in for the app's own in a copy of the project (see support.ts). */
export const kinds = {
  /** Gives back its payload. */
  echo: { schema: z.object({ n: z.number().optional() }) },
  /** Gives back what it was told about its job. */
  describe: { schema: z.object({ amount: z.coerce.number() }) },
  /** Writes its job's id as a line to a file, then waits; gives back when it was at work. */
  append: { schema: z.object({ file, ms: z.number().default(0) }) },
  /** The same, with every limit declared. */
  limited: {
    schema: z.object({ file, ms: z.number().default(0) }),
    concurrency: 1,
    keyConcurrency: 2,
    rateLimit: 1000,
    ratePeriodSeconds: 1.5,
    keepSucceededSeconds: 3600,
    keepDeadSeconds: 7200,
    keepCancelledSeconds: 0,
  },
  /** Writes its job's id as a line to a file, and ends when the file `<file>.gate` is there. */
  wait_for_gate: { schema: z.object({ file }) },
  /** Throws what it is told to. */
  fail: { schema: z.object({ how: z.enum(["error", "permanent", "retry_after"]), message: z.string() }) },
  /** Never ends; writes to a file when its signal aborts. */
  hang: { schema: z.object({ file }), timeoutMs: 60_000, maxAttempts: 2 },
  /** Ends only when its signal aborts. */
  wait_for_signal: { schema: z.object({ file }) },
  /** Returns one of the values in handlers.ts that are hard to store. */
  poisonous_result: { schema: z.object({ what: z.string() }) },
  /** Throws one of the values in handlers.ts that are hard to describe. */
  poisonous_error: { schema: z.object({ what: z.string() }) },
  /** Lets nothing else run for a while. */
  block: { schema: z.object({ ms: z.number() }) },
  /** Stores a webhook message, and gives back what that gave or threw. */
  receive: { schema: z.object({ payload: z.object({ amount: z.string() }), facts: z.looseObject({}) }) },
  /** Gives back what a server says. */
  ask: { schema: z.object({ url: z.string() }), timeoutMs: 5_000 },
  /** Ends the worker's process. */
  exit: { schema: z.object({}) },
  /** Its schema takes half a second to look at a payload. */
  slow_schema: {
    schema: z.object({ n: z.number() }).refine(async () => {
      await new Promise((resolve) => setTimeout(resolve, 500));
      return true;
    }),
  },
  /** Fails where nobody waits: in a promise that is not awaited and in a timer. */
  careless: { schema: z.object({}) },
  /** Ends at once, and leaves a promise with the runtime that fails when the file `<file>.gate` exists. */
  leave_behind: { schema: z.object({ file }) },
  /** Kills the worker's process the first time, at the moment it is told to, and leaves the file `<file>.died`. */
  die_once: {
    schema: z.object({ file, when: z.enum(["before", "inside", "returned"]) }).refine(
      async (payload) => {
        await Promise.resolve();
        if (payload.when === "before") dieOnce(payload.file);
        return true;
      },
    ),
  },
  /** Tells its isolate what the runtime tells one that is about to end, or with "drain" one that gets no more requests. */
  unload: { schema: z.object({ reason: z.string() }) },
  /** Calls a SQL function, and gives back its answer or its error. */
  call: { schema: z.object({ name: z.string(), args: z.record(z.string(), z.unknown()) }) },
  /** Takes its time. */
  pause: { schema: z.object({ ms: z.number() }) },
  /** Fails its first attempts, each to be repeated after half a second. */
  fail_first: { schema: z.object({ times: z.number() }) },
  /** Does one of the things in handlers.ts that have to do with progress and steps. */
  keep: { schema: z.object({ file, what: z.string() }) },
  /** Gives back, as the user who asked, the rows of a table and the token's claims as the database has them. */
  read_as_user: { schema: z.object({ table: z.string() }) },
  /** Throws an error that has a text somewhere. It comes reversed, so that the payload does not have it. */
  tell: { schema: z.object({ reversed: z.string(), where: z.string() }) },
} satisfies KindDeclarations;
