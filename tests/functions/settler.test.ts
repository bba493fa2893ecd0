import assert from "node:assert/strict";
import { join } from "node:path";
import { projectDir } from "../support.ts";

/** In a process of its own: the engine reads where the API is from the environment, which all test files share. */
const script = `
import { createSettler } from "./supabase/functions/_shared/settler.ts";

// An API that accepts every completion.
const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async (request) => {
  const { completions } = await request.json();
  return Response.json(completions.map(({ id }) => id));
});
Deno.env.set("SUPABASE_URL", "http://127.0.0.1:" + server.addr.port);
Deno.env.set("SUPABASE_SECRET_KEYS", '{"default":"key"}');

const entry = (id) => ({ job: { id, leaseToken: 1 }, controller: new AbortController(), leaseEndsAt: Infinity });
let lost = 0;
for (let depth = 1; depth <= 60; depth++) {
  const held = new Set();
  const results = [];
  const settler = createSettler(held, results);
  // The second job ends a number of turns after the first was settled.
  held.delete = async function (value) {
    Set.prototype.delete.call(this, value);
    if (value.job.id !== "first") return;
    for (let turn = 0; turn < depth; turn++) await null;
    settler.settle(entry("second"), { completed: 2 });
  };
  settler.settle(entry("first"), { completed: 1 });
  await settler.idle();
  await new Promise((resolve) => setTimeout(resolve, 5));
  await settler.idle();
  if (results.length !== 2) lost++;
}
console.log("lost " + lost);
Deno.exit(0);
`;

Deno.test("a job that ends at whatever moment of another's settling is settled as well", async () => {
  const child = new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--no-check", "--config", join(projectDir, "deno.json"), "-"],
    cwd: projectDir,
    stdin: "piped",
    stdout: "piped",
    stderr: "piped",
  }).spawn();
  const writer = child.stdin.getWriter();
  await writer.write(new TextEncoder().encode(script));
  await writer.close();
  const { stdout, stderr } = await child.output();
  assert.equal(new TextDecoder().decode(stdout).trim(), "lost 0", new TextDecoder().decode(stderr));
});
