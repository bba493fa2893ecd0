import assert from "node:assert/strict";
import { dirname, join } from "node:path";
import postgres from "postgres";
import { dataHome } from "../../scripts/local/binaries.ts";
import { type LocalPostgres, startPostgres } from "../../scripts/local/postgres.ts";
import { freePort } from "../../scripts/local/ports.ts";

const projectDir = join(import.meta.dirname ?? ".", "../..");
const module = new URL("../../scripts/local/postgres.ts", import.meta.url).href;

async function query(url: string, text: string): Promise<postgres.Row[]> {
  const sql = postgres(url, { max: 1, fetch_types: false, onnotice: () => {} });
  try {
    return await sql.unsafe(text);
  } finally {
    await sql.end();
  }
}

async function refused(url: string, text: string): Promise<string> {
  return await query(url, text).then(() => "was allowed", (error) => error.code);
}

function entries(folder: string): string[] {
  try {
    return [...Deno.readDirSync(folder)].map(({ name }) => name);
  } catch {
    return [];
  }
}

/** Runs with a data folder that outlives a stop, and removes it afterwards. */
async function withData(
  run: (start: () => Promise<LocalPostgres>, name: string) => Promise<void>,
): Promise<void> {
  const name = `test-${crypto.randomUUID().slice(0, 8)}`;
  let server: LocalPostgres | undefined;
  try {
    await run(async () => server = await startPostgres({ projectDir, name, port: freePort() }), name);
  } finally {
    await server?.stop();
    if (server) await Deno.remove(dirname(server.dataDir), { recursive: true });
  }
}

/** Starts Postgres from another process, so that a test can kill its starter; `told` resolves once it is up. */
function startElsewhere(
  name: string,
): { process: Deno.ChildProcess; told: Promise<{ url: string }> } {
  const code = `
    import { startPostgres } from ${JSON.stringify(module)};
    const options = { projectDir: ${JSON.stringify(projectDir)}, name: "${name}", port: ${freePort()} };
    const server = await startPostgres(options);
    console.log(JSON.stringify({ url: server.url("postgres") }));
    await server.exited;`;
  const process = new Deno.Command(Deno.execPath(), {
    args: ["eval", "--ext=ts", "--no-lock", code],
    cwd: projectDir,
    stdout: "piped",
    stderr: "null",
  }).spawn();
  const told = (async () => {
    let text = "";
    for await (const part of process.stdout.pipeThrough(new TextDecoderStream())) {
      text += part;
      if (text.includes("\n")) break;
    }
    return JSON.parse(text);
  })();
  return { process, told };
}

Deno.test("a new cluster has the roles, limits and grants of a hosted project", async (t) => {
  const server = await startPostgres({ projectDir, port: freePort(), temporary: true });
  const asPostgres = server.url("postgres");
  const asAuthenticator = server.url("authenticator");
  try {
    await t.step("postgres creates roles and databases and bypasses RLS, but is no superuser", async () => {
      const [role] = await query(
        asPostgres,
        `select rolsuper, rolcreaterole, rolcreatedb, rolbypassrls, rolreplication from pg_roles where rolname = current_user`,
      );
      assert.deepEqual({ ...role }, {
        rolsuper: false,
        rolcreaterole: true,
        rolcreatedb: true,
        rolbypassrls: true,
        rolreplication: true,
      });
      assert.equal(await refused(asPostgres, "alter role postgres superuser"), "42501");
    });

    await t.step(
      "postgres creates pg_cron and pg_net itself, and migrations may write to public",
      async () => {
        await query(asPostgres, "create extension pg_cron");
        await query(asPostgres, "create extension pg_net with schema extensions");
        await query(
          asPostgres,
          "create table public.notes (id int primary key); alter table notes enable row level security",
        );
      },
    );

    await t.step(
      "a new table of postgres in public is closed to the API's roles until it is granted",
      async () => {
        const [row] = await query(
          asPostgres,
          `select has_table_privilege('anon', 'notes', 'select, insert, update, delete') as anon,
                has_table_privilege('authenticated', 'notes', 'select, insert, update, delete') as authenticated,
                has_table_privilege('service_role', 'notes', 'select, insert, update, delete') as service_role`,
        );
        assert.deepEqual({ ...row }, { anon: false, authenticated: false, service_role: false });
      },
    );

    await t.step(
      "the authenticator becomes an API role, with 8 s for a statement and no rights of its own",
      async () => {
        const [row] = await query(
          asAuthenticator,
          "select current_setting('statement_timeout') as statement",
        );
        assert.equal(row.statement, "8s");
        assert.equal(await refused(asAuthenticator, "select * from notes"), "42501");
        assert.equal(await refused(asAuthenticator, "set role service_role"), "was allowed");
        assert.equal(await refused(asAuthenticator, "set role postgres"), "42501");
      },
    );

    await t.step(
      "secrets are read and written by postgres, and by nobody who comes through anon",
      async () => {
        await query(asPostgres, "select vault.create_secret('s3cret', 'test_secret')");
        const [row] = await query(
          asPostgres,
          "select secret, decrypted_secret from vault.decrypted_secrets where name = 'test_secret'",
        );
        assert.equal(row.decrypted_secret, "s3cret");
        assert.notEqual(row.secret, "s3cret");
        assert.equal(
          await refused(asPostgres, "select vault.create_secret('other', 'test_secret')"),
          "23505",
        );
        assert.equal(await refused(asPostgres, "update vault.secrets set secret = 'x'"), "42501");
        assert.equal(
          await refused(asAuthenticator, "set role anon; select * from vault.decrypted_secrets"),
          "42501",
        );
      },
    );

    await t.step("cron.job is written through cron's functions only", async () => {
      assert.equal(
        await refused(asPostgres, "insert into cron.job (schedule, command) values ('* * * * *', '')"),
        "42501",
      );
      assert.equal(await refused(asPostgres, "delete from cron.job"), "42501");
      assert.equal(await refused(asPostgres, "delete from cron.job_run_details"), "was allowed");
      assert.equal(await refused(asAuthenticator, "set role service_role; select * from cron.job"), "42501");
      const [first] = await query(asPostgres, "select cron.schedule('tick', '10 seconds', 'select 1') as id");
      const [second] = await query(asPostgres, "select cron.schedule('tick', '5 4 * * *', 'select 2') as id");
      assert.equal(first.id, second.id);
      const [job] = await query(asPostgres, "select schedule, command, username, active from cron.job");
      assert.deepEqual({ ...job }, {
        schedule: "5 4 * * *",
        command: "select 2",
        username: "postgres",
        active: true,
      });
      await query(asPostgres, "select cron.unschedule('tick')");
      await assert.rejects(
        query(asPostgres, "select cron.unschedule('tick')"),
        /could not find valid entry for job 'tick'/,
      );
    });

    await t.step("a schedule that pg_cron refuses is refused", async () => {
      const good = [
        "1 second",
        " 59 SECONDS ",
        "*/5 * * * *",
        "0 4-6/2 $ jan,3 MON-fri",
        "0 0 * * 7",
        "@daily",
      ];
      const bad = [
        "60 seconds",
        "0 seconds",
        "5 secondc",
        "* * * *",
        "*/0 * * * *",
        "*/60 * * * *",
        "1/20 * * * *",
      ];
      bad.push(
        "* * * 13 *",
        "* * * 0 *",
        "60 * * * *",
        "* 24 * * *",
        "-1 * * * *",
        "* * * foo *",
        "@never",
        "5-2 * * * *",
      );
      for (const schedule of good) {
        assert.equal(await refused(asPostgres, `select cron.schedule('${schedule}', '')`), "was allowed");
      }
      for (const schedule of bad) {
        assert.equal(await refused(asPostgres, `select cron.schedule('${schedule}', '')`), "22023", schedule);
      }
    });

    await t.step("pg_net queues what was asked and refuses what it cannot send", async () => {
      await query(
        asPostgres,
        `select net.http_post('http://a.test/f', '{"a": 1}', '{"q": "ü &"}', '{"x": "y", "z": null}')`,
      );
      const [row] = await query(
        asPostgres,
        `select method, url, headers, convert_from(body, 'utf8') as body, timeout_milliseconds from net.http_request_queue`,
      );
      assert.deepEqual({ ...row }, {
        method: "POST",
        url: "http://a.test/f?q=%C3%BC%20%26",
        headers: { x: "y", z: null, "Content-Type": "application/json" },
        body: '{"a": 1}',
        timeout_milliseconds: 5000,
      });
      assert.equal(await refused(asPostgres, "select net.http_post(null)"), "23502");
      await assert.rejects(query(asPostgres, "select net.http_get('/relative')"), /invalid URL/);
    });

    await t.step("auth.uid() and auth.role() read the request's claims", async () => {
      const [row] = await query(
        asPostgres,
        `with claims as materialized (select set_config('request.jwt.claims',
           '{"sub": "00000000-0000-0000-0000-000000000001", "role": "authenticated"}', true))
         select auth.uid() as uid, auth.role() as role from claims`,
      );
      assert.deepEqual({ ...row }, { uid: "00000000-0000-0000-0000-000000000001", role: "authenticated" });
    });

    await t.step("a change of the schema is announced to the REST layer", async () => {
      const sql = postgres(asPostgres, { max: 1, onnotice: () => {} });
      const { promise, resolve } = Promise.withResolvers<string>();
      await sql.listen("pgrst", resolve);
      await sql`create table public.announced ()`;
      assert.equal(await promise, "reload schema");
      await sql.end();
    });

    await t.step("a port that is taken is named, with the hint where to change it", async () => {
      const second = startPostgres({
        projectDir,
        port: server.port,
        temporary: true,
        portHint: "Set [db] port.",
      });
      await assert.rejects(second, new RegExp(`Port ${server.port} .* is taken\\. Set \\[db\\] port\\.`));
    });
  } finally {
    await server.stop();
  }
  await assert.rejects(Deno.stat(server.dataDir), Deno.errors.NotFound);
});

Deno.test("a second start finds the data of the first, and says so when another Postgres made it", async () => {
  await withData(async (start) => {
    const first = await start();
    await query(first.url("postgres"), "create table kept as select 42 as answer");
    await first.stop();
    await first.stop();
    assert.equal((await first.exited).success, true);

    // The lock file of a crashed server, whose process id something else has by now.
    await Deno.writeTextFile(join(first.dataDir, "postmaster.pid"), `${Deno.pid}\n${first.dataDir}\n`);
    const second = await start();
    const [row] = await query(second.url("postgres"), "select answer from kept");
    assert.equal(row.answer, 42);
    await second.stop();

    // That of a server which was killed before it had written it.
    await Deno.writeTextFile(join(first.dataDir, "postmaster.pid"), "");
    const third = await start();
    await query(third.url("postgres"), "select answer from kept");
    await third.stop();

    await Deno.writeTextFile(join(first.dataDir, "PG_VERSION"), "16\n");
    await assert.rejects(
      start(),
      /was made by Postgres 16, but .* has Postgres 17\. Move that folder away, or delete it/,
    );
  });
});

Deno.test("a server whose starter was killed is replaced; one whose starter lives is left alone", async () => {
  await withData(async (start, name) => {
    const { process, told } = startElsewhere(name);
    const { url } = await told;
    await query(url, "create table kept as select 42 as answer");
    await assert.rejects(start(), new RegExp(`already running on .*, started by process ${process.pid}`));

    process.kill("SIGKILL");
    await process.status;
    const server = await start();
    await assert.rejects(query(url, "select 1"), /ECONNREFUSED/);
    const [row] = await query(server.url("postgres"), "select answer from kept");
    assert.equal(row.answer, 42);
  });
});

for (const moment of ["while the cluster is made", "before the bootstrap has run"]) {
  Deno.test(`a first start that is killed ${moment} is made good by the next`, async () => {
    await withData(async (start, name) => {
      const { process, told } = startElsewhere(name);
      told.catch(() => {});
      const folder = join((await dataHome(projectDir)).dir, name);
      const sign = moment.startsWith("while") ? /^partial-/ : /^data$/;
      const deadline = Date.now() + 10_000;
      while (!entries(folder).some((entry) => sign.test(entry)) && Date.now() < deadline) {
        await new Promise((resolve) => setTimeout(resolve, 1));
      }
      process.kill("SIGKILL");
      await process.status;

      const server = await start();
      const [row] = await query(
        server.url("postgres"),
        "select to_regclass('auth.users') is not null as complete",
      );
      assert.equal(row.complete, true);
      assert.deepEqual(entries(folder).filter((entry) => entry.startsWith("partial-")), []);
    });
  });
}
