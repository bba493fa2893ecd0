import type { Verifier } from "./verifier.ts";
import { hmac } from "./hmac.ts";
import { fromHeader } from "./signatures.ts";

/**
 * GitHub: X-Hub-Signature-256 holds `sha256=` and an HMAC-SHA256 of the body in hex. There is no timestamp, and a webhook has
 * one secret: while it is being changed the variable holds both. X-GitHub-Delivery is the id, the same when someone has GitHub
 * deliver a message again; X-GitHub-Event is the type. Neither is signed: whoever has a signed body can send it under other
 * names. Set the webhook's content type to application/json.
 * https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
 */
export const github = ({ secret }: { secret: string }): Verifier => ({
  ...hmac({ secret, header: "x-hub-signature-256", prefix: "sha256=" }),
  headers: ["x-github-delivery", "x-github-event", "x-github-hook-id"],
  id: fromHeader("x-github-delivery"),
  type: fromHeader("x-github-event"),
});
