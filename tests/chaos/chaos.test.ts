import assert from "node:assert/strict";
import { describeReport, runChaos } from "./chaos.ts";

/** The short form of `npm run test:chaos`: each process killed once, then the worker again and again. */

Deno.test("whatever process is killed under load, nothing that was acknowledged is lost, nothing is completed twice, and all goes on by itself", async () => {
  const seed = crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
  const lines: string[] = [];
  const startedAt = performance.now();
  const report = await runChaos({
    seed,
    faults: [
      "SIGKILL worker",
      "SIGKILL gateway",
      "SIGKILL cron and net players",
      "SIGKILL a Postgres backend",
      "SIGKILL the postmaster",
      "pg_terminate_backend of all clients",
    ],
    stormSeconds: 10,
    leaseSeconds: 3,
    tickSeconds: 2,
    log: (line) => lines.push(`${((performance.now() - startedAt) / 1000).toFixed(1)} s  ${line}`),
    stackLog: (line) => lines.push(`  ${line}`),
  });
  if (report.problems.length > 0) {
    assert.fail(`seed ${seed}\n${lines.slice(-500).join("\n")}\n${describeReport(report)}`);
  }
  assert(report.enqueued > 100 && report.completed === report.enqueued, describeReport(report));
});
