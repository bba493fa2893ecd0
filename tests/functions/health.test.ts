import assert from "node:assert/strict";
import { startGateway } from "../../scripts/local/gateway.ts";
import { freePort } from "../../scripts/local/ports.ts";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import { cronSecret, startTestStack, type TestStack, until } from "../support.ts";

/**
 * Faults put into a stack that has nothing to do: each shows in job_dispatch_health() with what to do, and is gone from it
 * when it is mended. Times are moved rather than waited for.
 */

const env: Record<string, string> = {};
let stack: TestStack;
let stranger: Deno.HttpServer<Deno.NetAddr>;
let answer: (request: Request) => Response = () => new Response();

Deno.test.beforeAll(async () => {
  stranger = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, (request) => answer(request));
  stack = await startTestStack({
    env,
    // SUPABASE_… are the stack's own, so a wrong one is put in by the function itself.
    prepare: async (appDir) => {
      const path = `${appDir}/supabase/functions/job-worker/index.ts`;
      const key =
        `const key = Deno.env.get("TEST_KEY"); if (key) Deno.env.set("SUPABASE_SECRET_KEYS", key);\n`;
      await Deno.writeTextFile(path, await Deno.readTextFile(path) + key);
    },
  });
  await tickEverySecond();
});
Deno.test.afterAll(async () => {
  await stack[Symbol.asyncDispose]();
  await stranger.shutdown();
});

interface Item {
  ok: boolean | null;
  detail: string;
  todo: string | null;
}

async function ask(name: string): Promise<Item> {
  const [item] = await stack.sql<Item[]>`select * from job_dispatch_health() where item = ${name}`;
  assert(item);
  return item;
}

/** Asks until the item is as told, a minute after whatever was found out before. */
async function untilItem(name: string, ok: boolean, detail = /(?:)/, todo = /(?:)/): Promise<void> {
  await stack.sql`
    update private.pokes set poked_at = poked_at - interval '1 minute'
    where request_id not in (select id from net.http_request_queue)`;
  let last: Item | undefined;
  await until(`${name} ${ok ? "is" : "is not"} ok: ${detail}, ${todo}`, async () => {
    last = await ask(name);
    return last.ok === ok && detail.test(last.detail) && todo.test(last.todo ?? "");
  }).catch((error) => assert.fail(`${error.message}\n${JSON.stringify(last)}`));
}

const setSecrets = (secrets: Record<string, string>) => setVaultSecrets(stack.db.url("postgres"), secrets);

async function tickEverySecond(): Promise<void> {
  await stack.sql`select enable_dispatch()`;
  await stack.sql`select cron.schedule('nightshift_tick', '1 second', 'select private.tick()')`;
}

async function restartWorkerWith(changes: Record<string, string>): Promise<void> {
  Object.assign(env, changes);
  await stack.restart();
}

Deno.test("a stack that nobody has used yet is found to work, by asking twice", async () => {
  const { ok, detail } = await ask("worker");
  assert.deepEqual([ok, detail], [null, "poked just now: ask again in a few seconds"]);
  await untilItem("worker", true, /\(health\).*: 200$/);
  await untilItem("tick", true);
  const rows = await stack.sql`select * from job_dispatch_health() where ok is not true or todo is not null`;
  assert.deepEqual([...rows], []);
});

Deno.test("a secret that differs between Vault and the function shows", async () => {
  await setSecrets({ cron_secret: "another-secret-than-the-one-of-the-functions" });
  await untilItem("worker", false, / 401 /, /differ: set both/);
  await setSecrets({ cron_secret: cronSecret });
  await untilItem("worker", true);
});

Deno.test("a project_url where nobody listens, or that is no address, shows", async () => {
  await setSecrets({ project_url: `http://127.0.0.1:${freePort()}` });
  await untilItem("worker", false, /Could not connect/, /project_url/);
  await setSecrets({ project_url: "http://no-such-host.invalid" });
  await untilItem("worker", false, /Could not resolve/, /project_url/);
  await setSecrets({ project_url: stack.apiUrl });
  await untilItem("worker", true);
});

Deno.test("a project_url where somebody else listens shows, whatever he answers, also that he accepts every poke", async () => {
  const html = { headers: { "Content-Type": "text/html" } };
  const answers: [typeof answer, RegExp, RegExp][] = [
    [() => new Response("<h1>Not Found</h1>", { status: 404, ...html }), / 404 <h1>/, /check project_url/],
    [() => new Response("<h1>It works!</h1>", html), / 200 <h1>/, /not job-worker's answer/],
    [({ url }) => Response.redirect(`${url}/elsewhere`, 301), / 405 /, /project_url.*redirects/],
    [() => Response.json({ accepted: true }, { status: 202 }), / 202 /, /not job-worker's answer/],
  ];
  await setSecrets({ project_url: `http://127.0.0.1:${stranger.addr.port}` });
  for (const [respond, detail, todo] of answers) {
    answer = (request) =>
      request.method === "POST" ? respond(request) : new Response("Use POST", { status: 405 });
    await untilItem("worker", false, detail, todo);
  }
  await setSecrets({ project_url: stack.apiUrl });
  await untilItem("worker", true);
});

Deno.test("a job-worker that is not deployed, or wants a JWT, shows", async () => {
  const deployed = stack.services.functions.sockets;
  for (
    const [functions, jwtFunctions, detail, todo] of [
      [{}, [], / 404 .*NOT_FOUND/, /functions deploy job-worker/],
      [deployed, ["job-worker"], / 401 /, /verify_jwt = false/],
    ] as const
  ) {
    const gateway = await startGateway({
      port: 0,
      databaseUrl: stack.db.url("authenticator"),
      keys: stack.keys,
      functions,
      jwtFunctions: [...jwtFunctions],
    });
    await setSecrets({ project_url: `http://127.0.0.1:${gateway.port}` });
    await untilItem("worker", false, detail, todo);
    await gateway.stop();
  }
  await setSecrets({ project_url: stack.apiUrl });
  await untilItem("worker", true);
});

Deno.test("a function without CRON_SECRET, or with a wrong key to the database's API, shows", async () => {
  await restartWorkerWith({ CRON_SECRET: "" });
  await untilItem("worker", false, / 500 .*Not configured/, /log of the function/);
  await restartWorkerWith({ CRON_SECRET: cronSecret, TEST_KEY: '{"default":"sb_secret_wrong"}' });
  await untilItem("worker", false, / 500 (?!.*Not configured)/, /database's API/);
  await restartWorkerWith({ TEST_KEY: "" });
  await untilItem("worker", true);
});

Deno.test("a database API that refuses a worker which has worked before shows, in the drain's answer too", async () => {
  await stack.sql`revoke execute on function claim_jobs from service_role`;
  const draining = stack.call("drain");
  await untilItem("worker", false, / 500 .*The worker failed/, /database's API/);
  const { status, body } = await draining;
  await body?.cancel();
  assert.equal(status, 500);
  await stack.sql`grant execute on function claim_jobs to service_role`;
  await untilItem("worker", true);
});

Deno.test("a tick that is not scheduled, or paused, shows", async () => {
  await stack.sql`select cron.unschedule('nightshift_tick')`;
  await untilItem("tick", false, /^not scheduled$/, /enable_dispatch/);
  await tickEverySecond();
  await untilItem("tick", true);
  await stack.db.connect("supabase_admin", { max: 1 })`
    select cron.alter_job(jobid, active => false) from cron.job where jobname = 'nightshift_tick'`;
  await untilItem("tick", false, /paused/, /enable_dispatch/);
  await tickEverySecond();
  await untilItem("tick", true);
});

Deno.test("pg_cron and pg_net that have stopped show", async () => {
  const admin = stack.db.connect("supabase_admin", { max: 1 });
  const { pid } = stack.services.players;
  Deno.kill(pid, "SIGSTOP");
  try {
    await stack.sql`update private.pokes set poked_at = poked_at - interval '1 minute' where true`;
    await ask("worker"); // queues a poke
    await stack.sql`update private.pokes set poked_at = poked_at - interval '16 seconds' where true`;
    await untilItem("worker", false, /not sent yet/, /net\.worker_restart/);
    await admin`update cron.job_run_details set start_time = start_time - interval '41 seconds' where true`;
    await untilItem("tick", false, /^last run/, /restart the database/);
  } finally {
    Deno.kill(pid, "SIGCONT");
  }
  await untilItem("worker", true);
  await untilItem("tick", true);
});

Deno.test("what asking sends takes no job", async () => {
  const { sql } = stack;
  await sql`select disable_dispatch()`;
  const [job] = await sql`select enqueue_job('echo') as id`;
  const response = await stack.call("job-worker", { wait: true, kinds: ["nightshift_health"] });
  assert.deepEqual([response.status, await response.json()], [200, { processed: 0, results: [] }]);
  assert.equal((await sql`select from jobs where id = ${job?.id} and attempts = 0`).count, 1);
});
