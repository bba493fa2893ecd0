import { createHash } from "node:crypto";
import { callFor } from "../_shared/database.ts";
import { errorText, JobError } from "../_shared/errors.ts";
import { log } from "../_shared/log.ts";
import { type AppSchedules, ensured, scheduleArguments } from "./schedules.ts";

/** The schedules that _app/schedules.ts declares: `app:<name>` in the database. */

type Definitions = Record<string, unknown>[];

let loaded: Promise<Definitions> | undefined;

/** The app's schedules, read and checked at the first call: throws as scheduleJob does when a payload does not fit. */
export const loadAppSchedules = (): Promise<Definitions> => loaded ??= load();

async function load(): Promise<Definitions> {
  const { schedules }: { schedules: AppSchedules } = await import("../_app/schedules.ts");
  return await Promise.all(
    Object.entries(schedules).map(([name, schedule]) =>
      scheduleArguments(`_app/schedules.ts: ${name}`, { name: `app:${name}`, ...schedule })
    ),
  );
}

let inStep: Promise<void> | undefined;

/**
 * Brings the database in step with the app's schedules, once in this process: nothing is looked at there when they are those
 * of the last time. Throws what the database refuses; the next call tries again.
 */
export function ensureAppSchedules(): Promise<void> {
  return inStep ??= bringInStep().catch((error) => {
    inStep = undefined;
    throw error;
  });
}

let said = "";

/** The same for who calls it every few seconds: what fails is a line in the log, once, until something else does. */
export async function keepAppSchedules(): Promise<void> {
  try {
    await ensureAppSchedules();
  } catch (error) {
    const text = errorText(error);
    if (text !== said) log("error", "app_schedules_failed", { error: text }, error);
    said = text;
  }
}

async function bringInStep(): Promise<void> {
  const definitions = await loadAppSchedules();
  const digest = createHash("sha256").update(JSON.stringify(definitions)).digest("hex");
  const { scheduled, removed, error } = await callFor(ensured, "ensure_app_schedules", {
    digest,
    definitions,
  });
  if (error) throw new JobError("22023", error, "Correct _app/schedules.ts: nothing of it was changed.");
  if (scheduled.length + removed.length > 0) log("info", "app_schedules_changed", { scheduled, removed });
}
