import type { DenoOptions } from "@sentry/deno";
import { createTransport, init, linkedErrorsIntegration, Scope, withScope } from "@sentry/deno";
import { errorText, safeText } from "./errors.ts";
import { writeLine } from "./log.ts";

/** Sends errors to Sentry. log.ts loads this, and with it the SDK, at the first error where SENTRY_DSN is set. */

/** What waits beyond this is dropped, and said. */
const MAX_WAITING = 1_000;
/** Sent at once. */
const BATCH = 30;
const SEND_MS = 3_000;
/** Sentry cuts texts at 8,192 characters. The whole text is in the log and in job_failures. */
const MAX_TEXT_LENGTH = 4_000;

type Capture = (client: NonNullable<ReturnType<typeof connect>>) => unknown;

const waiting: Capture[] = [];
let dropped = 0;
/** How many of the batch at hand Sentry has taken, and why it has not taken the first that it has not. */
let taken = 0;
let reason: string | undefined;
let draining: Promise<void> | undefined;

/** Sends an event with the fields `id`, `kind` and `attempt` as tags. */
export function report(event: string, fields: Record<string, unknown>, thrown: unknown): Promise<void> {
  return send((client) => capture(client, event, fields, thrown));
}

/**
 * Queues what gives the client one thing to send. The promise resolves when nothing waits any more: sent, or given up with a
 * line `report_failed` in the log.
 */
export function send(one: Capture): Promise<void> {
  if (!client) return Promise.resolve();
  if (waiting.length < MAX_WAITING) waiting.push(one);
  else dropped++;
  return draining ??= drain();
}

async function drain(): Promise<void> {
  try {
    while (waiting.length > 0) {
      const batch = waiting.splice(0, BATCH);
      taken = 0;
      reason = undefined;
      for (const one of batch) if (client) one(client);
      await client?.flush(SEND_MS + 1_000);
      // Nobody is to wait for a Sentry that takes nothing, or wants none for a while.
      if (taken === 0) dropped += waiting.splice(0).length;
      const events = batch.length - taken + dropped;
      dropped = 0;
      const error = reason ?? "more than Sentry takes for now";
      if (events > 0) writeLine("error", "report_failed", { events, error });
    }
  } finally {
    // Together with the last look: whatever is reported later starts it again.
    draining = undefined;
  }
}

function capture(
  client: Parameters<Capture>[0],
  event: string,
  { id, kind, attempt, error, ...extra }: Record<string, unknown>,
  thrown: unknown,
): void {
  const scope = new Scope();
  for (const [tag, value] of Object.entries({ event, job_id: id, kind, attempt })) {
    if (value !== undefined) scope.setTag(tag, String(value));
  }
  scope.setExtras(extra);
  try {
    if (thrown instanceof Error) {
      // The SDK passes over an error that it has seen: in another job, or in the app's own Sentry.
      Reflect.deleteProperty(thrown, "__sentry_captured__");
      const mechanism = { type: "generic", handled: true };
      client.captureException(thrown, { originalException: thrown, mechanism }, scope);
      return;
    }
  } catch {
    // It cannot be read. Its text says so.
  }
  const text = String(error ?? extra.todo ?? "");
  // What the engine says names the cause up to the first colon, such as handler_timeout; the rest differs.
  scope.setFingerprint([event, String(kind ?? ""), text.split(":", 1)[0] ?? ""]);
  client.captureMessage(text ? `${event}: ${text}` : event, "error", {}, scope);
}

/**
 * A client of our own. Made in a scope of its own it replaces none that the app has, and without the usual integrations it
 * listens to nothing and keeps no breadcrumbs, in which an app's URLs would travel.
 */
function connect(dsn: string) {
  // Looked at here, since the SDK would write it into the log.
  if (!/^https?:\/\/\w+(:\w+)?@[^@\s]+\/\d+$/.test(dsn)) {
    const todo =
      "SENTRY_DSN is not https://<key>@<host>/<project>: copy it from the project's settings in Sentry.";
    writeLine("error", "sentry_dsn_unusable", { todo });
    return;
  }
  return withScope(() =>
    init({
      dsn,
      environment: Deno.env.get("SENTRY_ENVIRONMENT") || undefined,
      release: Deno.env.get("SENTRY_RELEASE") || undefined,
      defaultIntegrations: false,
      integrations: [linkedErrorsIntegration()],
      skipOpenTelemetrySetup: true,
      sendClientReports: false,
      maxBreadcrumbs: 0,
      beforeSend: withoutSecrets,
      transport,
    })
  );
}

/** The last door: all texts that the SDK has put into an event. Its notes to itself, which hold the DSN's key, are not sent. */
const withoutSecrets: DenoOptions["beforeSend"] = ({ sdkProcessingMetadata: _, ...event }) =>
  JSON.parse(
    JSON.stringify(event, (_, value) => typeof value === "string" ? safeText(value, MAX_TEXT_LENGTH) : value),
  );

/** As the SDK's own, but for a limit on the time, no redirects, with which the key would travel, and a count. */
const transport: DenoOptions["transport"] = (options) =>
  createTransport(options, async ({ body }) => {
    try {
      const response = await fetch(options.url, {
        method: "POST",
        headers: options.headers,
        body: typeof body === "string" ? body : new Uint8Array(body),
        redirect: "manual",
        signal: AbortSignal.timeout(SEND_MS),
      });
      await response.body?.cancel();
      if (response.ok) taken++;
      else reason ??= `Sentry answered ${response.status}`;
      return {
        statusCode: response.status,
        headers: {
          "x-sentry-rate-limits": response.headers.get("X-Sentry-Rate-Limits"),
          "retry-after": response.headers.get("Retry-After"),
        },
      };
    } catch (error) {
      reason ??= errorText(error);
      throw error;
    }
  });

const client = connect(Deno.env.get("SENTRY_DSN")?.trim() ?? "");
