import { z } from "zod";
import type { KindDeclarations } from "../_shared/kinds.ts";

/** Kinds for tests: this file and handlers.ts stand in for the app's own in a copy of the project (see support.ts). */
export const kinds = {
  /** Gives back its payload. */
  echo: { schema: z.object({ n: z.number().optional() }) },
  /** Writes its job's id as a line to a file, then waits. */
  append: { schema: z.object({ file: z.string(), ms: z.number().default(0) }) },
  /** Throws what it is told to. */
  fail: { schema: z.object({ how: z.enum(["error", "permanent", "retry_after"]), message: z.string() }) },
  /** Never ends; writes to a file when its signal aborts. */
  hang: { schema: z.object({ file: z.string() }), timeoutMs: 1_000, maxAttempts: 2 },
  /** Ends only when its signal aborts, and not by a timeout of its own in a test's time. */
  wait_for_signal: { schema: z.object({ file: z.string() }), timeoutMs: 60_000 },
  /** Returns what JSON or Postgres cannot hold. */
  unstorable: { schema: z.object({ what: z.enum(["bigint", "circular", "nul"]) }) },
} satisfies KindDeclarations;
