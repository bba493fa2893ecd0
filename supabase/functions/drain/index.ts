// loadApp() loads them; named here, whatever bundles this function takes them along.
import "../_app/handlers.ts";
import "../_app/webhooks.ts";
import { retirement, shutdown, surviveUncaughtErrors } from "../_shared/edge_runtime.ts";
import { errorText } from "../_shared/errors.ts";
import { problem, readJson, refuseOtherMethods, refuseWithoutCronSecret } from "../_shared/http.ts";
import { loadApp, rescueExpiredJobs, workJobs } from "../_shared/jobs.ts";
import { log } from "../_shared/log.ts";

// What does not load, or go together, shows when the function starts, not when a job comes.
await loadApp();
surviveUncaughtErrors();

/** For any outside scheduler: rescues what expired and runs what is ready, then says what it did. */
Deno.serve(async (request) => {
  const refused = refuseOtherMethods(request, "GET", "POST") ?? refuseWithoutCronSecret(request);
  if (refused) return refused;
  const read = await readJson(request); // nothing in it counts; what is refused is the same as by job-worker
  if ("refused" in read) return read.refused;
  try {
    await rescueExpiredJobs();
    const { results, backlog } = await workJobs({ signal: shutdown(), retirement });
    const queues: Record<string, { succeeded: number; failed: number; dead: number }> = {};
    let errors = 0;
    for (const { kind, status } of results) {
      const queue = queues[kind] ??= { succeeded: 0, failed: 0, dead: 0 };
      if (status === "succeeded") queue.succeeded++;
      else if (status === "pending" || status === "cancelled") queue.failed++;
      else if (status === "dead") queue.dead++;
      else if (status === "lost") errors++;
    }
    return Response.json({ schedules: 0, queues, budgetExhausted: backlog, errors });
  } catch (error) {
    log("error", "drain_failed", { error: errorText(error) }, error);
    return problem(500, "The drain failed", "The function's log says why.");
  }
});
