import { createHash, timingSafeEqual } from "node:crypto";

const SECRET_NAME = /KEY|SECRET|TOKEN|PASS|CREDENTIAL|DSN|DB_URL|DATABASE_URL/i;
/** What is shorter may stand in any text by chance. */
const MIN_LENGTH = 12;

/** Whether a text is one of these secrets, in a time that says nothing about them. An empty secret is none. */
export function isOneOf(text: string, secrets: string[]): boolean {
  const given = sha256(text);
  const usable = secrets.map((secret) => secret.trim()).filter(Boolean);
  return usable.map((secret) => timingSafeEqual(given, sha256(secret))).includes(true);
}

const sha256 = (text: string) => createHash("sha256").update(text).digest();

let filter: ReturnType<typeof createSecretFilter> | undefined;

/** The filter of this function's own environment, made at the first call. */
export const secretFilter = () => filter ??= createSecretFilter(Deno.env.toObject());

/**
 * Makes what keeps secrets out of texts: the values of variables whose name says that they are secret, each part of a list
 * or of JSON in them, and the password inside any URL; plain, or encoded as in a URL, in JSON or in base64. Values of fewer
 * than 12 characters stay. `replace` puts `[NAME]` in place of each; `longest` is the length of the longest text replaced.
 */
export function createSecretFilter(env: Record<string, string>) {
  const names = new Map<string, string>();
  for (const [name, value] of Object.entries(env)) {
    for (const secret of secretsIn(name, value)) {
      if (secret.length < MIN_LENGTH) continue;
      for (const form of formsOf(secret)) if (!names.has(form)) names.set(form, name);
    }
  }
  // The longest first: a secret may be a part of another.
  const forms = [...names].sort(([a], [b]) => b.length - a.length);
  return {
    longest: forms[0]?.[0].length ?? 0,
    replace: (text: string) => forms.reduce((rest, [form, name]) => rest.replaceAll(form, `[${name}]`), text),
  };
}

function secretsIn(name: string, value: string): string[] {
  const secrets: string[] = [];
  for (const [, user = "", password = ""] of value.matchAll(/:\/\/([^\s/:@]*):?([^\s/@]*)@/g)) {
    secrets.push(password, decoded(password));
    // A DSN's key stands where others have a user.
    if (/DSN/i.test(name)) secrets.push(user);
  }
  if (!SECRET_NAME.test(name)) return secrets;
  secrets.push(value, ...value.split(/[\s,;]+/));
  try {
    JSON.parse(value, (_, part) => {
      if (typeof part === "string") secrets.push(part);
    });
  } catch {
    // It is not JSON.
  }
  return secrets;
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function formsOf(secret: string): string[] {
  const forms = [secret, encodeURIComponent(secret.toWellFormed()), JSON.stringify(secret).slice(1, -1)];
  const bytes = String.fromCharCode(...new TextEncoder().encode(secret));
  // Base64 looks different at each place in a group of three bytes. What depends on the neighbours too is left out.
  for (const before of [0, 1, 2]) {
    const base64 = btoa("\0".repeat(before) + bytes)
      .slice(Math.ceil(before * 4 / 3), Math.floor((before + bytes.length) * 4 / 3));
    forms.push(base64, base64.replaceAll("+", "-").replaceAll("/", "_"));
  }
  return forms;
}
