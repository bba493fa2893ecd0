import type { Verifier } from "./verifier.ts";
import { fromHex, fromPayload, joined, namedValues, staleness, textKeys, verifyHmac } from "./signatures.ts";

export interface StripeOptions {
  /** The environment variable that holds the endpoint's secret (whsec_…), all of which is the key. */
  secret: string;
  /** 300 by default, as in Stripe's own libraries. */
  toleranceSeconds?: number;
}

/**
 * Stripe: Stripe-Signature holds `t=<seconds>`, and for each secret that is in use while one is being rolled `v1=` and an
 * HMAC-SHA256 of `<t>.<body>` in hex; other schemes, such as v0, are passed over. A retry is signed anew. The body's id is the
 * id, its type the type, and its account, which events of connected accounts have, the tenant.
 * https://docs.stripe.com/webhooks/signature
 */
export function stripe({ secret, toleranceSeconds = 300 }: StripeOptions): Verifier {
  return {
    secret,
    secretHeaders: ["stripe-signature"],
    id: fromPayload("id"),
    type: fromPayload("type"),
    tenant: fromPayload("account"),
    async verify({ headers, body }, secrets, now) {
      const values = namedValues(headers.get("stripe-signature") ?? "", ",");
      const [timestamp, ...more] = values.get("t") ?? [];
      if (timestamp === undefined || more.length > 0) {
        return "its stripe-signature is missing, or has not one t";
      }
      return staleness(timestamp, toleranceSeconds, now) ?? await verifyHmac(
        "SHA-256",
        textKeys(secrets),
        joined(`${timestamp}.`, body),
        (values.get("v1") ?? []).map(fromHex),
      );
    },
  };
}
