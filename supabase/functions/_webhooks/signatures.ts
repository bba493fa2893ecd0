import { Buffer } from "node:buffer";
import { type Reader, valuesByName } from "./verifier.ts";

/** What the verifiers have in common: strict decoding, verifying, and reading what a message is known by. */

export type Bytes = Uint8Array<ArrayBuffer>;

/** A signature costs a hash of the whole body: rotation needs two or three of them, a forger might send hundreds. */
const MAX_SIGNATURES = 10;

/** The bytes of base64 as RFC 4648 writes it: its own alphabet, padding, no bits left over; else null. */
export function fromBase64(text: string): Bytes | null {
  const bytes = Buffer.from(text, "base64");
  return bytes.toString("base64") === text ? new Uint8Array(bytes) : null;
}

/** The bytes of hex in either case; null for anything else. */
export const fromHex = (text: string): Bytes | null =>
  /^(?:[0-9a-f]{2})*$/i.test(text) ? new Uint8Array(Buffer.from(text, "hex")) : null;

/** The bytes of a secret in base64, as people paste it: in either alphabet, with or without padding; else null. */
export function fromSecretBase64(text: string): Bytes | null {
  const digits = /^([A-Za-z0-9+/_-]+)={0,2}$/.exec(text)?.[1] ?? "";
  return digits && digits.length % 4 !== 1 ? new Uint8Array(Buffer.from(digits, "base64")) : null;
}

export const utf8 = (text: string): Bytes => new TextEncoder().encode(text);

/** Secrets that are used as they are written, but for what pasting may have left around them. */
export const textKeys = (secrets: string[]): Bytes[] => secrets.map((secret) => utf8(secret.trim()));

/** Bytes and texts, one after the other. */
export const joined = (...parts: (Bytes | string)[]): Bytes =>
  new Uint8Array(Buffer.concat(
    parts.map((part) => typeof part === "string" ? utf8(part) : part),
  ));

/**
 * A header that is there once, in ASCII, and not empty; else null. None of the values that this reads has a comma in it, and
 * Headers has one between the values of a header that came twice.
 */
export function oneHeader(headers: Headers, name: string): string | null {
  const value = headers.get(name);
  return value !== null && /^[\x21-\x2b\x2d-\x7e]+$/.test(value) ? value : null;
}

/** The values by their names in a header such as `t=1,v1=a,v1=b`. */
export const namedValues = (header: string, separator: string): Map<string, string[]> =>
  valuesByName(
    header.split(separator).map((part): [string, string] => {
      const [, name = "", value = ""] = /^([^=]*)=(.*)$/s.exec(part.trim()) ?? [];
      return [name, value];
    }),
  );

/**
 * Why a time in seconds since 1970 is not about `now`, or is not written in digits; null when it is. Exactly the tolerance,
 * before or after, is near enough.
 */
export function staleness(timestamp: string, toleranceSeconds: number, now: Date): string | null {
  if (!/^[0-9]{1,15}$/.test(timestamp)) return "its timestamp is not written in digits";
  const age = Math.floor(now.getTime() / 1000) - Number(timestamp);
  // Said so that a tolerance or a time that is no number refuses everything.
  if (Math.abs(age) <= toleranceSeconds) return null;
  return `its timestamp is ${Math.abs(age)} s in the ${age < 0 ? "future" : "past"}`;
}

export type HmacAlgorithm = "SHA-1" | "SHA-256" | "SHA-512";

/** Null when one of the keys made one of the signatures; else why that is not so. A null signature could not be decoded. */
export function verifyHmac(
  algorithm: HmacAlgorithm,
  keys: Bytes[],
  message: Bytes,
  signatures: (Bytes | null)[],
): Promise<string | null> {
  return verifyWith({ name: "HMAC", hash: algorithm }, keys, message, signatures);
}

/** As verifyHmac, with the public keys of ed25519, of 32 bytes each. */
export function verifyEd25519(keys: Bytes[], message: Bytes, signatures: (Bytes | null)[]) {
  return verifyWith({ name: "Ed25519" }, keys, message, signatures);
}

async function verifyWith(
  algorithm: { name: string; hash?: string },
  keys: Bytes[],
  message: Bytes,
  signatures: (Bytes | null)[],
): Promise<string | null> {
  if (signatures.length > MAX_SIGNATURES) return `it has more than ${MAX_SIGNATURES} signatures`;
  const decoded = signatures.filter((signature) => signature !== null);
  if (decoded.length === 0) return "its signature is missing, or not encoded as it should be";
  for (const bytes of keys) {
    // An empty key would verify what anyone can sign.
    if (bytes.length === 0) continue;
    const key = await crypto.subtle.importKey("raw", bytes, algorithm, false, ["verify"]);
    for (const signature of decoded) {
      if (await crypto.subtle.verify(algorithm, key, signature, message)) return null;
    }
  }
  return "it was signed with another secret, or changed";
}

/** The text, or the whole number, at a place in a payload; undefined where there is none, or JSON.parse may have rounded it. */
export function textAt(payload: unknown, ...path: string[]): string | undefined {
  let value = payload;
  for (const name of path) {
    if (typeof value !== "object" || value === null) return undefined;
    value = Reflect.get(value, name);
  }
  if (typeof value === "string") return value;
  return Number.isSafeInteger(value) ? String(value) : undefined;
}

/** Reads the payload at a place. */
export const fromPayload = (...path: string[]): Reader => ({ payload }) => textAt(payload, ...path);

/** Reads a header. */
export const fromHeader = (name: string): Reader => ({ headers }) => headers.get(name);

/** Gives a challenge back, in a way that no browser takes for a page; null for one of no reasonable length. */
export function echo(challenge: string | null | undefined): Response | null {
  if (!challenge || challenge.length > 1_000) return null;
  return new Response(challenge, {
    headers: { "Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff" },
  });
}
