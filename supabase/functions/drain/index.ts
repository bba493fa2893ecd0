import { z } from "zod";
// loadApp() and loadAppSchedules() load them; named here, whatever bundles this function takes them along.
import "../_app/handlers.ts";
import "../_app/schedules.ts";
import "../_app/webhooks.ts";
import { drainHooks } from "../_app/drain.ts";
import { loadAppSchedules } from "../_schedules/app.ts";
import { drain } from "../_schedules/drain.ts";
import { describeIssue } from "../_shared/attempt.ts";
import { retirement, shutdown, surviveUncaughtErrors } from "../_shared/edge_runtime.ts";
import { passes } from "../_shared/errors.ts";
import { problem, readJson, refuseOtherMethods, refuseWithoutCronSecret } from "../_shared/http.ts";
import { loadApp } from "../_shared/jobs.ts";
import { kindNames } from "../_shared/kinds.ts";

/** What else a scheduler puts into a body does not count. */
const requestBody = z.object({
  budgetMs: z.int().min(1).max(70_000).default(50_000),
  kinds: kindNames,
});

// What does not load, or go together, shows when the function starts, not when a job comes.
await Promise.all([loadApp(), loadAppSchedules()]);
surviveUncaughtErrors();

/** For any outside scheduler: does all that is due, then says what it did. */
Deno.serve(async (request) => {
  const arrivedAt = performance.now();
  const refused = refuseOtherMethods(request, "GET", "POST") ?? refuseWithoutCronSecret(request);
  if (refused) return refused;
  const read = await readJson(request);
  if ("refused" in read) return read.refused;
  const budgetMs = new URL(request.url).searchParams.get("budgetMs");
  const given = { ...Object(read.body), ...(budgetMs === null ? {} : { budgetMs: Number(budgetMs) }) };
  const parsed = requestBody.safeParse(given);
  if (!parsed.success) return problem(400, "Bad request", describeIssue(parsed.error.issues[0]));
  try {
    const options = { ...parsed.data, arrivedAt, signal: shutdown(), retirement };
    return Response.json(await drain(options, drainHooks));
  } catch (error) {
    const status = passes(error) ? 503 : 500;
    return problem(status, "The drain failed", "The function's log says why.");
  }
});
