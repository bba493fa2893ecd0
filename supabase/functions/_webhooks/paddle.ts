import type { Verifier } from "./verifier.ts";
import {
  fromHex,
  fromPayload,
  joined,
  namedValues,
  oneHeader,
  staleness,
  textKeys,
  verifyHmac,
} from "./signatures.ts";

export interface PaddleOptions {
  /** The environment variable that holds the destination's secret (pdl_ntfset_…), all of which is the key. */
  secret: string;
  /** 5 by default, as in Paddle's own libraries: set more where clocks differ, or a function is slow to start. */
  toleranceSeconds?: number;
}

/**
 * Paddle Billing: Paddle-Signature holds `ts=<seconds>`, and for each secret that is in use while one is being rotated `h1=` and
 * an HMAC-SHA256 of `<ts>:<body>` in hex, separated by semicolons. The body's event_id is the id: it stays the same over
 * retries and replays (a replay has a notification_id of its own). Its event_type is the type.
 * https://developer.paddle.com/webhooks/about/signature-verification
 */
export function paddle({ secret, toleranceSeconds = 5 }: PaddleOptions): Verifier {
  return {
    secret,
    secretHeaders: ["paddle-signature"],
    id: fromPayload("event_id"),
    type: fromPayload("event_type"),
    async verify({ headers, body }, secrets, now) {
      const values = namedValues(oneHeader(headers, "paddle-signature") ?? "", ";");
      const [timestamp, ...more] = values.get("ts") ?? [];
      if (timestamp === undefined || more.length > 0) {
        return "its paddle-signature is missing, or has not one ts";
      }
      return staleness(timestamp, toleranceSeconds, now) ?? await verifyHmac(
        "SHA-256",
        textKeys(secrets),
        joined(`${timestamp}:`, body),
        (values.get("h1") ?? []).map(fromHex),
      );
    },
  };
}
