import postgres from "postgres";
import { join } from "node:path";
import { runFunctions } from "../scripts/local/functions.ts";
import type { LocalKeys } from "../scripts/local/gateway.ts";
import { makeKeys } from "../scripts/local/keys.ts";
import { freePort } from "../scripts/local/ports.ts";
import { type Services, setVaultSecrets, startServices } from "../scripts/local/stack.ts";

/** What the tests share: databases of their own, and the services on top of one. */

export const projectDir = join(import.meta.dirname ?? ".", "..");

/** Which Postgres `npm test` has started for the tests, and what it made from the migrations. */
export interface TestPostgres {
  port: number;
  adminPassword: string;
  template: string;
}

export interface TestDatabase extends AsyncDisposable {
  /** As postgres, the owner, over up to 10 connections. */
  sql: postgres.Sql;
  url(user: string): string;
  /** A client of its own, as another role or with other options. */
  connect(user?: string, options?: postgres.Options<Record<string, never>>): postgres.Sql;
}

function testPostgres(): TestPostgres {
  const text = Deno.env.get("TEST_POSTGRES");
  if (!text) {
    throw new Error(
      "Tests need the Postgres that npm test starts: npm test -- tests/database/claim_jobs.test.ts",
    );
  }
  return JSON.parse(text);
}

/** A new database with all migrations, which is dropped when it goes out of scope: `await using db = …`. */
export async function createDatabase(): Promise<TestDatabase> {
  const { port, adminPassword, template } = testPostgres();
  const name = `test_${crypto.randomUUID().replaceAll("-", "")}`;
  const url = (user: string, database = name) =>
    `postgresql://${user}:${
      user === "supabase_admin" ? adminPassword : "postgres"
    }@127.0.0.1:${port}/${database}`;
  const admin = postgres(url("supabase_admin", "postgres"), { max: 1, onnotice: () => {} });
  await admin`create database ${admin(name)} template ${admin(template)} owner postgres`;
  const clients: postgres.Sql[] = [];
  const connect: TestDatabase["connect"] = (user = "postgres", options = {}) => {
    const client = postgres(url(user), { onnotice: () => {}, max: 10, ...options });
    clients.push(client);
    return client;
  };
  return {
    sql: connect(),
    url,
    connect,
    async [Symbol.asyncDispose]() {
      await Promise.all(clients.map((client) => client.end({ timeout: 1 })));
      await admin`drop database ${admin(name)} with (force)`;
      await admin.end();
    },
  };
}

export const cronSecret = "a-secret-that-only-the-tests-of-this-project-use";

export interface TestStack extends AsyncDisposable {
  db: TestDatabase;
  sql: postgres.Sql;
  services: Services;
  apiUrl: string;
  keys: LocalKeys;
  /** The app's folder: a copy of this project's supabase folder whose _app is tests/app. */
  appDir: string;
  /** What the services and functions printed. */
  lines: string[];
  /** POST to a function with CRON_SECRET. */
  call(name: string, body?: unknown, headers?: HeadersInit): Promise<Response>;
  /** The process of a function, job-worker's unless named; fails when it does not run. */
  pid(name?: string): number;
  /** Waits until a function has another process than that. */
  untilRestarted(pid: number, name?: string): Promise<void>;
  /** Ends a function's process, and waits until another has taken its place, with the variables as they are now. */
  restart(signal?: Deno.Signal, name?: string): Promise<void>;
}

export interface StackOptions {
  /** The functions' variables beside CRON_SECRET; read anew when a function is started again. */
  env?: Record<string, string>;
  /** False: Vault has no secrets, so that only the test itself starts a worker. */
  dispatch?: boolean;
  /** The folder whose kinds and handlers are used; tests/app unless given. */
  app?: string;
  /** Changes the copy of the app before anything starts. */
  prepare?: (appDir: string) => Promise<void>;
}

/** The whole stack but Postgres, on free ports, for one test file: gateway, players and functions with the kinds of tests/app. */
export async function startTestStack(
  options: StackOptions = {},
): Promise<TestStack> {
  const db = await createDatabase();
  const apiPort = freePort();
  const keys = await makeKeys();
  const appDir = await makeApp(options.app);
  await options.prepare?.(appDir);
  const lines: string[] = [];
  if (options.dispatch !== false) {
    await setVaultSecrets(db.url("postgres"), {
      project_url: `http://127.0.0.1:${apiPort}`,
      cron_secret: cronSecret,
    });
  }
  // cron.job names the database that it was made in, which is the template.
  await db.sql`select disable_dispatch()`;
  await db.sql`select enable_dispatch()`;
  const services = await startServices({
    projectDir: appDir,
    apiPort,
    databaseUrl: db.url,
    keys,
    env: () => Promise.resolve({ CRON_SECRET: cronSecret, ...options.env }),
    watch: false,
    log: (line) => lines.push(line),
  });
  const pid = (name = "job-worker") => {
    const found = services.functions.pid(name);
    if (!found) throw new Error(`${name} does not run`);
    return found;
  };
  const untilRestarted = async (pid: number, name = "job-worker") => {
    await until(`another ${name}`, () => ![undefined, pid].includes(services.functions.pid(name)));
  };
  return {
    db,
    sql: db.sql,
    services,
    pid,
    untilRestarted,
    async restart(signal = "SIGKILL", name) {
      const old = pid(name);
      Deno.kill(old, signal);
      await untilRestarted(old, name);
    },
    apiUrl: services.apiUrl,
    keys,
    appDir,
    lines,
    call: (name, body = {}, headers = {}) =>
      fetch(`${services.apiUrl}/functions/v1/${name}`, {
        method: "POST",
        headers: { Authorization: `Bearer ${cronSecret}`, "Content-Type": "application/json", ...headers },
        body: JSON.stringify(body),
      }),
    async [Symbol.asyncDispose]() {
      await services.stop();
      await db[Symbol.asyncDispose]();
      await Deno.remove(appDir, { recursive: true });
    },
  };
}

export interface TestFunction extends AsyncDisposable {
  /** Calls it with a path below its name. */
  fetch(path: string, init?: RequestInit): Promise<Response>;
  /** The unix socket where it listens. */
  socket: string;
  lines: string[];
}

/** One function by itself, without gateway or database; one that `prepare` writes into the copy of the app, too. */
export async function startFunction(
  name: string,
  env: Record<string, string>,
  prepare?: StackOptions["prepare"],
): Promise<TestFunction> {
  const appDir = await makeApp();
  await prepare?.(appDir);
  const lines: string[] = [];
  const functions = await runFunctions({
    projectDir: appDir,
    names: [name],
    env: () => Promise.resolve(env),
    watch: false,
    log: (line) => lines.push(line),
  });
  const socket = functions.sockets[name] ?? "";
  const client = Deno.createHttpClient({ proxy: { transport: "unix", path: socket }, poolMaxIdlePerHost: 0 });
  return {
    socket,
    fetch: (path, init = {}) => fetch(`http://localhost/${name}${path}`, { client, ...init }),
    lines,
    async [Symbol.asyncDispose]() {
      client.close();
      await functions.stop();
      await Deno.remove(appDir, { recursive: true });
    },
  };
}

/**
 * A temporary project of the template's own migrations and functions, with tests/app (or `app`) as its _app: what an app
 * adds to the template is not in it. Returns the project's folder.
 */
export async function makeApp(app = "tests/app"): Promise<string> {
  const dir = await Deno.makeTempDir({ prefix: "nightshift-app-" });
  const functions = ["_shared", "_schedules", "_webhooks", "job-worker", "webhook-inbox", "drain"].map((
    name,
  ) => `functions/${name}`);
  for (const path of functions) {
    await copyTree(join(projectDir, "supabase", path), join(dir, "supabase", path));
  }
  for (const path of ["config.toml", "functions/deno.json", ...await templateMigrations()]) {
    await Deno.mkdir(join(dir, "supabase/migrations"), { recursive: true });
    await Deno.copyFile(join(projectDir, "supabase", path), join(dir, "supabase", path));
  }
  await copyTree(join(projectDir, app), join(dir, "supabase/functions/_app"));
  return dir;
}

/** The template's migrations, below supabase: an app's own have later dates. */
export async function templateMigrations(): Promise<string[]> {
  const files = await Array.fromAsync(Deno.readDir(join(projectDir, "supabase/migrations")));
  return files.map(({ name }) => `migrations/${name}`).filter((path) =>
    path.startsWith("migrations/20260101")
  ).sort();
}

/** Copies a folder's files over those of another, but for hidden ones. */
export async function copyTree(from: string, to: string): Promise<void> {
  await Deno.mkdir(to, { recursive: true });
  for await (const { name, isDirectory } of Deno.readDir(from)) {
    if (name.startsWith(".")) continue;
    if (isDirectory) await copyTree(join(from, name), join(to, name));
    else await Deno.copyFile(join(from, name), join(to, name));
  }
}

/**
 * For `prepare`: the same engine with a shorter lease and a quicker heartbeat, so that nobody has to wait a minute for a
 * lease to end. Throws when worker.ts no longer has the two constants, or one of `more`.
 */
export function shortLease(
  seconds: number,
  heartbeatMs: number,
  more: Record<string, string> = {},
): (appDir: string) => Promise<void> {
  return (appDir) =>
    changeConstants(appDir, "_shared/worker.ts", {
      "LEASE_SECONDS = 60": `LEASE_SECONDS = ${seconds}`,
      "HEARTBEAT_MS = 20_000": `HEARTBEAT_MS = ${heartbeatMs}`,
      ...more,
    });
}

/** For `prepare`: other values for constants of a file below supabase/functions. Throws when it no longer has one of them. */
export async function changeConstants(
  appDir: string,
  file: string,
  changes: Record<string, string>,
): Promise<void> {
  const path = join(appDir, "supabase/functions", file);
  let text = await Deno.readTextFile(path);
  for (const [from, to] of Object.entries(changes)) {
    if (!text.includes(`const ${from};`)) throw new Error(`${file} has no "const ${from};"`);
    text = text.replace(`const ${from};`, `const ${to};`);
  }
  await Deno.writeTextFile(path, text);
}

/** A generator of numbers from 0 to 1 that gives the same ones for the same seed (mulberry32). */
export function seeded(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Enqueues jobs by a plain insert, due at once; their ids in order. */
export async function insertJobs(
  { sql }: TestStack,
  kind: string,
  payload: Record<string, string | number>,
  count = 1,
): Promise<string[]> {
  const rows = await sql`
    insert into jobs (kind, payload) select ${kind}, ${sql.json(payload)}
    from generate_series(1, ${count}) returning id`;
  return rows.map(({ id }) => id);
}

/** Status and attempts of jobs, such as "succeeded 1", in the order of their ids. */
export async function states({ sql }: TestStack, ids: string[]): Promise<string[]> {
  const rows = await sql`select status, attempts from jobs where id = any(${ids}) order by id`;
  return rows.map(({ status, attempts }) => `${status} ${attempts}`);
}

/** Waits until all of these jobs are in that state. */
export async function untilStates(stack: TestStack, ids: string[], state: string): Promise<void> {
  await until(
    `${ids.length} jobs to be ${state}`,
    async () => (await states(stack, ids)).every((one) => one === state),
  );
}

/** The lines that handlers have written to a file; none while it is not there. */
export async function linesOf(file: string): Promise<string[]> {
  const text = await Deno.readTextFile(file).catch(() => "");
  return text.split("\n").slice(0, -1);
}

/** Waits until handlers have written that many lines to a file. */
export async function untilLines(file: string, count: number): Promise<void> {
  await until(`${count} lines in ${file}`, async () => (await linesOf(file)).length >= count);
}

/**
 * Tests that wait for time to pass: all of them begin when the first one does, so that a file takes as long as the longest.
 * Each owns its data as any other, and also whatever it stops or kills.
 */
export function sideBySide(tests: Record<string, () => Promise<void>>): void {
  let begun: Map<string, Promise<void>> | undefined;
  for (const name of Object.keys(tests)) {
    Deno.test(name, async () => {
      begun ??= new Map(
        Object.entries(tests).map(([name, run]) => {
          const running = run();
          running.catch(() => {}); // its own test says so
          return [name, running];
        }),
      );
      await begun.get(name);
    });
  }
}

/** Waits until `condition` gives something truthy, and gives it back. Throws naming `what` after `timeoutMs`. */
export async function until<T>(
  what: string,
  condition: () => Promise<T | false | null | undefined> | T | false | null | undefined,
  timeoutMs = 15_000,
): Promise<T> {
  for (const deadline = performance.now() + timeoutMs;;) {
    const value = await condition();
    if (value) return value;
    if (performance.now() > deadline) throw new Error(`waited ${timeoutMs} ms in vain for: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
