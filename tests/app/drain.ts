import type { DrainHooks } from "../_schedules/drain.ts";
import { sentryCheckIns } from "../_schedules/monitor.ts";

/** Write what they are told to the file TEST_DRAIN_HOOKS, and then do what the file beside it, `.how`, says. */

const file = Deno.env.get("TEST_DRAIN_HOOKS");

function told(hook: string, ...args: unknown[]): unknown {
  const line = JSON.stringify([hook, ...args.map((arg) => arg instanceof Error ? arg.message : arg)]);
  Deno.writeTextFileSync(file ?? "", `${line}\n`, { append: true });
  const how = Deno.readTextFileSync(`${file}.how`);
  if (how === "throw") throw new Error(`${hook} throws`);
  if (how === "reject") return Promise.reject(new Error(`${hook} rejects`));
  if (how === "hang") return new Promise(() => {});
}

export const drainHooks: DrainHooks = file
  ? {
    onError: (error, job) => told("onError", error, job),
    monitor: {
      started: (drain) => told("started", drain.id),
      finished: (report, drain) => told("finished", drain.id, report),
      failed: (error, drain) => told("failed", drain.id, error),
    },
  }
  : { monitor: sentryCheckIns("drain", { schedule: { type: "interval", value: 1, unit: "minute" } }) };
