import { join } from "node:path";
import { setTimeout as delay } from "node:timers/promises";
import { parseArgs } from "node:util";
import { keepAppSchedules, loadAppSchedules } from "../supabase/functions/_schedules/app.ts";
import { useTransport } from "../supabase/functions/_shared/database.ts";
import { surviveUncaughtErrors } from "../supabase/functions/_shared/edge_runtime.ts";
import { errorText, JobError, passes } from "../supabase/functions/_shared/errors.ts";
import {
  enqueueDueSchedules,
  loadApp,
  purgeJobs,
  rescueExpiredJobs,
  workJobs,
} from "../supabase/functions/_shared/jobs.ts";
import { log } from "../supabase/functions/_shared/log.ts";
import { reportLostAttempts } from "../supabase/functions/_shared/worker.ts";
import { connectDirectly } from "./direct.ts";
import { endWhenStuck } from "./local/stuck.ts";
import { readEnv } from "./setup.ts";

/**
 * `npm run worker [-- --kinds a,b --slots 10 --stop-seconds 7]`: a worker in a process of its own, until SIGTERM or Ctrl-C, for
 * jobs that take longer than an Edge Function lives.
 */

/** What the tick does in the database, for a project that has none. */
const UPKEEP_MS = 10_000;
/** From the end of the stop time to the end of the process, for giving jobs back. Docker kills after ten seconds. */
const LAST_MS = 1_500;
/** Signals within this time are one: a terminal sends Ctrl-C to every process, and scripts/run.mjs passes others on. */
const SAME_SIGNAL_MS = 500;

const USAGE = "npm run worker -- [--kinds a,b] [--slots 10] [--stop-seconds 7]";

const projectDir = join(import.meta.dirname ?? ".", "..");

/** Says what is wrong and ends the process. */
function fail(message: string): never {
  console.error(message);
  Deno.exit(1);
}

const pending = new Set<Promise<unknown>>();
// As in an Edge Function, what is sent to Sentry is waited for.
Object.defineProperty(globalThis, "EdgeRuntime", {
  value: {
    waitUntil(promise: Promise<unknown>): void {
      pending.add(promise);
      promise.finally(() => pending.delete(promise));
    },
  },
});

const { kinds, slots, stopMs } = readOptions();
await readEnvironment();
// Not before: what the app loads may read its settings.
const [app] = await Promise.all([loadApp(), loadAppSchedules()]);
const unknown = kinds?.find((kind) => !Object.hasOwn(app.kinds, kind));
if (unknown !== undefined) fail(`_app declares no kind "${unknown}"\n${USAGE}`);
const databaseUrl = Deno.env.get("DATABASE_URL");
if (databaseUrl && !isUrl(databaseUrl, /^postgres(ql)?:$/)) {
  const example =
    "postgresql://user:password@host:5432/postgres, with %25 and %40 for % and @ in the password";
  fail(`DATABASE_URL is not the address of a database: ${example}`);
}
const apiUrl = Deno.env.get("SUPABASE_URL");
if (apiUrl && !(isUrl(apiUrl, /^https?:$/) && new URL(apiUrl).pathname === "/")) {
  fail("SUPABASE_URL is not the address of a project's API: https://<ref>.supabase.co");
}
surviveUncaughtErrors();
endWhenStuck();

const worker = `worker-${Deno.hostname()}-${crypto.randomUUID().slice(0, 8)}`;
const stopping = new AbortController();
let stoppedAt: number | undefined;
for (const signal of ["SIGTERM", "SIGINT", "SIGHUP"] as const) {
  Deno.addSignalListener(signal, () => {
    if (stoppedAt === undefined) {
      stoppedAt = performance.now();
      log("info", "worker_stopping", { worker, signal });
      stopping.abort();
      // A database that does not answer must not keep it.
      setTimeout(
        () => fail("The worker ends before all jobs are given back: their leases run out."),
        stopMs + LAST_MS,
      );
    } else if (performance.now() - stoppedAt > SAME_SIGNAL_MS) fail("The worker is ended at once.");
  });
}

log("info", "worker_started", { worker, slots, kinds, over: databaseUrl ? "postgres" : "rest" });
try {
  if (databaseUrl) useTransport(connectDirectly(databaseUrl));
  keepUp();
  await workOn();
} catch (error) {
  log("error", "worker_failed", { worker, error: errorText(error) }, error);
  await Promise.allSettled(pending);
  fail(`The worker has ended: ${errorText(error)}${whatToDo(error)}`);
}
await Promise.allSettled(pending);
log("info", "worker_stopped", { worker });
Deno.exit(0);

/** Works until it is told to stop. Throws what the database refuses for good. */
async function workOn(): Promise<void> {
  for (let delayMs = 200;; delayMs = Math.min(delayMs * 2, 30_000)) {
    try {
      await workJobs({ kinds, slots, signal: stopping.signal, longRunning: { worker, stopMs } });
      if (stopping.signal.aborted) return;
      throw new Error("none of its kinds could be declared: the log says why");
    } catch (error) {
      // It has not begun: the kinds are declared first.
      if (!passes(error)) throw error;
      log("error", "declare_job_kinds_failed", { worker, error: errorText(error) }, error);
    }
    await pause(delayMs);
    if (stopping.signal.aborted) return;
  }
}

/**
 * The app's schedules, and every ten seconds due schedules, rescue and purge, as the tick does and whether or not it runs; and
 * the reports that any worker makes.
 */
async function keepUp(): Promise<void> {
  while (!stopping.signal.aborted) {
    // What one of them meets is not to keep the others from their work.
    for (
      const task of [
        keepAppSchedules,
        enqueueDueSchedules,
        () => rescueExpiredJobs(),
        () => purgeJobs(),
        reportLostAttempts,
      ]
    ) {
      try {
        await task();
      } catch (error) {
        log("error", "upkeep_failed", { worker, error: errorText(error) }, error);
        if (passes(error)) break; // the others would say the same
      }
    }
    await pause(UPKEEP_MS);
  }
}

/** Waits, but not for longer than it works. Leaves nothing behind on the signal, which lives as long as the process. */
async function pause(ms: number): Promise<void> {
  await delay(ms, undefined, { signal: stopping.signal }).catch(() => {});
}

function isUrl(text: string, protocol: RegExp): boolean {
  try {
    const url = new URL(text);
    decodeURIComponent(url.username + url.password);
    return protocol.test(url.protocol) && url.hostname !== "";
  } catch {
    return false;
  }
}

function readOptions(): { kinds?: string[]; slots: number; stopMs: number } {
  const options = {
    kinds: { type: "string" },
    slots: { type: "string" },
    "stop-seconds": { type: "string" },
  } as const;
  try {
    const { values } = parseArgs({ options });
    const slots = Number(values.slots ?? 10);
    if (!Number.isInteger(slots) || slots < 1 || slots > 1000) {
      throw new Error("--slots is not from 1 to 1000");
    }
    const stopSeconds = Number(values["stop-seconds"] ?? 7);
    if (!(stopSeconds >= 0 && stopSeconds <= 86_400)) {
      throw new Error("--stop-seconds is not from 0 to 86400");
    }
    const kinds = values.kinds?.split(",").map((kind) => kind.trim());
    return { kinds, slots, stopMs: stopSeconds * 1000 };
  } catch (error) {
    fail(`${error instanceof Error ? error.message : error}\n${USAGE}`);
  }
}

/**
 * The process's own variables, then supabase/functions/.env for what is missing; and where neither says which database, those
 * of a local stack that runs, in the place of a hosted project's.
 */
async function readEnvironment(): Promise<void> {
  const own = await readEnv(join(projectDir, "supabase/functions/.env"));
  for (const [name, value] of Object.entries(own)) if (!Deno.env.get(name)) Deno.env.set(name, value);
  if (Deno.env.get("DATABASE_URL") || Deno.env.get("SUPABASE_URL")) return;
  const { runningStackEnv } = await import("./local/stack.ts");
  const local = await runningStackEnv(projectDir);
  if (!local) {
    fail(
      "There is no database to work for: set DATABASE_URL (postgresql://…), or SUPABASE_URL and SUPABASE_SECRET_KEYS, or " +
        "run npm start first.",
    );
  }
  for (const [name, value] of Object.entries(local)) Deno.env.set(name, value);
}

function whatToDo(error: unknown): string {
  switch (error instanceof JobError ? error.code : "") {
    case "42501":
      return databaseUrl
        ? "\nUse the user postgres, or another that may execute it, in DATABASE_URL."
        : "\nUse a secret key, or the service role's.";
    case "42883":
    case "PGRST202":
      return "\nThe database has other migrations than this code: npx supabase db push.";
    case "PGRST301":
      return "\nCheck SUPABASE_SECRET_KEYS, or SUPABASE_SERVICE_ROLE_KEY.";
    case "28P01":
      return "\nCheck user and password in DATABASE_URL.";
    case "3D000":
      return "\nCheck the database's name in DATABASE_URL.";
    default:
      return "";
  }
}
