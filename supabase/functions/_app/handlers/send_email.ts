import { requiredEnv } from "../../_shared/database.ts";
import { type HandlerOf, PermanentError, RetryAfterError } from "../../_shared/jobs.ts";
import { render } from "../emails.ts";

/**
 * Sends one mail through Resend (https://resend.com/docs/api-reference/emails/send-email). The job's id is the idempotency
 * key, so that a second attempt within 24 hours cannot send a second mail. Needs RESEND_API_KEY and EMAIL_FROM;
 * RESEND_BASE_URL points it elsewhere. 429 and 5xx are retried, other refusals are permanent.
 */
export const sendEmail: HandlerOf<"send_email"> = async ({ to, template, data }, job) => {
  const response = await fetch(`${Deno.env.get("RESEND_BASE_URL") || "https://api.resend.com"}/emails`, {
    method: "POST",
    headers: {
      "Authorization": `Bearer ${requiredEnv("RESEND_API_KEY")}`,
      "Content-Type": "application/json",
      "Idempotency-Key": job.id,
    },
    body: JSON.stringify({ from: requiredEnv("EMAIL_FROM"), to: [to], ...render(template, data) }),
    signal: job.signal,
  });
  const answer = await response.text();
  if (response.ok) return { id: sentId(answer) };

  const message = `Resend answered ${response.status}: ${answer.slice(0, 500)}`;
  const retryAfter = Number(response.headers.get("Retry-After") ?? NaN);
  if (response.status === 429 && Number.isFinite(retryAfter)) throw new RetryAfterError(retryAfter, message);
  // 409 with this name: the first attempt is still on its way through Resend.
  const retryable = response.status >= 500 || response.status === 429 || response.status === 408 ||
    answer.includes("concurrent_idempotent_requests");
  throw retryable ? new Error(message) : new PermanentError(message);
};

/** Resend's id of the mail; null when the answer does not have one, since the mail is sent all the same. */
function sentId(answer: string): string | null {
  try {
    const parsed: unknown = JSON.parse(answer);
    return typeof parsed === "object" && parsed !== null && "id" in parsed ? String(parsed.id) : null;
  } catch {
    return null;
  }
}
