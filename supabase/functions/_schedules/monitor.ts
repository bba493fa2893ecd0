import type { DenoClient } from "@sentry/deno";
import type { Drain, DrainMonitor } from "./drain.ts";

/** Monitors for _app/drain.ts. */

/** A Sentry monitor's schedule, margins and thresholds. */
export type MonitorConfig = NonNullable<Parameters<DenoClient["captureCheckIn"]>[1]>;

/**
 * Sends Sentry a check-in when a drain starts, and when it ends: `ok`, or `error` when it could do nothing or its report has
 * errors. With a config Sentry makes or changes the monitor of that name itself
 * (https://develop.sentry.dev/sdk/telemetry/check-ins/); without SENTRY_DSN nothing is sent.
 */
export function sentryCheckIns(monitorSlug: string, config?: MonitorConfig): DrainMonitor {
  return {
    started: (drain) => checkIn(drain, "in_progress"),
    finished: ({ errors }, drain) => checkIn(drain, errors > 0 ? "error" : "ok"),
    failed: (_, drain) => checkIn(drain, "error"),
  };

  async function checkIn({ id, startedAt }: Drain, status: "in_progress" | "ok" | "error"): Promise<void> {
    if (!Deno.env.get("SENTRY_DSN")) return;
    const { send } = await import("../_shared/sentry.ts");
    const duration = status === "in_progress" ? undefined : (Date.now() - startedAt.getTime()) / 1000;
    const given = { monitorSlug, checkInId: id, status, duration };
    await send((client) => client.captureCheckIn?.(given, config));
  }
}
