import { z } from "zod";
import { requiredEnv } from "../../_shared/database.ts";
import { type HandlerOf, PermanentError, RetryAfterError, retryAfterSeconds } from "../../_shared/jobs.ts";
import { render } from "../emails.ts";

/**
 * Sends one mail through Resend (https://resend.com/docs/api-reference/emails/send-email). Needs RESEND_API_KEY and
 * EMAIL_FROM; RESEND_BASE_URL points it elsewhere.
 *
 * The job's id is the idempotency key (https://resend.com/docs/dashboard/emails/idempotency-keys, at most 256 characters):
 * for 24 hours Resend gives its first answer to the same key again and sends nothing, so that an attempt whose answer was
 * lost is repeated safely.
 *
 * By https://resend.com/docs/api-reference/errors these are tried again, when Retry-After says or after the kind's own
 * wait: 429 (rate_limit_exceeded, daily_quota_exceeded, monthly_quota_exceeded), 5xx, 408, and 409
 * concurrent_idempotent_requests, which says that the first attempt is still under way at Resend. So is a redirect, which is not
 * followed: the API has none. Every other 4xx is permanent, also 409 invalid_idempotent_request: the mail has
 * changed since an earlier attempt, which Resend has taken.
 */
export const sendEmail: HandlerOf<"send_email"> = async ({ to, template, data }, job) => {
  const apiKey = requiredEnv("RESEND_API_KEY");
  const mail = render(template, data);
  const response = await fetch(`${Deno.env.get("RESEND_BASE_URL") || "https://api.resend.com"}/emails`, {
    method: "POST",
    headers: {
      "Authorization": `Bearer ${apiKey}`,
      "Content-Type": "application/json",
      "Idempotency-Key": job.id,
    },
    body: JSON.stringify({ from: requiredEnv("EMAIL_FROM"), to: [to], ...mail }),
    redirect: "manual",
    signal: job.signal,
  });
  const { id, name, message } = await readAnswer(response);
  if (response.ok) return { id: id ?? null };

  const { headers } = response;
  const said = [name, message].filter(Boolean).join(": ") || headers.get("Location") ||
    headers.get("Content-Type");
  // An answer may quote what it was sent.
  const unsaid = [
    apiKey,
    to,
    mail.subject,
    ...`${mail.text}\n${mail.html}`.split("\n"),
    ...Object.values(data),
  ];
  const error = `Resend answered ${response.status}: ${without(said ?? "nothing", unsaid).slice(0, 500)}`;
  const retryAfter = retryAfterSeconds(response);
  const permanent = response.status >= 400 && response.status < 500 &&
    ![408, 429].includes(response.status) &&
    name !== "concurrent_idempotent_requests";
  if (permanent) throw new PermanentError(error);
  if (retryAfter === undefined) throw new Error(error);
  // A limit refuses many at once and tells them the same second: those that it refuses again come back spread over 2, 4, 8 …
  // minutes, or a burst would use up all its attempts against it within seconds. (100 mails at 2 a second: 88 were dead.)
  const spread = response.status === 429 && job.attempts > 1
    ? Math.random() * 60 * 2 ** (job.attempts - 1)
    : 0;
  throw new RetryAfterError(Math.max(1, retryAfter) + Math.min(spread, 3_600), error);
};

const MAX_ANSWER_BYTES = 16 * 1024;
const answerSchema = z.object({ id: z.string(), name: z.string(), message: z.string() }).partial();

/**
 * What Resend said: the mail's id, or an error's name and message. Empty when it is not its JSON, such as a proxy's page: a
 * mail that was taken is sent all the same. Reads about 16 kB at most. Throws when the connection breaks.
 */
async function readAnswer(response: Response): Promise<z.output<typeof answerSchema>> {
  const chunks: Uint8Array<ArrayBuffer>[] = [];
  let size = 0;
  for await (const chunk of response.body ?? []) {
    chunks.push(chunk);
    size += chunk.byteLength;
    if (size > MAX_ANSWER_BYTES) break; // which ends the connection
  }
  try {
    return answerSchema.parse(JSON.parse(await new Blob(chunks).text()));
  } catch {
    return {};
  }
}

/** The text without those parts; shorter ones are found in any text. */
function without(text: string, parts: string[]): string {
  return parts.filter((part) => part.length > 3).reduce((rest, part) => rest.replaceAll(part, "…"), text);
}
