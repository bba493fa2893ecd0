import { parseArgs } from "node:util";
import { describeReport, runChaos } from "../tests/chaos/chaos.ts";

/** `npm run test:chaos [-- --seconds N --seed S --lease N]`: ten minutes of faults under load, then a report. */

const { values } = parseArgs({
  options: {
    seconds: { type: "string", default: "600" },
    seed: { type: "string", default: String(crypto.getRandomValues(new Uint32Array(1))[0]) },
    lease: { type: "string", default: "6" },
  },
});
const [seconds, seed, lease] = [values.seconds, values.seed, values.lease].map(Number);
if (
  seconds === undefined || seed === undefined || lease === undefined || !(seconds > 0) ||
  !Number.isInteger(seed) ||
  !(Number.isInteger(lease) && lease > 0)
) {
  console.error("--seconds, --seed and --lease take numbers; --lease 60 runs the files as they are shipped.");
  Deno.exit(1);
}

const stopping = new AbortController();
for (const signal of ["SIGINT", "SIGTERM"] as const) {
  Deno.addSignalListener(signal, () => {
    console.log("stopping: the report follows when everything that was enqueued has ended");
    stopping.abort();
  });
}

const stackLog = await Deno.makeTempFile({ prefix: "nightshift-chaos-", suffix: ".log" });
const startedAt = performance.now();
const now = () => `${((performance.now() - startedAt) / 1000).toFixed(1).padStart(6)} s`;
const stormSeconds = Math.min(60, seconds / 4);
console.log(`seed ${seed}, ${seconds} s, a lease of ${lease} s; what the stack prints is in ${stackLog}`);
const report = await runChaos({
  seed,
  faultSeconds: seconds - stormSeconds,
  stormSeconds,
  leaseSeconds: lease,
  signal: stopping.signal,
  log(line) {
    console.log(`${now()}  ${line}`);
    Deno.writeTextFileSync(stackLog, `${now()}  ${line}\n`, { append: true });
  },
  stackLog: (line) => Deno.writeTextFileSync(stackLog, `${now()}    ${line}\n`, { append: true }),
});
console.log(`\n${describeReport(report)}`);
Deno.exit(report.problems.length > 0 ? 1 : 0);
