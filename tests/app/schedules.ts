import type { AppSchedules } from "../_shared/jobs.ts";

/** Schedules for tests, which are not due while they run. */
export const schedules = {
  echo: { cron: "0 0 29 2 *", kind: "echo", payload: { n: 29 }, timeZone: "Europe/Berlin", overlap: "skip" },
} satisfies AppSchedules;
