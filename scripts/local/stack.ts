import postgres from "postgres";
import { join } from "node:path";
import { readEnv, setup } from "../setup.ts";
import { listFunctions, type LocalFunctions, runFunctions } from "./functions.ts";
import type { GatewayOptions, LocalKeys } from "./gateway.ts";
import { localKeys } from "./keys.ts";
import { pushMigrations } from "./migrations.ts";
import { startOutbox } from "./outbox.ts";
import { assertPortFree, portHint, type Ports } from "./ports.ts";
import { startPostgres } from "./postgres.ts";
import { endProcess, readLines } from "./process.ts";

/** The parts of the stack that use the database, and what is needed to reach and to kill them. */
export interface Services {
  apiUrl: string;
  functions: LocalFunctions;
  gateway: Deno.ChildProcess;
  players: Deno.ChildProcess;
  stop(): Promise<void>;
}

export interface ServiceOptions {
  projectDir: string;
  apiPort: number;
  /** Connection string of a role, for the database to serve. */
  databaseUrl: (user: string) => string;
  keys: LocalKeys;
  /** The functions' variables beside SUPABASE_…; read anew when they are reloaded. */
  env: () => Promise<Record<string, string>>;
  watch: boolean;
  log: (line: string) => void;
}

/**
 * Starts the functions, the gateway and the players of pg_cron and pg_net on a database that has its migrations, each in
 * a process of its own. A gateway or player that ends by itself is started again.
 */
export async function startServices(options: ServiceOptions): Promise<Services> {
  const { keys, log } = options;
  const apiUrl = `http://127.0.0.1:${options.apiPort}`;
  const listed = await listFunctions(options.projectDir);
  const functions = await runFunctions({
    projectDir: options.projectDir,
    names: listed.map(({ name }) => name),
    watch: options.watch,
    log,
    env: async () => ({
      ...await options.env(),
      ...platformEnv(apiUrl, options.databaseUrl("postgres"), keys),
    }),
  });
  const gatewayOptions: GatewayOptions = {
    port: options.apiPort,
    databaseUrl: options.databaseUrl("authenticator"),
    keys,
    functions: functions.sockets,
    jwtFunctions: listed.filter(({ verifyJwt }) => verifyJwt).map(({ name }) => name),
  };
  const players = keepRunning("players", {
    LOCAL_CRON_URL: options.databaseUrl("supabase_admin"),
    LOCAL_NET_URL: options.databaseUrl("postgres"),
  }, log);
  const gateway = keepRunning("gateway", { LOCAL_GATEWAY: JSON.stringify(gatewayOptions) }, log);
  const services = {
    apiUrl,
    functions,
    get gateway() {
      return gateway.child();
    },
    get players() {
      return players.child();
    },
    // The functions go first: they give jobs back through the gateway.
    async stop() {
      await players.stop();
      await functions.stop();
      await gateway.stop();
    },
  };
  try {
    await gateway.firstLine;
  } catch (error) {
    await services.stop();
    throw error;
  }
  return services;
}

/** The variables that Supabase gives every function, and the key that signs users' tokens here. */
const platformEnv = (apiUrl: string, databaseUrl: string, keys: LocalKeys) => ({
  SUPABASE_URL: apiUrl,
  SUPABASE_DB_URL: databaseUrl,
  SUPABASE_SECRET_KEYS: JSON.stringify({ default: keys.secretKey }),
  SUPABASE_PUBLISHABLE_KEYS: JSON.stringify({ default: keys.publishableKey }),
  SUPABASE_SERVICE_ROLE_KEY: keys.serviceRoleKey,
  SUPABASE_ANON_KEY: keys.anonKey,
  // Whatever .env has for the hosted project: this API takes no other's signature.
  JWT_SIGNING_KEY: keys.jwtSecret,
});

/** With these, mails go to the outbox. */
const outboxEnv = (mailUrl: string) => ({
  RESEND_API_KEY: "re_local",
  RESEND_BASE_URL: mailUrl,
  EMAIL_FROM: "Nightshift <nightshift@localhost>",
});

/** What functions get from the stack that `npm start` has started for this project; null when none answers. */
export async function runningStackEnv(projectDir: string): Promise<Record<string, string> | null> {
  try {
    const { apiUrl, databaseUrl, mailUrl }: Record<string, string> = JSON.parse(
      await Deno.readTextFile(join(projectDir, ".local/stack.json")),
    );
    await (await fetch(apiUrl, { signal: AbortSignal.timeout(3_000) })).body?.cancel();
    const keys = await localKeys(join(projectDir, ".local/keys.json"));
    return {
      ...platformEnv(apiUrl, databaseUrl, keys),
      ...Deno.env.get("RESEND_API_KEY") ? {} : outboxEnv(mailUrl),
    };
  } catch {
    return null;
  }
}

/** Everything: Postgres, migrations, secrets in Vault, services and the outbox for mails. */
export async function startStack(options: {
  projectDir: string;
  ports: Ports;
  log: (line: string) => void;
}): Promise<
  {
    apiUrl: string;
    databaseUrl: string;
    dataDir: string;
    mailUrl: string;
    keys: LocalKeys;
    /** Connection string of a role, supabase_admin's too. */
    urlOf(user: string): string;
    services: Services;
    stop(): Promise<void>;
  }
> {
  const { projectDir, ports, log } = options;
  assertPortFree(ports, "api");
  assertPortFree(ports, "mail");
  const { cronSecret, written } = await setup(projectDir);
  if (written.length > 0) log(`setup wrote ${written.join(", ")}`);
  await Deno.mkdir(join(projectDir, ".local"), { recursive: true });
  const keys = await localKeys(join(projectDir, ".local/keys.json"));
  const apiUrl = `http://127.0.0.1:${ports.api}`;
  const mailUrl = `http://127.0.0.1:${ports.mail}`;
  const stops: (() => Promise<void>)[] = [];
  const stop = async () => {
    for (const step of stops.splice(0).reverse()) await step();
  };
  try {
    const outbox = startOutbox(ports.mail, log);
    stops.push(() => outbox.stop());
    let hasMigrations = false;
    const startDatabase = () =>
      startPostgres({
        projectDir,
        port: ports.database,
        portHint: portHint("database"),
        // What it says while it starts and is migrated is in the errors that follow; its LOG lines are no news.
        log: (line) => hasMigrations && !line.includes(" LOG: ") && log(`[postgres] ${line}`),
      });
    let database = await startDatabase();
    let stopping = false;
    const keepDatabase = async () => {
      while (true) {
        const { signal, code } = await database.exited;
        if (stopping) return;
        log(`Postgres ended (${signal ?? `exit code ${code}`}); starting it again`);
        await restartDatabase();
      }
    };
    const restartDatabase = async () => {
      for (let delayMs = 500; !stopping; delayMs = Math.min(delayMs * 2, 5_000)) {
        try {
          database = await startDatabase();
          if (stopping) await database.stop();
          return;
        } catch (error) {
          log(
            `Postgres cannot be started, and will be tried again: ${
              error instanceof Error ? error.message : error
            }`,
          );
          await new Promise((resolve) => setTimeout(resolve, delayMs));
        }
      }
    };
    const keeping = keepDatabase();
    stops.push(async () => {
      stopping = true;
      await database.stop();
      await keeping;
    });
    const startingServices = startServices({
      projectDir,
      apiPort: ports.api,
      databaseUrl: (user) => database.url(user),
      keys,
      watch: true,
      log,
      env: async () => {
        const env = await readEnv(join(projectDir, "supabase/functions/.env"));
        return { ...env.RESEND_API_KEY ? {} : outboxEnv(mailUrl), ...env };
      },
    });
    stops.push(() => startingServices.then((services) => services.stop(), () => {}));
    const migrating = pushMigrations(projectDir, database.url("postgres"), {
      PROJECT_URL: apiUrl,
      CRON_SECRET: cronSecret,
    }).then(() =>
      setVaultSecrets(database.url("postgres"), { project_url: apiUrl, cron_secret: cronSecret })
    );
    stops.push(() => migrating.catch(() => {})); // the CLI is not left behind
    const [services] = await Promise.all([startingServices, migrating]);
    hasMigrations = true;
    return {
      apiUrl,
      databaseUrl: database.url("postgres"),
      dataDir: database.dataDir,
      mailUrl,
      keys,
      urlOf: (user) => database.url(user),
      services,
      stop,
    };
  } catch (error) {
    await stop();
    throw error;
  }
}

/** The CLI writes Vault's secrets only when a migration is pending, so a changed port or secret is set here. */
export async function setVaultSecrets(databaseUrl: string, secrets: Record<string, string>): Promise<void> {
  const sql = postgres(databaseUrl, { max: 1, fetch_types: false, onnotice: () => {} });
  try {
    for (const [name, value] of Object.entries(secrets)) {
      const [row] = await sql`select id, decrypted_secret from vault.decrypted_secrets where name = ${name}`;
      if (!row) await sql`select vault.create_secret(${value}, ${name})`;
      else if (row.decrypted_secret !== value) await sql`select vault.update_secret(${row.id}, ${value})`;
    }
  } finally {
    await sql.end();
  }
}

/** Runs scripts/local/<name>.ts in a process of its own, and again whenever it ends by itself. */
function keepRunning(name: string, env: Record<string, string>, log: (line: string) => void) {
  let stopping = false;
  let child = spawn();
  const firstLine = Promise.withResolvers<void>();
  firstLine.promise.catch(() => {}); // not everyone waits for it
  follow(child);
  return { child: () => child, firstLine: firstLine.promise, stop };

  function spawn(): Deno.ChildProcess {
    return new Deno.Command(Deno.execPath(), {
      // The flag: a request's signal then aborts only when the caller has gone.
      args: [
        "run",
        "-A",
        "--quiet",
        "--unstable-no-legacy-abort",
        join(import.meta.dirname ?? ".", `${name}.ts`),
      ],
      env,
      stdin: "piped",
      stdout: "piped",
      stderr: "piped",
    }).spawn();
  }

  function follow(process: Deno.ChildProcess): void {
    const printed: string[] = [];
    const startedAt = performance.now();
    const onError = (line: string) => {
      printed.push(line);
      log(line);
    };
    Promise.all([
      process.status,
      readLines(process.stdout, () => firstLine.resolve()),
      readLines(process.stderr, onError),
    ])
      .then(async ([status]) => {
        firstLine.reject(new Error(`The ${name} does not start:\n${printed.join("\n")}`));
        if (stopping) return;
        log(`${name} ended (${status.signal ?? `exit code ${status.code}`}); starting it again`);
        const soon = performance.now() - startedAt < 1_000;
        await new Promise((resolve) => setTimeout(resolve, soon ? 1_000 : 0));
        if (stopping) return;
        child = spawn();
        follow(child);
      });
  }

  async function stop(): Promise<void> {
    stopping = true;
    await endProcess(child);
  }
}
