import { join } from "node:path";
import { readPorts } from "./local/ports.ts";
import { startStack } from "./local/stack.ts";
import { signInTestUser } from "./local/test_user.ts";

/** `npm start`: the local stack, until Ctrl-C. */

const projectDir = join(import.meta.dirname ?? ".", "..");
const stopped = Promise.withResolvers<void>();
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"] as const) {
  Deno.addSignalListener(signal, () => stopped.resolve());
}

/** Prints a line, if there still is a terminal to print to: its end must not stop the stack's orderly end. */
function print(line: string): void {
  try {
    console.log(line);
  } catch {
    // It is gone.
  }
}

try {
  const stack = await startStack({ projectDir, ports: readPorts(), log: print });
  const { apiUrl, databaseUrl, dataDir, mailUrl, keys } = stack;
  const token = await signInTestUser(databaseUrl, keys.jwtSecret);
  const state = JSON.stringify({ apiUrl, databaseUrl, dataDir, mailUrl }, null, 2);
  await Deno.writeTextFile(join(projectDir, ".local/stack.json"), `${state}\n`);
  print(`
ready
  API              ${apiUrl}
  publishable key  ${keys.publishableKey}
  secret key       ${keys.secretKey}
  database         ${databaseUrl}
  data             ${dataDir}
  mails            printed here, and listed at ${mailUrl}/emails
  a user's token   ${token}
                   (test@example.com, for a day)

Send one from another terminal:
  npm run sql -- "select enqueue_job('send_email', '{\\"to\\":\\"a@example.com\\",\\"template\\":\\"welcome\\"}')"
Ctrl-C stops everything; data stays.
`);
  await stopped.promise;
  print("stopping …");
  await stack.stop();
  Deno.exit(0);
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  Deno.exit(1);
}
