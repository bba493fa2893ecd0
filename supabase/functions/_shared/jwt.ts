import { Buffer } from "node:buffer";
import { z } from "zod";
import { JobError } from "./errors.ts";

/** The key that signs users' tokens, as it stands in JWT_SIGNING_KEY. */
export interface SigningKey {
  alg: keyof typeof algorithms;
  jwk: JsonWebKey;
  /** Which of the project's keys it is; a plain secret has no such name. */
  kid?: string;
}

const algorithms = {
  ES256: { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" },
  RS256: { name: "RSASSA-PKCS1-v1_5", hash: "SHA-256" },
  HS256: { name: "HMAC", hash: "SHA-256" },
};

const part = z.string().regex(/^[\w-]+$/);
const kid = z.string().min(1);
/** Private keys as RFC 7518, section 6, has them; what else a JWK says of its use is left out. */
const privateKeys = z.discriminatedUnion("kty", [
  z.object({
    kty: z.literal("EC"),
    crv: z.literal("P-256"),
    ...{ x: part, y: part, d: part, kid },
    alg: z.literal("ES256").default("ES256"),
  }),
  z.object({
    kty: z.literal("RSA"),
    ...{ n: part, e: part, d: part, p: part, q: part, dp: part, dq: part, qi: part, kid },
    alg: z.literal("RS256").default("RS256"),
  }),
  // 32 bytes at least, as RFC 7518 wants for HS256.
  z.object({ kty: z.literal("oct"), k: part.min(43), kid, alg: z.literal("HS256").default("HS256") }),
]);

const MIN_SECRET_LENGTH = 32;
/** How the texts begin that people may take for the project's JWT secret: other forms of keys, and API keys. */
const NO_SECRET = /^(\[|-----BEGIN|sb_|eyJ[\w-]+\.)/;

/**
 * The key in JWT_SIGNING_KEY: the project's HS256 secret as it is, or a private JWK as JSON. Throws JobError
 * `not_configured`, which quotes nothing of it.
 */
export function signingKey(): SigningKey {
  const text = Deno.env.get("JWT_SIGNING_KEY")?.trim() ?? "";
  if (text === "") throw unusable("is not set");
  if (text.startsWith("{")) {
    const read = z.string().transform(parseJson).pipe(privateKeys).safeParse(text);
    if (!read.success) throw unusable("is no private JWK with a kid, of a key for ES256, RS256 or HS256");
    const { alg, kid, ...jwk } = read.data;
    return { alg, kid, jwk };
  }
  if (NO_SECRET.test(text)) throw unusable("is neither the JWT secret nor a private JWK");
  if (text.length < MIN_SECRET_LENGTH) throw unusable(`is shorter than ${MIN_SECRET_LENGTH} characters`);
  return { alg: "HS256", jwk: { kty: "oct", k: Buffer.from(text).toString("base64url") } };
}

/** A token of these claims (JWS compact, RFC 7515). Throws JobError `not_configured` when the key is damaged. */
export async function signToken(key: SigningKey, claims: Record<string, unknown>): Promise<string> {
  const content = [{ alg: key.alg, typ: "JWT", kid: key.kid }, claims]
    .map((value) => Buffer.from(JSON.stringify(value)).toString("base64url")).join(".");
  const bytes = new TextEncoder().encode(content);
  const signature = await crypto.subtle.sign(algorithms[key.alg], await importKey(key, "sign"), bytes);
  return `${content}.${Buffer.from(signature).toString("base64url")}`;
}

/** Whether a token's signature is that of an HS256 key. */
export async function isSignedWith(key: SigningKey, token: string): Promise<boolean> {
  const end = token.lastIndexOf(".");
  const content = new TextEncoder().encode(token.slice(0, end));
  const signature = Buffer.from(token.slice(end + 1), "base64url");
  return await crypto.subtle.verify(algorithms.HS256, await importKey(key, "verify"), signature, content);
}

const decoded = part.transform((text) => Buffer.from(text, "base64url").toString()).transform(parseJson);
const tokenParts = z.tuple([
  decoded.pipe(z.object({ alg: z.string(), kid: z.string().optional() })),
  decoded.pipe(z.record(z.string(), z.unknown())),
  part,
]).transform(([header, claims]) => ({ header, claims }));

/** A token's header and claims, which nobody has verified; null when it is none. */
export const readToken = (token: string) => tokenParts.safeParse(token.split(".")).data ?? null;

/** JSON as a step of a schema; the error does not quote the text. */
function parseJson(text: string, step: z.RefinementCtx): unknown {
  try {
    return JSON.parse(text);
  } catch {
    step.addIssue("not JSON");
    return z.NEVER;
  }
}

async function importKey(key: SigningKey, use: KeyUsage): Promise<CryptoKey> {
  try {
    return await crypto.subtle.importKey("jwk", key.jwk, algorithms[key.alg], false, [use]);
  } catch {
    throw unusable("is a damaged JWK");
  }
}

function unusable(why: string): JobError {
  const hint =
    "Set it with supabase secrets set, to the project's JWT secret or to a private JWK that is one of its " +
    "signing keys; see the README, Who asked for it.";
  return new JobError("not_configured", `JWT_SIGNING_KEY ${why}`, hint);
}
