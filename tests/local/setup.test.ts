import assert from "node:assert/strict";
import { join } from "node:path";
import { readEnv, setup } from "../../scripts/setup.ts";

const secret = "s".repeat(40);

/** A project's folder with these two env files; undefined for none. */
async function project(env?: string, functionsEnv?: string) {
  const dir = await Deno.makeTempDir();
  await Deno.mkdir(join(dir, "supabase/functions"), { recursive: true });
  if (env !== undefined) await Deno.writeTextFile(join(dir, "supabase/.env"), env);
  if (functionsEnv !== undefined) {
    await Deno.writeTextFile(join(dir, "supabase/functions/.env"), functionsEnv);
  }
  return {
    dir,
    read: async () => [
      await readEnv(join(dir, "supabase/.env")),
      await readEnv(join(dir, "supabase/functions/.env")),
    ],
    [Symbol.asyncDispose]: () => Deno.remove(dir, { recursive: true }),
  };
}

Deno.test("setup writes one random secret to both files, for the owner only, and nothing the second time", async () => {
  await using first = await project();
  await using other = await project();
  const { cronSecret, written } = await setup(first.dir);
  assert.equal(written.length, 3);
  assert.match(cronSecret, /^[0-9a-f]{64}$/);
  assert.notEqual((await setup(other.dir)).cronSecret, cronSecret);
  const [env, functionsEnv] = await first.read();
  assert.equal(env?.CRON_SECRET, cronSecret);
  assert.equal(functionsEnv?.CRON_SECRET, cronSecret);
  const { mode } = await Deno.stat(join(first.dir, "supabase/.env"));
  assert.equal((mode ?? 0) & 0o777, 0o600);
  assert.deepEqual(await setup(first.dir), { cronSecret, written: [] });
});

Deno.test("setup completes what is there and keeps the rest", async () => {
  await using one = await project(`# mine\nOTHER="a b"\nCRON_SECRET=\n`, `CRON_SECRET='${secret}'\n`);
  assert.equal((await setup(one.dir)).cronSecret, secret);
  const [env] = await one.read();
  assert.equal(env?.OTHER, "a b");
  assert.equal(env?.CRON_SECRET, secret);
});

Deno.test("while a secret is rotated the functions may take two, one of which the database sends", async () => {
  await using one = await project(`CRON_SECRET=${secret}\n`, `CRON_SECRET=${"n".repeat(40)},${secret}\n`);
  assert.equal((await setup(one.dir)).cronSecret, secret);
});

Deno.test("secrets that would keep the database out, or that are too short, are refused by name", async () => {
  await using different = await project(`CRON_SECRET=${secret}\n`, `CRON_SECRET=${"n".repeat(40)}\n`);
  await assert.rejects(
    setup(different.dir),
    /CRON_SECRET differs between .*supabase\/\.env and .*functions\/\.env/,
  );
  await using short = await project("CRON_SECRET=short\n", "CRON_SECRET=short\n");
  await assert.rejects(setup(short.dir), /CRON_SECRET in .*supabase\/\.env is shorter than 32 characters/);
});
