import { isOneOf } from "../_shared/secrets.ts";
import type { Verifier } from "./verifier.ts";
import { hmac } from "./hmac.ts";
import { echo, fromPayload } from "./signatures.ts";

/**
 * Meta (Facebook, Instagram, WhatsApp): X-Hub-Signature-256 holds `sha256=` and an HMAC-SHA256 of the body in hex, made with the
 * app secret. There is no timestamp, and an app has one secret: while it is being changed the variable holds both. `verifyToken`
 * names the variable with the text that is entered in Meta's dashboard: Meta asks for it with GET when the address is entered,
 * and wants its challenge back. The body's object is the type. Meta has no id, and one message may hold changes of several
 * accounts: a message is known by the hash of its body, and has no tenant.
 * https://developers.facebook.com/docs/graph-api/webhooks/getting-started
 */
export const meta = ({ secret, verifyToken }: { secret: string; verifyToken: string }): Verifier => ({
  ...hmac({ secret, header: "x-hub-signature-256", prefix: "sha256=" }),
  type: fromPayload("object"),
  challenge: {
    secret: verifyToken,
    answer({ searchParams }, secrets) {
      const known = isOneOf(searchParams.get("hub.verify_token") ?? "", secrets);
      return known && searchParams.get("hub.mode") === "subscribe"
        ? echo(searchParams.get("hub.challenge"))
        : null;
    },
  },
});
