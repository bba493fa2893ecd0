// The process that plays the background workers of pg_cron and pg_net. Its parent gives it LOCAL_CRON_URL (a
// superuser's, to run jobs as whoever scheduled them), LOCAL_NET_URL (postgres's, as hosted) and a pipe as standard input:
// when that ends, the parent is gone, and so must this be.

import { playCron } from "./cron.ts";
import { playNet } from "./net.ts";

const cronUrl = Deno.env.get("LOCAL_CRON_URL");
const netUrl = Deno.env.get("LOCAL_NET_URL");
if (!cronUrl || !netUrl) {
  console.error(
    "players: LOCAL_CRON_URL or LOCAL_NET_URL is not set. `npm start` sets them; this is not meant to be run by hand.",
  );
  Deno.exit(1);
}

const stopping = new AbortController();
const stop = () => stopping.abort();
Deno.addSignalListener("SIGTERM", stop);
// Ctrl-C in a terminal and its end reach every process of the stack: it is the parent that ends them, in order.
for (const signal of ["SIGINT", "SIGHUP"] as const) Deno.addSignalListener(signal, () => {});
(async () => {
  for await (const _ of Deno.stdin.readable); // nothing is ever sent
  stop();
})();

const options = { signal: stopping.signal, log: (line: string) => console.error(line) };
await Promise.all([playCron({ url: cronUrl, ...options }), playNet({ url: netUrl, ...options })]);
Deno.exit(0); // or the read of standard input would keep the process
