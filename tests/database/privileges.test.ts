import assert from "node:assert/strict";
import postgres from "postgres";
import { startGateway } from "../../scripts/local/gateway.ts";
import { signJwt } from "../../scripts/local/jwt.ts";
import { makeKeys } from "../../scripts/local/keys.ts";
import { createDatabase } from "../support.ts";
import { startBareServer } from "./bare.ts";
import { restApi, sqlApi, useContract } from "./contract.ts";
import { only, setUpDispatch, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

const apiRoles = ["anon", "authenticated"];

/** What may run with its owner's rights: it reads Vault, sends pokes or schedules. All the rest is the caller's. */
const securityDefiners = [
  "private.complete_new_job",
  "private.poke",
  "private.prune_cron_history",
  "private.tick",
  "private.wake",
  "private.worker_endpoint",
  "public.disable_dispatch",
  "public.enable_dispatch",
  "public.job_dispatch_health",
];

/** What there is in the template's schemas, whatever it is called: what a later migration adds is looked at as well. */
interface Relation {
  schema: string;
  name: string;
  kind: string;
  secured: boolean;
  columns: string[];
}
interface Routine {
  schema: string;
  name: string;
  trigger: boolean;
  definer: boolean;
  settings: string[] | null;
  args: { name: string; type: string }[];
}
const relations = (sql: postgres.Sql) =>
  sql<Relation[]>`
    select n.nspname as schema, c.relname as name, c.relkind as kind, c.relrowsecurity as secured,
      array(select a.attname::text from pg_attribute a where a.attrelid = c.oid and a.attnum > 0) as columns
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname in ('public', 'private') and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
    order by 1, 2`;
const routines = (sql: postgres.Sql) =>
  sql<Routine[]>`
    select n.nspname as schema, p.proname as name, p.prorettype = 'trigger'::regtype as trigger,
      p.prosecdef as definer, p.proconfig as settings,
      (select coalesce(json_agg(json_build_object('name', a.name, 'type', format_type(a.type, null)) order by a.n), '[]')
        from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargnames, p.proargmodes::text[])
          with ordinality a(type, name, mode, n)
        where a.mode is null or a.mode in ('i', 'b', 'v')) as args
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where n.nspname in ('public', 'private')
    order by 1, 2`;

/** For each type of an argument something to call with, so that a refusal is about the caller: as SQL and as JSON. */
const samples: Record<string, [sql: string, json: postgres.JSONValue]> = {
  bigint: ["1", 1],
  "bit varying[]": ["'{1}'", ["1"]],
  boolean: ["true", true],
  bytea: ["'\\x7b7d'", "\\x7b7d"],
  integer: ["1", 1],
  "integer[]": ["'{1}'", [1]],
  interval: ["'1 second'", "1 second"],
  jsonb: ["'[]'", []],
  text: ["'test'", "test"],
  "text[]": ["'{test}'", ["test"]],
  "timestamp without time zone": ["'2030-01-01 00:00:00'", "2030-01-01T00:00:00"],
  "timestamp with time zone": ["'2030-01-01 00:00:00Z'", "2030-01-01T00:00:00Z"],
  uuid: ["gen_random_uuid()", crypto.randomUUID()],
  "uuid[]": ["'{}'", []],
  "private.new_job": ["null", null],
  "private.requeued_job[]": ["'{}'", []],
};
function sampleFor({ name, type }: { name: string; type: string }) {
  const sample = samples[type];
  assert.ok(sample && name, `samples lacks the type ${type} of the argument ${name}`);
  return { name, type, sql: sample[0], json: sample[1] };
}

/** What the API's roles may do with the template, by Postgres's own account: it should be nothing. */
async function openings(sql: postgres.Sql): Promise<string[]> {
  const found = await sql<{ opening: string }[]>`
    with things as (
      select c.oid, c.relkind, c.oid::regclass::text as name from pg_class c
      where c.relnamespace in ('public'::regnamespace, 'private'::regnamespace)
    ), rights as (
      select 'select, insert, update, delete, truncate, references, trigger'
        || case when current_setting('server_version_num')::int >= 170000 then ', maintain' else '' end as on_tables
    )
    select role || ': ' || opening as opening from unnest(${apiRoles}::text[]) role
    cross join lateral (
      select t.name as opening from things t cross join rights
      where t.relkind in ('r', 'p', 'v', 'm', 'f')
        and (has_table_privilege(role, t.oid, rights.on_tables)
          or has_any_column_privilege(role, t.oid, 'select, insert, update, references'))
      union all
      select t.name from things t where t.relkind = 'S' and has_sequence_privilege(role, t.oid, 'usage, select, update')
      union all
      select n.nspname || '.' || p.proname || '()' from pg_proc p join pg_namespace n on n.oid = p.pronamespace
      where n.nspname in ('public', 'private') and has_function_privilege(role, p.oid, 'execute')
      union all
      select 'schema private' where has_schema_privilege(role, 'private', 'usage, create')
    ) o
    order by 1`;
  return found.map(({ opening }) => opening);
}

/** Every way to use each table, sequence and function, as SQL. */
async function uses(sql: postgres.Sql): Promise<string[]> {
  const found: string[] = [];
  for (const { schema, name, kind, columns } of await relations(sql)) {
    const full = `${schema}.${name}`;
    if (kind === "S") found.push(`select nextval('${full}')`, `select * from ${full}`);
    else {
      found.push(...columns.map((column) => `select ${column} from ${full}`));
      // A view of a function cannot be written, whoever asks.
      if (kind === "v") continue;
      found.push(
        `insert into ${full} default values`,
        `update ${full} set ${columns[0]} = default where true`,
        `delete from ${full} where true`,
        `truncate ${full}`,
      );
    }
  }
  for (const { schema, name, args } of await routines(sql)) {
    const list = args.map(sampleFor).map((arg) => `${arg.name} => ${arg.sql}::${arg.type}`);
    found.push(`select ${schema}.${name}(${list.join(", ")})`);
  }
  return found;
}

type Key = Record<string, string>;

/** Sends a request and gives back its status and the error's code. */
async function ask(
  apiUrl: string,
  key: Key,
  method: string,
  path: string,
  body?: unknown,
  headers: Key = {},
) {
  const response = await fetch(`${apiUrl}/rest/v1/${path}`, {
    method,
    headers: { ...key, ...headers, "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await response.text();
  const code = /"code":"(\w+)"/.exec(text)?.[1] ??
    /error=(\w+)/.exec(response.headers.get("proxy-status") ?? "")?.[1];
  return { what: `${method} ${path}`, answer: `${response.status} ${code}` };
}

/** What each request over REST to the template's tables and functions in public is answered. */
async function askForEverything(sql: postgres.Sql, apiUrl: string, key: Key) {
  const found: { what: string; answer: string }[] = [];
  for (const { name, kind, columns } of (await relations(sql)).filter(({ schema }) => schema === "public")) {
    const [column] = columns;
    for (const each of columns) found.push(await ask(apiUrl, key, "GET", `${name}?select=${each}`));
    found.push(
      await ask(apiUrl, key, "GET", name),
      await ask(apiUrl, key, "HEAD", name, undefined, { Prefer: "count=exact" }),
    );
    if (kind === "v") continue;
    found.push(
      await ask(apiUrl, key, "POST", name, {}),
      await ask(apiUrl, key, "POST", name, {}, { Prefer: "return=representation" }),
      await ask(apiUrl, key, "POST", name, {}, { Prefer: "resolution=merge-duplicates" }),
      await ask(apiUrl, key, "PATCH", `${name}?${column}=not.is.null`, { [column ?? ""]: null }),
      await ask(apiUrl, key, "DELETE", `${name}?${column}=not.is.null`),
    );
  }
  return [...found, ...await callEverything(sql, apiUrl, key)];
}

async function callEverything(sql: postgres.Sql, apiUrl: string, key: Key) {
  const found: { what: string; answer: string }[] = [];
  for (const { schema, name, trigger, args } of await routines(sql)) {
    if (schema !== "public" || trigger) continue;
    const body = Object.fromEntries(args.map(sampleFor).map((arg) => [arg.name, arg.json]));
    found.push(await ask(apiUrl, key, "POST", `rpc/${name}`, body));
  }
  return found;
}

/** What service_role has no use for stays the database's own: the secret, the pokes, the switch. */
async function assertDispatchIsClosed(service: postgres.Sql): Promise<void> {
  const refused = [
    "select private.worker_endpoint()",
    "select private.poke('wake')",
    "select private.tick()",
    "select private.prune_cron_history()",
    "select * from private.pokes",
    "update private.dispatch set enabled = false where true",
  ];
  for (const query of refused) await assert.rejects(service.unsafe(query), { code: "42501" }, query);
}

/** How projects differ: what each grants, before the first migration, on what will be created. */
const projects: Record<string, string> = {
  "grants nothing of what is new, as projects do since October 2026": "",
  "grants all that is new to the API's roles, as projects did before": `
    alter default privileges in schema public grant all on tables to anon, authenticated, service_role;
    alter default privileges in schema public grant all on sequences to anon, authenticated, service_role;
    alter default privileges in schema public grant all on functions to anon, authenticated, service_role;`,
  "has been hardened until new things belong to their owner alone": `
    alter default privileges in schema public revoke all on tables from anon, authenticated, service_role;
    alter default privileges in schema public revoke all on sequences from anon, authenticated, service_role;
    alter default privileges in schema public revoke all on functions from anon, authenticated, service_role;
    alter default privileges revoke execute on functions from public;
    alter default privileges revoke usage on types from public;
    revoke usage on schema public from public, anon, authenticated;`,
  // Schema public is open to all where the database has come from Postgres 14; schema private is what Supabase's guides
  // have an app make for its own functions.
  "grants everything to everyone, and has opened a schema private of its own": `
    alter default privileges grant all on tables to public, anon, authenticated, service_role;
    alter default privileges grant all on functions to public, anon, authenticated, service_role;
    alter default privileges grant all on sequences to public, anon, authenticated, service_role;
    alter default privileges grant all on schemas to public, anon, authenticated, service_role;
    grant create on schema public to public;
    create schema private;
    alter default privileges in schema private grant all on tables to public, anon, authenticated, service_role;
    alter default privileges in schema private grant all on functions to public, anon, authenticated, service_role;
    alter default privileges in schema private grant all on sequences to public, anon, authenticated, service_role;
    grant usage on schema private to public, anon, authenticated, service_role;`,
};

Deno.test("whatever a project grants by default, only service_role gets in, in SQL and over REST", async (t) => {
  await using server = await startBareServer();
  const keys = await makeKeys();
  const exp = Math.floor(Date.now() / 1000) + 3600;
  const user = await signJwt({ role: "authenticated", sub: crypto.randomUUID(), exp }, keys.jwtSecret);
  const service: Key = { apikey: keys.secretKey };
  const outsiders: [who: string, key: Key, refusal: string][] = [
    ["anon", { apikey: keys.publishableKey }, "401 42501"],
    ["a user", { apikey: keys.publishableKey, Authorization: `Bearer ${user}` }, "403 42501"],
  ];
  for (const [i, [project, sql]] of Object.entries(projects).entries()) {
    await t.step(`a project that ${project}`, async () => {
      const db = await server.createDatabase(`project_${i}`);
      await db.sql.unsafe(sql).simple();
      await db.push();
      const ours = (opening: string) =>
        !sql.includes("create schema private") || !opening.includes("schema private");
      assert.deepEqual((await openings(db.sql)).filter(ours), []);

      for (const role of apiRoles) {
        const api = await db.as(role);
        const refused = await uses(db.sql);
        assert.ok(refused.length >= 80);
        for (const use of refused) {
          await assert.rejects(api.unsafe(use), { code: "42501" }, `${role}: ${use}`);
        }
      }
      const role = await db.as("service_role");
      await assertDispatchIsClosed(role);
      await useContract(sqlApi(role));

      const gateway = await startGateway({
        port: 0,
        databaseUrl: db.url("authenticator"),
        keys,
        functions: {},
      });
      const apiUrl = `http://127.0.0.1:${gateway.port}`;
      try {
        for (const [who, key, refusal] of outsiders) {
          const answers = await askForEverything(db.sql, apiUrl, key);
          assert.ok(answers.length >= 50);
          for (const { what, answer } of answers) assert.equal(answer, refusal, `${who}: ${what}`);
        }
        await db
          .sql`truncate jobs, job_failures, webhook_inbox, job_kinds, schedules, idempotency_keys, leases, private.app_schedules, private.starts`;
        await useContract(restApi(apiUrl, service));
        for (const { what, answer } of await callEverything(db.sql, apiUrl, service)) {
          assert.ok(!/42501|PGRST/.test(answer), `${what}: ${answer}`);
        }
      } finally {
        await gateway.stop();
      }
    });
  }
});

Deno.test("schema private is not there over REST, named or not, for any key", async () => {
  const keys = await makeKeys();
  const gateway = await startGateway({ port: 0, databaseUrl: db.url("authenticator"), keys, functions: {} });
  const apiUrl = `http://127.0.0.1:${gateway.port}`;
  const hidden = (await relations(db.sql)).filter(({ schema }) => schema === "private").map(({ name }) =>
    name
  );
  const uncallable = (await routines(db.sql)).filter(({ schema }) => schema === "private");
  assert.ok(hidden.length >= 4 && uncallable.length >= 8);
  const named = { "Accept-Profile": "private", "Content-Profile": "private" };
  try {
    const expected: Promise<void>[] = [];
    const expect = async (answer: string, ...request: Parameters<typeof ask>) => {
      const found = await ask(...request);
      assert.equal(found.answer, answer, found.what);
    };
    for (const key of [{ apikey: keys.publishableKey }, { apikey: keys.secretKey }]) {
      for (const name of hidden) {
        for (const [method, body] of [["GET"], ["POST", {}], ["PATCH", { one: true }], ["DELETE"]] as const) {
          expected.push(expect("406 PGRST106", apiUrl, key, method, `${name}?one=is.true`, body, named));
        }
        for (const path of [name, `private.${name}`]) {
          expected.push(expect("404 PGRST205", apiUrl, key, "GET", path));
        }
      }
      for (const { name, args } of uncallable) {
        const body = Object.fromEntries(args.map(sampleFor).map((arg) => [arg.name, arg.json]));
        expected.push(
          expect("406 PGRST106", apiUrl, key, "POST", `rpc/${name}`, body, named),
          expect("404 PGRST202", apiUrl, key, "POST", `rpc/${name}`, body),
        );
      }
    }
    // All at once: each name that is not known has the API look at the database's schema anew.
    await Promise.all(expected);
  } finally {
    await gateway.stop();
  }
});

Deno.test("the checks above find a table, a column, a sequence and a function that are open", async () => {
  await using db = await createDatabase();
  await db.sql`create table private.left_open (a int, b serial)`;
  await db.sql`grant select (a) on private.left_open to anon`;
  await db.sql`grant usage on sequence private.left_open_b_seq to authenticated`;
  await db.sql`create function public.left_open() returns int language sql as 'select 1'`;
  await db.sql`create view public.left_open as select 1 as one`;
  await db.sql`grant select on public.left_open to anon, authenticated`;
  assert.deepEqual(await openings(db.sql), [
    "anon: left_open",
    "anon: private.left_open",
    "anon: public.left_open()",
    "authenticated: left_open",
    "authenticated: private.left_open_b_seq",
    "authenticated: public.left_open()",
  ]);
  const all = await uses(db.sql);
  for (
    const use of [
      "select one from public.left_open",
      "select public.left_open()",
      "select b from private.left_open",
    ]
  ) {
    assert.ok(all.includes(use), use);
  }
  const keys = await makeKeys();
  const gateway = await startGateway({ port: 0, databaseUrl: db.url("authenticator"), keys, functions: {} });
  const answers = await askForEverything(db.sql, `http://127.0.0.1:${gateway.port}`, {
    apikey: keys.publishableKey,
  });
  await gateway.stop();
  assert.deepEqual(
    answers.filter(({ answer }) => answer.startsWith("2")).map(({ what, answer }) => `${what}: ${answer}`)
      .sort(),
    [
      "GET left_open: 200 undefined",
      "GET left_open?select=one: 200 undefined",
      "HEAD left_open: 200 undefined",
      "POST rpc/left_open: 200 undefined",
    ],
  );
});

Deno.test("row level security is on for every table, and no policy opens one", async () => {
  const tables = (await relations(db.sql)).filter(({ kind }) => kind === "r");
  assert.deepEqual(tables.filter(({ secured }) => !secured), []);
  assert.equal((await db.sql`select from pg_policies where schemaname in ('public', 'private')`).count, 0);
});

Deno.test("every function pins its search_path, has no overload, and only the listed ones run as their owner", async () => {
  const all = (await routines(db.sql)).map((each) => ({ ...each, name: `${each.schema}.${each.name}` }));
  const unpinned = all.filter(({ settings }) => !settings?.includes("search_path=pg_catalog, pg_temp"));
  assert.deepEqual(unpinned.map(({ name }) => name), []);
  const names = all.map(({ name }) => name);
  assert.equal(new Set(names).size, names.length, "REST cannot choose between overloads");
  assert.deepEqual(all.filter(({ definer }) => definer).map(({ name }) => name), securityDefiners);
});

Deno.test("an app's own trigger, security definer, enqueues for a user who may not", async () => {
  await using db = await createDatabase();
  await db.sql.unsafe(`
    create table public.orders (id int primary key, owner uuid not null default auth.uid());
    alter table public.orders enable row level security;
    grant insert on public.orders to authenticated;
    create policy own on public.orders for insert to authenticated with check (owner = auth.uid());
    create function public.enqueue_receipt() returns trigger language plpgsql security definer set search_path = '' as $$
    begin
      perform public.enqueue_job('send_email', jsonb_build_object('order', new.id));
      return null;
    end $$;
    create trigger receipt after insert on public.orders for each row execute function public.enqueue_receipt();
  `).simple();
  const api = db.connect("authenticator", { max: 1 });
  await api`set role authenticated`;
  await api`select set_config('request.jwt.claims', '{"sub": "00000000-0000-0000-0000-000000000001"}', false)`;
  await api`insert into orders (id) values (1)`;
  assert.deepEqual(only(await db.sql`select kind, payload from jobs`), {
    kind: "send_email",
    payload: { order: 1 },
  });
});

Deno.test("a caller's temporary types are not used by a function that runs with its owner's rights", async () => {
  await using db = await createDatabase();
  await setUpDispatch(db);
  await db.sql.unsafe(`
    create table public.orders (id int);
    grant insert on public.orders to authenticated;
    create function public.enqueue_order() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
      perform public.enqueue_job('order', jsonb_build_object('id', new.id));
      return null;
    end $$;
    create trigger enqueue_order after insert on public.orders for each row execute function public.enqueue_order();
  `).simple();
  const attacker = db.connect("authenticator", { max: 1 });
  await attacker`set role authenticated`;
  for (const type of ["uuid", "text", "jsonb", "int4", "timestamptz", "interval"]) {
    await attacker.unsafe(`
      create function pg_temp.check_${type}(value pg_catalog.${type}) returns pg_catalog.bool language plpgsql as $$
      begin
        raise exception 'the check of pg_temp.${type} runs as %', current_user;
      end $$;
      create domain pg_temp.${type} as pg_catalog.${type} check (pg_temp.check_${type}(value));
    `).simple();
  }
  await attacker`insert into public.orders values (1)`;
  assert.equal((await db.sql`select from jobs where kind = 'order'`).count, 1);
  assert.equal((await db.sql`select from net.http_request_queue`).count, 1);
});
