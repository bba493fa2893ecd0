import { AsyncLocalStorage } from "node:async_hooks";
import { waitUntil } from "./edge_runtime.ts";
import { errorText } from "./errors.ts";

/**
 * Writes one line of JSON to the function's log. Fields name things (job id, kind, attempt) and carry error texts; they
 * never carry secrets or payloads. With SENTRY_DSN set, an error is reported to Sentry as well, in the background, with
 * `thrown`, if something was, as its exception.
 */
export function log(
  level: "info" | "error",
  event: string,
  fields: Record<string, unknown> = {},
  thrown?: unknown,
): void {
  writeLine(level, event, fields);
  logWatch.getStore()?.(level, event, fields, thrown);
  if (level === "error" && Deno.env.get("SENTRY_DSN")) report(event, fields, thrown);
}

/** Who is told of what is logged beneath its own call, and nowhere else: a drain, of what goes wrong in it. */
export const logWatch = new AsyncLocalStorage<typeof log | undefined>();

/** What Supabase keeps of a line of the log; what is cut is no JSON. */
const MAX_LINE_LENGTH = 10_000;

/** The line alone. */
export function writeLine(level: "info" | "error", event: string, fields: Record<string, unknown>): void {
  let line = JSON.stringify({ level, event, ...fields });
  for (let most = MAX_LINE_LENGTH / 2; line.length > MAX_LINE_LENGTH && most > 1; most /= 2) {
    line = JSON.stringify(
      { level, event, ...fields },
      (_, value) => typeof value === "string" || Array.isArray(value) ? value.slice(0, most) : value,
    );
  }
  if (level === "error") console.error(line);
  else console.log(line);
}

function report(event: string, fields: Record<string, unknown>, thrown: unknown): void {
  const reporting = import("./sentry.ts").then((sentry) => sentry.report(event, fields, thrown))
    .catch((error) => writeLine("error", "report_failed", { events: 1, error: errorText(error) }));
  waitUntil(reporting); // the isolate stays until it is sent
}
