import { createClient, type SupabaseClient } from "@supabase/supabase-js";
import { z } from "zod";
import { apiKey, requiredEnv, serviceClient } from "./database.ts";
import { JobError } from "./errors.ts";
import { isSignedWith, readToken, type SigningKey, signingKey, signToken } from "./jwt.ts";
import { within } from "./timer.ts";

/** Who asked for a job. A type, since an interface is not JSON to the compiler. */
export type Context = {
  user_id: string;
  tenant_id: string | null;
  /** What the user's token said, but for when it holds. */
  claims: Record<string, unknown>;
};

const TOKEN_SECONDS = 300;
/** A token that is to end this soon is signed anew. */
const RENEW_SECONDS = 60;
const ANSWER_MS = 10_000;

const now = () => Math.floor(Date.now() / 1000);

/**
 * Who sends the request, by its bearer, as the trigger on `jobs` records it in SQL; null when nobody is signed in: no bearer,
 * an API key, or a token without `sub`, which names nobody whoever signed it. Tokens are verified by the project's public
 * keys, by JWT_SIGNING_KEY where that is the HS256 key they name, else by asking Auth. Throws JobError `invalid_token` for one
 * that is forged, expired or damaged (answer 401), `unreachable` when Auth gives no usable answer.
 */
export async function contextOf(request: Request): Promise<Context | null> {
  const authorization = request.headers.get("Authorization");
  if (authorization === null) return null;
  const token = /^Bearer +(\S+)$/i.exec(authorization)?.[1] ?? "";
  if (token.startsWith("sb_")) return null;
  const read = readToken(token);
  if (!read) throw invalid("the bearer is no token");
  const { sub, tenant_id, app_metadata } = read.claims;
  if (typeof sub !== "string" || sub === "") return null;
  const times = timesSchema.safeParse(read.claims).data;
  if (!times) throw invalid("the token does not say until when it holds");
  if (times.exp <= now()) throw invalid("the token has expired");
  if (times.nbf !== undefined && times.nbf > now() + 30) throw invalid("the token does not hold yet");
  const own = read.header.alg === "HS256" ? ownSecret(read.header.kid) : null;
  if (own ? !await isSignedWith(own, token) : !await isKnownToAuth(token)) {
    throw invalid("the token is not one of this project, or no longer");
  }
  const metadata = z.object({ tenant_id: z.unknown() }).safeParse(app_metadata).data;
  const tenant = asText(tenant_id) ?? asText(metadata?.tenant_id);
  return { user_id: sub, tenant_id: tenant, claims: withoutTimes(read.claims) };
}

const timesSchema = z.object({ exp: z.number(), nbf: z.number().optional() });

/** JWT_SIGNING_KEY where it is an HS256 key that signs tokens with this `kid`; the plain secret may have signed any. */
function ownSecret(kid: string | undefined): SigningKey | null {
  if (!Deno.env.get("JWT_SIGNING_KEY")) return null;
  const key = signingKey();
  return key.alg === "HS256" && (key.kid === undefined || key.kid === kid) ? key : null;
}

/**
 * Whether a token is the project's own: supabase-js looks at its public keys, which it keeps for ten minutes, and asks Auth
 * about a token that none of them has signed.
 */
async function isKnownToAuth(token: string): Promise<boolean> {
  const late = new JobError("unreachable", `contextOf: Auth gave no answer within ${ANSWER_MS / 1000} s`);
  try {
    const { error } = await within(ANSWER_MS, serviceClient().auth.getClaims(token), late);
    if (!error) return true;
    if ([400, 401, 403].includes(error.status ?? 0)) return false;
    const detail = `contextOf: Auth did not answer: ${error.message}`;
    throw new JobError("unreachable", detail, "Check SUPABASE_URL.");
  } catch (error) {
    if (error instanceof JobError) throw error;
    // Its public key and its algorithm do not go together.
    return false;
  }
}

/**
 * A supabase-js client that is the user whom a job's context names: each request carries a token for five minutes, signed
 * anew as they pass, with the claims of the context, `act` included. Row level security sees that user; `auth` is not to be
 * had. Throws JobError `no_user` when the context names no user, or one whose claims are not a signed-in user's own: it is
 * never another role; `not_configured` when JWT_SIGNING_KEY is missing or unusable.
 */
export function asUser(context: unknown): SupabaseClient {
  const recorded = userContext.safeParse(context).data;
  if (!recorded) {
    const hint =
      "A job has one that a signed-in user's request enqueued, or that was given contextOf(request).";
    throw new JobError("no_user", "asUser: the context names no user", hint);
  }
  const { user_id, claims } = recorded;
  if ((claims.sub ?? user_id) !== user_id || (claims.role ?? "authenticated") !== "authenticated") {
    const detail = "asUser: the context's claims have another sub, or another role than authenticated";
    throw new JobError("no_user", detail);
  }
  const key = signingKey();
  let token = "";
  let expiresAt = 0;
  const accessToken = async () => {
    const iat = now();
    if (expiresAt - iat < RENEW_SECONDS) {
      const exp = iat + TOKEN_SECONDS;
      const fixed = { sub: user_id, role: "authenticated", iat, exp };
      token = await signToken(key, { ...withoutTimes(claims), ...fixed });
      expiresAt = exp;
    }
    return token;
  };
  return createClient(requiredEnv("SUPABASE_URL"), apiKey("publishable"), { accessToken });
}

const userContext = z.object({
  user_id: z.string().min(1),
  claims: z.record(z.string(), z.unknown()).default({}),
});

const withoutTimes = (claims: Record<string, unknown>) =>
  Object.fromEntries(Object.entries(claims).filter(([name]) => !["exp", "iat", "nbf", "jti"].includes(name)));

/** A claim as `->>` gives it in SQL. */
const asText = (claim: unknown): string | null =>
  claim === undefined || claim === null ? null : typeof claim === "string" ? claim : JSON.stringify(claim);

const invalid = (why: string) => new JobError("invalid_token", `contextOf: ${why}`, "Answer 401.");
