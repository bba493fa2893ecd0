import type { Verifier } from "./verifier.ts";
import { hmac } from "./hmac.ts";
import { fromHeader } from "./signatures.ts";

/**
 * Shopify: X-Shopify-Hmac-SHA256 holds an HMAC-SHA256 of the body in base64, made with the app's client secret. There is no
 * timestamp. After a new client secret is made, Shopify may sign with the old one for an hour: the variable holds both.
 * X-Shopify-Webhook-Id is the id, the same over retries (X-Shopify-Event-Id is that of what the merchant did, which several
 * messages may share); X-Shopify-Topic is the type, X-Shopify-Shop-Domain the tenant. None of them is signed: whoever has a
 * signed body can send it under another id, topic or shop, so take what matters from the body.
 * https://shopify.dev/docs/apps/build/webhooks/verify-deliveries
 */
export const shopify = ({ secret }: { secret: string }): Verifier => ({
  ...hmac({ secret, header: "x-shopify-hmac-sha256", encoding: "base64" }),
  headers: [
    "x-shopify-webhook-id",
    "x-shopify-event-id",
    "x-shopify-topic",
    "x-shopify-shop-domain",
    "x-shopify-triggered-at",
    "x-shopify-api-version",
  ],
  id: fromHeader("x-shopify-webhook-id"),
  type: fromHeader("x-shopify-topic"),
  tenant: fromHeader("x-shopify-shop-domain"),
});
