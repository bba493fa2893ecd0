import { join } from "node:path";
import { runningStackEnv } from "./local/stack.ts";
import { readEnv } from "./setup.ts";

/** `npm run drain`: calls the local stack's drain once, as an outside scheduler calls the hosted one, and prints the answer. */

const projectDir = join(import.meta.dirname ?? ".", "..");
const stack = await runningStackEnv(projectDir);
if (!stack) {
  console.error("There is no local stack: run npm start first.");
  Deno.exit(1);
}
const { CRON_SECRET = "" } = await readEnv(join(projectDir, "supabase/functions/.env"));
const url = `${stack.SUPABASE_URL}/functions/v1/drain`;
try {
  const response = await fetch(url, {
    method: "POST",
    headers: { Authorization: `Bearer ${CRON_SECRET.split(",", 1)[0]?.trim()}` },
  });
  const text = await response.text();
  if (response.ok) console.log(text);
  else console.error(`${url} answered ${response.status}: ${text}`);
  Deno.exit(response.ok ? 0 : 1);
} catch (error) {
  console.error(`${url} gave no answer: ${error instanceof Error ? error.message : error}`);
  Deno.exit(1);
}
