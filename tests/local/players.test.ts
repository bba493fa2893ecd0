import assert from "node:assert/strict";
import { join } from "node:path";
import postgres from "postgres";
import { startPostgres } from "../../scripts/local/postgres.ts";
import { isDue, playCron } from "../../scripts/local/cron.ts";
import { playNet } from "../../scripts/local/net.ts";
import { freePort } from "../../scripts/local/ports.ts";

const projectDir = join(import.meta.dirname ?? ".", "../..");

/** Asks until the answer is there; a promise that takes longer than `patienceMs` is broken. */
async function eventually<T>(ask: () => Promise<T | undefined>, patienceMs = 5000): Promise<T> {
  for (const deadline = Date.now() + patienceMs;;) {
    const answer = await ask();
    if (answer !== undefined) return answer;
    assert.ok(Date.now() < deadline, `not within ${patienceMs} ms: ${ask}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

interface Received {
  at: number;
  path: string;
  headers: Headers;
  body: string;
}

/** A server that notes what it gets; a path of /slow/<ms> is answered that much later. */
function startReceiver() {
  const received: Received[] = [];
  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen: () => {} }, async (request) => {
    const path = new URL(request.url).pathname;
    received.push({ at: performance.now(), path, headers: request.headers, body: await request.text() });
    const delay = Number(path.match(/^\/slow\/(\d+)/)?.[1] ?? 0);
    if (delay) await new Promise((resolve) => setTimeout(resolve, delay));
    return new Response(`hello ${path}`, {
      status: path === "/teapot" ? 418 : 200,
      headers: { "x-kind": "test" },
    });
  });
  const arrival = (path: string) =>
    eventually(() => Promise.resolve(received.find((request) => request.path === path)));
  return { url: `http://127.0.0.1:${server.addr.port}`, arrival, received, stop: () => server.shutdown() };
}

Deno.test("the players do what pg_cron's and pg_net's workers do", async (t) => {
  const server = await startPostgres({ projectDir, port: freePort(), temporary: true });
  const receiver = startReceiver();
  const stopping = new AbortController();
  const log: string[] = [];
  const options = {
    url: server.url("supabase_admin"),
    signal: stopping.signal,
    log: (line: string) => void log.push(line),
  };
  const sql = postgres(server.url("postgres"), { onnotice: () => {}, fetch_types: false });
  const playing = [playCron(options), playNet({ ...options, url: server.url("postgres"), pauseMs: 250 })];

  const response = (id: string) =>
    eventually(async () => (await sql`select * from net._http_response where id = ${id}`).at(0));
  const get = async (path: string, timeoutMs = 5000): Promise<string> =>
    (await sql`select net.http_get(${receiver.url + path}, timeout_milliseconds => ${timeoutMs}) as id`)[0]
      .id;
  const asleep = () => new Promise((resolve) => setTimeout(resolve, 550)); // two pauses without work
  const runsOf = async (name: string, statuses: string[]): Promise<postgres.Row[]> =>
    await sql`select d.* from cron.job_run_details d join cron.job j using (jobid)
               where j.jobname = ${name} and d.status in ${sql(statuses)} order by runid`;

  try {
    await t.step("they wait for extensions that do not exist yet", async () => {
      await sql`create extension pg_cron`;
      await sql`create extension pg_net with schema extensions`;
      // What the steps on pg_cron look at runs while the others are at it.
      await sql`create table seen (at timestamptz default clock_timestamp(), who text default session_user)`;
      await sql`select cron.schedule('beat', '1 second', 'insert into seen default values')`;
      await sql`select cron.schedule('fails', '1 second', 'select 1/0')`;
      await sql`select cron.schedule('long', '1 second', 'select pg_sleep(1.6)')`;
    });

    await t.step("a post leaves as soon as its transaction commits when the worker is asleep", async () => {
      await asleep();
      const body = { hello: "wörld" };
      const [{ id }] = await sql.begin((tx) =>
        tx`select net.http_post(${receiver.url + "/post"}, ${tx.json(body)},
                                headers => '{"Authorization": "Bearer x", "X-Null": null}') as id`
      );
      const committed = performance.now();
      const request = await receiver.arrival("/post");
      assert.ok(request.at - committed < 100, `took ${request.at - committed} ms`);
      assert.deepEqual(JSON.parse(request.body), body);
      assert.equal(request.headers.get("authorization"), "Bearer x");
      assert.equal(request.headers.get("content-type"), "application/json");
      assert.equal(request.headers.get("user-agent"), "pg_net/0.20.0");
      assert.equal(request.headers.has("x-null"), false);

      const row = await response(id);
      assert.equal(row.status_code, 200);
      assert.equal(row.content, "hello /post");
      assert.equal(row.headers["x-kind"], "test");
      assert.match(row.content_type, /^text\/plain/);
      assert.deepEqual([row.timed_out, row.error_msg], [false, null]);
    });

    await t.step("nothing is sent for a transaction that rolls back", async () => {
      await sql.begin(async (tx) => {
        await tx`select net.http_get(${receiver.url + "/undone"})`;
        throw new Error("undo");
      }).catch(() => {});
      await get("/done");
      await receiver.arrival("/done");
      assert.ok(!receiver.received.some(({ path }) => path === "/undone"));
    });

    await t.step(
      "in a stream of requests, one goes out per pause: the first cuts the pause short, the next wait",
      async () => {
        await asleep();
        await get("/stream/1");
        const first = await receiver.arrival("/stream/1");
        await get("/stream/2");
        const second = await receiver.arrival("/stream/2");
        await get("/stream/3");
        const third = await receiver.arrival("/stream/3");
        assert.ok(second.at - first.at < 150, `second after ${second.at - first.at} ms`);
        assert.ok(third.at - second.at > 240, `third after ${third.at - second.at} ms`);
      },
    );

    await t.step("a slow answer holds the whole batch's responses, and the next batch, up", async () => {
      await asleep();
      const [{ slow, quick }] = await sql`
        select net.http_get(${receiver.url + "/slow/400"}) as slow, net.http_get(${
        receiver.url + "/quick"
      }) as quick`;
      const sent = await receiver.arrival("/quick");
      await get("/after-slow");
      const next = await receiver.arrival("/after-slow");
      assert.ok(next.at - sent.at > 390, `next batch after ${next.at - sent.at} ms`);
      assert.deepEqual((await response(slow)).created, (await response(quick)).created);
    });

    await t.step(
      "a timeout, a refused connection and an error status are recorded as such, and not retried",
      async () => {
        const late = await response(await get("/slow/2000", 100));
        assert.deepEqual([late.timed_out, late.status_code, late.content], [true, null, null]);
        assert.match(late.error_msg, /^Timeout of 100 ms reached\. Total time: 1\d\d\.\d{6} ms \(DNS time/);

        const [{ id }] = await sql`select net.http_get(${`http://127.0.0.1:${freePort()}/`}) as id`;
        const refused = await response(id);
        assert.deepEqual([refused.timed_out, refused.status_code], [false, null]);
        assert.equal(refused.error_msg, "Could not connect to server");

        assert.equal((await response(await get("/teapot"))).status_code, 418);
        assert.equal(receiver.received.filter(({ path }) => path === "/teapot").length, 1);
      },
    );

    await t.step("responses older than six hours are removed", async () => {
      await sql`insert into net._http_response (id, created) values (-1, now() - interval '361 minutes'), (-2, now())`;
      await response(await get("/cleaned"));
      assert.equal((await sql`select from net._http_response where id in (-1, -2)`).count, 1);
    });

    await t.step("a cron schedule names the minutes that it names elsewhere, in GMT", async () => {
      const cases: [schedule: string, at: string, due: boolean][] = [
        ["*/15 * * * *", "2026-03-01T10:45", true],
        ["*/15 * * * *", "2026-03-01T10:46", false],
        ["0 4-6/2 * * *", "2026-03-01T06:00", true],
        ["0 4-6/2 * * *", "2026-03-01T05:00", false],
        ["0 0 1 * mon", "2026-03-01T00:00", true], // a Sunday, but the first
        ["0 0 1 * mon", "2026-03-02T00:00", true], // not the first, but a Monday
        ["0 0 1 * mon", "2026-03-03T00:00", false],
        ["0 0 * * 7", "2026-03-01T00:00", true],
        ["0 0 $ feb *", "2026-02-28T00:00", true],
        ["0 0 $ feb *", "2026-02-27T00:00", false],
        ["@hourly", "2026-03-01T07:00", true],
      ];
      for (const [schedule, at, due] of cases) {
        const [{ parsed }] = await sql`select cron._parse_schedule(${schedule}) as parsed`;
        assert.equal(isDue(parsed, new Date(`${at}Z`)), due, `${schedule} at ${at}`);
      }
    });

    await t.step(
      "a job of every second runs every second, as its user, and what it returned is recorded",
      async () => {
        const runs = await eventually(async () => {
          const done = await runsOf("beat", ["succeeded"]);
          return done.length >= 2 ? done : undefined;
        });
        assert.equal(runs[0].return_message, "INSERT 0 1");
        assert.equal(runs[0].username, "postgres");
        assert.ok(runs[0].job_pid > 0 && runs[0].end_time >= runs[0].start_time);
        const gap = runs[1].start_time - runs[0].start_time;
        assert.ok(gap >= 1000 && gap < 1500, `started ${gap} ms apart`);
        assert.equal((await sql`select from seen where who <> 'postgres'`).count, 0);
        await sql`select cron.unschedule('beat')`;
      },
    );

    await t.step(
      "a failing job is recorded with its error, and a job that takes long never runs beside itself",
      async () => {
        const [failed] = await eventually(async () => {
          const runs = await runsOf("fails", ["failed"]);
          return runs.length ? runs : undefined;
        });
        assert.equal(failed.return_message, "ERROR:  division by zero\n");
        const runs = await eventually(async () => {
          const done = await runsOf("long", ["succeeded"]);
          return done.length >= 2 ? done : undefined;
        });
        assert.equal(runs[0].return_message, "1 row");
        assert.ok(
          runs[1].start_time >= runs[0].end_time,
          "the second run started before the first had ended",
        );
        assert.ok(runs[1].start_time - runs[0].end_time < 300, "a run that was due started late");
      },
    );

    await t.step("unscheduling ends the run that is under way", async () => {
      const [{ runid }] = await eventually(async () => {
        const runs = await runsOf("long", ["running"]);
        return runs.length ? runs : undefined;
      });
      await sql`select cron.unschedule('long'), cron.unschedule('fails')`;
      const ended = await eventually(async () =>
        (await sql`select * from cron.job_run_details where runid = ${runid} and status = 'failed'`).at(0)
      );
      assert.equal(ended.return_message, "job canceled");
    });

    await t.step("both go on when their connections are cut", async () => {
      const admin = postgres(server.url("supabase_admin"), { max: 1 });
      await admin`select pg_terminate_backend(pid) from pg_stat_activity
                   where application_name like 'pg\\_net%' or application_name like 'pg\\_cron%'`;
      await admin.end();
      await sql`select cron.schedule('again', '1 second', 'select 1')`;
      await get("/again");
      await receiver.arrival("/again");
      await eventually(async () => (await runsOf("again", ["succeeded"])).at(0));
    });

    await t.step(
      "pg_net's goes on when its connection is cut in the middle of a batch, at whatever moment",
      async () => {
        const admin = postgres(server.url("supabase_admin"), { max: 1 });
        for (let n = 0; n < 10; n++) {
          await get(`/slow/${n * 5}/cut/${n}`);
          await receiver.arrival(`/slow/${n * 5}/cut/${n}`);
          await admin`select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pg\\_net%'`;
          await get(`/after-cut/${n}`);
          await receiver.arrival(`/after-cut/${n}`);
        }
        await admin.end();
      },
    );
  } finally {
    stopping.abort();
    await Promise.all(playing);
    await sql.end();
    await receiver.stop();
    await server.stop();
  }
});

Deno.test("the players' process ends when its parent's pipe does", async () => {
  const server = await startPostgres({ projectDir, port: freePort(), temporary: true });
  const process = new Deno.Command(Deno.execPath(), {
    args: ["run", "-A", "--no-lock", join(projectDir, "scripts/local/players.ts")],
    cwd: projectDir,
    env: { LOCAL_CRON_URL: server.url("supabase_admin"), LOCAL_NET_URL: server.url("postgres") },
    stdin: "piped",
  }).spawn();
  const sql = postgres(server.url("postgres"), { max: 1 });
  await eventually(async () =>
    (await sql`select from pg_stat_activity where application_name like 'pg_net%'`).at(0)
  );
  await process.stdin.close();
  assert.equal((await process.status).code, 0);
  await sql.end();
  await server.stop();
});
