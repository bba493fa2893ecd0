import { webhooks } from "../_app/webhooks.ts";
import { requiredEnv } from "../_shared/database.ts";
import { surviveUncaughtErrors } from "../_shared/edge_runtime.ts";
import { errorText, passes } from "../_shared/errors.ts";
import { notConfigured, problem, readBody, refuseOtherMethods } from "../_shared/http.ts";
import { log } from "../_shared/log.ts";
import { readPayload, storeWebhook, type WebhookFacts, type WebhookSource } from "../_webhooks/sources.ts";
import { isJson, type ReceivedRequest, type Verifier } from "../_webhooks/verifier.ts";

/** Senders wait for three seconds (Slack) or more: what takes longer is answered as failed, and they send again. */
const STORE_MS = 2_000;
const MIN_SECRET_LENGTH = 16;
/** A comma, but for that in "v1,whsec_…", as Supabase Auth writes a secret. */
const BETWEEN_SECRETS = /(?<!(?:^|[,|\s])v1a?),/;

const sources = new Map<string, WebhookSource>(
  webhooks.map((source: WebhookSource) => [source.name, source]),
);

surviveUncaughtErrors();

/**
 * Takes webhooks at /webhook-inbox/<source>: 202 with the id of a message that is stored, 200 when it was stored before, in
 * either case after the commit. A message that is refused is refused before anything of it is stored.
 */
Deno.serve(async (request) => {
  const [, , name = "", ...rest] = new URL(request.url).pathname.split("/");
  const source = rest.length === 0 ? sources.get(name) : undefined;
  const challenge = source?.verify?.challenge;
  const refused = refuseOtherMethods(request, ...challenge ? ["GET", "POST"] : ["POST"]);
  if (refused) return refused;
  if (!source?.verify) {
    log("info", "webhook_refused", {
      source: name.slice(0, 80),
      status: 404,
      reason: "there is no such source",
    });
    return problem(404, "Not found", `There is no webhook source ${JSON.stringify(name.slice(0, 80))}.`);
  }
  try {
    if (request.method === "POST") return await receive(request, source, source.verify);
    const secrets = challenge && readSecrets(source, challenge.secret);
    return secrets ? challenge.answer(publicUrl(request), secrets) ?? unauthorized() : notConfigured();
  } catch (error) {
    log("error", "webhook_failed", { source: source.name, error: errorText(error) }, error);
    return problem(500, "Not stored", "The message is not stored; the function's log says why.");
  }
});

async function receive(request: Request, source: WebhookSource, verify: Verifier): Promise<Response> {
  const { headers } = request;
  const refuse = (response: Response, reason: string) => {
    log("info", "webhook_refused", { source: source.name, status: response.status, reason });
    return response;
  };
  const contentType = headers.get("Content-Type");
  if (source.format === "json" && contentType !== null && !isJson(contentType)) {
    const detail = "This source takes application/json.";
    return refuse(problem(415, "Unsupported media type", detail), "it is not JSON by its Content-Type");
  }
  const secrets = readSecrets(source, verify.secret, verify);
  if (!secrets) return notConfigured();
  const read = await readBody(request, source.maxBodyBytes);
  if ("refused" in read) return refuse(read.refused, "its body is too large or too slow, or breaks off");

  const signed = { url: publicUrl(request), headers, body: read.body };
  const why = await verify.verify(signed, secrets, new Date());
  if (why !== null) return refuse(unauthorized(), why);

  const unreadable = () => problem(400, "Bad request", "The signature holds, but the body cannot be read.");
  let payload: unknown;
  try {
    payload = readPayload(source, read.body);
  } catch {
    return refuse(unreadable(), "its body is not JSON"); // the error would quote it
  }
  const received: ReceivedRequest = { ...signed, payload };
  let facts: WebhookFacts;
  try {
    const answer = verify.answer?.(received);
    if (answer) return answer;
    facts = readFacts(source, received);
  } catch (error) {
    log("error", "webhook_unreadable", { source: source.name, error: errorText(error) }, error);
    return unreadable();
  }

  try {
    const { id, created } = await storeWebhook(source, read.body, payload, facts, STORE_MS);
    return Response.json({ id, created }, { status: created ? 202 : 200 });
  } catch (error) {
    if (!passes(error)) throw error;
    log("error", "webhook_not_stored", { source: source.name, error: errorText(error) }, error);
    const detail = "The message is not stored. Send it again.";
    return problem(503, "Service unavailable", detail, { "Retry-After": "10" });
  }
}

/** What a message is known by, and the headers to keep of it. Throws what a reader throws. */
function readFacts({ readers, headers }: WebhookSource, received: ReceivedRequest): WebhookFacts {
  const kept: Record<string, string> = {};
  for (const name of headers) {
    const value = received.headers.get(name);
    if (value !== null) kept[name] = value;
  }
  const read = (name: keyof typeof readers) => {
    const value: unknown = readers[name]?.(received);
    if (value === undefined || value === null || typeof value === "string") return value;
    // A cast may have hidden it from the compiler.
    throw new TypeError(`the source's ${name} gives a ${typeof value}, and no text`);
  };
  return {
    id: read("id"),
    type: read("type"),
    tenant: read("tenant"),
    concurrencyKey: read("concurrencyKey"),
    headers: kept,
  };
}

/** One text for whatever is wrong: a forger learns nothing from it. */
const unauthorized = () =>
  problem(401, "Unauthorized", "The signature is missing, wrong or too old.", {
    "WWW-Authenticate": "Signature",
  });

/** The secrets in a variable; null, with a line in the log, when they cannot be used. */
function readSecrets(source: WebhookSource, variable: string, verify?: Verifier): string[] | null {
  const text = Deno.env.get(variable) ?? "";
  const secrets = text.split(BETWEEN_SECRETS).map((secret) => secret.trim()).filter(Boolean);
  const wrong = secrets.length === 0
    ? "is unset"
    : secrets.some((secret) => secret.replace(/^(v1a?,)?(whsec_|whpk_)?/, "").length < MIN_SECRET_LENGTH)
    ? `is shorter than ${MIN_SECRET_LENGTH} characters`
    : secrets.map((secret) => verify?.checkSecret?.(secret)).find(Boolean);
  if (!wrong) return secrets;
  const todo =
    `${variable} ${wrong}: set it with supabase secrets set, or in functions/.env for npm start, to the ` +
    "secret that the sender signs with. Until then every message is refused.";
  log("error", "webhook_secret_unusable", { source: source.name, todo });
  return null;
}

/** The address as senders know it: a function sees its path alone. */
function publicUrl(request: Request): URL {
  const { pathname, search } = new URL(request.url);
  return new URL(`${requiredEnv("SUPABASE_URL")}/functions/v1${pathname}${search}`);
}
