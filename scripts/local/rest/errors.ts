// Errors as the hosted REST API (PostgREST 14) answers them: a status, and a body of code, message, details and hint.

import postgres from "postgres";

export class RestError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly details: string | null = null,
    readonly hint: string | null = null,
  ) {
    super(message);
  }
}

/** What the local stack's REST does not do, though hosted does: 501, and where it can be had. */
export function notImplemented(what: string): RestError {
  return new RestError(
    501,
    "LOCAL501",
    `The local stack's REST API does not do this: ${what}.`,
    null,
    "Run `supabase start` (it needs Docker) to have all of PostgREST locally.",
  );
}

/**
 * Turns what a call to Postgres threw into a RestError. `anonymous` decides between 401 and 403 for a missing
 * privilege. Anything else is a fault of ours, and is thrown again.
 */
export function fromDatabase(error: unknown, anonymous: boolean): RestError {
  if (error instanceof RestError) return error;
  if (!(error instanceof postgres.PostgresError)) throw error;
  const { code, message, detail, hint } = error;
  return new RestError(databaseStatus(code, message, anonymous), code, message, detail, hint);
}

/** The answer that carries an error. */
export function errorResponse(error: RestError): Response {
  const { code, details, hint, message } = error;
  const headers = new Headers({
    "content-type": "application/json; charset=utf-8",
    "proxy-status": `PostgREST; error=${code.replace(/[^\w]/g, "")}`,
  });
  if (error.status === 401) headers.set("www-authenticate", "Bearer");
  if (error.status === 503) headers.set("retry-after", "1");
  return new Response(JSON.stringify({ code, details, hint, message }), { status: error.status, headers });
}

// The first matching beginning of an SQLSTATE decides; anything else is the client's fault.
const statuses: [string, number][] = [
  ["08", 503],
  ["09", 500],
  ["0L", 403],
  ["0P", 403],
  ["23503", 409],
  ["23505", 409],
  ["25006", 405],
  ["25", 500],
  ["28", 403],
  ["2D", 500],
  ["38", 500],
  ["39", 500],
  ["3B", 500],
  ["40", 500],
  ["42883", 404],
  ["42P01", 404],
  ["42P17", 500],
  ["53400", 500],
  ["53", 503],
  ["54", 500],
  ["55", 500],
  ["57P01", 503],
  ["57", 500],
  ["58", 500],
  ["F0", 500],
  ["HV", 500],
  ["P0001", 400],
  ["P0", 500],
  ["XX", 500],
];

function databaseStatus(code: string, message: string, anonymous: boolean): number {
  if (code === "42501") return anonymous ? 401 : 403;
  if (code === "21000") return message.endsWith("requires a WHERE clause") ? 400 : 500;
  if (code === "22023") return /^role .* does not exist$/.test(message) ? 401 : 400;
  if (/^PT\d{3}$/.test(code)) {
    const status = Number(code.slice(2));
    return status >= 200 && status <= 599 ? status : 500;
  }
  if (code.startsWith("PT")) return 500;
  return statuses.find(([start]) => code.startsWith(start))?.[1] ?? 400;
}
