import { join } from "node:path";
import { readLines } from "../../scripts/local/process.ts";
import { copyTree, projectDir, shortLease, type TestStack, until } from "../support.ts";

/** `npm run worker` with the kinds of tests/app. */

export const transports = ["rest", "direct"] as const;
export type TransportName = typeof transports[number];

export interface WorkerProcess extends AsyncDisposable {
  pid: number;
  lines: string[];
  status: Promise<Deno.CommandStatus>;
  /** Sends a signal, waits for the end and gives back the exit code. */
  end(signal?: Deno.Signal): Promise<number>;
}

/**
 * For `prepare`: the scripts beside the app, a short lease, a poll every few milliseconds, and a kind, `pause`, that may take
 * more time than an Edge Function has.
 */
export async function withWorker(appDir: string): Promise<void> {
  const kinds = join(appDir, "supabase/functions/_app/kinds.ts");
  const text = await Deno.readTextFile(kinds);
  await Deno.writeTextFile(kinds, text.replace("  pause: {", "$& timeoutMs: 150_000,"));
  await copyTree(join(projectDir, "scripts"), join(appDir, "scripts"));
  for (const file of ["deno.json", "package.json"]) {
    await Deno.copyFile(join(projectDir, file), join(appDir, file));
  }
  await Deno.symlink(join(projectDir, "node_modules"), join(appDir, "node_modules"));
  await shortLease(3, 200, {
    "MIN_IDLE_MS = 1_000": "MIN_IDLE_MS = 20",
    "MAX_IDLE_MS = 30_000": "MAX_IDLE_MS = 50",
    "SUSPECT_PATIENCE_MS = 10_000": "SUSPECT_PATIENCE_MS = 200",
  })(appDir);
}

/** What tells a worker which database is its own, over one of the transports. */
export function databaseEnv(stack: TestStack, transport: TransportName): Record<string, string> {
  return {
    SUPABASE_URL: stack.apiUrl,
    SUPABASE_SECRET_KEYS: JSON.stringify({ default: stack.keys.secretKey }),
    DATABASE_URL: transport === "direct" ? stack.db.url("postgres") : "",
  };
}

/** Starts it in a project's folder with these variables, by its own command unless another is given, and waits until it works. */
export async function startWorker(...given: Parameters<typeof spawnWorker>): Promise<WorkerProcess> {
  const worker = spawnWorker(...given);
  const started = () => worker.lines.some((line) => line.includes('"worker_started"'));
  const ended = worker.status.then(() => {
    if (!started()) throw new Error(`the worker does not start:\n${worker.lines.join("\n")}`);
  });
  await Promise.race([ended, until("the worker to start", started)]);
  return worker;
}

/** The same, whatever comes of it. */
export function spawnWorker(
  { appDir }: { appDir: string },
  env: Record<string, string>,
  args: string[] = [],
  [command = "", ...before]: string[] = [Deno.execPath(), "run", "-A", "--quiet", "scripts/worker.ts"],
): WorkerProcess {
  const child = new Deno.Command(command, {
    args: [...before, ...args],
    cwd: appDir,
    env: { ...env, NO_COLOR: "1" },
    stdin: "null",
    stdout: "piped",
    stderr: "piped",
  }).spawn();
  const lines: string[] = [];
  const print = (line: string) => void lines.push(line);
  let isOver = false;
  const status = Promise.all([child.status, readLines(child.stdout, print), readLines(child.stderr, print)])
    .then(([status]) => status).finally(() => isOver = true);
  const worker: WorkerProcess = {
    pid: child.pid,
    lines,
    status,
    async end(signal = "SIGTERM") {
      if (!isOver) child.kill(signal);
      return (await status).code;
    },
    async [Symbol.asyncDispose]() {
      await worker.end("SIGKILL");
    },
  };
  return worker;
}
