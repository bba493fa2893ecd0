import { join } from "node:path";

/** `npm run setup`: makes the files that hold this project's secrets, and says what it did. */

const projectDir = join(import.meta.dirname ?? ".", "..");

/**
 * Writes what is missing to supabase/.env (read by config.toml) and supabase/functions/.env (the functions' secrets):
 * CRON_SECRET, the same random value in both, and PROJECT_URL. What is there stays. Both files are for the owner's eyes
 * only. Returns CRON_SECRET and what was written. Throws when the two files hold different secrets.
 */
export async function setup(dir: string): Promise<{ cronSecret: string; written: string[] }> {
  const files = { project: join(dir, "supabase/.env"), functions: join(dir, "supabase/functions/.env") };
  const project = await readEnv(files.project);
  const functions = await readEnv(files.functions);
  // While the secret is being rotated the functions take two, and the database sends its first.
  const secretsOf = (text = "") => text.split(",").map((secret) => secret.trim()).filter(Boolean);
  const [sent] = secretsOf(project.CRON_SECRET);
  if (sent && functions.CRON_SECRET && !secretsOf(functions.CRON_SECRET).includes(sent)) {
    throw new Error(
      `CRON_SECRET differs between ${files.project} and ${files.functions}: the database would be refused by the ` +
        "functions. Make them the same, or delete the line in one of them.",
    );
  }
  for (const [file, { CRON_SECRET }] of [[files.project, project], [files.functions, functions]] as const) {
    if (secretsOf(CRON_SECRET).some((secret) => secret.length < 32)) {
      throw new Error(
        `CRON_SECRET in ${file} is shorter than 32 characters. Delete the line: a new one is made.`,
      );
    }
  }
  const cronSecret = project.CRON_SECRET || functions.CRON_SECRET || randomSecret();
  const written: string[] = [];
  const add = async (file: string, env: Record<string, string>, name: string, value: string, why: string) => {
    if (env[name]) return;
    const text = await Deno.readTextFile(file).catch(() => "");
    // An empty `NAME=` would stand in the way of the new line.
    const kept = text.split("\n").filter((line) => !line.startsWith(`${name}=`)).join("\n").trimEnd();
    await Deno.writeTextFile(file, `${kept && kept + "\n"}# ${why}\n${name}=${value}\n`, { mode: 0o600 });
    await Deno.chmod(file, 0o600);
    written.push(`${name} in ${file.slice(dir.length + 1)}`);
  };
  await add(
    files.project,
    project,
    "CRON_SECRET",
    cronSecret,
    "Opens job-worker and drain; the same in functions/.env.",
  );
  await add(
    files.project,
    project,
    "PROJECT_URL",
    "http://api.supabase.internal:8000",
    "The API as seen from the database: this is `supabase start`'s; hosted: https://<ref>.supabase.co.",
  );
  await add(
    files.functions,
    functions,
    "CRON_SECRET",
    cronSecret,
    "Opens job-worker and drain; the same in ../.env.",
  );
  return { cronSecret, written };
}

/** The variables in an env file; {} when there is none. */
export async function readEnv(file: string): Promise<Record<string, string>> {
  const text = await Deno.readTextFile(file).catch((error) => {
    if (error instanceof Deno.errors.NotFound) return "";
    throw error;
  });
  const env: Record<string, string> = {};
  for (const line of text.split("\n")) {
    const [, name, value] = /^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$/.exec(line) ?? [];
    if (name && value !== undefined) env[name] = value.replace(/^(["'])(.*)\1$/, "$2");
  }
  return env;
}

function randomSecret(): string {
  return crypto.getRandomValues(new Uint8Array(32)).toHex();
}

if (import.meta.main) {
  try {
    const { written } = await setup(projectDir);
    console.log(written.length === 0 ? "Nothing is missing." : `Wrote ${written.join(", ")}.`);
  } catch (error) {
    console.error(error instanceof Error ? error.message : error);
    Deno.exit(1);
  }
}
