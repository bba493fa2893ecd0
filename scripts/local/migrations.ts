import { join } from "node:path";

/** The Supabase CLI of package.json. */
export const supabaseCli = join(import.meta.dirname ?? ".", "../../node_modules/.bin/supabase");

/**
 * Applies the migrations with the Supabase CLI (2 or 3), as postgres, and with them the Vault secrets that config.toml
 * names from `env`. Throws when one fails, with its file, line and Postgres's message.
 */
export async function pushMigrations(
  projectDir: string,
  databaseUrl: string,
  env: Record<string, string>,
  cli = supabaseCli,
): Promise<void> {
  // sslmode: the CLI asks for TLS wherever the port is not the one in config.toml.
  const { success, stdout, stderr } = await new Deno.Command(cli, {
    args: ["db", "push", "--yes", "--workdir", projectDir, "--db-url", `${databaseUrl}?sslmode=disable`],
    env: { ...env, DO_NOT_TRACK: "1" },
    stdin: "null",
  }).output();
  if (success) return;
  const output = new TextDecoder().decode(stdout) + new TextDecoder().decode(stderr);
  throw new Error(await describeFailure(projectDir, output));
}

/** The CLI names the file, the message and the statement; the line is where that statement stands in the file. */
async function describeFailure(projectDir: string, output: string): Promise<string> {
  const file = output.match(/Applying migration (\S+\.sql)\.\.\.(?![\s\S]*Applying migration)/)?.[1];
  const message = output.match(/^ERROR: .*$/m)?.[0];
  if (!file || !message) return `supabase db push failed:\n${output.trim()}`;
  const path = join("supabase/migrations", file);
  const shown = (output.split(/^At statement: \d+\n/m)[1] ?? "").split("\nTry rerunning")[0]?.split("\n") ??
    [];
  const caret = shown.findIndex((line) => /^\s*\^\s*$/.test(line));
  const statement = caret > 0 ? shown.slice(0, caret) : shown;
  const at = (await Deno.readTextFile(join(projectDir, path))).indexOf(statement.join("\n"));
  const first = statement.findIndex((line) => line.trim() !== "" && !line.trim().startsWith("--"));
  const offset = caret > 0 ? caret - 1 : Math.max(first, 0);
  const before = at < 0
    ? undefined
    : (await Deno.readTextFile(join(projectDir, path))).slice(0, at).split("\n").length;
  const detail = output.split("\n").filter((line) => /^(DETAIL|HINT): /.test(line));
  return [`${path}${before === undefined ? "" : `:${before + offset}`}: ${message}`, ...detail].join("\n");
}
