import assert from "node:assert/strict";
import { join } from "node:path";
import {
  insertJobs,
  linesOf,
  startTestStack,
  states,
  type TestStack,
  until,
  untilLines,
  untilStates,
} from "../support.ts";
import {
  databaseEnv,
  spawnWorker,
  startWorker,
  transports,
  withWorker,
} from "../functions/worker_process.ts";

/** `npm run worker` as a process: how it ends, and what it outlives. What it does with jobs is in promises.test.ts. */

let stack: TestStack;
Deno.test.beforeAll(async () => {
  stack = await startTestStack({ dispatch: false, prepare: withWorker });
  await stack.sql`select cron.unschedule('nightshift_tick')`;
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

let files = 0;
const newFile = () => join(stack.appDir, `lines-${++files}`);

/** Deletes jobs, so that no later worker takes them. */
const remove = (ids: string[]) => stack.sql`delete from jobs where id = any(${ids})`;

/** A door to the database that can be shut, as while it restarts, or left open with nobody behind it. */
function openDoor(databaseUrl: string) {
  const url = new URL(databaseUrl);
  const target = { hostname: url.hostname, port: Number(url.port) };
  const open = new Set<Deno.Conn>();
  let isStuck = false;
  let listener = listen(0);
  const { port } = listener.addr;
  url.port = String(port);

  function listen(port: number): Deno.TcpListener {
    const listener = Deno.listen({ hostname: "127.0.0.1", port });
    (async () => {
      for await (const conn of listener) pass(conn).catch(() => {});
    })();
    return listener;
  }

  async function pass(conn: Deno.Conn): Promise<void> {
    const behind = await Deno.connect(target);
    for (const each of [conn, behind]) open.add(each);
    const waitWhileStuck = () =>
      new TransformStream<Uint8Array, Uint8Array>({
        transform: (chunk, controller) => isStuck ? undefined : controller.enqueue(chunk),
      });
    await Promise.all([
      conn.readable.pipeThrough(waitWhileStuck()).pipeTo(behind.writable),
      behind.readable.pipeThrough(waitWhileStuck()).pipeTo(conn.writable),
    ]);
  }

  const shut = () => {
    listener.close();
    for (const conn of open) {
      try {
        conn.close();
      } catch {
        // It has been closed by the other side.
      }
    }
    open.clear();
  };
  return {
    url: url.href,
    shut,
    reopen: () => void (listener = listen(port)),
    stick: () => void (isStuck = true),
    [Symbol.dispose]: shut,
  };
}

const has = (lines: string[], ...parts: string[]) =>
  lines.some((line) => parts.every((part) => line.includes(part)));

for (
  const [how, command, transport] of [
    ["npm run worker", ["npm", "run", "-s", "worker", "--"], "direct"],
    ["node", ["node", "scripts/run.mjs", "scripts/worker.ts"], "rest"],
  ] as const
) {
  Deno.test(`at SIGTERM in the middle of ten jobs, started by ${how}, those that can end do, and the rest are given back uncounted`, async () => {
    const [quick, slow] = [newFile(), newFile()];
    const ends = await insertJobs(stack, "wait_for_gate", { file: quick }, 5);
    const rest = await insertJobs(stack, "wait_for_signal", { file: slow }, 5);
    await using worker = await startWorker(stack, databaseEnv(stack, transport), ["--stop-seconds", "1"], [
      ...command,
    ]);
    await untilLines(quick, 5);
    await untilLines(slow, 5);
    const ended = worker.end("SIGTERM");
    await until("the signal", () => has(worker.lines, '"worker_stopping"'));
    const [late = ""] = await insertJobs(stack, "echo", {});
    await Deno.writeTextFile(`${quick}.gate`, "");
    await untilStates(stack, ends, "succeeded 1");
    assert.equal(await ended, 0, worker.lines.join("\n"));
    assert.deepEqual(await states(stack, [...rest, late]), Array(6).fill("pending 0"));
    assert.deepEqual((await linesOf(slow)).slice(5).toSorted(), rest.map((id) => `${id} aborted`).toSorted());
    assert.equal((await stack.sql`select from job_failures where job_id = any(${rest})`).length, 0);
    await remove([...rest, late]);
  });
}

Deno.test("while the database restarts a worker keeps its jobs at work, and goes on afterwards", async () => {
  using door = openDoor(stack.db.url("postgres"));
  await using worker = await startWorker(stack, { DATABASE_URL: door.url });
  const file = newFile();
  const [before = ""] = await insertJobs(stack, "wait_for_gate", { file });
  await untilLines(file, 1);
  door.shut();
  await until("a claim to fail", () => has(worker.lines, '"claim_failed"'));
  const [after = ""] = await insertJobs(stack, "echo", {});
  await Deno.writeTextFile(`${file}.gate`, "");
  await until("a settling to fail", () => has(worker.lines, '"settle_repeated"'));
  door.reopen();
  await untilStates(stack, [before, after], "succeeded 1");
  await stack.sql`
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and application_name = 'nightshift worker'`;
  await untilStates(stack, await insertJobs(stack, "echo", {}), "succeeded 1");
  assert.equal(await worker.end(), 0);
});

Deno.test("a worker over the API outlives the end of that", async () => {
  await using worker = await startWorker(stack, databaseEnv(stack, "rest"));
  await untilStates(stack, await insertJobs(stack, "echo", {}), "succeeded 1");
  stack.services.gateway.kill("SIGKILL");
  await until("a claim to fail", () => has(worker.lines, '"claim_failed"'));
  await untilStates(stack, await insertJobs(stack, "echo", {}), "succeeded 1");
  assert.equal(await worker.end(), 0);
});

Deno.test("a database that no longer answers does not keep a worker from ending; a second signal ends it at once", async () => {
  for (const again of [false, true]) {
    const door = openDoor(stack.db.url("postgres"));
    await using worker = await startWorker(stack, { DATABASE_URL: door.url }, [
      "--stop-seconds",
      again ? "60" : "0",
    ]);
    const file = newFile();
    const ids = await insertJobs(stack, "wait_for_signal", { file });
    await untilLines(file, 1);
    door.stick();
    const began = performance.now();
    const ended = worker.end("SIGINT");
    if (again) {
      await new Promise((resolve) => setTimeout(resolve, 600)); // sooner, it would be the same
      Deno.kill(worker.pid, "SIGINT");
    }
    assert.equal(await ended, 1);
    const took = performance.now() - began;
    assert(took < 3_000, `${took} ms`);
    assert(has(worker.lines, again ? "ended at once" : "leases run out"), worker.lines.join("\n"));
    door.shut();
    assert.deepEqual(await states(stack, ids), ["running 1"]);
    await remove(ids);
  }
});

Deno.test("24 long jobs run side by side in a worker, while the Edge Function refuses their kind and says where to run it", async () => {
  const ids = await insertJobs(stack, "pause", { ms: 500 }, 24);
  const [short = ""] = await insertJobs(stack, "echo", {});
  const response = await stack.call("job-worker", { wait: true });
  assert.deepEqual(await response.json(), {
    processed: 1,
    results: [{ id: short, kind: "echo", status: "succeeded" }],
  });
  const said = '"event":"kind_not_claimed","kind":"pause","timeoutMs":150000';
  const line = await until("the note", () => stack.lines.find((line) => line.includes(said)));
  assert.match(line, /"level":"info".*Run it with npm run worker/);
  assert.deepEqual(await states(stack, ids), Array(24).fill("pending 0"));

  await using worker = await startWorker(stack, databaseEnv(stack, "direct"), [
    "--kinds",
    "pause",
    "--slots",
    "24",
  ]);
  await untilStates(stack, ids, "succeeded 1");
  const [row] = await stack.sql`
    select count(distinct locked_by)::int as workers,
      extract(epoch from max(finished_at) - min(locked_at))::float8 as seconds
    from jobs where id = any(${ids})`;
  assert.equal(row?.workers, 1);
  assert(row?.seconds < 2, `side by side: ${row?.seconds} s`);
  const [other = ""] = await insertJobs(stack, "echo", {});
  assert.equal(await worker.end(), 0);
  assert.deepEqual(await states(stack, [other]), ["pending 0"], "it takes no other kind");
  await remove([other]);
});

for (const transport of transports) {
  Deno.test(`a database that is read-only for a while does not end a worker over ${transport}`, async () => {
    // A connection of before stays as it is.
    const owner = stack.db.connect("postgres", { max: 1 });
    const [{ name } = { name: "" }] = await owner`select current_database() as name`;
    const turn = async (onOff: "on" | "off") => {
      await owner`alter database ${owner(name)} set default_transaction_read_only = ${owner.unsafe(onOff)}`;
      await owner`select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and usename in ('postgres', 'authenticator')`;
    };
    await using worker = await startWorker(stack, databaseEnv(stack, transport));
    const ids = await insertJobs(stack, "echo", {});
    await untilStates(stack, ids, "succeeded 1");
    await turn("on");
    try {
      await until("the refusal", () => has(worker.lines, '"claim_failed"', "read-only transaction"));
    } finally {
      await turn("off");
    }
    const later = await insertJobs(stack, "echo", {});
    await untilStates(stack, later, "succeeded 1");
    assert.equal(await worker.end(), 0, worker.lines.join("\n"));
  });
}

Deno.test("a job that may be what ends workers waits for others no longer than it may, and soon lets others in", async () => {
  const [beside, alone] = [newFile(), newFile()];
  const long = await insertJobs(stack, "wait_for_gate", { file: beside });
  await using worker = await startWorker(stack, databaseEnv(stack, "direct"));
  await untilLines(beside, 1);
  const [suspect] = await stack.sql`
    insert into jobs (kind, payload, attempts, last_error)
    values ('wait_for_gate', ${stack.sql.json({ file: alone })}, 3, 'lease expired: worker x') returning id`;
  await untilLines(alone, 1);
  assert.ok(has(worker.lines, '"suspect_waits_to_be_alone"', suspect?.id));
  await untilStates(stack, await insertJobs(stack, "echo", {}), "succeeded 1");
  for (const file of [beside, alone]) await Deno.writeTextFile(`${file}.gate`, "");
  await untilStates(stack, long, "succeeded 1");
  await untilStates(stack, [suspect?.id], "succeeded 4");
});

Deno.test("a worker in which nothing else can run any more is ended, and the log says why", async () => {
  const ids = await insertJobs(stack, "block", { ms: 600_000 });
  const env = { ...databaseEnv(stack, "direct"), LOCAL_STUCK_SECONDS: "1" };
  await using worker = await startWorker(stack, env, [], ["node", "scripts/run.mjs", "scripts/worker.ts"]);
  assert.equal((await worker.status).code, 1);
  assert.ok(has(worker.lines, "a handler does not yield"), worker.lines.join("\n"));
  assert.ok(has(worker.lines, "was ended by SIGKILL"));
  assert.deepEqual(await states(stack, ids), ["running 1"]);
  await remove(ids);
});

Deno.test("what no waiting mends ends a worker with a message that says what to do", async (t) => {
  const wrongPassword = stack.db.url("postgres").replace("postgres:postgres@", "postgres:wrong@");
  const cases: [what: string, env: Record<string, string>, args: string[], message: RegExp][] = [
    ["no database", { DATABASE_URL: "", SUPABASE_URL: "" }, [], /set DATABASE_URL .* or run npm start first/],
    [
      "a wrong password",
      { DATABASE_URL: wrongPassword },
      [],
      /authentication failed[\s\S]*Check user and password/,
    ],
    [
      "no such database",
      { DATABASE_URL: `${stack.db.url("postgres")}x` },
      [],
      /does not exist[\s\S]*database's name/,
    ],
    [
      "no migrations",
      { DATABASE_URL: stack.db.url("postgres").replace(/[^/]*$/, "template1") },
      [],
      /there is no function[\s\S]*npx supabase db push/,
    ],
    [
      "a user without privileges",
      { DATABASE_URL: stack.db.url("authenticator") },
      [],
      /permission denied[\s\S]*DATABASE_URL/,
    ],
    [
      "a wrong key",
      { ...databaseEnv(stack, "rest"), SUPABASE_SECRET_KEYS: '{"default":"sb_secret_that-no-project-has"}' },
      [],
      /Invalid API key .*SUPABASE_SECRET_KEYS/,
    ],
    [
      "no key",
      { ...databaseEnv(stack, "rest"), SUPABASE_SECRET_KEYS: "" },
      [],
      /SUPABASE_SECRET_KEYS holds no key/,
    ],
    [
      "an unknown kind",
      databaseEnv(stack, "direct"),
      ["--kinds", "ehco"],
      /declares no kind "ehco"[\s\S]*npm run worker/,
    ],
    ["no address", { DATABASE_URL: "garbage" }, [], /^DATABASE_URL is not the address of a database: /],
    ["another address", { DATABASE_URL: stack.apiUrl }, [], /^DATABASE_URL is not the address of a database/],
    ["a half-encoded password", { DATABASE_URL: "postgresql://a:50%@localhost/x" }, [], /with %25 and %40/],
    [
      "not the API's address",
      { ...databaseEnv(stack, "rest"), SUPABASE_URL: `${stack.apiUrl}/rest/v1` },
      [],
      /^SUPABASE_URL is not/,
    ],
    ["no slots", databaseEnv(stack, "direct"), ["--slots", "0"], /--slots is not from 1/],
  ];
  await Promise.all(cases.map(([what, env, args, message]) =>
    t.step({
      name: what,
      sanitizeExit: false,
      sanitizeOps: false,
      sanitizeResources: false,
      fn: async () => {
        await using worker = spawnWorker(stack, { SUPABASE_SERVICE_ROLE_KEY: "", ...env }, args);
        assert.equal((await worker.status).code, 1);
        assert.match(worker.lines.join("\n"), message);
      },
    })
  ));
});

for (const transport of transports) {
  Deno.test(`a claim that is refused for good ends a worker over ${transport}; the jobs at hand get their time`, async () => {
    const { sql } = stack;
    const file = newFile();
    const late = newFile();
    const ids = [
      ...await insertJobs(stack, "leave_behind", { file: late }),
      ...await insertJobs(stack, "wait_for_gate", { file }),
    ];
    await using worker = await startWorker(stack, databaseEnv(stack, transport));
    await untilLines(file, 1);
    await sql`revoke execute on function claim_jobs from postgres, service_role`;
    try {
      await until("the refusal", () => has(worker.lines, '"claim_failed"', "permission denied"));
      await Deno.writeTextFile(`${file}.gate`, "");
      await until("its end", () => has(worker.lines, '"worker_failed"'));
      // What a handler has left with the runtime is waited for, and may fail.
      await Deno.writeTextFile(`${late}.gate`, "");
      assert.equal((await worker.status).code, 1);
    } finally {
      await sql`grant execute on function claim_jobs to postgres, service_role`;
    }
    assert.match(worker.lines.at(-1) ?? "", /Use (the user postgres|a secret key)/);
    assert.deepEqual(await states(stack, ids), ["succeeded 1", "succeeded 1"]);
  });
}
