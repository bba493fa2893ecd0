import postgres from "postgres";
import { join } from "node:path";
import { makeApp, type TestPostgres } from "../tests/support.ts";
import { pushMigrations } from "./local/migrations.ts";
import { freePort } from "./local/ports.ts";
import { startPostgres } from "./local/postgres.ts";
import { chosenPostgres } from "../tests/postgres_15/install.ts";

/**
 * `npm test [-- files]`: formatting, lint and types, then every test. The last line is `N passed, N failed`.
 * TEST_POSTGRES_VERSION=15 runs them on Postgres 15.
 */

const projectDir = join(import.meta.dirname ?? ".", "..");
const files = Deno.args.length > 0 ? Deno.args : ["tests"];

const app = await makeApp();
const { tasks }: { tasks: Record<string, string> } = JSON.parse(
  await Deno.readTextFile(join(projectDir, "deno.json")),
);
const checks = [
  ...Object.values(tasks).map((command) => command.split(" ").slice(1)),
  // The kinds and handlers of tests/app fit only into a copy of the project.
  ["check", "--config", join(app, "supabase/functions/deno.json"), join(app, "supabase/functions")],
];
let passed = 0;
let failed = 0;
await Promise.all(checks.map(async (args) => {
  if (await deno(args)) return;
  failed++;
  console.error(
    `failed: deno ${args.join(" ")}${args[0] === "fmt" ? " (node_modules/.bin/deno fmt mends it)" : ""}`,
  );
}));

if (failed === 0) {
  const template = "nightshift_template";
  const port = freePort();
  const server = await startPostgres({
    projectDir,
    port,
    temporary: true,
    installDir: await chosenPostgres(),
    settings: { max_connections: "300" },
  });
  try {
    // Made before the migrations, and then migrated: a template may have no connections while it is copied.
    const admin = postgres(server.url("supabase_admin"), { max: 1 });
    await admin`create database ${admin(template)} template postgres owner postgres`;
    await pushMigrations(app, server.url("postgres", template), { PROJECT_URL: "", CRON_SECRET: "" });
    await admin.end();
    const settings: TestPostgres = {
      port,
      adminPassword: new URL(server.url("supabase_admin")).password,
      template,
    };
    const report = await Deno.makeTempFile({ suffix: ".xml" });
    const succeeded = await deno([
      "test",
      "-A",
      "--parallel",
      "--no-check",
      `--junit-path=${report}`,
      ...files,
    ], {
      TEST_POSTGRES: JSON.stringify(settings),
      // Files at once: one more than processors, since tests wait more than they compute.
      DENO_JOBS: String(navigator.hardwareConcurrency + 1),
    });
    const xml = await Deno.readTextFile(report);
    const counts = xml.match(/<testsuites [^>]*tests="(\d+)" failures="(\d+)" errors="(\d+)"/);
    const skipped = xml.split("<skipped/>").length - 1;
    failed = counts ? Number(counts[2]) + Number(counts[3]) : 0;
    passed = counts ? Number(counts[1]) - failed - skipped : 0;
    // Something outside the tests, such as an error that nobody caught.
    if (!succeeded && failed === 0) failed = 1;
    await Deno.remove(report);
  } finally {
    await server.stop();
  }
}
await Deno.remove(app, { recursive: true });
console.log(`${passed} passed, ${failed} failed`);
Deno.exit(failed > 0 || passed === 0 ? 1 : 0);

async function deno(args: string[], env: Record<string, string> = {}): Promise<boolean> {
  const command = new Deno.Command(Deno.execPath(), {
    args,
    cwd: projectDir,
    env,
    stdin: "null",
  });
  return (await command.spawn().status).success;
}
