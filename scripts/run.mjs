// What every npm script starts with, on plain Node.js: installs what is missing, then hands over to a TypeScript file
// under Deno. JavaScript, because Node.js 20 runs nothing else.

import { spawn, spawnSync } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const project = join(dirname(fileURLToPath(import.meta.url)), "..");
const [script, ...args] = process.argv.slice(2);
const wanted = JSON.parse(readFileSync(join(project, "package.json"), "utf8")).devDependencies;

const installed = Object.entries(wanted).every(([name, version]) => {
  const manifest = join(project, "node_modules", name, "package.json");
  return existsSync(manifest) && JSON.parse(readFileSync(manifest, "utf8")).version === version;
});
if (!installed) {
  console.error("Installing what is missing (npm ci) …");
  // Scripts are held back on purpose: nothing here needs them, and whether npm runs them differs from place to place.
  const { status } = spawnSync("npm", ["ci", "--ignore-scripts", "--no-audit", "--no-fund"], {
    cwd: project,
    stdio: ["ignore", 2, 2],
    shell: process.platform === "win32",
  });
  if (status !== 0) {
    console.error("npm ci failed; its message is above. Mend that and start again.");
    process.exit(1);
  }
}

const child = spawn(denoBinary(), ["run", "-A", "--quiet", join(project, script), ...args], {
  stdio: "inherit",
});
// Ctrl-C reaches the child as well: it shuts down and this process waits for it. Other signals are passed on.
process.on("SIGINT", () => {});
let told = false;
for (const signal of ["SIGTERM", "SIGHUP"]) {
  process.on(signal, () => {
    told = true;
    child.kill(signal);
  });
}
// npm leaves this process behind when it is killed, and would leave the stack with it. (package.json says `exec`: this is
// npm's own child then, and not that of a shell which outlives npm.)
const parent = process.ppid;
setInterval(() => {
  if (process.ppid === parent || told) return;
  told = true;
  child.kill("SIGTERM");
}, 500).unref();
child.on("exit", (code, signal) => {
  // Such as by the kernel, for want of memory: the child itself could not say so.
  if (signal) console.error(`${script} was ended by ${signal}.`);
  process.exit(signal ? 1 : code);
});

/** The package's own launcher would be one more process between the terminal's signals and Deno. */
function denoBinary() {
  const platform = process.platform === "linux"
    ? `linux-${process.arch}-glibc`
    : `${process.platform}-${process.arch}`;
  const file = process.platform === "win32" ? "deno.exe" : "deno";
  try {
    const require = createRequire(join(project, "node_modules/deno/package.json"));
    return join(dirname(require.resolve(`@deno/${platform}/package.json`)), file);
  } catch {
    console.error(`There is no Deno for ${platform} in node_modules: delete node_modules and start again.`);
    process.exit(1);
  }
}
