import assert from "node:assert/strict";
import postgres from "postgres";
import { createDatabase } from "../support.ts";
import { startBareServer } from "./bare.ts";
import { only, setUpDispatch, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

const apiRoles = ["anon", "authenticated"];

/** What may run with its owner's rights: it reads Vault, sends pokes or schedules. All the rest is the caller's. */
const securityDefiners = [
  "private.poke",
  "private.prune_cron_history",
  "private.tick",
  "private.wake",
  "private.worker_endpoint",
  "public.disable_dispatch",
  "public.enable_dispatch",
  "public.job_dispatch_health",
];

/** Everything of one sort in the template's schemas, whatever it is called. */
const relations = (sql: postgres.Sql) =>
  sql<{ name: string; secured: boolean; kind: string }[]>`
    select c.oid::regclass::text as name, c.relrowsecurity as secured, c.relkind as kind
    from pg_class c
    where c.relnamespace in ('public'::regnamespace, 'private'::regnamespace) and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
    order by 1`;
const functions = (sql: postgres.Sql) =>
  sql<{ oid: number; name: string; settings: string[] | null; definer: boolean }[]>`
    select p.oid::int, n.nspname || '.' || p.proname as name, p.proconfig as settings, p.prosecdef as definer
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where n.nspname in ('public', 'private')
    order by 2`;

/** What the API's roles may do with the template: it should be nothing. */
async function openings(sql: postgres.Sql): Promise<string[]> {
  const found: string[] = [];
  for (const role of apiRoles) {
    for (const { name, kind } of await relations(sql)) {
      const rights = kind === "S" ? "usage, select, update" : "insert, update, select, references";
      const check = kind === "S" ? "has_sequence_privilege" : "has_any_column_privilege";
      const { allowed } = only(
        await sql.unsafe(`select ${check}($1, $2, $3) as allowed`, [role, name, rights]),
      );
      const { whole } = kind === "S" ? { whole: false } : only(
        await sql`select has_table_privilege(${role}, ${name}, 'delete, truncate, trigger, maintain') as whole`,
      );
      if (allowed || whole) found.push(`${role}: ${name}`);
    }
    for (const { oid, name } of await functions(sql)) {
      const { allowed } = only(
        await sql`select has_function_privilege(${role}, ${oid}::oid, 'execute') as allowed`,
      );
      if (allowed) found.push(`${role}: ${name}()`);
    }
    const { usage } = only(
      await sql`select has_schema_privilege(${role}, 'private', 'usage, create') as usage`,
    );
    if (usage) found.push(`${role}: schema private`);
  }
  return found;
}

/** Everything that the contract lets service_role do. */
async function useAsServiceRole(api: postgres.Sql): Promise<void> {
  await api`insert into jobs (kind, payload) values ('test', '{}')`;
  for (let i = 0; i < 4; i++) await api`select enqueue_job('test')`;
  await api`insert into jobs (kind) select 'kind_' || n from generate_series(1, 40) n`; // enough to take turns
  const jobs = await api`select id, lease_token from claim_jobs('w', 100, awake_for => '1 second')`;
  assert.ok(jobs.length >= 32);
  const [a, b, c, d, e] = jobs.map(({ id, lease_token }) => ({ id, lease_token, error: "x" }));
  assert.ok(a && b && c && d && e);
  assert.equal((await api`select extend_jobs(${api.json([a])})`).count, 1);
  assert.equal((await api`select complete_jobs(${api.json([a])})`).count, 1);
  assert.equal(only(await api`select complete_job(${b.id}, ${b.lease_token}) as held`).held, true);
  assert.equal((await api`select fail_jobs(${api.json([c])})`).count, 1);
  assert.equal(only(await api`select fail_job(${d.id}, ${d.lease_token}, 'x') as status`).status, "pending");
  assert.equal((await api`select release_jobs(${api.json([e])})`).count, 1);
  await api`update jobs set lease_expires_at = clock_timestamp() - interval '1 s' where status = 'running'`;
  assert.ok(only(await api`select rescue_expired_jobs() as n`).n > 0);
  assert.equal((await api`select * from declare_job_kinds('[{"kind": "test"}]')`).count, 1);
  await api`update job_kinds set max_attempts = 3 where kind = 'test'`;
  assert.equal((await api`select * from job_failures where error = 'x'`).count, 2);
  await api`delete from jobs where status = 'succeeded'`;
  await api`select disable_dispatch()`;
  await api`select enable_dispatch()`;
  assert.ok((await api`select * from job_dispatch_health()`).length > 0);
}

Deno.test("where new things are granted to everyone, anon and authenticated still get nothing", async () => {
  const grants = await db.sql`select from pg_default_acl where defaclacl::text like '%anon=%'`;
  assert.ok(grants.count >= 3, "this database grants tables, functions and sequences by default");
  assert.ok((await relations(db.sql)).length >= 7 && (await functions(db.sql)).length >= 15);
  assert.deepEqual(await openings(db.sql), []);
  const api = db.connect("authenticator", { max: 1 });
  await api`set role service_role`;
  await useAsServiceRole(api);
});

Deno.test("where new things are granted to nobody, service_role can still do all that it must", async () => {
  await using server = await startBareServer();
  const db = await server.createDatabase("closed");
  for (const sort of ["tables", "functions", "sequences"]) {
    await db.sql.unsafe(`
      alter default privileges in schema public revoke all on ${sort} from anon, authenticated, service_role`);
  }
  await db.push();
  assert.deepEqual(await openings(db.sql), []);
  await useAsServiceRole(await db.as("service_role"));
});

Deno.test("the check above finds a table, a column, a sequence and a function that are open", async () => {
  await using db = await createDatabase();
  await db.sql`create table private.left_open (a int, b serial)`;
  await db.sql`grant select (a) on private.left_open to anon`;
  await db.sql`grant usage on sequence private.left_open_b_seq to authenticated`;
  await db.sql`create function public.left_open() returns int language sql as 'select 1'`;
  assert.deepEqual(
    await openings(db.sql),
    [
      "anon: private.left_open",
      "anon: left_open()",
      "authenticated: private.left_open_b_seq",
      "authenticated: left_open()",
    ].map((each) => each.replace(": left_open()", ": public.left_open()")),
  );
});

Deno.test("row level security is on for every table, and no policy opens one", async () => {
  const tables = (await relations(db.sql)).filter(({ kind }) => kind === "r");
  assert.deepEqual(tables.filter(({ secured }) => !secured), []);
  assert.equal((await db.sql`select from pg_policies where schemaname in ('public', 'private')`).count, 0);
});

Deno.test("every function pins its search_path, has no overload, and only the listed ones run as their owner", async () => {
  const all = await functions(db.sql);
  const unpinned = all.filter(({ settings }) => !settings?.includes("search_path=pg_catalog, pg_temp"));
  assert.deepEqual(unpinned.map(({ name }) => name), []);
  const names = all.map(({ name }) => name);
  assert.equal(new Set(names).size, names.length, "REST cannot choose between overloads");
  assert.deepEqual(all.filter(({ definer }) => definer).map(({ name }) => name), securityDefiners);
});

Deno.test("service_role cannot call what reads the secret, nor read which pokes were sent", async () => {
  await using db = await createDatabase();
  await setUpDispatch(db);
  const api = db.connect("authenticator", { max: 1 });
  await api`set role service_role`;
  const refused = [
    "select private.worker_endpoint()",
    "select private.poke('wake')",
    "select private.tick()",
    "select private.prune_cron_history()",
    "select * from private.pokes",
    "update private.dispatch set enabled = false where true",
  ];
  for (const query of refused) await assert.rejects(api.unsafe(query), { code: "42501" }, query);
});

Deno.test("a request as anon or authenticated is refused: inserts, reads and calls", async () => {
  const api = db.connect("authenticator", { max: 1 });
  for (const role of apiRoles) {
    await api`set role ${api(role)}`;
    const refused = [
      "insert into jobs (kind) values ('test')",
      "select * from jobs",
      "select enqueue_job('test')",
      "select * from claim_jobs('w')",
      "select * from job_dispatch_health()",
      "select private.tick()",
      "select * from private.turn",
    ];
    for (const query of refused) {
      await assert.rejects(api.unsafe(query), { code: "42501" }, `${role}: ${query}`);
    }
  }
});

Deno.test("an app's own trigger, security definer, enqueues for a user who may not", async () => {
  await using db = await createDatabase();
  await db.sql.unsafe(`
    create table public.orders (id int primary key, owner uuid not null default auth.uid());
    alter table public.orders enable row level security;
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
