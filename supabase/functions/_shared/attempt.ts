import { errorText, JobError, PermanentError, RetryAfterError, safeText, SnoozeError } from "./errors.ts";
import type { Handler, Job, KindDeclarations } from "./kinds.ts";
import { createProgress, type Progress } from "./progress.ts";
import type { ClaimedJob, Failure, Lease } from "./queue.ts";
import { after } from "./timer.ts";

/** The app as the engine sees it. */
export type App = { kinds: KindDeclarations; handlers: Record<string, Handler<never>> };

/** A claimed job until it is settled. */
export interface Held {
  job: ClaimedJob;
  controller: AbortController;
  /** When the lease ends as far as this worker knows, on performance.now()'s clock. */
  leaseEndsAt: number;
  /** Why the handler was stopped, when it was not the handler's own doing. */
  stopped?: "timeout" | "lost" | "released";
  /** Only its settling is left: no heartbeat extends it, so that one that cannot be settled is given up with its lease. */
  ended?: true;
}

/** How an attempt ended, before the database has heard of it. `delay`: seconds before it is claimed again. */
export type Outcome =
  | { completed: unknown }
  | { failed: Omit<Failure, keyof Lease>; thrown?: unknown }
  | { snoozed: number }
  | { stopped: "lost" | "released"; delay?: number };

/** One run of one handler, from payload to outcome. Never throws. */
export async function attempt(app: App, entry: Held): Promise<Outcome> {
  const { job, controller } = entry;
  const kind = app.kinds[job.kind];
  const handler = app.handlers[job.kind];
  // A job may also name what every object inherits, such as "constructor".
  if (!kind || !Object.hasOwn(app.kinds, job.kind)) {
    return { failed: { error: `unknown_kind: ${job.kind}`, permanent: true } };
  }
  if (!handler) {
    const error = `no_handler: ${job.kind} is declared, but _app/handlers.ts does not name it`;
    return { failed: { error } };
  }
  if (entry.stopped === "lost" || entry.stopped === "released") return { stopped: entry.stopped };
  const thrown: unknown[] = []; // by the handler, of its own accord
  const { promise: stopped, reject } = Promise.withResolvers<never>();
  controller.signal.addEventListener("abort", () => reject(controller.signal.reason), { once: true });
  stopped.catch(() => {}); // it may come when nobody waits for it any more
  const cancelTimeout = after(job.timeoutMs, () => stop(entry, "timeout"));
  try {
    const parsed = await Promise.race([kind.schema.safeParseAsync(job.payload), stopped]);
    if (!parsed.success) {
      // A path has keys of the payload, whatever they are.
      const error = safeText(`invalid_payload: ${describeIssue(parsed.error.issues[0])}`, MAX_ISSUE_LENGTH);
      return { failed: { error, permanent: true } };
    }
    // Made when it is first asked for, since most handlers never do.
    let kept: Progress | undefined;
    const startedAt = performance.now();
    const keep = () => kept ??= createProgress(entry, startedAt);
    const described: Job = {
      id: job.id,
      kind: job.kind,
      attempts: job.attempts,
      maxAttempts: job.maxAttempts,
      isLastAttempt: job.attempts >= job.maxAttempts,
      context: job.context,
      createdAt: new Date(job.createdAt),
      schedule: job.schedule,
      dueAt: job.dueAt === null ? null : new Date(job.dueAt),
      signal: controller.signal,
      get progress() {
        return keep().progress;
      },
      checkpoint: (fields) => keep().checkpoint(fields),
      step: (name, run) => keep().step(name, run),
    };
    // The schema gave the payload its handler's type; the map over all kinds has lost which is which.
    const run = async () => {
      try {
        return await (handler as Handler<unknown>)(parsed.data, described);
      } catch (error) {
        if (!entry.stopped) thrown.push(error);
        throw error;
      } finally {
        // One of several steps may have failed while others are under way.
        if (kept) await kept.end();
      }
    };
    return storable(await Promise.race([run(), stopped]));
  } catch (error) {
    if (entry.stopped && entry.stopped !== "timeout") return { stopped: entry.stopped };
    if (entry.stopped === "timeout" && thrown.length === 0) {
      const error = `handler_timeout: the handler was still running after ${job.timeoutMs} ms`;
      return { failed: { error } };
    }
    return outcomeOf(thrown.length > 0 ? thrown[0] : error);
  } finally {
    cancelTimeout();
  }
}

/** What a thrown value says of its attempt. Seconds that are no number, or negative, are not heard: the kind's backoff holds. */
function outcomeOf(thrown: unknown): Outcome {
  const failed: Omit<Failure, keyof Lease> = { error: errorText(thrown) };
  try {
    // Less than a second would have a handler that always snoozes take up a worker.
    if (thrown instanceof SnoozeError) return { snoozed: Math.max(thrown.seconds, 1) };
    if (thrown instanceof PermanentError) failed.permanent = true;
    // What was recorded at enqueue is the same at the next attempt.
    if (thrown instanceof JobError && thrown.code === "no_user") failed.permanent = true;
    if (thrown instanceof RetryAfterError && thrown.seconds >= 0) failed.retryIn = thrown.seconds;
  } catch {
    // A proxy can refuse even to say what it is.
  }
  return { failed, thrown };
}

const MAX_ISSUE_LENGTH = 1_000;
const MAX_RESULT_LENGTH = 1_000_000;
const CUT_RESULT_LENGTH = 10_000;

/**
 * A handler's result as it is stored: a copy, so that nothing in it can fail the settle call that it shares with other jobs.
 * Text that jsonb cannot hold becomes U+FFFD; more than a million characters of JSON are cut, and it says so. What has no
 * JSON at all ends the job: the work is done, and doing it again would give the same.
 */
function storable(result: unknown): Outcome {
  try {
    const json = JSON.stringify(result) ?? "null";
    if (json.length > MAX_RESULT_LENGTH) {
      const cut = json.slice(0, CUT_RESULT_LENGTH).toWellFormed();
      return { completed: { cut, characters: json.length } };
    }
    return { completed: JSON.parse(storableJson(json)) };
  } catch (error) {
    return { failed: cannotStore(error) };
  }
}

/** JSON with U+FFFD for what jsonb cannot hold: of escapes of this sort JSON.stringify writes only U+0000 and lone surrogates. */
export const storableJson = (json: string): string =>
  json.replaceAll(
    /\\(?:\\|u0000|ud[89a-f][\da-f]{2})/g,
    (escape) => escape === "\\\\" ? escape : "\\ufffd",
  );

/** Of a text that is not storable as it is. */
export const NOT_STORABLE = "has U+0000 or half a surrogate pair, which jsonb cannot hold";

/**
 * A value's JSON; undefined where it has none to write. Throws JobError `invalid_payload` for what JSON or jsonb cannot hold: it
 * would look like a lost connection, or name no entry.
 */
export function assertJson(value: unknown, what: string): string | undefined {
  let json: string | undefined;
  try {
    json = JSON.stringify(value);
  } catch (error) {
    throw new JobError("invalid_payload", `${what} has no JSON: ${errorText(error)}`);
  }
  if (json && storableJson(json) !== json) throw new JobError("invalid_payload", `${what} ${NOT_STORABLE}`);
  return json;
}

/** The end of an attempt whose result is the trouble. */
export const cannotStore = (error: unknown) => ({
  error: `the result cannot be stored: ${errorText(error)}`,
  permanent: true,
});

/** Where and why a payload does not fit its schema. */
export function describeIssue(issue: { path: PropertyKey[]; message: string } | undefined): string {
  if (!issue) return "(payload): does not fit its schema";
  return `${issue.path.length > 0 ? issue.path.map(String).join(".") : "(payload)"}: ${issue.message}`;
}

/** Aborts the handler of a job, once. */
export function stop(entry: Held, why: NonNullable<Held["stopped"]>): void {
  if (entry.controller.signal.aborted) return;
  entry.stopped = why;
  const reason = why === "lost" ? "it was cancelled, or its lease is lost" : why;
  entry.controller.abort(new Error(`the job was stopped: ${reason}`));
}
