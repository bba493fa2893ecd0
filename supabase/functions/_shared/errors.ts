/**
 * What the functions of this template throw. `code` is the SQLSTATE of a database error (listed in the first migration), a
 * PGRST code of the database's API, `unreachable` when that gave no usable answer, `too_large` when it refused the size,
 * `unknown_kind`, `invalid_payload` or `not_configured`.
 */
export class JobError extends Error {
  override name = "JobError";
  constructor(readonly code: string, readonly detail: string, readonly hint?: string) {
    super(hint ? `${detail} (${hint})` : detail);
  }
}

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

const MAX_ERROR_LENGTH = 10_000;

/**
 * What a handler threw, as the text for last_error: name, message and the causes below it, at most 10,000 characters.
 * Never throws: anything can be thrown, also null or an object whose properties throw.
 */
export function errorText(thrown: unknown): string {
  let text: string;
  try {
    text = describe(thrown, 0);
  } catch {
    text = "the thrown value cannot be read";
  }
  // Postgres's text holds no U+0000.
  text = text.replaceAll("\u0000", "\\u0000").toWellFormed();
  return text.length <= MAX_ERROR_LENGTH
    ? text
    : `${text.slice(0, MAX_ERROR_LENGTH).toWellFormed()}… (cut, ${text.length} characters in all)`;
}

function describe(thrown: unknown, depth: number): string {
  if (!(thrown instanceof Error)) {
    return typeof thrown === "string"
      ? thrown
      : `thrown ${typeof thrown}: ${JSON.stringify(thrown) ?? String(thrown)}`;
  }
  const text = `${thrown.name}: ${thrown.message}`;
  return thrown.cause === undefined || depth === 3
    ? text
    : `${text}\ncaused by ${describe(thrown.cause, depth + 1)}`;
}
