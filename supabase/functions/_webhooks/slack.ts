import type { Verifier } from "./verifier.ts";
import { echo, fromHex, joined, oneHeader, staleness, textAt, textKeys, verifyHmac } from "./signatures.ts";

export interface SlackOptions {
  /** The environment variable that holds the app's signing secret. */
  secret: string;
  /** 300 by default, as Slack's document has it. */
  toleranceSeconds?: number;
}

/**
 * Slack: X-Slack-Signature holds `v0=` and an HMAC-SHA256 of `v0:<X-Slack-Request-Timestamp>:<body>` in hex. An app has one
 * signing secret: while it is being changed the variable holds both. Events are JSON, commands and interactions are forms. An
 * event has its event_id as the id, the same over retries, its inner type as the type and its team_id as the tenant; commands
 * have their name as the type. Forms are sent once and have no id: each has a trigger_id in it, and so a hash of its own.
 * The question whether an address is the app's own (url_verification) is answered, once it is verified.
 * https://docs.slack.dev/authentication/verifying-requests-from-slack
 */
export function slack({ secret, toleranceSeconds = 300 }: SlackOptions): Verifier {
  return {
    secret,
    secretHeaders: ["x-slack-signature"],
    headers: ["x-slack-retry-num", "x-slack-retry-reason"],
    format: "form",
    id: ({ payload }) => textAt(payload, "event_id"),
    type: ({ payload }) =>
      textAt(payload, "event", "type") ?? textAt(payload, "type") ?? textAt(payload, "command"),
    tenant: ({ payload }) => textAt(payload, "team_id"),
    answer: ({ payload }) =>
      textAt(payload, "type") === "url_verification" ? echo(textAt(payload, "challenge")) : null,
    async verify({ headers, body }, secrets, now) {
      const timestamp = oneHeader(headers, "x-slack-request-timestamp");
      const signature = oneHeader(headers, "x-slack-signature");
      if (timestamp === null) return "its x-slack-request-timestamp is missing, or there twice";
      if (!signature?.startsWith("v0=")) {
        return "its x-slack-signature is missing, there twice, or of another form";
      }
      return staleness(timestamp, toleranceSeconds, now) ?? await verifyHmac(
        "SHA-256",
        textKeys(secrets),
        joined(`v0:${timestamp}:`, body),
        [fromHex(signature.slice(3))],
      );
    },
  };
}
