import { join } from "node:path";

/**
 * What the senders' own npm packages sign. They run in a process with an import map and a lock file of their own: Deno fetches
 * all that a lock file names, and only tests need these.
 */

export interface Message {
  sender: "standardwebhooks" | "svix" | "stripe" | "github";
  secret: string;
  body: string;
  /** Seconds since 1970. */
  timestamp: number;
}

/** The headers of each message, as its sender's package makes them. Throws with the output of the process when it fails. */
export async function signByPackages(messages: Message[]): Promise<Record<string, string>[]> {
  const dir = import.meta.dirname ?? ".";
  const process = new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--quiet", "--frozen", "--config", join(dir, "deno.json"), join(dir, "sign.ts")],
    stdin: "piped",
    stdout: "piped",
    stderr: "piped",
  }).spawn();
  const writer = process.stdin.getWriter();
  await writer.write(new TextEncoder().encode(JSON.stringify(messages)));
  await writer.close();
  const { success, stdout, stderr } = await process.output();
  if (!success) throw new Error(`tests/senders/sign.ts failed:\n${new TextDecoder().decode(stderr)}`);
  return JSON.parse(new TextDecoder().decode(stdout));
}
