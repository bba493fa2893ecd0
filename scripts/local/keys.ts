import type { LocalKeys } from "./gateway.ts";
import { signJwt } from "./jwt.ts";

/**
 * The local API's keys: made at the first start, kept in `file` (mode 600) so that they stay the same. They open nothing
 * but this machine's stack.
 */
export async function localKeys(file: string): Promise<LocalKeys> {
  try {
    return JSON.parse(await Deno.readTextFile(file));
  } catch (error) {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  }
  const keys = await makeKeys();
  await Deno.writeTextFile(file, JSON.stringify(keys, null, 2) + "\n", { mode: 0o600 });
  return keys;
}

/** New keys in the forms that Supabase gives them: two opaque ones, and two JWTs signed with a secret. */
export async function makeKeys(): Promise<LocalKeys> {
  const random = () => crypto.getRandomValues(new Uint8Array(24)).toBase64({ alphabet: "base64url" });
  const jwtSecret = random() + random();
  const exp = Math.floor(Date.now() / 1000) + 10 * 365 * 24 * 3600;
  return {
    jwtSecret,
    publishableKey: `sb_publishable_${random()}`,
    secretKey: `sb_secret_${random()}`,
    anonKey: await signJwt({ role: "anon", iss: "nightshift-local", exp }, jwtSecret),
    serviceRoleKey: await signJwt({ role: "service_role", iss: "nightshift-local", exp }, jwtSecret),
  };
}
