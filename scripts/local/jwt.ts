// JSON Web Tokens of the one kind the local stack makes and takes: HS256, signed with the project's JWT secret.

export type Claims = Record<string, unknown>;

/** Why a token is refused. `kind` says whether it could not be decoded or its claims do not hold now. */
export class JwtError extends Error {
  constructor(readonly kind: "decode" | "claims", message: string, readonly details: string | null = null) {
    super(message);
  }
}

const clockSkewSeconds = 30;
const encoder = new TextEncoder();

/**
 * Signs claims into a token (HS256). `exp`, `iat` and `nbf` are in seconds since 1970 and are the caller's to set.
 */
export async function signJwt(claims: Claims, secret: string): Promise<string> {
  const header = encoder.encode(JSON.stringify({ alg: "HS256", typ: "JWT" }));
  const content = `${toBase64Url(header)}.${toBase64Url(encoder.encode(JSON.stringify(claims)))}`;
  const signature = await crypto.subtle.sign("HMAC", await hmacKey(secret), encoder.encode(content));
  return `${content}.${toBase64Url(new Uint8Array(signature))}`;
}

/**
 * Returns the claims of a token signed with the secret.
 * Throws a JwtError if it is no such token, or if it has expired or is not valid yet (30 seconds of grace).
 */
export async function verifyJwt(token: string, secret: string): Promise<Claims> {
  const parts = token.split(".");
  if (parts.length !== 3) throw new JwtError("decode", `Expected 3 parts in JWT; got ${parts.length}`);
  const header = parseObject(parts[0]);
  if (header?.alg !== "HS256") {
    throw new JwtError("decode", "Wrong or unsupported encoding algorithm", "Only HS256 is accepted");
  }
  const signature = fromBase64Url(parts[2]);
  const content = encoder.encode(`${parts[0]}.${parts[1]}`);
  if (!signature || !await crypto.subtle.verify("HMAC", await hmacKey(secret), signature, content)) {
    throw new JwtError(
      "decode",
      "No suitable key or wrong key type",
      "None of the keys was able to decode the JWT",
    );
  }
  const claims = parseObject(parts[1]);
  if (!claims) throw new JwtError("claims", "Parsing claims failed");
  checkTimes(claims);
  return claims;
}

/** Throws a JwtError if the claims have expired or are not valid yet, with 30 seconds of grace for clocks. */
export function checkTimes(claims: Claims): void {
  const now = Date.now() / 1000;
  const time = (name: string) => {
    const value = claims[name];
    if (value === undefined || value === null) return null;
    if (typeof value !== "number") throw new JwtError("claims", `The JWT '${name}' claim must be a number`);
    return value;
  };
  const [expires, notBefore, issuedAt] = [time("exp"), time("nbf"), time("iat")];
  if (expires !== null && expires < now - clockSkewSeconds) throw new JwtError("claims", "JWT expired");
  if (notBefore !== null && notBefore > now + clockSkewSeconds) {
    throw new JwtError("claims", "JWT not yet valid");
  }
  if (issuedAt !== null && issuedAt > now + clockSkewSeconds) {
    throw new JwtError("claims", "JWT issued at future");
  }
}

function hmacKey(secret: string): Promise<CryptoKey> {
  const usages: KeyUsage[] = ["sign", "verify"];
  return crypto.subtle.importKey(
    "raw",
    encoder.encode(secret),
    { name: "HMAC", hash: "SHA-256" },
    false,
    usages,
  );
}

function toBase64Url(bytes: Uint8Array<ArrayBuffer>): string {
  return bytes.toBase64({ alphabet: "base64url", omitPadding: true });
}

function fromBase64Url(text: string): Uint8Array<ArrayBuffer> | null {
  try {
    return Uint8Array.fromBase64(text, { alphabet: "base64url" });
  } catch {
    return null;
  }
}

function parseObject(part: string): Claims | null {
  const bytes = fromBase64Url(part);
  if (!bytes) return null;
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
    return isObject(value) ? value : null;
  } catch {
    return null;
  }
}

function isObject(value: unknown): value is Claims {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
