import { Buffer } from "node:buffer";
import { z } from "zod";
import { type App, assertJson, describeIssue, storableJson } from "../_shared/attempt.ts";
import { bytea, callFor, storableText } from "../_shared/database.ts";
import { JobError, PermanentError, safeText } from "../_shared/errors.ts";
import type { Handler, Job, KindDeclaration } from "../_shared/kinds.ts";
import { readWebhook } from "../_shared/queue.ts";
import { beginsAsJson, type Reader, valuesByName, type Verifier, type WebhookFormat } from "./verifier.ts";

/** Webhook sources: who may send messages to this app, and what becomes of them. A job of kind `webhook_<source>` has each. */

/** What the handler of a source is given: the message, and all of its job but the payload. */
export interface WebhookMessage<Payload> extends Omit<Job, "id"> {
  /** What its sender calls it, the same however often it is sent; `sha256:` and a hash of the body where that is nothing. */
  id: string;
  /** The id of its job, and of its row in webhook_inbox. */
  jobId: string;
  source: string;
  type: string | null;
  tenant: string | null;
  /** The body as the source's schema gives it. JSON.parse has rounded numbers above 2^53. */
  payload: Payload;
  /** The bytes that came. */
  raw(): Uint8Array<ArrayBuffer>;
  /** The headers that were kept, with their names in lower case. */
  headers: Record<string, string>;
  receivedAt: Date;
}

/** A source's settings are those of a kind, and these. `maxAttempts` is 8 by default. */
export interface WebhookSourceOptions<Schema extends z.ZodType> extends Omit<KindDeclaration, "schema"> {
  /** Null: nothing is taken over HTTP (404); receiveWebhook() alone fills it. */
  verify: Verifier | null;
  /** What it throws fails the attempt, as in any handler. It may run more than once for one message. */
  handler: (message: WebhookMessage<z.output<Schema>>) => unknown;
  /** The types that the handler takes; all by default. Others are stored, and succeed without it and the schema. */
  types?: string[];
  /** What the payload has to be when the message is processed: one that does not fit is dead at once. */
  schema?: Schema;
  /** How the body is read; as the verifier says by default. */
  format?: WebhookFormat;
  /** What a message is known by; as the verifier says by default. Those of one source, tenant and id are stored once. */
  id?: Reader;
  type?: Reader;
  tenant?: Reader;
  /** Of the messages with one key, such as a customer's id, `keyConcurrency` (1) are processed at once. */
  concurrencyKey?: Reader;
  /** Headers to keep, beside Content-Type and those of the verifier. */
  headers?: string[];
  /** 1 MiB by default, 6 MiB at most. */
  maxBodyBytes?: number;
}

export interface WebhookSource<Name extends string = string, Schema extends z.ZodType = z.ZodType> {
  name: Name;
  kind: string;
  verify: Verifier | null;
  schema: Schema;
  format: WebhookFormat;
  types?: string[];
  readers: { id?: Reader; type?: Reader; tenant?: Reader; concurrencyKey?: Reader };
  headers: string[];
  maxBodyBytes: number;
  declaration: KindDeclaration;
  handler: (message: never) => unknown;
}

const MIB = 1024 * 1024;
const MAX_BODY_BYTES = 6 * MIB;
const SECRET_HEADER = /signature|hmac|token|secret|authori[sz]ation|cookie|password|api-?key/i;

/** Declares a source, to be named in _app/webhooks.ts. Throws for a name or a setting that cannot be. */
export function defineWebhookSource<const Name extends string, Schema extends z.ZodType = z.ZodUnknown>(
  name: Name,
  options: WebhookSourceOptions<Schema>,
): WebhookSource<Name, Schema> {
  const { verify, handler, types, schema, format, id, type, tenant, concurrencyKey, headers, ...more } =
    options;
  const { maxBodyBytes = MIB, ...settings } = more;
  const refuse = (why: string) => new Error(`defineWebhookSource(${JSON.stringify(name)}): ${why}`);
  if (!/^[a-z][a-z0-9_]{0,54}$/.test(name)) {
    throw refuse(
      "a name has lower case letters, digits and _, begins with a letter and has at most 55 characters",
    );
  }
  if (!(maxBodyBytes > 0 && maxBodyBytes <= MAX_BODY_BYTES)) {
    throw refuse(`maxBodyBytes is not from 1 to ${MAX_BODY_BYTES}`);
  }
  const secret = verify?.secretHeaders.map((header) => header.toLowerCase()) ?? [];
  const kept = ["content-type", ...verify?.headers ?? [], ...headers ?? []].map((header) =>
    header.toLowerCase()
  );
  const unkept = kept.find((header) => secret.includes(header) || SECRET_HEADER.test(header));
  if (unkept) throw refuse(`the header ${unkept} is a secret or a signature by its name, and none is kept`);
  return {
    name,
    kind: `webhook_${name}`,
    verify,
    // Without one, Schema is ZodUnknown.
    schema: schema ?? z.unknown() as z.ZodType as Schema,
    format: format ?? verify?.format ?? "json",
    types,
    readers: {
      id: id ?? verify?.id,
      type: type ?? verify?.type,
      tenant: tenant ?? verify?.tenant,
      concurrencyKey,
    },
    headers: [...new Set(kept)],
    maxBodyBytes,
    declaration: { maxAttempts: 8, ...settings, schema: z.unknown() },
    handler,
  };
}

/** The kinds and handlers of sources, beside those that the app has. Throws when two have one name. */
export function withWebhooks({ kinds, handlers }: App, sources: readonly WebhookSource[]): App {
  const app = { kinds: { ...kinds }, handlers: { ...handlers } };
  for (const source of sources) {
    const { name, kind } = source;
    if (Object.hasOwn(app.kinds, kind)) {
      throw new Error(`_app/webhooks.ts: ${name} has the kind ${kind}, which is taken`);
    }
    app.kinds[kind] = source.declaration;
    const handler: Handler<unknown> = (_payload, job) => handle(source, job);
    app.handlers[kind] = handler;
  }
  return app;
}

/** A payload that does not fit, as its job's last_error has it. */
class InvalidPayload extends PermanentError {
  override name = "invalid_payload";
}

async function handle(source: WebhookSource, job: Job): Promise<unknown> {
  const stored = await readWebhook(job.id);
  if (!stored) throw new PermanentError("it has no message in webhook_inbox: receive_webhook() makes both");
  const { messageId: id, receivedAt, body, ...message } = stored;
  if (source.types && !source.types.includes(message.type ?? "")) return { ignored: message.type };
  const raw = () => new Uint8Array(Buffer.from(body, "base64"));
  let payload: unknown;
  try {
    payload = readPayload(source, raw());
  } catch {
    throw new InvalidPayload("(payload): not JSON");
  }
  const parsed = await source.schema.safeParseAsync(payload);
  if (!parsed.success) throw new InvalidPayload(safeText(describeIssue(parsed.error.issues[0]), 1_000));
  const given: WebhookMessage<unknown> = {
    ...job,
    ...message,
    id,
    jobId: job.id,
    source: source.name,
    payload: parsed.data,
    raw,
    receivedAt: new Date(receivedAt),
    get progress() {
      return job.progress;
    },
  };
  // The schema gave the payload its handler's type; the list of all sources has lost which is which.
  return await (source.handler as (message: WebhookMessage<unknown>) => unknown)(given);
}

/** The payload of a body, in UTF-8. Throws SyntaxError when it should be JSON and is none. */
export function readPayload(
  { format }: Pick<WebhookSource, "format">,
  body: Uint8Array<ArrayBuffer>,
): unknown {
  const text = new TextDecoder().decode(body);
  if (format === "text") return text;
  if (format === "json" || beginsAsJson(text)) return JSON.parse(text);
  const fields = valuesByName(new URLSearchParams(text));
  return Object.fromEntries(
    Array.from(fields, ([name, values]) => [name, values.length > 1 ? values : values[0]]),
  );
}

/** What is known of a message beside its body. */
export interface WebhookFacts {
  id?: string | null;
  type?: string | null;
  tenant?: string | null;
  /** Of the messages with one key, the source's `keyConcurrency` (1) are processed at once. */
  concurrencyKey?: string | null;
  headers?: Record<string, string>;
  context?: unknown;
}

const received = z.object({ id: z.string(), created: z.boolean() });

/**
 * Stores a message and enqueues its job, in one transaction, unless one of its source, tenant and id is there; gives back the
 * id of both, and whether they are new. Without an id that is a hash of the body. Throws what callDatabase throws.
 */
export async function storeWebhook(
  { name, format }: WebhookSource,
  body: Uint8Array<ArrayBuffer>,
  payload: unknown,
  { id, type, tenant, concurrencyKey, headers = {}, context }: WebhookFacts,
  timeoutMs?: number,
): Promise<z.output<typeof received>> {
  // As with JSON, what is larger has no payload for queries.
  const form = format === "form" && body.length <= MIB && !beginsAsJson(new TextDecoder().decode(body));
  return await callFor(received, "receive_webhook", {
    source: name,
    body: bytea(body),
    messageId: id ? storableText(id) : null,
    type: type ? safeText(type, 100) : null,
    tenant: tenant ? storableText(tenant) : null,
    concurrencyKey: concurrencyKey ? storableText(concurrencyKey) : null,
    headers: Object.fromEntries(
      Object.entries(headers).map(([key, value]) => [key.toLowerCase(), safeText(value, 1_000)]),
    ),
    // JSON goes as it came: Postgres reads it, and rounds no number.
    payload: form ? JSON.parse(storableJson(JSON.stringify(payload))) : null,
    context,
  }, timeoutMs);
}

/**
 * Stores a message of a source as if it had come over HTTP, from code that is trusted: once, with its job; gives back the id
 * of both, and whether they are new. The source's readers are not asked: without an `id` it is a hash of the payload. Throws
 * JobError `invalid_payload` naming the field; and what the database refuses, by its SQLSTATE.
 */
export async function receiveWebhook<Schema extends z.ZodType>(
  source: WebhookSource<string, Schema>,
  payload: z.input<Schema>,
  facts: WebhookFacts = {},
): Promise<{ id: string; created: boolean }> {
  const where = `receiveWebhook: payload of ${source.name}`;
  const parsed = await source.schema.safeParseAsync(payload);
  if (!parsed.success) {
    throw new JobError("invalid_payload", `${where}: ${describeIssue(parsed.error.issues[0])}`);
  }
  const json = assertJson(payload, where);
  if (json === undefined) throw new JobError("invalid_payload", `${where} has no JSON`);
  const text = source.format === "text" && typeof payload === "string" ? payload : json;
  if (source.format === "form" && !beginsAsJson(text)) {
    throw new JobError("invalid_payload", `${where} is no object, as a form is`);
  }
  return await storeWebhook(source, new TextEncoder().encode(text), payload, facts);
}
