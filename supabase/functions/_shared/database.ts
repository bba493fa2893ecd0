import { createClient, type SupabaseClient } from "@supabase/supabase-js";
import { JobError } from "./errors.ts";
import { after } from "./timer.ts";

let client: SupabaseClient | undefined;

/**
 * The supabase-js client of the service role, made at the first call. Reads SUPABASE_URL and SUPABASE_SECRET_KEYS
 * (`{"default": "sb_secret_…"}`), or the older SUPABASE_SERVICE_ROLE_KEY. Throws JobError `not_configured`.
 */
function serviceClient(): SupabaseClient {
  return client ??= createClient(requiredEnv("SUPABASE_URL"), secretKey(), {
    auth: { persistSession: false, autoRefreshToken: false, detectSessionInUrl: false },
  });
}

/**
 * Calls a SQL function through REST as the service role, and gives back its answer as JSON has it. Throws JobError with
 * the database's SQLSTATE, message and hint, or `unreachable` when there was no answer within ten seconds: the call may
 * or may not have taken effect.
 */
export async function callDatabase(name: string, args: Record<string, unknown>): Promise<unknown> {
  const controller = new AbortController();
  const cancelTimeout = after(10_000, () => controller.abort(new Error("no answer within 10 s")));
  const { data, error, status } = await serviceClient().rpc(name, args).abortSignal(controller.signal);
  cancelTimeout();
  // JSON.stringify has a limit of its own, and nothing was sent.
  if (error?.message.startsWith("RangeError: ")) {
    throw new JobError("too_large", `${name}: the arguments are nested too deeply for JSON`);
  }
  if (status === 413) throw new JobError("too_large", `${name}: the body is too large for the API`);
  if (error?.code) {
    // Class 22 is about a value, and its details say what is wrong with it. Others may quote a whole row.
    const why = error.code.startsWith("22") && error.details ? `: ${error.details}` : "";
    throw new JobError(error.code, error.message + why, error.hint || undefined);
  }
  if (error) {
    throw new JobError(
      "unreachable",
      `${name}: ${error.message}`,
      "Check SUPABASE_URL and the database's API.",
    );
  }
  return data;
}

/** An environment variable that must be there. Throws JobError `not_configured` naming it. */
export function requiredEnv(name: string): string {
  const value = Deno.env.get(name);
  if (!value) throw new JobError("not_configured", `${name} is not set`, "Set it with supabase secrets set.");
  return value;
}

function secretKey(): string {
  const keys = Deno.env.get("SUPABASE_SECRET_KEYS");
  if (!keys) return requiredEnv("SUPABASE_SERVICE_ROLE_KEY");
  try {
    const parsed: unknown = JSON.parse(keys);
    if (
      typeof parsed === "object" && parsed !== null && "default" in parsed &&
      typeof parsed.default === "string"
    ) {
      return parsed.default;
    }
  } catch {
    // Said below.
  }
  throw new JobError("not_configured", 'SUPABASE_SECRET_KEYS is not JSON with a "default" key');
}
