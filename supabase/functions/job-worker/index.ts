import { z } from "zod";
// loadApp() and loadAppSchedules() load them; named here, whatever bundles this function takes them along.
import "../_app/handlers.ts";
import "../_app/schedules.ts";
import "../_app/webhooks.ts";
import { keepAppSchedules, loadAppSchedules } from "../_schedules/app.ts";
import { describeIssue } from "../_shared/attempt.ts";
import { requiredEnv, serviceClient } from "../_shared/database.ts";
import { retirement, shutdown, surviveUncaughtErrors } from "../_shared/edge_runtime.ts";
import { errorText } from "../_shared/errors.ts";
import {
  notConfigured,
  problem,
  readJson,
  refuseOtherMethods,
  refuseWithoutCronSecret,
} from "../_shared/http.ts";
import { loadApp, wakeJobWorker, workJobs } from "../_shared/jobs.ts";
import { kindNames } from "../_shared/kinds.ts";
import { log } from "../_shared/log.ts";

const requestBody = z.strictObject({
  kinds: kindNames,
  maxJobs: z.int().min(1).max(1000).optional(),
  /** Work first and answer with what was done; else answer 202 at once and work on. */
  wait: z.boolean().default(false),
});

// What does not load, or go together, shows when the function starts, not when a job comes.
await Promise.all([loadApp(), loadAppSchedules()]);
surviveUncaughtErrors();

Deno.serve(async (request) => {
  const refused = refuseOtherMethods(request, "POST") ?? refuseWithoutCronSecret(request);
  if (refused) return refused;
  const read = await readJson(request);
  if ("refused" in read) return read.refused;
  const parsed = requestBody.safeParse(read.body);
  if (!parsed.success) return problem(400, "Bad request", describeIssue(parsed.error.issues[0]));
  const { wait, ...options } = parsed.data;
  // Before the 202: only an answer that says so shows in job_dispatch_health().
  try {
    serviceClient();
  } catch (error) {
    log("error", "not_configured", { error: errorText(error) });
    return notConfigured();
  }
  EdgeRuntime.waitUntil(keepAppSchedules()); // no job waits for them

  if (wait) {
    try {
      const { results } = await workJobs({ ...options, signal: shutdown(), retirement });
      return Response.json({ processed: results.length, results });
    } catch (error) {
      log("error", "worker_failed", { error: errorText(error) }, error);
      return problem(500, "The worker failed", "The function's log says why.");
    }
  }
  EdgeRuntime.waitUntil(workOn(options));
  return Response.json({ accepted: true }, { status: 202 });
});

/** Works until nothing is ready. With backlog left when this worker has done its share, a successor is woken. */
async function workOn(options: { kinds?: string[]; maxJobs?: number }): Promise<void> {
  const onBacklog = () => EdgeRuntime.waitUntil(wakeSuccessor(options.kinds));
  try {
    await wakeJobWorker({
      ...options,
      signal: shutdown(),
      retirement,
      onBacklog: options.maxJobs ? undefined : onBacklog,
    });
  } catch (error) {
    log("error", "worker_failed", { error: errorText(error) }, error);
  }
}

/** Pokes job-worker as the database does. When that fails the tick wakes the next one. */
async function wakeSuccessor(kinds?: string[]): Promise<void> {
  try {
    const [secret = ""] = requiredEnv("CRON_SECRET").split(",", 1);
    const response = await fetch(`${requiredEnv("SUPABASE_URL")}/functions/v1/job-worker`, {
      method: "POST",
      headers: { Authorization: `Bearer ${secret.trim()}` },
      body: JSON.stringify({ kinds }),
      signal: AbortSignal.timeout(5_000),
    });
    await response.body?.cancel();
    if (!response.ok) throw new Error(`the poke was answered ${response.status}`);
  } catch (error) {
    log("error", "successor_not_woken", { error: errorText(error) }, error);
  }
}
