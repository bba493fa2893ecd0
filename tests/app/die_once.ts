/** Ends this process as nothing can catch it, unless it has done so before: then the file `<file>.died` is there. */
export function dieOnce(file: string): void {
  try {
    Deno.writeTextFileSync(`${file}.died`, "", { createNew: true });
  } catch (error) {
    if (error instanceof Deno.errors.AlreadyExists) return;
    throw error;
  }
  Deno.kill(Deno.pid, "SIGKILL");
}
