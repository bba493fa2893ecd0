import type { Verifier } from "./verifier.ts";
import { fromBase64, fromHex, type HmacAlgorithm, oneHeader, textKeys, verifyHmac } from "./signatures.ts";

export interface HmacOptions {
  /** The environment variable that holds the secret. */
  secret: string;
  /** The header with the signature. */
  header: string;
  /** SHA-256 by default. */
  algorithm?: HmacAlgorithm;
  /** Hex, in either case, by default. */
  encoding?: "hex" | "base64";
  /** What stands before the signature, such as `sha256=`. */
  prefix?: string;
}

/**
 * An HMAC of the body alone, in a header of its own, as many senders have it. There is no timestamp: a message that someone has
 * recorded can be sent again at any time, and is a duplicate as long as its row is there and its id comes from the body. No other
 * header is signed.
 * While a secret is being rotated the variable holds both. A message is known by the hash of its body unless the source says
 * otherwise.
 */
export function hmac(
  { secret, header, algorithm = "SHA-256", encoding = "hex", prefix = "" }: HmacOptions,
): Verifier {
  const decode = encoding === "hex" ? fromHex : fromBase64;
  return {
    secret,
    secretHeaders: [header],
    async verify({ headers, body }, secrets) {
      const value = oneHeader(headers, header);
      if (!value?.startsWith(prefix)) return `its ${header} is missing, there twice, or of another form`;
      return await verifyHmac(algorithm, textKeys(secrets), body, [decode(value.slice(prefix.length))]);
    },
  };
}
