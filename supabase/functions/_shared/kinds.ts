import { z } from "zod";

/** A list of kinds, as the functions take it. */
export const kindNames = z.array(z.string().regex(/^[a-z][a-z0-9_]{0,62}$/)).min(1).max(1000).optional();

/** What the code says about a kind: the schema of its payload, and settings that an operator may override in job_kinds. */
export interface KindDeclaration {
  schema: z.ZodType;
  /** Attempts before the job is dead; 5 by default. */
  maxAttempts?: number;
  /** How long one attempt may run, in milliseconds; 45,000 by default. */
  timeoutMs?: number;
  /** After attempt n the wait is base × factor^n, at most cap, drawn from the last `jitter` (0 to 1) below that. */
  backoff?: { baseSeconds?: number; factor?: number; capSeconds?: number; jitter?: number };
  /** How many run at once, over all workers; no limit by default. */
  concurrency?: number;
  /** How many of one concurrency key run at once; 1 by default. */
  keyConcurrency?: number;
  /** How many start within any `ratePeriodSeconds` (60); no limit by default. */
  rateLimit?: number;
  ratePeriodSeconds?: number;
  /** How long what has ended is kept; 7, 30 and 7 days by default. */
  keepSucceededSeconds?: number;
  keepDeadSeconds?: number;
  keepCancelledSeconds?: number;
}

export type KindDeclarations = Record<string, KindDeclaration>;

/** What a handler is told about the job it runs, beside the payload. */
export interface Job {
  id: string;
  kind: string;
  /** This attempt included: 1 the first time. */
  attempts: number;
  maxAttempts: number;
  isLastAttempt: boolean;
  /** Who asked for the job, as recorded at enqueue. */
  context: unknown;
  createdAt: Date;
  /** The schedule that enqueued it, and the time for which it did: the first one, when several were missed. */
  schedule: string | null;
  dueAt: Date | null;
  /**
   * Aborts when the attempt runs out of time, the job is cancelled, its lease is lost or the worker must stop. Pass it to
   * fetch.
   */
  signal: AbortSignal;
  /** The fields that checkpoint has kept, in this attempt and in those before. */
  readonly progress: Readonly<Record<string, unknown>>;
  /**
   * Keeps these fields, beside those that are kept already. Throws JobError 22023 for what JSON would change or 1 MB does not
   * hold, and the signal's reason when the attempt is over.
   */
  checkpoint(fields: Record<string, unknown>): Promise<void>;
  /**
   * Runs a part of the job once: a later attempt does not run it again, but gets what it gave (undefined as null). What it
   * throws goes on to the handler, and nothing is stored: it may be tried again. A name, of at most 200 characters, means the
   * same work in every attempt. Throws JobError 22023 for that of another step of this attempt, PermanentError for a value that
   * JSON would change, since the part is done, and the signal's reason when the attempt is over.
   */
  step<T>(name: string, run: () => T | Promise<T>): Promise<Stored<T>>;
}

/** What a step that gives a T gives to a later attempt. */
export type Stored<T> = T extends undefined | void ? null : T;

/** What it returns is stored in `result`; what it throws fails the attempt. It may run more than once for one job. */
export type Handler<Payload> = (payload: Payload, job: Job) => unknown;

/** One handler for every declared kind, each taking what its schema gives. */
export type HandlersOf<Kinds extends KindDeclarations> = {
  [K in keyof Kinds]: Handler<z.output<Kinds[K]["schema"]>>;
};
