import postgres from "postgres";
import { join } from "node:path";
import type { startStack } from "../../scripts/local/stack.ts";
import { until } from "../support.ts";

/** What production does to a stack, one thing at a time. */

export interface Fault {
  name: string;
  /** Resolves when it is over, and may say something about it. */
  strike(stack: Stack, leaseSeconds: number): Promise<string | void>;
  /** Recovery counts from the end: meanwhile nothing can go on. */
  fromItsEnd?: true;
}

export type Stack = Awaited<ReturnType<typeof startStack>>;

export const faults: Fault[] = [
  { name: "SIGKILL worker", strike: killWorker },
  {
    name: "SIGTERM worker",
    async strike(stack) {
      const pid = await workerPid(stack);
      Deno.kill(pid, "SIGTERM");
      await until("the worker to end", () => stack.services.functions.pid("job-worker") !== pid);
    },
  },
  {
    name: "SIGSTOP worker, longer than the lease",
    strike: async (stack, leaseSeconds) => await freeze(await workerPid(stack), leaseSeconds + 2),
    fromItsEnd: true, // the local stack has no other process for it
  },
  {
    name: "SIGKILL gateway",
    strike: (stack) => kill("the gateway", () => stack.services.gateway.pid),
  },
  { name: "SIGSTOP gateway for 5 s", strike: (stack) => freeze(stack.services.gateway.pid, 5) },
  {
    name: "SIGKILL cron and net players",
    strike: (stack) => kill("the players", () => stack.services.players.pid),
  },
  {
    name: "SIGKILL a Postgres backend",
    strike: (stack) =>
      asAdmin(stack, (admin) =>
        kill("a backend", async () => {
          const [row] = await admin`
            select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()
            order by state = 'active' desc, random() limit 1`;
          return Number(row?.pid);
        })),
  },
  {
    name: "SIGKILL the postmaster",
    strike: (stack) =>
      kill("the postmaster", () => parseInt(Deno.readTextFileSync(join(stack.dataDir, "postmaster.pid")))),
  },
  { name: "pg_terminate_backend of all clients", strike: (stack) => asAdmin(stack, endConnections) },
  { name: "connection limit full for 5 s", strike: fillConnections, fromItsEnd: true },
  {
    name: "running jobs' rows locked for 3 s",
    strike: (stack) =>
      holding(stack, async (sql) => {
        const count = await until(
          "running jobs",
          async () => (await sql`select from jobs where status = 'running' for update`).count,
        );
        return `${count} rows`;
      }),
    fromItsEnd: true,
  },
  {
    name: "table jobs locked for 3 s",
    strike: (stack) =>
      holding(stack, async (sql) => void await sql`lock table jobs in access exclusive mode`),
    fromItsEnd: true,
  },
];

/** The worker's process ends as nothing can catch it. */
export async function killWorker(stack: Stack): Promise<void> {
  Deno.kill(await workerPid(stack), "SIGKILL");
}

const workerPid = (stack: Stack) =>
  until("a worker's process", () => stack.services.functions.pid("job-worker"));

export const sleep = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

/** Kills what this names, as soon as it is there. */
async function kill(what: string, findPid: () => number | Promise<number>): Promise<void> {
  await until(what, async () => {
    try {
      const pid = await findPid();
      if (!(pid > 1)) return false; // 0 would be this process and its kin
      Deno.kill(pid, "SIGKILL");
      return true;
    } catch (error) {
      if (error instanceof Deno.errors.NotFound) return false;
      throw error;
    }
  });
}

async function freeze(pid: number, seconds: number): Promise<void> {
  Deno.kill(pid, "SIGSTOP");
  await sleep(seconds * 1000);
  Deno.kill(pid, "SIGCONT");
}

/** As a superuser, for whom Postgres keeps connections free, though not while others are being refused. */
async function asAdmin<T>(stack: Stack, run: (admin: postgres.Sql) => Promise<T>): Promise<T> {
  const admin = postgres(stack.urlOf("supabase_admin"), { max: 1, backoff: () => 0.2, onnotice: () => {} });
  try {
    await until("a superuser's connection", () => admin`select 1`.then(() => true, () => false));
    return await run(admin);
  } finally {
    await admin.end({ timeout: 1 });
  }
}

async function endConnections(admin: postgres.Sql): Promise<string> {
  const { count } = await admin`
    select pg_terminate_backend(pid) from pg_stat_activity
    where backend_type = 'client backend' and pid <> pg_backend_pid() and application_name <> 'chaos: in the way'`;
  return `${count} connections`;
}

/** Takes every connection there is, the ones of the stack too, and keeps them. */
async function fillConnections(stack: Stack): Promise<string> {
  const end = performance.now() + 6_000;
  const others = postgres(stack.urlOf("postgres"), {
    max: 300,
    fetch_types: false,
    backoff: () => 0.2,
    connection: { application_name: "chaos: in the way" },
  });
  const taking = Array.from({ length: 300 }, async () => {
    while (performance.now() < end) {
      await others`select pg_sleep(${(end - performance.now()) / 1000})`.catch(() => sleep(1_000));
    }
  });
  await sleep(1_000);
  const said = await asAdmin(stack, async (admin) => {
    await endConnections(admin);
    await sleep(2_500);
    const rows = await admin`
      select current_setting('max_connections') as most, count(*) filter (where application_name like 'chaos: %') as taken
      from pg_stat_activity where backend_type = 'client backend'`;
    return `${rows[0]?.taken} of ${rows[0]?.most} taken`;
  });
  await Promise.all(taking);
  await others.end({ timeout: 1 });
  return said;
}

/** Holds a lock for three seconds. */
async function holding(
  stack: Stack,
  lock: (sql: postgres.TransactionSql) => Promise<string | void>,
): Promise<string | void> {
  const sql = postgres(stack.urlOf("postgres"), { max: 1, onnotice: () => {} });
  try {
    return await sql.begin(async (transaction) => {
      const said = await lock(transaction);
      await sleep(3_000);
      return said;
    });
  } finally {
    await sql.end({ timeout: 1 });
  }
}
