import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import { z } from "zod";
import { contextOf } from "./context.ts";
import { bytea, callFor, storableText } from "./database.ts";
import { waitUntil } from "./edge_runtime.ts";
import { errorText, JobError, passes } from "./errors.ts";
import { problem, readBody } from "./http.ts";
import { type Hold, keepHeld } from "./leases.ts";
import { log } from "./log.ts";
import { interval } from "./queue.ts";
import { sleep, within } from "./timer.ts";

/**
 * Requests with an Idempotency-Key: one that is sent again runs once. One function per SQL function, with the same name, and
 * idempotency.handle, which uses them.
 *
 * As https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/ has it; where that leaves something open,
 * as Stripe does it (https://docs.stripe.com/api/idempotent_requests).
 */

export interface IdempotencyOptions {
  /**
   * Whose request it is: two callers with one key do not meet. The user who is signed in unless given; nobody else is let in
   * then. Give it for callers who are not, and let it name what only that caller knows or is.
   */
  scope?: string | ((request: Request) => string | Promise<string>);
  /** For how many seconds an answer is kept, counted from its end: 86,400 (a day) unless given. */
  ttl?: number;
  /** Whether a request without a key is refused; it runs as often as it comes unless this is true. */
  required?: boolean;
  /** How long a request waits for one that has died: 60 seconds unless given. The lock is renewed while the handler runs. */
  lockSeconds?: number;
  /** Answers that are no handler's, in the app's own format; RFC 9457's problem+json unless given. */
  problem?: typeof problem;
  /** Headers to keep beside the usual ones; never Set-Cookie, or one about how the body is sent. */
  headers?: string[];
  /** What is more is refused with 413: 1 MiB unless given. */
  maxBodyBytes?: number;
  /** An answer with more is not kept: 1 MiB unless given, at most 6. */
  maxAnswerBytes?: number;
}

/** What the handler is told beside the request, which has its body still to be read. */
export interface IdempotentRequest {
  /** Null when there is none. */
  key: string | null;
  /** Aborts when another may have begun the same request, since this one's lock could not be renewed. */
  signal: AbortSignal;
}

export type IdempotentHandler = (request: Request, about: IdempotentRequest) => Response | Promise<Response>;

const METHODS = new Set(["POST", "PUT", "PATCH", "DELETE"]);
const MAX_KEY_LENGTH = 255;
/** A text in quotes (RFC 9651, section 3.3.3). */
const QUOTED = /^"((?:[ !#-[\]-~]|\\["\\])*)"$/;
/** As most clients send it, without the quotes. Two headers come as one, with a comma between. */
const BARE = /^[!#-+\--~]+$/;
const MIB = 1024 * 1024;
/** The work came to nothing, or the same request may be answered otherwise next time. */
const NOT_KEPT = new Set([401, 403, 408, 429]);
const WITHOUT_BODY = new Set([204, 205, 304]);
const KEPT_HEADERS = [
  ...["Content-Type", "Content-Language", "Content-Disposition", "Content-Location", "Location", "Link"],
  ...["ETag", "Last-Modified", "Cache-Control", "Vary", "Retry-After"],
  ...["Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Access-Control-Expose-Headers"],
];
const NEVER_KEPT =
  /^(set-cookie2?|content-length|content-encoding|transfer-encoding|connection|keep-alive|te|trailer|upgrade|proxy-.*)$/i;
const BEGIN_MS = 5_000;
/** How long the client waits for its answer to be stored, and how long that is tried. */
const STORE_MS = 2_000;
const STORE_AT_MOST_MS = 60_000;
const MAX_PAUSE_MS = 2_000;
/** What the database takes. */
const MAX_ANSWER_BYTES = 6 * MIB;
/** An answer that is not complete by then is a stream. */
const STREAM_MS = 2_000;

const beginnings = z.discriminatedUnion("outcome", [
  z.object({ outcome: z.literal("started"), holder: z.number() }),
  z.object({ outcome: z.literal("in_progress") }),
  z.object({ outcome: z.literal("mismatch") }),
  z.object({
    outcome: z.literal("replay"),
    status: z.number(),
    headers: z.record(z.string(), z.string()),
    body: z.string().startsWith("\\x").transform((hex) => new Uint8Array(Buffer.from(hex.slice(2), "hex"))),
  }),
]);

/** What became of a request that was to begin: it has `started` by this call, and `holder` completes it; or why not. */
export type Beginning = z.output<typeof beginnings>;

/** What an answer is, as far as it is kept. */
export interface StoredAnswer {
  status: number;
  headers: Record<string, string>;
  body: Uint8Array;
}

/** Begins a request, locked for `lockSeconds` (60); its answer is kept for `ttl` seconds (86,400). Throws JobError. */
export const beginIdempotentRequest = (
  key: string,
  fingerprint: string,
  { ttl, ...options }: { lockSeconds?: number; ttl?: number; scope?: string } = {},
  timeoutMs?: number,
): Promise<Beginning> =>
  callFor(
    beginnings,
    "begin_idempotent_request",
    { key, fingerprint, ...options, ttl: interval(ttl) },
    timeoutMs,
  );

/** Locks a request for `lockSeconds` (60) from now; false when another has started it since, or it is finished. */
export const extendIdempotentRequest = (
  key: string,
  holder: number,
  options: { lockSeconds?: number; scope?: string } = {},
): Promise<boolean> => callFor(z.boolean(), "extend_idempotent_request", { key, holder, ...options });

/** Stores a request's answer; false when another has started it since. Safe to repeat. */
export const completeIdempotentRequest = (
  key: string,
  holder: number,
  { body, ...answer }: StoredAnswer,
  options: { scope?: string } = {},
  timeoutMs?: number,
): Promise<boolean> =>
  callFor(
    z.boolean(),
    "complete_idempotent_request",
    { key, holder, ...answer, body: bytea(body), ...options },
    timeoutMs,
  );

/** Forgets a request that came to nothing; false when another has started it since, or it is finished. */
export const releaseIdempotentRequest = (
  key: string,
  holder: number,
  options: { scope?: string } = {},
  timeoutMs?: number,
): Promise<boolean> =>
  callFor(z.boolean(), "release_idempotent_request", { key, holder, ...options }, timeoutMs);

/** Deletes up to `maxKeys` (10,000) idempotency keys, and as many leases, whose time is over; gives back how many. */
export const purgeExpiredKeys = (maxKeys = 10_000): Promise<number> =>
  callFor(z.number(), "purge_expired_keys", { maxKeys });

/**
 * Runs `handler` once for all requests of one caller with one key, path and method, and gives the others its answer, with
 * the header Idempotency-Replayed: true. Requests without a key, and others than POST, PUT, PATCH and DELETE, just run.
 *
 * 400 for a key that is missing and required, or malformed; 401 when nobody is signed in and no scope is given; 409 while the
 * first request is at work; 422 when the key was used for another request; 503 when the database does not answer. Nothing
 * runs then. Answers of 5xx, 401, 403, 408 and 429, and a thrown error, which goes on to the caller, are not kept: the next
 * request runs. A stream, what is encoded and what has more than `maxAnswerBytes` is sent with Idempotency-Stored: false,
 * and 410 is kept in its place, since the work is done.
 */
async function handle(
  request: Request,
  handler: IdempotentHandler,
  options: IdempotencyOptions = {},
): Promise<Response> {
  const { required = false, problem: refuse = problem } = options;
  const wrong = options.headers?.find((name) => NEVER_KEPT.test(name));
  if (wrong) throw new TypeError(`idempotency.handle: the header ${wrong} is never kept`);
  const header = request.headers.get("Idempotency-Key");
  if (!METHODS.has(request.method) || header === null && !required) {
    return await handler(request, { key: null, signal: new AbortController().signal });
  }
  if (header === null) {
    const detail = "Send Idempotency-Key with a value of its own for each new request, such as a UUID.";
    return refuse(400, "Idempotency-Key is missing", detail);
  }
  // Read already it would look empty, and every request the same.
  if (request.bodyUsed) throw new TypeError("idempotency.handle: the request's body has been read already");
  const key = readKey(header);
  if (key === null) {
    const detail = `Send one Idempotency-Key of 1 to ${MAX_KEY_LENGTH} visible ASCII characters.`;
    return refuse(400, "Idempotency-Key is malformed", detail);
  }
  const begun = await begin(request, key, options, refuse);
  if (begun instanceof Response) return begun;
  const work = carryOut(begun, handler, options, refuse);
  waitUntil(work.then(({ storing }) => storing, () => {})); // also where the client waits no longer
  const { response, storing } = await work;
  await within(STORE_MS, storing, new Error()).catch(() => {});
  return response;
}

export const idempotency = { handle };

/** The key of the header, quoted or bare; null when it is malformed. */
function readKey(header: string): string | null {
  const quoted = QUOTED.exec(header)?.[1]?.replaceAll(/\\(.)/g, "$1");
  const key = quoted ?? (BARE.test(header) ? header : "");
  return key.length > 0 && key.length <= MAX_KEY_LENGTH ? key : null;
}

/** A request that this call has started. */
interface Started {
  request: Request;
  route: string;
  key: string;
  scope: string;
  holder: number;
  hold: Hold;
}

/** Begins a request; or gives the answer to one that is not to run. */
async function begin(
  request: Request,
  key: string,
  { scope: givenScope, lockSeconds = 60, ttl, maxBodyBytes = MIB }: IdempotencyOptions,
  refuse: typeof problem,
): Promise<Started | Response> {
  const unauthorized = (detail: string) =>
    refuse(401, "Unauthorized", detail, { "WWW-Authenticate": "Bearer" });
  const { pathname, search } = new URL(request.url);
  const route = `${request.method} ${pathname}`;
  try {
    const caller = await callerOf(request, givenScope);
    if (caller === null) return unauthorized("Sign in: callers are told apart by who is signed in.");
    const scope = storableText(`${route} ${caller}`);
    const read = await readBody(request, maxBodyBytes, refuse);
    if ("refused" in read) return read.refused;
    const { body } = read;
    const fingerprint = createHash("sha256").update(`${route}${search}\n`).update(body).digest("hex");
    const calledAt = performance.now();
    const begun = await beginIdempotentRequest(key, fingerprint, { lockSeconds, ttl, scope }, BEGIN_MS);
    if (begun.outcome !== "started") return answerTo(begun, refuse);
    const { holder } = begun;
    const extend = (lockSeconds: number) => extendIdempotentRequest(key, holder, { lockSeconds, scope });
    const { url, method, headers } = request;
    return {
      request: new Request(url, { method, headers, body: body.length > 0 ? body : null }),
      ...{ route, key, scope, holder, hold: keepHeld(lockSeconds, calledAt, extend) },
    };
  } catch (error) {
    if (!(error instanceof JobError)) throw error;
    if (error.code === "invalid_token") return unauthorized("The token is forged, damaged or has expired.");
    log("error", "idempotent_request_not_begun", { route, error: errorText(error) }, error);
    return passes(error)
      ? refuse(503, "Service unavailable", "This call did nothing. Send it again with the same key.", {
        "Retry-After": "5",
      })
      : refuse(500, "Not carried out", "This call did nothing; the function's log says why.");
  }
}

/** Who asks; null when nobody is signed in. What is given and what is verified do not meet. */
async function callerOf(request: Request, scope: IdempotencyOptions["scope"]): Promise<string | null> {
  if (scope === undefined) {
    const context = await contextOf(request);
    return context && `user ${context.user_id}`;
  }
  const given = typeof scope === "string" ? scope : await scope(request);
  // A variable that was not filled would make one of all callers.
  if (typeof given !== "string" || given === "") throw new TypeError("idempotency.handle: scope is empty");
  return `scope ${given}`;
}

function answerTo(begun: Exclude<Beginning, { outcome: "started" }>, refuse: typeof problem): Response {
  switch (begun.outcome) {
    case "in_progress": {
      const detail = "The same request is at work. Send it again later for its answer.";
      return refuse(409, "A request is outstanding for this Idempotency-Key", detail, { "Retry-After": "1" });
    }
    case "mismatch": {
      const detail = "It came with another request. Send a new key with a new request.";
      return refuse(422, "Idempotency-Key is already used", detail);
    }
    case "replay": {
      const { status, headers, body } = begun;
      const response = new Response(WITHOUT_BODY.has(status) ? null : body, { status, headers });
      response.headers.set("Idempotency-Replayed", "true");
      return response;
    }
  }
}

/** Runs the handler, and stores its answer or releases the key; `storing` may go on for longer than the client waits. */
async function carryOut(
  begun: Started,
  handler: IdempotentHandler,
  { headers = [], maxAnswerBytes = MIB }: IdempotencyOptions,
  refuse: typeof problem,
): Promise<{ response: Response; storing: Promise<void> }> {
  try {
    const answer = await handler(begun.request, { key: begun.key, signal: begun.hold.signal });
    if (!(answer instanceof Response) || answer.bodyUsed) {
      throw new TypeError(
        "idempotency.handle: the handler gives no Response, or one whose body has been read",
      );
    }
    const { status } = answer;
    if (status < 200 || status >= 500 || NOT_KEPT.has(status)) {
      await release(begun);
      return { response: answer, storing: Promise.resolve() };
    }
    const names = [...KEPT_HEADERS, ...headers];
    const read = await readAnswer(answer, Math.min(maxAnswerBytes, MAX_ANSWER_BYTES));
    if ("body" in read) {
      const { body } = read;
      const response = sentAs(answer, WITHOUT_BODY.has(status) ? null : body);
      return { response, storing: store(begun, { status, headers: pick(answer.headers, names), body }) };
    }
    log("info", "idempotent_answer_not_kept", { route: begun.route, reason: read.why });
    const instead = refuse(
      410,
      "Answer not kept",
      `The request was carried out. Its answer is not kept: ${read.why}.`,
    );
    const body = new Uint8Array(await instead.arrayBuffer());
    const response = sentAs(answer, read.rest);
    response.headers.set("Idempotency-Stored", "false");
    const storing = store(begun, { status: instead.status, headers: pick(instead.headers, names), body });
    return { response, storing };
  } catch (error) {
    await release(begun);
    throw error;
  }
}

const sentAs = (
  { status, statusText, headers }: Response,
  body: Uint8Array<ArrayBuffer> | ReadableStream | null,
) => new Response(body, { status, statusText, headers });

function pick(headers: Headers, names: string[]): Record<string, string> {
  const kept: Record<string, string> = {};
  for (const name of names) {
    const value = headers.get(name);
    if (value !== null) kept[name.toLowerCase()] = value; // whoever names one twice, it is one
  }
  return kept;
}

/** The body of an answer; or why it cannot be kept, and the whole of it to be passed on. */
async function readAnswer(
  answer: Response,
  maxBytes: number,
): Promise<{ body: Uint8Array<ArrayBuffer> } | { why: string; rest: ReadableStream | null }> {
  if (answer.headers.get("Content-Type")?.toLowerCase().startsWith("text/event-stream")) {
    return { why: "it is a stream", rest: answer.body };
  }
  if (answer.headers.has("Content-Encoding")) {
    return { why: "it has a Content-Encoding", rest: answer.body };
  }
  const reader = answer.body?.getReader();
  const chunks: Uint8Array[] = [];
  const late = Promise.withResolvers<null>();
  const timer = setTimeout(() => late.resolve(null), STREAM_MS);
  try {
    for (let size = 0; reader;) {
      const next = reader.read();
      const read = await Promise.race([next, late.promise]);
      if (!read) return { why: "it is a stream", rest: passOn(chunks, reader, next) };
      if (read.done) break;
      chunks.push(read.value);
      size += read.value.byteLength;
      if (size > maxBytes) {
        return { why: `it has more than ${maxBytes} bytes`, rest: passOn(chunks, reader) };
      }
    }
  } finally {
    clearTimeout(timer);
  }
  return { body: new Uint8Array(Buffer.concat(chunks)) };
}

/** A stream of which `head` has been read already, and perhaps the read after that begun. */
function passOn(
  head: Uint8Array[],
  reader: ReadableStreamDefaultReader<Uint8Array>,
  next?: Promise<ReadableStreamReadResult<Uint8Array>>,
): ReadableStream {
  return new ReadableStream({
    start: (controller) => controller.enqueue(new Uint8Array(Buffer.concat(head))),
    async pull(controller) {
      const { done, value } = await (next ?? reader.read());
      next = undefined;
      if (done) controller.close();
      else controller.enqueue(value);
    },
    cancel: (reason) => reader.cancel(reason),
  });
}

/** Stores an answer, and goes on trying for a minute. Never throws: the work is done, and its client gets the answer. */
async function store({ route, key, scope, holder, hold }: Started, answer: StoredAnswer): Promise<void> {
  const giveUpAt = performance.now() + STORE_AT_MOST_MS;
  for (let pauseMs = 200;; pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS)) {
    try {
      const stored = await completeIdempotentRequest(key, holder, answer, { scope }, STORE_MS);
      if (!stored) logLost(route, holder);
      break;
    } catch (error) {
      const willRetry = passes(error) && performance.now() + pauseMs < giveUpAt;
      if (pauseMs === 200 || !willRetry) {
        log(
          "error",
          "idempotent_answer_not_stored",
          { route, holder, willRetry, error: errorText(error) },
          error,
        );
      }
      if (!willRetry) break;
    }
    await sleep(pauseMs);
  }
  hold.stop();
}

const logLost = (route: string, holder: number) =>
  log("error", "idempotency_key_lost", {
    route,
    holder,
    error: "its lock was over, and another has begun the request",
  });

/** Releases a key whose request came to nothing. Never throws: its lock runs out. */
async function release({ route, key, scope, holder, hold }: Started): Promise<void> {
  hold.stop();
  try {
    const released = await releaseIdempotentRequest(key, holder, { scope }, STORE_MS);
    if (!released) logLost(route, holder);
  } catch (error) {
    log("error", "idempotency_key_not_released", { route, holder, error: errorText(error) }, error);
  }
}
