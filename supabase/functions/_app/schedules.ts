import type { AppSchedules } from "../_shared/jobs.ts";

/**
 * The schedules that this app always has, by name, such as
 * `report: { cron: "0 9 * * MON-FRI", timeZone: "Europe/Berlin", kind: "send_email", payload: { to: "…", template: "welcome" } }`.
 * The database, where their names begin with `app:`, is brought in step when this file has changed.
 */
export const schedules = {} satisfies AppSchedules;
