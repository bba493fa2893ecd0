import { secretFilter } from "./secrets.ts";

/**
 * What the functions of this template throw. `code` is the SQLSTATE of a database error (listed in the first migration), a
 * PGRST code of the database's API, `unreachable` when that gave no usable answer, `refused` when it did not take the key,
 * `too_large` when it refused the size, `unknown_kind`, `invalid_payload`, `not_configured`, `invalid_token` (contextOf:
 * answer 401), `no_user` (asUser) or `lease_lost` (the reason of a lease's signal).
 */
export class JobError extends Error {
  override name = "JobError";
  constructor(readonly code: string, readonly detail: string, readonly hint?: string) {
    super(hint ? `${detail} (${hint})` : detail);
  }
}

/**
 * What is over after a while: no connection, conflict, no resources, lock timeout, intervention by an operator; a database
 * that is read-only, as while its disk is full or a replica takes over, or lets nobody in; and what a pooler raises (XX000).
 */
const PASSING = /^(unreachable|PGRST00[0-3]|25006|55P03|55000|XX000|(08|40|53|57)[0-9A-Z]{3})$/;
/** Whether a call that was answered so may be answered otherwise later, with nobody's help. */
export const passes = (error: unknown) => error instanceof JobError && PASSING.test(error.code);

/** Thrown by a handler whose job can never succeed: the job is dead at once, whatever attempts are left. */
export class PermanentError extends Error {
  override name = "PermanentError";
}

/** Thrown by a handler that knows when to try again: the attempt has failed, and the next one waits that many seconds. */
export class RetryAfterError extends Error {
  override name = "RetryAfterError";
  constructor(readonly seconds: number, message = `retry after ${seconds} s`, options?: ErrorOptions) {
    super(message, options);
  }
}

/**
 * Thrown by a handler that finds its job too early: it is claimed again after that many seconds (one at least, at most ten
 * years), and the attempt does not count. Throws RangeError for what is no number of seconds.
 */
export class SnoozeError extends Error {
  override name = "SnoozeError";
  constructor(readonly seconds: number) {
    super(`snoozed for ${seconds} s`);
    if (!(seconds >= 0)) throw new RangeError(`SnoozeError: ${seconds} is no number of seconds`);
  }
}

const MAX_ERROR_LENGTH = 10_000;
/** How the errors begin that the engine itself acts on: no thrown text may pass for one. */
const ENGINE_WORDS = /^(unknown_kind|lease expired)/;

/**
 * What was thrown, as a text for last_error, the log and Sentry: name, message and the causes below it, at most `maxLength`
 * (10,000) characters, with this function's secrets replaced by their names. Never throws: anything can be thrown, also
 * null or an object whose properties throw.
 */
export function errorText(thrown: unknown, maxLength = MAX_ERROR_LENGTH): string {
  try {
    return safeText(describe(thrown, 0), maxLength);
  } catch {
    return "the thrown value cannot be read";
  }
}

/** A text without this function's secrets and without what Postgres's text cannot hold, cut after `maxLength` characters. */
export function safeText(text: string, maxLength: number): string {
  const secrets = secretFilter();
  const isCut = text.length > maxLength + secrets.longest;
  // A text that is far too long is not searched to its end. The last secret in the rest may then be an incomplete one.
  let safe = secrets.replace(text.slice(0, maxLength + secrets.longest));
  if (isCut) safe = safe.slice(0, Math.max(0, safe.length - secrets.longest));
  const cut = isCut || safe.length > maxLength;
  safe = safe.slice(0, maxLength).replaceAll("\u0000", "\ufffd").toWellFormed();
  return cut ? `${safe}… (cut, ${text.length} characters in all)` : safe;
}

function describe(thrown: unknown, depth: number): string {
  if (!(thrown instanceof Error)) {
    if (typeof thrown === "bigint") return `thrown bigint: ${thrown}`;
    return typeof thrown === "string" && !ENGINE_WORDS.test(thrown)
      ? thrown
      : `thrown ${typeof thrown}: ${JSON.stringify(thrown) ?? String(thrown)}`;
  }
  const causes = thrown.cause === undefined ? [] : [thrown.cause];
  if (thrown instanceof AggregateError) causes.push(...thrown.errors.slice(0, 3));
  return [
    `${thrown.name}: ${thrown.message}`,
    ...(depth === 3 ? [] : causes).map((cause) => `caused by ${describe(cause, depth + 1)}`),
  ].join("\n");
}
