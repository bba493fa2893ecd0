import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import { parse, stringify } from "node:querystring";
import { isOneOf } from "../_shared/secrets.ts";
import { beginsAsJson, valuesByName, type Verifier } from "./verifier.ts";
import { fromBase64, fromHeader, joined, oneHeader, textAt, textKeys, verifyHmac } from "./signatures.ts";

/** Twilio's forms have a few dozen. */
const MAX_FIELDS = 1_000;

export interface TwilioOptions {
  /** The environment variable that holds the account's auth token. */
  secret: string;
  /** The address that Twilio knows, without a query, where it is not this function's own: behind a proxy, or a domain. */
  url?: string;
}

/**
 * Twilio: X-Twilio-Signature holds an HMAC-SHA1, in base64, of the address with its query and then each field of the form, sorted
 * by name: its name and its value. A body in JSON is signed through the bodySHA256 in the query. There is no timestamp; names and
 * values run together; and other headers are not signed. While a token is being rotated the variable holds both. Requests that a
 * webhooks rule has signed with a shared key (and HMAC-SHA256) need that key in the variable, too. The port may be signed or
 * not, as in Twilio's own library. I-Twilio-Idempotency-Token is the id, the same over retries; the status is the type, and
 * AccountSid the tenant.
 * https://www.twilio.com/docs/usage/webhooks/webhooks-security
 */
export function twilio({ secret, url: known }: TwilioOptions): Verifier {
  if (known !== undefined && (!URL.canParse(known) || /[?#]/.test(known))) {
    throw new Error(`twilio({ url: ${JSON.stringify(known)} }): that is no address without a query`);
  }
  return {
    secret,
    secretHeaders: ["x-twilio-signature"],
    format: "form",
    id: fromHeader("i-twilio-idempotency-token"),
    type: ({ payload }) =>
      ["CallStatus", "MessageStatus", "SmsStatus", "EventType"].map((name) => textAt(payload, name)).find(
        Boolean,
      ),
    tenant: ({ payload }) => textAt(payload, "AccountSid"),
    async verify({ url, headers, body }, secrets) {
      const signature = oneHeader(headers, "x-twilio-signature");
      if (signature === null) return "its x-twilio-signature is missing, or there twice";
      const bodyHash = url.searchParams.get("bodySHA256");
      let fields = "";
      if (bodyHash === null) {
        const text = Buffer.from(body).toString();
        if (beginsAsJson(text)) return "it is JSON without bodySHA256";
        // Looked at before it is read: to parse and sort them would cost a forger nothing, and this function its time.
        if (hasMany(body)) return `it has more than ${MAX_FIELDS} fields`;
        fields = sortedFields(text);
      } else if (!isOneOf(bodyHash, [createHash("sha256").update(body).digest("hex")])) {
        return "its body is not that of its bodySHA256";
      }
      const settings = headers.get("x-twilio-webhooks-signature-settings") ?? "";
      const algorithm = /(^|,) *algorithm *= *HMAC_SHA256 *(,|$)/i.test(settings) ? "SHA-256" : "SHA-1";
      let why: string | null = null;
      for (const address of addresses(known ?? `${url.origin}${url.pathname}`, url.search)) {
        why = await verifyHmac(algorithm, textKeys(secrets), joined(address, fields), [
          fromBase64(signature),
        ]);
        if (why === null) break;
      }
      return why;
    },
  };
}

/** Whether a form has more fields than it may. */
function hasMany(body: Uint8Array): boolean {
  let fields = 1;
  for (const byte of body) if (byte === 0x26 && ++fields > MAX_FIELDS) return true;
  return false;
}

/** The fields of a form, names and values run together. A name that is there twice has each of its values once. */
function sortedFields(form: string): string {
  const fields = valuesByName(new URLSearchParams(form));
  // By UTF-16, as Twilio's library sorts.
  return [...fields.keys()].sort().map((name) =>
    [...new Set(fields.get(name))].sort().map((value) => name + value).join("")
  ).join("");
}

/** What Twilio may have signed: with the scheme's own port or without, and the query as it or its library may write it. */
function addresses(address: string, query: string): Set<string> {
  const [, scheme = "", host = "", path = ""] = /^(https?:\/\/)([^/]*)(.*)$/i.exec(address) ?? [];
  const bare = host.replace(/:\d+$/, "");
  const port = /:\d+$/.exec(host)?.[0] ?? (scheme.toLowerCase() === "http://" ? ":80" : ":443");
  const queries = query
    ? [query, query.replaceAll("%27", "'"), `?${stringify(parse(query.slice(1)))}`]
    : [""];
  return new Set(queries.flatMap((text) => [bare, bare + port].map((name) => scheme + name + path + text)));
}
