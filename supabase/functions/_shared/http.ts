import { log } from "./log.ts";
import { isOneOf } from "./secrets.ts";

const MAX_BODY_BYTES = 64 * 1024;
/** Longer than senders wait for an answer. */
const BODY_MS = 10_000;
const FIRST_BYTES = 16 * 1024;
/** Of 6 MiB there are 4,500 in packets of the internet's usual size. Each costs 20 µs, however small it is. */
const MAX_CHUNKS = 10_000;
const MIN_SECRET_LENGTH = 32;

/** An error answer as RFC 9457 has it: application/problem+json with type, title, status and detail. */
export function problem(status: number, title: string, detail: string, headers: HeadersInit = {}): Response {
  const answer = Response.json({ type: "about:blank", title, status, detail }, { status, headers });
  answer.headers.set("Content-Type", "application/problem+json");
  return answer;
}

/**
 * Whether the request carries CRON_SECRET as its bearer; null when it does, else the answer to give: 401, or 500 when the
 * secret is unset or shorter than 32 characters. CRON_SECRET may hold two secrets, separated by a comma, while one is
 * being rotated.
 */
export function refuseWithoutCronSecret(request: Request): Response | null {
  const setting = Deno.env.get("CRON_SECRET") ?? "";
  const secrets = setting.split(",").map((secret) => secret.trim()).filter(Boolean);
  if (secrets.length === 0 || secrets.some((secret) => secret.length < MIN_SECRET_LENGTH)) {
    const todo =
      `CRON_SECRET is unset or shorter than ${MIN_SECRET_LENGTH} characters: set it with supabase secrets set, ` +
      "to the value of cron_secret in Vault. Until then every call is refused.";
    log("error", "cron_secret_unusable", { todo });
    return notConfigured();
  }
  const given = /^Bearer ([^\s]+)$/i.exec(request.headers.get("Authorization") ?? "")?.[1] ?? "";
  return isOneOf(given, secrets)
    ? null
    : problem(401, "Unauthorized", "Send CRON_SECRET as the bearer.", { "WWW-Authenticate": "Bearer" });
}

/** The answer of a function that lacks a setting: which one is for its log alone. */
export const notConfigured = () =>
  problem(500, "Not configured", "This function is not configured; its log says what to do.");

/** Null when the request's method is one of these, else the 405 to give. */
export function refuseOtherMethods(request: Request, ...allowed: string[]): Response | null {
  if (allowed.includes(request.method)) return null;
  return problem(405, "Method not allowed", `Use ${allowed.join(" or ")}.`, { Allow: allowed.join(", ") });
}

/**
 * The request's body as JSON, `{}` when it is empty; or the answer to give: 413 above 64 kB, 400 when it is not JSON in UTF-8
 * (RFC 8259, section 8.1; a byte order mark is passed over) or breaks off.
 */
export async function readJson(request: Request): Promise<{ body: unknown } | { refused: Response }> {
  const read = await readBody(request, MAX_BODY_BYTES);
  if ("refused" in read) return read;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(read.body);
    return { body: text.trim() === "" ? {} : JSON.parse(text) };
  } catch {
    return { refused: problem(400, "Bad request", "The body is not JSON.") };
  }
}

/**
 * The bytes of a request's body; or the answer to give: 413 when there are more than `maxBytes`, by Content-Length or, where
 * that is missing or untrue, before more than these are read, or when it comes in more than 10,000 pieces; 408 when it comes
 * for more than 10 s; 400 when it breaks off.
 */
export async function readBody(
  request: Request,
  maxBytes: number,
  answer = problem,
): Promise<{ body: Uint8Array<ArrayBuffer> } | { refused: Response }> {
  const refused = (...why: Parameters<typeof problem>) => ({ refused: answer(...why) });
  const tooLarge = () => refused(413, "Content too large", `The body may have ${maxBytes} bytes.`);
  if (Number(request.headers.get("Content-Length")) > maxBytes) return tooLarge();
  const reader = request.body?.getReader();
  let late = false;
  const timer = setTimeout(() => {
    late = true;
    reader?.cancel().catch(() => {});
  }, BODY_MS);
  try {
    let bytes = new Uint8Array(Math.min(maxBytes, FIRST_BYTES));
    let size = 0;
    let chunks = 0;
    for (let read; reader && !(read = await reader.read()).done;) {
      const end = size + read.value.byteLength;
      if (end > maxBytes || ++chunks > MAX_CHUNKS) return tooLarge();
      if (end > bytes.length) bytes = new Uint8Array(bytes.buffer.transfer(Math.min(maxBytes, 2 * end)));
      // Copied: a chunk of one byte keeps a buffer of 64 kB, and a sender can make a million of them.
      bytes.set(read.value, size);
      size = end;
    }
    if (late) return refused(408, "Request timeout", `The body takes more than ${BODY_MS / 1000} s.`);
    return { body: bytes.slice(0, size) };
  } catch {
    return refused(400, "Bad request", "The body breaks off.");
  } finally {
    clearTimeout(timer);
    reader?.cancel().catch(() => {});
  }
}
