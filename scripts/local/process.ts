const STOP_MS = 7_000;

/** SIGTERM, and SIGKILL to what is still there after seven seconds. */
export async function endProcess(child: Deno.ChildProcess): Promise<void> {
  const signal = (name: Deno.Signal) => {
    try {
      child.kill(name);
    } catch {
      // It has ended.
    }
  };
  const timer = setTimeout(() => signal("SIGKILL"), STOP_MS);
  signal("SIGTERM");
  await child.status;
  clearTimeout(timer);
}

/** Calls `onLine` for each line of a process's output, until it ends. */
export async function readLines(
  stream: ReadableStream<Uint8Array>,
  onLine: (line: string) => void,
): Promise<void> {
  let rest = "";
  for await (const text of stream.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop() ?? "";
    lines.forEach(onLine);
  }
  if (rest) onLine(rest);
}
