import { join } from "node:path";
import { freePort } from "../../scripts/local/ports.ts";
import { projectDir, templateMigrations, until } from "../support.ts";

/** A copy of the project as a person clones it, but for the installed packages, which it shares. */
export interface Clone extends AsyncDisposable {
  dir: string;
  env: Record<string, string>;
  /** Starts `npm start` in a process group of its own, and waits until it prints `ready`. */
  start(): Promise<Start>;
  /** Runs a command line in a shell until it ends. */
  run(command: string, env?: Record<string, string>): Promise<{ code: number; output: string }>;
}

export interface Start {
  output: () => string;
  /** Ctrl-C is a SIGINT to all, the end of the terminal a SIGHUP to all, a kill a SIGTERM to npm. Resolves when all is gone. */
  end(signal: "SIGINT" | "SIGHUP" | "SIGTERM"): Promise<void>;
  /** The process that supervises the stack. */
  supervisor(): Promise<number>;
}

export async function makeClone(): Promise<Clone> {
  const dir = await Deno.makeTempDir({ prefix: "nightshift-clone-" });
  const files = await new Deno.Command("git", {
    args: ["ls-files", "--cached", "--others", "--exclude-standard"],
    cwd: projectDir,
  }).output();
  const migrations = (await templateMigrations()).map((path) => `supabase/${path}`);
  for (const file of new TextDecoder().decode(files.stdout).trim().split("\n")) {
    if (file.startsWith("supabase/migrations/") && !migrations.includes(file)) continue; // an app's own
    await Deno.mkdir(join(dir, file, ".."), { recursive: true });
    await Deno.copyFile(join(projectDir, file), join(dir, file)).catch((error) => {
      if (!(error instanceof Deno.errors.NotFound)) throw error; // deleted, but not yet committed
    });
  }
  await Deno.symlink(join(projectDir, "node_modules"), join(dir, "node_modules"));
  const env = {
    LOCAL_API_PORT: String(freePort()),
    LOCAL_DB_PORT: String(freePort()),
    LOCAL_MAIL_PORT: String(freePort()),
  };
  const started: Deno.ChildProcess[] = [];
  let dataDir: string | undefined;

  async function start(): Promise<Start> {
    const child = new Deno.Command("npm", {
      args: ["start"],
      cwd: dir,
      env,
      detached: true,
      stdin: "null",
      stdout: "piped",
      stderr: "piped",
    }).spawn();
    started.push(child);
    let output = "";
    const collect = async (stream: ReadableStream<Uint8Array>) => {
      for await (const text of stream.pipeThrough(new TextDecoderStream())) output += text;
    };
    const ended = Promise.all([child.status, collect(child.stdout), collect(child.stderr)]);
    let isOver = false;
    ended.then(() => isOver = true);
    await until(`npm start to be ready`, () => {
      if (isOver) throw new Error(`npm start ended:\n${output}`);
      return /^ready$/m.test(output);
    }, 60_000);
    dataDir = JSON.parse(await Deno.readTextFile(join(dir, ".local/stack.json"))).dataDir;
    return {
      output: () => output,
      async end(signal) {
        Deno.kill(signal === "SIGTERM" ? child.pid : -child.pid, signal);
        await until("every process to end", async () => (await processes(dir, dataDir ?? dir)).length === 0);
        await ended;
      },
      async supervisor() {
        const pids = await processes(join(dir, "scripts/start.ts"));
        const deno = pids.find(({ command }) => !command.includes("run.mjs"));
        if (!deno) throw new Error("there is no supervisor");
        return deno.pid;
      },
    };
  }

  return {
    dir,
    env,
    start,
    async run(command, more = {}) {
      const { code, stdout, stderr } = await new Deno.Command("sh", {
        args: ["-c", command],
        cwd: dir,
        env: { ...env, ...more },
        stdin: "null",
      }).output();
      return { code, output: new TextDecoder().decode(stdout) + new TextDecoder().decode(stderr) };
    },
    async [Symbol.asyncDispose]() {
      for (const { pid } of started) {
        try {
          Deno.kill(-pid, "SIGKILL");
        } catch {
          // It has ended.
        }
      }
      for (const { pid } of await processes(dir, dataDir ?? dir)) Deno.kill(pid, "SIGKILL");
      await Deno.remove(dir, { recursive: true });
      // As root the data is not in the clone.
      if (dataDir?.startsWith("/var/lib/nightshift/")) {
        await Deno.remove(join(dataDir, "../.."), { recursive: true }).catch(() => {});
      }
    },
  };
}

/** The processes whose command line contains one of these. */
export async function processes(...parts: string[]): Promise<{ pid: number; command: string }[]> {
  const { stdout } = await new Deno.Command("ps", { args: ["-eww", "-o", "pid=,command="] }).output();
  return new TextDecoder().decode(stdout).split("\n")
    .map((line) => ({ pid: parseInt(line), command: line.trim().replace(/^\d+\s+/, "") }))
    .filter(({ command }) => parts.some((part) => command.includes(part)));
}
