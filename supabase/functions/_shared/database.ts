import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";
import { createClient, type SupabaseClient } from "@supabase/supabase-js";
import { z } from "zod";
import { JobError } from "./errors.ts";
import { after } from "./timer.ts";

let client: SupabaseClient | undefined;

/**
 * The supabase-js client of the service role, made at the first call. Reads SUPABASE_URL and SUPABASE_SECRET_KEYS
 * (`{"default": "sb_secret_…"}`), or the older SUPABASE_SERVICE_ROLE_KEY. Throws JobError `not_configured`.
 */
export const serviceClient = (): SupabaseClient =>
  client ??= createClient(requiredEnv("SUPABASE_URL"), apiKey("secret"), {
    auth: { persistSession: false, autoRefreshToken: false, detectSessionInUrl: false },
  });

/** Arguments of a SQL function by their names. */
export type Arguments = Record<string, unknown>;

/** Calls a SQL function with named arguments, and gives back its answer as REST would. Throws what callDatabase throws. */
export type Transport = (name: string, args: Arguments) => Promise<unknown>;

let transport: Transport | undefined;

/** From now on callDatabase goes another way than through REST: for a process that has the database at hand. */
export function useTransport(call: Transport): void {
  transport = call;
}

/**
 * Calls a SQL function through REST as the service role, with the names of its arguments in camelCase, and gives back its
 * answer as JSON has it. Throws JobError with the database's SQLSTATE, message and hint, `refused` when the API does not take
 * the key, or `unreachable` when there was no answer within `timeoutMs` (10,000): the call may or may not have taken effect.
 */
export async function callDatabase(name: string, args: Arguments, timeoutMs = 10_000): Promise<unknown> {
  if (transport) return await transport(name, inSnakeCase(args));
  const controller = new AbortController();
  const call = serviceClient().rpc(name, inSnakeCase(args)).abortSignal(controller.signal);
  const giveUp = () => controller.abort(new Error(`no answer within ${timeoutMs / 1000} s`));
  const cancelTimeout = after(timeoutMs, giveUp);
  const { data, error, status } = await call;
  cancelTimeout();
  // JSON.stringify has a limit of its own, and nothing was sent.
  if (error?.message.startsWith("RangeError: ")) throw tooLarge(name);
  if (status === 413) throw new JobError("too_large", `${name}: the body is too large for the API`);
  if (error?.code) throw databaseError(error);
  if (error && (status === 401 || status === 403)) {
    const hint = "Check that the key in SUPABASE_SECRET_KEYS is one of the project at SUPABASE_URL.";
    throw new JobError("refused", `${name}: the API answered ${status}: ${error.message}`, hint);
  }
  if (error) {
    const hint = "Check SUPABASE_URL and the database's API.";
    throw new JobError("unreachable", `${name}: ${error.message}`, hint);
  }
  return data;
}

/** Calls a SQL function as callDatabase does, and reads its answer by a schema. */
export const callFor = async <Answer>(answer: z.ZodType<Answer>, ...call: Parameters<typeof callDatabase>) =>
  answer.parse(await callDatabase(...call));

/** The schema of rows with these columns, whose names become camelCase. */
export const rowsOf = <Shape extends z.ZodRawShape>(shape: Shape) =>
  z.array(z.record(z.string(), z.unknown()).transform(inCamelCase).pipe(z.object(shape)));

/** A time as an argument; undefined when it is left out. Throws JobError 22023, `what` first, when it is no time. */
export function instant(what: string, date: Date | undefined): string | undefined {
  if (date === undefined || date instanceof Date && Number.isFinite(date.getTime())) {
    return date?.toISOString();
  }
  throw new JobError("22023", `${what} is not a Date with a time`);
}

/** Bytes as an argument. */
export const bytea = (bytes: Uint8Array) => `\\x${Buffer.from(bytes).toString("hex")}`;

const MAX_TEXT_BYTES = 512;

/** A text, or its hash where the database cannot hold it or it has more than 512 bytes: nothing is refused for its name. */
export function storableText(text: string): string {
  const storable = Buffer.byteLength(text) <= MAX_TEXT_BYTES && text.isWellFormed() && !text.includes("\0");
  // Of its JSON, since UTF-8 has one character for every half of a surrogate pair.
  return storable ? text : `sha256:${createHash("sha256").update(JSON.stringify(text)).digest("hex")}`;
}

/** What Postgres, or its API, has raised. */
export function databaseError(
  { code, message, details, hint }: { code: string; message: string; details?: string; hint?: string },
): JobError {
  // Class 22 is about a value, and its details say what is wrong with it. Others may quote a whole row.
  const why = code.startsWith("22") && details ? `: ${details}` : "";
  return new JobError(code, message + why, hint || undefined);
}

/** JSON.stringify has thrown a RangeError. */
export const tooLarge = (name: string) =>
  new JobError("too_large", `${name}: the arguments are nested too deeply for JSON`);

/** An object with its keys as SQL has them; what its values hold stays as it is. */
export const inSnakeCase = (object: object): Record<string, unknown> =>
  renamed(object, (key) => key.replaceAll(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`));

/** A row with its keys as TypeScript has them. */
export const inCamelCase = (row: object): Record<string, unknown> =>
  renamed(row, (key) => key.replaceAll(/_./g, ([, letter = ""]) => letter.toUpperCase()));

const renamed = (object: object, rename: (key: string) => string) =>
  Object.fromEntries(Object.entries(object).map(([key, value]) => [rename(key), value]));

/** An environment variable that must be there. Throws JobError `not_configured` naming it. */
export function requiredEnv(name: string): string {
  const value = Deno.env.get(name);
  if (!value) {
    const hint = name.startsWith("SUPABASE_")
      ? "Supabase sets it for every function that it runs; elsewhere set it yourself."
      : "Set it among the functions' secrets, or in the worker's environment.";
    throw new JobError("not_configured", `${name} is not set`, hint);
  }
  return value;
}

const KEY_VARIABLES = {
  secret: ["SUPABASE_SECRET_KEYS", "SUPABASE_SERVICE_ROLE_KEY"],
  publishable: ["SUPABASE_PUBLISHABLE_KEYS", "SUPABASE_ANON_KEY"],
} as const;

/**
 * A key that the API takes, for the service role (`secret`) or for whoever has no other (`publishable`): the one named
 * `default`, else the first there is, as Supabase's own server library has it
 * (https://supabase.com/docs/reference/server/primitives-createadminclient); the older key where there is none of the sort,
 * as in a project that has not made the new ones. Throws JobError `not_configured`.
 */
export function apiKey(sort: keyof typeof KEY_VARIABLES): string {
  const [name, older] = KEY_VARIABLES[sort];
  const text = Deno.env.get(name);
  const keys = text ? parseKeys(name, text) : {};
  const key = keys.default ?? Object.values(keys)[0] ?? Deno.env.get(older);
  if (key) return key;
  const detail = `${name} holds no key, and the older ${older} is not set`;
  const hint =
    `Make a ${sort} key in the project's settings, under API keys; elsewhere than in a function set ${name}.`;
  throw new JobError("not_configured", detail, hint);
}

function parseKeys(name: string, text: string): Record<string, string> {
  try {
    return z.record(z.string(), z.string().min(1)).parse(JSON.parse(text));
  } catch {
    // Without the cause: it may quote a key.
    throw new JobError("not_configured", `${name} is not JSON of keys by name, such as {"default": "sb_…"}`);
  }
}
