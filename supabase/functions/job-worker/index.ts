import { z } from "zod";
import "../_app/handlers.ts"; // one that does not load shows when the function starts, not when a job comes
import { describeIssue } from "../_shared/attempt.ts";
import { requiredEnv } from "../_shared/database.ts";
import { shutdown, surviveUncaughtErrors } from "../_shared/edge_runtime.ts";
import { errorText } from "../_shared/errors.ts";
import { problem, readJson, refuseOtherMethods, refuseWithoutCronSecret } from "../_shared/http.ts";
import { wakeJobWorker, workJobs } from "../_shared/jobs.ts";
import { log } from "../_shared/log.ts";

const requestBody = z.strictObject({
  kinds: z.array(z.string()).min(1).max(1000).optional(),
  maxJobs: z.int().min(1).max(1000).optional(),
  /** Work first and answer with what was done; else answer 202 at once and work on. */
  wait: z.boolean().default(false),
});

surviveUncaughtErrors();

Deno.serve(async (request) => {
  const refused = refuseOtherMethods(request, "POST") ?? await refuseWithoutCronSecret(request);
  if (refused) return refused;
  const read = await readJson(request);
  if ("refused" in read) return read.refused;
  const parsed = requestBody.safeParse(read.body);
  if (!parsed.success) return problem(400, "Bad request", describeIssue(parsed.error.issues[0]));
  const { wait, ...options } = parsed.data;

  if (wait) {
    try {
      const { results } = await workJobs({ ...options, signal: shutdown });
      return Response.json({ processed: results.length, results });
    } catch (error) {
      log("error", "worker_failed", { error: errorText(error) });
      return problem(500, "The worker failed", "The function's log says why.");
    }
  }
  EdgeRuntime.waitUntil(workOn(options));
  return Response.json({ accepted: true }, { status: 202 });
});

/** Works until nothing is ready. With backlog left when this isolate has done its share, a successor is woken. */
async function workOn(options: { kinds?: string[]; maxJobs?: number }): Promise<void> {
  try {
    const report = await wakeJobWorker({ ...options, signal: shutdown });
    if (!report?.backlog || options.maxJobs) return;
    const response = await fetch(`${requiredEnv("SUPABASE_URL")}/functions/v1/job-worker`, {
      method: "POST",
      headers: { Authorization: `Bearer ${requiredEnv("CRON_SECRET").split(",", 1)[0]}` },
      body: JSON.stringify({ kinds: options.kinds }),
      signal: AbortSignal.timeout(5_000),
    });
    await response.body?.cancel();
  } catch (error) {
    // The tick wakes the next one.
    log("error", "worker_failed", { error: errorText(error) });
  }
}
