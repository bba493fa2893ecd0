import { join } from "node:path";
import { endProcess, readLines } from "./process.ts";

export interface LocalFunctions {
  /** Unix socket by function name, for the gateway. */
  sockets: Record<string, string>;
  /** The process of a function, for tests that kill it. */
  pid(name: string): number | undefined;
  stop(): Promise<void>;
}

/**
 * The project's Edge Functions, and whether each wants a JWT: every folder with an index.ts that does not start with _. As
 * the CLI has it, a function wants one unless config.toml says `verify_jwt = false` for it.
 */
export async function listFunctions(projectDir: string): Promise<{ name: string; verifyJwt: boolean }[]> {
  const functionsDir = join(projectDir, "supabase/functions");
  const config = await Deno.readTextFile(join(projectDir, "supabase/config.toml"));
  const found: { name: string; verifyJwt: boolean }[] = [];
  for await (const { name, isDirectory } of Deno.readDir(functionsDir)) {
    if (!isDirectory || /^[_.]/.test(name)) continue;
    if (!await Deno.stat(join(functionsDir, name, "index.ts")).then(() => true, () => false)) continue;
    const section = config.split(/^(?=\s*\[)/m).find((part) =>
      part.trimStart().startsWith(`[functions.${name}]`)
    );
    found.push({ name, verifyJwt: !/^\s*verify_jwt\s*=\s*false\b/m.test(section ?? "") });
  }
  return found;
}

interface RunOptions {
  projectDir: string;
  names: string[];
  /** Read anew at every (re)start. */
  env: () => Promise<Record<string, string>>;
  /** Restart when a file under supabase/functions changes. */
  watch: boolean;
  log: (line: string) => void;
}

const START_MS = 30_000;
/** A function that ends by itself is started again after this, doubled each time up to five seconds. */
const RESTART_MS = 100;

/**
 * Runs each Edge Function in a Deno process of its own, behind a unix socket, from the very files that are deployed.
 * Resolves when all of them listen; throws with Deno's message when one does not compile. Later, one that ends by itself
 * is started again, and a change that does not compile is reported and waits for the next change.
 */
export async function runFunctions(options: RunOptions): Promise<LocalFunctions> {
  const { projectDir, names, log } = options;
  const functionsDir = join(projectDir, "supabase/functions");
  // Short, since a socket's path may have about a hundred characters; and only for us.
  const socketDir = await Deno.makeTempDir({ prefix: "nightshift-" });
  const sockets = Object.fromEntries(names.map((name) => [name, join(socketDir, name)]));
  const running = new Map<string, Deno.ChildProcess>();
  const stopping = new AbortController();
  let generation = 0;

  /** Starts one function; resolves when it listens, rejects with what it printed when it ends before that. */
  async function start(name: string): Promise<void> {
    const mine = generation;
    const socket = sockets[name] ?? "";
    await Deno.remove(socket).catch(() => {});
    const env = await options.env();
    if (mine !== generation) return;
    const child = new Deno.Command(Deno.execPath(), {
      args: [
        "run",
        "--allow-all",
        "--no-prompt",
        "--config",
        join(functionsDir, "deno.json"),
        "--preload",
        join(import.meta.dirname ?? ".", "edge_runtime.ts"),
        join(functionsDir, name, "index.ts"),
      ],
      env: { ...env, DENO_SERVE_ADDRESS: `unix:${socket}`, NO_COLOR: "1" },
      stdin: "piped",
      stdout: "piped",
      stderr: "piped",
    }).spawn();
    running.set(name, child);

    const printed: string[] = [];
    let isListening = false;
    await new Promise<void>((resolve, reject) => {
      const timer = setTimeout(() => {
        child.kill("SIGKILL");
        reject(
          new Error(
            `The function ${name} did not listen within ${START_MS / 1000} s:\n${printed.join("\n")}`,
          ),
        );
      }, START_MS);
      const onLine = (line: string) => {
        if (!isListening && line.startsWith("Listening on ")) {
          isListening = true;
          clearTimeout(timer);
          return resolve();
        }
        if (isListening) log(`[${name}] ${line}`);
        else printed.push(line);
      };
      Promise.all([child.status, readLines(child.stdout, onLine), readLines(child.stderr, onLine)]).then(
        ([status]) => {
          if (running.get(name) === child) running.delete(name);
          clearTimeout(timer);
          reject(new Error(`The function ${name} does not start:\n${printed.join("\n")}`));
          if (isListening && mine === generation && !stopping.signal.aborted) {
            log(`[${name}] ended (${status.signal ?? `exit code ${status.code}`}); starting it again`);
            restart(name, mine, RESTART_MS);
          }
        },
      );
    });
  }

  async function restart(name: string, mine: number, delayMs: number): Promise<void> {
    await new Promise((resolve) => setTimeout(resolve, delayMs));
    if (mine !== generation || stopping.signal.aborted) return;
    await start(name).catch((error) => {
      log(error.message);
      restart(name, mine, Math.min(delayMs * 2, 5_000));
    });
  }

  async function stopAll(): Promise<void> {
    generation++;
    await Promise.all([...running.values()].map(endProcess));
  }

  async function reloadOnChange(): Promise<void> {
    const watcher = Deno.watchFs(functionsDir);
    stopping.signal.addEventListener("abort", () => watcher.close());
    let timer: ReturnType<typeof setTimeout> | undefined;
    for await (const event of watcher) {
      if (event.kind === "access" || event.kind === "other") continue;
      clearTimeout(timer);
      timer = setTimeout(async () => {
        if (stopping.signal.aborted) return;
        log("supabase/functions changed: reloading");
        const stopped = stopAll();
        const mine = generation;
        await stopped;
        if (mine !== generation) return; // changed again, or stopped
        for (const name of names) start(name).catch((error) => log(error.message));
      }, 150);
    }
  }

  const stop = async () => {
    stopping.abort();
    await stopAll();
    await Deno.remove(socketDir, { recursive: true }).catch(() => {});
  };
  try {
    await Promise.all(names.map(start));
  } catch (error) {
    await stop();
    throw error;
  }
  if (options.watch) reloadOnChange().catch((error) => log(`Changes are not seen: ${error.message}`));
  return { sockets, pid: (name) => running.get(name)?.pid, stop };
}
