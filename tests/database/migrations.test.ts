import assert from "node:assert/strict";
import { join } from "node:path";
import postgres from "postgres";
import { startGateway } from "../../scripts/local/gateway.ts";
import { makeKeys } from "../../scripts/local/keys.ts";
import { cronSecret, projectDir, startFunction, templateMigrations } from "../support.ts";
import { installPostgres15 } from "../postgres_15/install.ts";
import { type BareDatabase, startBareServer } from "./bare.ts";
import { sqlApi, useContract } from "./contract.ts";
import { only } from "./queue.ts";

const read = (path: string) => Deno.readTextFile(join(projectDir, path));

async function files(folder: string, extension: string): Promise<string[]> {
  const found: string[] = [];
  for await (const { name, isDirectory } of Deno.readDir(join(projectDir, folder))) {
    const path = join(folder, name);
    if (isDirectory) found.push(...await files(path, extension));
    else if (name.endsWith(extension)) found.push(path);
  }
  return found.sort();
}

/** Runs one job from enqueue to completion. */
async function workOneJob(sql: postgres.Sql): Promise<void> {
  const { id } = only(await sql`select public.enqueue_job('test') as id`);
  const claimed = only(await sql`select id, lease_token from public.claim_jobs('w')`);
  assert.equal(claimed.id, id);
  assert.equal(only(await sql`select public.complete_job(${id}, ${claimed.lease_token}) as held`).held, true);
}

/** What the Supabase CLI's advisors find, at the level of a warning or above. */
async function advise(db: BareDatabase): Promise<{ success: boolean; output: string }> {
  const { success, stdout, stderr } = await new Deno.Command(join(projectDir, "node_modules/.bin/supabase"), {
    args: ["db", "advisors", "--fail-on", "warn", "--db-url", `${db.url("postgres")}?sslmode=disable`],
    env: { DO_NOT_TRACK: "1" },
    stdin: "null",
  }).output();
  return { success, output: new TextDecoder().decode(stdout) + new TextDecoder().decode(stderr) };
}

/** The updates and deletes in a piece of SQL that have no where of their own, at whatever depth they stand. */
function withoutWhere(sql: string): string[] {
  const text = sql.replace(/--.*$/gm, "").replace(/'(?:[^']|'')*'/g, "''");
  const found: string[] = [];
  for (
    const { index } of text.matchAll(/\b(?<!for no key |for |do )(?:update\s+(?!of\b)|delete\s+from\s)/gi)
  ) {
    let depth = 0;
    let end = index;
    let hasWhere = false;
    for (; end < text.length && depth >= 0 && text[end] !== ";"; end++) {
      if (text[end] === "(") depth++;
      if (text[end] === ")") depth--;
      if (depth === 0 && /^\swhere\b/i.test(text.slice(end, end + 7))) hasWhere = true;
    }
    if (!hasWhere) found.push(text.slice(index, end).trim());
  }
  return found;
}

/** What an app may have before it gets the template: tables, and functions and a schema of the same names. */
async function createApp({ sql, admin }: BareDatabase): Promise<void> {
  await sql.unsafe(`
    create table public.profiles (id uuid primary key default gen_random_uuid(), name text);
    insert into public.profiles (name) values ('Ada');
    grant select on public.profiles to anon;
    create table public.orders (id int primary key, profile uuid references public.profiles, kind text, status text);
    create function public.tick() returns text language sql set search_path = '' as $$ select 'the app''s' $$;
    create function public.wake() returns trigger language plpgsql set search_path = '' as $$ begin new.status := 'woken'; return new; end $$;
    create trigger wake before insert on public.orders for each row execute function public.wake();

    create schema app;
    create table app.jobs (id int primary key, status text);
    create table app.job_kinds (kind int);
    create domain app.uuid as text check (value = 'never');
    create function app.enqueue_job(kind text) returns text language sql set search_path = '' as $$ select 'the app''s' $$;
    create function app.claim_jobs(worker text) returns text language sql set search_path = '' as $$ select 'the app''s' $$;
    create function app.clock_timestamp() returns timestamptz language sql set search_path = '' as $$ select '2000-01-01'::timestamptz $$;

    create schema private;
    grant usage on schema private to authenticated;
    create function private.is_owner() returns boolean language sql security definer set search_path = '' as $$ select true $$;
    alter table public.orders enable row level security;
    create policy own on public.orders to authenticated using (private.is_owner());
    grant select on public.orders to authenticated;

    do $$ begin execute format('alter role postgres in database %I set search_path = app, public', current_database()); end $$;
  `).simple();
  // What takes a superuser here: row level security for every new table, and every table replicated, as both are offered.
  await admin.unsafe(`
    create function public.secure_new_table() returns event_trigger language plpgsql set search_path = '' as $$
    declare
      made record;
    begin
      for made in select object_identity from pg_event_trigger_ddl_commands() where object_type = 'table' and schema_name = 'public' loop
        execute format('alter table %s enable row level security', made.object_identity);
      end loop;
    end $$;
    create event trigger secure_new_tables on ddl_command_end when tag in ('CREATE TABLE')
      execute function public.secure_new_table();
    create publication everything for all tables;
  `).simple();
}

/** Applies the migrations twice to a database that holds an app already, and works a job. */
async function testPush(t: Deno.TestContext, app: BareDatabase, env: Record<string, string>): Promise<void> {
  await t.step("postgres, who is no superuser, applies them beside what an app has already", async () => {
    const { rolsuper } = only(await app.sql`select rolsuper from pg_roles where rolname = current_user`);
    assert.equal(rolsuper, false);
    await createApp(app);
    await app.push(env);
    const owners = await app.sql`
      select distinct pg_get_userbyid(relowner) as owner from pg_class
      where relnamespace in ('public'::regnamespace, 'private'::regnamespace)`;
    assert.deepEqual(owners.map(({ owner }) => owner), ["postgres"]);
    await workOneJob(app.sql);
  });

  await t.step("the app's own tables, functions and schema are as they were", async () => {
    const { sql } = app;
    assert.equal(only(await sql`select name from public.profiles`).name, "Ada");
    await sql`insert into public.orders (id, kind) values (1, 'book')`;
    assert.equal(only(await sql`select status from public.orders`).status, "woken");
    assert.deepEqual(
      { ...only(await sql`select public.tick() as a, app.enqueue_job('x') as b, app.claim_jobs('w') as c`) },
      { a: "the app's", b: "the app's", c: "the app's" },
    );
    const user = await app.as("authenticated");
    assert.equal((await user`select private.is_owner()`).length, 1);
    assert.equal((await user`select * from public.orders`).length, 1);
  });

  await t.step("a second push does nothing", async () => {
    const state = async () =>
      (await app.sql`
      select 'function' as what, oid::text from pg_proc
      where pronamespace in ('public'::regnamespace, 'private'::regnamespace)
      union all select 'relation', oid::text || xmin from pg_class
      where relnamespace in ('public'::regnamespace, 'private'::regnamespace)
      union all select 'version', version from supabase_migrations.schema_migrations
      union all select 'job', id::text from public.jobs
      order by 1, 2`).map(({ what, oid }) => `${what} ${oid}`);
    const before = await state();
    await app.push(env);
    assert.deepEqual(await state(), before);
    const versions = (await templateMigrations()).map((path) => path.match(/\d{14}/)?.[0]);
    assert.deepEqual(
      before.filter((each) => each.startsWith("version")),
      versions.map((each) => `version ${each}`),
    );
  });
}

/** A value for each variable that config.toml reads one of Vault's secrets from. */
async function vaultVariables(): Promise<Record<string, string>> {
  const env: Record<string, string> = {};
  const vault = (await read("supabase/config.toml")).match(/^\[db\.vault\]$([^[]*)/m)?.[1] ?? "";
  for (const [, name, variable] of vault.matchAll(/^(\w+) = "env\((\w+)\)"$/gm)) {
    assert.ok(name && variable);
    env[variable] = name === "project_url" ? "http://api.test:8000" : `value-of-${name}-${"x".repeat(32)}`;
  }
  return env;
}

Deno.test("the migrations, applied with the real CLI", async (t) => {
  await using server = await startBareServer();
  const app = await server.createDatabase("app");
  const env = await vaultVariables();
  await testPush(t, app, env);

  await t.step(
    "a secret goes by the name in config.toml through Vault into the header of the poke",
    async () => {
      assert.ok(env.PROJECT_URL && env.CRON_SECRET);
      const { url, headers } = only(await app.sql`select url, headers from net.http_request_queue`);
      assert.equal(url, "http://api.test:8000/functions/v1/job-worker");
      assert.equal(headers.Authorization, `Bearer ${env.CRON_SECRET}`);
      await app.sql`select private.tick()`;
    },
  );

  await t.step(
    "the advisors find the app's table that is left open, and nothing in the migrations",
    async () => {
      const open = await advise(app);
      assert.ok(!open.success);
      assert.deepEqual([...open.output.matchAll(/"cache_key": "(.*)"/g)].map(([, key]) => key), [
        "rls_disabled_in_public_public_profiles",
      ]);
      await app.sql`alter table profiles enable row level security`;
      const clean = await advise(app);
      assert.ok(clean.success, clean.output);
    },
  );

  await t.step("no function updates or deletes without a where, which hosted projects refuse", async () => {
    assert.equal(
      withoutWhere("with a as (update t set x = (select 1 from u where true)) select 1").length,
      1,
    );
    assert.equal(
      withoutWhere("delete from t; update t set x = 1 where true; delete from t where a").length,
      1,
    );
    assert.equal(withoutWhere("insert into t values (1) on conflict (a) do update set a = 1").length, 0);
    assert.equal(withoutWhere("select 1 from t where a for no key update skip locked").length, 0);
    const bodies = await app.sql<{ name: string; body: string }[]>`
      select oid::regprocedure::text as name, prosrc as body from pg_proc
      where pronamespace in ('public'::regnamespace, 'private'::regnamespace)`;
    assert.ok(bodies.length >= 15);
    for (const { name, body } of bodies) assert.deepEqual(withoutWhere(body), [], name);
    const statements = bodies.flatMap(({ body }) =>
      body.match(/\bupdate (?:public|private)\.|\bdelete from/g) ?? []
    );
    assert.ok(statements.length >= 8, "the check above saw the statements that there are");
  });

  await t.step("without pg_cron and pg_net the queue works, and says what is missing", async () => {
    const db = await server.createDatabase("plain");
    // Extensions that the server does not offer: the view of them is this database's own.
    await db.admin.unsafe(`
      set allow_system_table_mods = on;
      do $$ begin execute format(
        'create or replace view pg_catalog.pg_available_extensions as select * from (%s) e where name not in (%L, %L)',
        rtrim(pg_get_viewdef('pg_catalog.pg_available_extensions'::regclass), ';'), 'pg_cron', 'pg_net');
      end $$`).simple();
    await db.push(env);
    assert.deepEqual(
      (await db.sql`select extname from pg_extension where extname in ('pg_cron', 'pg_net')`).length,
      0,
    );
    await workOneJob(db.sql);
    const service = await db.as("service_role");
    await workOneJob(service);
    const missing = await db.sql`
      select item, detail from job_dispatch_health() where not ok and item in ('extensions', 'tick', 'worker') order by item`;
    assert.deepEqual(missing.map(({ item, detail }) => [item, detail]), [
      ["extensions", "missing: pg_cron, pg_net"],
      ["tick", "pg_cron is not installed"],
      ["worker", "cannot be tried: pg_net is not installed"],
    ]);
    await assert.rejects(service`select enable_dispatch()`, { code: "55000", message: /pg_cron/ });
    await service`select disable_dispatch()`;
    await assert.rejects(db.sql`select private.tick()`, { code: "55000", message: /pg_net/ });
    await drainAlone(db);
  });
});

/** Where nothing ticks and pokes, calls of the drain do all of it. */
async function drainAlone({ sql, url }: BareDatabase): Promise<void> {
  const keys = await makeKeys();
  const gateway = await startGateway({ port: 0, databaseUrl: url("authenticator"), keys, functions: {} });
  try {
    await using drain = await startFunction("drain", {
      CRON_SECRET: cronSecret,
      SUPABASE_URL: `http://127.0.0.1:${gateway.port}`,
      SUPABASE_SECRET_KEYS: JSON.stringify({ default: keys.secretKey }),
    });
    const get = (query = "") => drain.fetch(query, { headers: { Authorization: `Bearer ${cronSecret}` } });
    const call = async () => await (await get()).json();
    await sql`delete from jobs where true`;
    await sql`select enqueue_job('echo')`;
    await sql`select from claim_jobs('gone')`;
    await sql`update jobs set lease_expires_at = clock_timestamp() where status = 'running'`;
    await sql`select enqueue_job('fail_first', '{"times": 1}')`;
    await sql`select schedule_job('due', '@hourly', 'echo', next_run => clock_timestamp())`;
    await sql`insert into jobs (kind, status, finished_at) values ('old', 'succeeded', now() - interval '8 days')`;
    const counts = (succeeded: number, failed = 0) => ({ succeeded, failed, dead: 0 });
    const done = { schedules: 1, budgetExhausted: false, errors: 0 };
    assert.deepEqual(await call(), { ...done, queues: { echo: counts(2), fail_first: counts(0, 1) } });
    await sql`update jobs set available_at = clock_timestamp() where kind = 'fail_first'`;
    assert.deepEqual(await call(), { ...done, schedules: 0, queues: { fail_first: counts(1) } });
    const rows = await sql`select kind, status, attempts, schedule from jobs order by id`;
    assert.deepEqual(rows.map((row) => Object.values(row)), [
      ["echo", "succeeded", 2, null],
      ["fail_first", "succeeded", 2, null],
      ["echo", "succeeded", 1, "due"],
    ], "what was to be purged is gone");
    await gateway.stop();
    assert.equal((await get("?budgetMs=1")).status, 503, "when it cannot do anything it says so");
  } finally {
    await gateway.stop();
  }
}

Deno.test("on Postgres 15 as well", async (t) => {
  await using server = await startBareServer(await installPostgres15());
  const app = await server.createDatabase("app");
  const { version } = only(
    await app.sql`select current_setting('server_version_num')::int / 10000 as version`,
  );
  assert.equal(version, 15);
  const env = await vaultVariables();
  await testPush(t, app, env);

  await t.step("every function of every migration does what it does on 17", async () => {
    const db = await server.createDatabase("path");
    await db.admin`alter database path set track_functions = 'all'`;
    await db.push(env);
    const owner = await db.sql.reserve();
    const service = await db.as("service_role");
    await useContract(sqlApi(service));
    await service`select pg_stat_force_next_flush()`;

    await owner`delete from net.http_request_queue`;
    await owner`delete from private.awake_workers`; // the promise of the claim above
    await owner`insert into jobs (kind) values ('test')`;
    assert.equal((await owner`select from net.http_request_queue`).count, 1, "the wake pokes");
    await owner`select private.tick()`;
    await owner`select private.prune_cron_history()`;
    const health =
      await owner`select item, ok from job_dispatch_health() where item in ('extensions', 'cron_secret')`;
    assert.deepEqual(health.map(({ ok }) => ok), [true, true]);
    await owner`select pg_stat_force_next_flush()`;
    const unused = await owner`
      select p.oid::regproc::text as name from pg_proc p left join pg_stat_user_functions s on s.funcid = p.oid
      where p.pronamespace in ('public'::regnamespace, 'private'::regnamespace) and coalesce(s.calls, 0) = 0`;
    assert.deepEqual(unused.map(({ name }) => name), []);
    owner.release();
  });
});

const linesOf = async (paths: string[]) =>
  (await Promise.all(paths.map(read))).flatMap((text) => text.split("\n").map((line) => line.trim()));
/** Without blank lines and comments, so that explaining costs nothing. */
const codeOf = (lines: string[]) => lines.filter((line) => !/^($|--|\/\/|\/\*|\*)/.test(line)).length;
const code = async (paths: string[]) => codeOf(await linesOf(paths));
const [migrations, shared] = [
  (await templateMigrations()).map((path) => `supabase/${path}`),
  await files("supabase/functions/_shared", ".ts"),
];
/** What stands on the engine, and can be left unread: which migrations and functions it is. */
const parts: [name: string, own: RegExp][] = [
  ["webhooks", /_webhooks\.|\/_webhooks\//],
  ["schedules", /_(cron|schedules)\.|\/_schedules\//],
  ["idempotency and leases", /[/_](idempotency|leases)\./],
];
const all = [
  ...migrations,
  ...shared,
  ...await files("supabase/functions/_webhooks", ".ts"),
  ...await files("supabase/functions/_schedules", ".ts"),
];
const engine = await code(all.filter((path) => !parts.some(([, own]) => own.test(path))));
const sizes = await Promise.all(
  parts.map(async ([name, own]) => [name, await code(all.filter((path) => own.test(path)))] as const),
);

// The counts are in the name, so that every run shows them.
Deno.test(
  `the engine has ${engine} lines of code, fewer than 4,000, and fewer than 1,000 each: ${
    sizes.map(([name, size]) => `${name} ${size}`).join(", ")
  } (all migrations and _shared: ${await code([...migrations, ...shared])})`,
  () => {
    assert.ok(engine > 500 && engine < 4000);
    for (const [name, size] of sizes) assert.ok(size > 100 && size < 1000, name);
  },
);
