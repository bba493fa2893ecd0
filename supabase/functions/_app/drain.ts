import type { DrainHooks } from "../_schedules/drain.ts";

/**
 * What this app does about drains beside them: `onError(error, job?)`, and a `monitor` of its own or Sentry's, such as
 * `monitor: sentryCheckIns("drain")` from _schedules/monitor.ts.
 */
export const drainHooks: DrainHooks = {};
