import { z } from "zod";
import type { kinds } from "../_app/kinds.ts";
import { callFor, inSnakeCase, instant, rowsOf } from "../_shared/database.ts";
import { log } from "../_shared/log.ts";
import { type EnqueueOptions, type Kind, toArguments } from "../_shared/jobs.ts";

/** Schedules: one function per SQL function, with the same name. All throw JobError; what the database refuses has its SQLSTATE. */

export interface ScheduleOptions extends Pick<EnqueueOptions, "priority" | "maxAttempts" | "context"> {
  /** As Postgres knows it, such as Europe/Berlin; UTC by default. */
  timeZone?: string;
  /** When it runs next, in place of what `cron` says. */
  nextRun?: Date;
  /** Whose it is: schedules can be listed and removed by tenant. */
  tenant?: string;
  /** `skip`: a run is left out while the job of the one before waits or runs; `allow` by default. */
  overlap?: "allow" | "skip";
}

type PayloadOf<K extends Kind> = z.input<(typeof kinds)[K]["schema"]>;

/** When to enqueue what: a cron expression, a kind, a payload that fits. */
type Timetable<Options> = { [K in Kind]: { cron: string; kind: K; payload: PayloadOf<K> } & Options }[Kind];

/** A schedule as ensureSchedules takes it. */
export type NewSchedule = Timetable<{ name: string } & ScheduleOptions>;

/** What _app/schedules.ts declares: schedules by name. */
export type AppSchedules = Record<string, Timetable<Omit<ScheduleOptions, "nextRun" | "tenant">>>;

/**
 * Makes a schedule, or changes the one of that name, and gives back when it runs next: as before, unless cron or time zone are
 * new. The payload is checked by the kind's schema before anything is written: throws as enqueueJob does, and JobError 22023
 * naming what is wrong with a cron expression or time zone.
 */
export async function scheduleJob<K extends Kind>(
  name: string,
  cron: string,
  kind: K,
  payload: PayloadOf<K>,
  options: ScheduleOptions = {},
): Promise<Date> {
  const args = await scheduleArguments("scheduleJob", { name, cron, kind, payload, ...options });
  return await callFor(time, "schedule_job", args);
}

/** The arguments of schedule_job, once the payload fits; `where` begins the error of one that does not. */
export async function scheduleArguments(
  where: string,
  { kind, payload, priority, maxAttempts, context, nextRun, ...rest }:
    & { name: string; cron: string; kind: Kind; payload: unknown }
    & ScheduleOptions,
): Promise<Record<string, unknown>> {
  const job = await toArguments(where, kind, payload, { priority, maxAttempts, context });
  return { ...inSnakeCase({ ...rest, nextRun: instant(`${where}: nextRun`, nextRun) }), ...job };
}

/**
 * Brings the schedules whose names begin with `prefix` (and that are the tenant's, when one is given) in step with these:
 * what is new or changed is scheduled, what is not among them removed, and the rest left alone. All or nothing: throws as
 * scheduleJob does, naming the entry, from 0 on.
 */
export async function ensureSchedules(
  definitions: NewSchedule[],
  options: { prefix: string; tenant?: string },
): Promise<{ scheduled: string[]; removed: string[] }> {
  const given = [];
  for (const [n, definition] of definitions.entries()) {
    given.push(await scheduleArguments(`ensureSchedules: entry ${n}`, definition));
  }
  return await callFor(ensured, "ensure_schedules", { definitions: given, ...options });
}

/** Removes a schedule; false when there is none of that name. */
export const unscheduleJob = (name: string): Promise<boolean> =>
  callFor(z.boolean(), "unschedule_job", { name });

/** Removes the schedules whose names begin with `prefix`, or of a tenant, or both; gives back how many. One must be given. */
export const unscheduleJobs = (
  { prefix, tenant }: { prefix?: string; tenant?: string },
): Promise<number> =>
  // Null, where leaving it out would mean another call.
  callFor(z.number(), "unschedule_jobs", { prefix: prefix ?? null, tenant: tenant ?? null });

/** Nothing is enqueued until it is resumed; false when there is no such schedule. */
export const pauseSchedule = (name: string): Promise<boolean> =>
  callFor(z.boolean(), "pause_schedule", { name });

/** When it runs next, runs that were due while it was paused being left out; null when there is no such schedule. */
export const resumeSchedule = (name: string): Promise<Date | null> =>
  callFor(time.nullable(), "resume_schedule", { name });

/** Schedules by name: at most `maxRows` (1,000), and after the one named `after`, the last of the page before. */
export const listSchedules = (
  options: { prefix?: string; tenant?: string; maxRows?: number; after?: string } = {},
): Promise<z.output<typeof listed>> => callFor(listed, "list_schedules", options);

/** The first run after `after` (now). Throws JobError 22023 naming what is wrong with the expression or the time zone. */
export async function nextCronRun(
  cron: string,
  { timeZone, after }: { timeZone?: string; after?: Date } = {},
): Promise<Date> {
  const args = { cron, timeZone, after: instant("nextCronRun: after", after) };
  return await callFor(time, "next_cron_run", args);
}

/**
 * Enqueues the job of each schedule that is due, as the tick does; gives back how many. A schedule whose job cannot be
 * enqueued is an error in the log.
 */
export async function enqueueDueSchedules(): Promise<number> {
  const { enqueued, failed } = await callFor(due, "enqueue_due_schedules_as_json", {});
  for (const each of failed) log("error", "schedule_failed", each);
  return enqueued;
}

const due = z.object({
  enqueued: z.number(),
  failed: z.array(z.object({ schedule: z.string(), error: z.string() })),
});

/** A time as REST gives it. Date has milliseconds: the rest is cut. */
const time = z.string().transform((text) => new Date(text));

/** What was scheduled and what removed, by name. */
export const ensured = z.object({
  scheduled: z.array(z.string()),
  removed: z.array(z.string()),
  error: z.string().nullish(),
});

const listed = rowsOf({
  name: z.string(),
  cron: z.string(),
  timeZone: z.string(),
  kind: z.string(),
  payload: z.unknown(),
  tenant: z.string().nullable(),
  overlap: z.enum(["allow", "skip"]),
  paused: z.boolean(),
  nextRun: time,
  lastRun: time.nullable(),
  lastJobId: z.string().nullable(),
  lastStatus: z.string().nullable(),
  lastError: z.string().nullable(),
});
