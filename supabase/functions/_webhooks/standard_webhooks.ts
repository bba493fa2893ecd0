import type { SignedRequest, Verifier } from "./verifier.ts";
import {
  type Bytes,
  fromBase64,
  fromPayload,
  fromSecretBase64,
  joined,
  oneHeader,
  staleness,
  verifyEd25519,
  verifyHmac,
} from "./signatures.ts";

export interface StandardWebhooksOptions {
  /**
   * The environment variable that holds the secret: base64 (`whsec_…`) of an HMAC's key, or of the public key of ed25519
   * (`whpk_…`). Supabase Auth's forms are taken as they are: `v1,whsec_…`, `v1a,whpk_…:whsk_…`, and several of them with `|`
   * between.
   */
  secret: string;
  /** 300 by default, as in the libraries of Standard Webhooks. */
  toleranceSeconds?: number;
}

/**
 * Standard Webhooks, and so Svix, Clerk, Resend, Supabase Auth hooks, GitLab with a signing token and others: webhook-signature
 * holds one signature or more of `<webhook-id>.<webhook-timestamp>.<body>` in base64: `v1,` is an HMAC-SHA256, `v1a,` is
 * ed25519. They have spaces between, in Auth's hooks ", ". The headers of Svix begin with svix- instead. Several signatures, and
 * several secrets, are how a secret is rotated; one of them has to match. A key is used for its own scheme alone.
 * webhook-id is the id, the same over retries (but Auth's hooks have a new one at each), and it is signed; the body's type is
 * the type.
 * https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
 */
export function standardWebhooks({ secret, toleranceSeconds = 300 }: StandardWebhooksOptions): Verifier {
  return {
    secret,
    secretHeaders: ["webhook-signature", "svix-signature"],
    headers: ["webhook-timestamp", "svix-timestamp"],
    id: (request) => request.headers.get(`${sender(request)}-id`),
    type: fromPayload("type"),
    checkSecret: (secret) => {
      const keys = secret.trim().split("|").map(readKey);
      return keys.map((key) => "wrong" in key ? key.wrong : null).find(Boolean) ?? null;
    },
    async verify(request, secrets, now) {
      const { headers, body } = request;
      const prefix = sender(request);
      const id = oneHeader(headers, `${prefix}-id`);
      const timestamp = oneHeader(headers, `${prefix}-timestamp`);
      if (id === null || timestamp === null) {
        return `its ${prefix}-id or ${prefix}-timestamp is missing, or there twice`;
      }
      const stale = staleness(timestamp, toleranceSeconds, now);
      if (stale) return stale;
      const signatures = (headers.get(`${prefix}-signature`) ?? "").split(/,? +/);
      const keys = secrets.flatMap((secret) => secret.trim().split("|").map(readKey));
      const message = joined(`${id}.${timestamp}.`, body);
      const of = (scheme: string) => ({
        keys: keys.flatMap((key) => "bytes" in key && key.scheme === scheme ? [key.bytes] : []),
        signatures: signatures.filter((signature) => signature.startsWith(`${scheme},`))
          .map((signature) => fromBase64(signature.slice(scheme.length + 1))),
      });
      const [hmac, ed25519] = [of("v1"), of("v1a")];
      const wrong = await verifyHmac("SHA-256", hmac.keys, message, hmac.signatures);
      if (wrong === null || ed25519.keys.length === 0) return wrong;
      return await verifyEd25519(ed25519.keys, message, ed25519.signatures);
    },
  };
}

/** What the names of a request's headers begin with. */
const sender = ({ headers }: Pick<SignedRequest, "headers">) =>
  headers.has("webhook-signature") || !headers.has("svix-signature") ? "webhook" : "svix";

type Key = { scheme: "v1" | "v1a"; bytes: Bytes } | { wrong: string };

function readKey(secret: string): Key {
  const [, scheme, kind, text = ""] = /^(?:(v1a?),)?(?:(whsec|whpk|whsk)_)?(.*)$/s.exec(secret.trim()) ?? [];
  if (kind === "whsk") return { wrong: "is a private key (whsk_): the public one begins with whpk_" };
  if (scheme === "v1a" || kind === "whpk") {
    if (kind === "whsec" || scheme === "v1") {
      return { wrong: "is of v1 by one of its prefixes, of v1a by the other" };
    }
    const bytes = fromSecretBase64(text.split(":")[0]);
    return bytes?.length === 32
      ? { scheme: "v1a", bytes }
      : { wrong: "is not a public key of ed25519: base64 of 32 bytes" };
  }
  const bytes = fromSecretBase64(text);
  return bytes ? { scheme: "v1", bytes } : { wrong: text ? "is not base64" : "is empty" };
}
