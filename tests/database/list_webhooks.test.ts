import assert from "node:assert/strict";
import postgres from "postgres";
import { createDatabase } from "../support.ts";
import { claim, cost, enqueue, job, only, openTransaction, rowText, sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

type Status = "pending" | "running" | "succeeded" | "dead" | "cancelled";

/** Messages of a source whose jobs have a status, with a failure each; the first to come first. */
async function add(
  source: string,
  status: Status,
  { count = 1, tenant = null }: { count?: number; tenant?: string | null } = {},
  sql = db.sql,
): Promise<string[]> {
  const rows = await sql`
    with added as (
      insert into jobs (kind, status, finished_at, lease_expires_at)
      select 'webhook_' || ${source}::text, ${status},
        case when ${status} in ('succeeded', 'dead', 'cancelled') then clock_timestamp() end,
        case when ${status} = 'running' then clock_timestamp() + interval '1 minute' end
      from generate_series(1, ${count}::int) returning id, kind
    ), failures as (
      insert into job_failures (job_id, kind, attempt, lease_token, error) select id, kind, 1, 1, 'x' from added
    )
    insert into webhook_inbox (id, source, tenant, message_id, body)
    select id, ${source}, ${tenant}, id::text, '{}' from added returning id`;
  return rows.map(({ id }) => id).sort();
}

interface Asked {
  source?: string | null;
  tenant?: string | null;
  status?: string | null;
  max_rows?: number | null;
  before?: string | null;
}

async function list({ source, tenant, status, max_rows = 50, before }: Asked = {}): Promise<string[]> {
  const rows = await db.sql`
    select id from list_webhooks(${source ?? null}, ${tenant ?? null}, ${status ?? null}, ${max_rows}, ${
    before ?? null
  })`;
  return rows.map(({ id }) => id);
}

async function retry(args: string): Promise<string[]> {
  const rows = await db.sql.unsafe<{ id: string }[]>(`select id from retry_webhooks(${args}) id order by id`);
  return rows.map(({ id }) => id);
}

async function purge(args: string, sql: postgres.Sql = db.sql): Promise<number> {
  return only(await sql.unsafe(`select purge_webhooks(${args}) as deleted`)).deleted;
}

/** What is left: messages, jobs, failures. */
async function left(): Promise<number[]> {
  const tables = ["webhook_inbox", "jobs", "job_failures"];
  return await Promise.all(tables.map(async (name) => (await db.sql`select from ${db.sql(name)}`).count));
}

Deno.test("messages are listed with all that is known of them and of their jobs, the newest first", async () => {
  const { id } = only(
    await db.sql`
    select id from receive_webhook('billing', '{}', 'm', type => 'paid', tenant => 'acme')`,
  );
  await db.sql`select receive_webhook('billing', '[]', 'm', tenant => 'acme')`;
  const { lease_token } = only(await claim(db.sql));
  await db.sql`select fail_job(${id}, ${lease_token}, 'boom', permanent => true)`;
  const row = await job(db.sql, id);
  const { received_at, ...listed } = only(await db.sql`select * from list_webhooks()`);
  assert.deepEqual(listed, {
    id,
    source: "billing",
    tenant: "acme",
    message_id: "m",
    type: "paid",
    status: "dead",
    attempts: 1,
    last_error: "boom",
    other_bodies: 1,
    finished_at: row.finished_at,
  });
  assert.ok(Math.abs(received_at - row.created_at) < 1_000);
});

Deno.test("by source, by tenant, by status and by any of these together, and jobs that are no messages are not among them", async () => {
  const all: { id: string; source: string; tenant: string | null; status: Status }[] = [];
  const statuses: Status[] = ["pending", "running", "succeeded", "dead", "cancelled"];
  const sources = ["billing", "shop", "billing_2"];
  const tenants = [null, "a", "b"];
  for (const status of statuses) {
    for (const source of sources) {
      for (const tenant of tenants) {
        for (const id of await add(source, status, { tenant, count: 2 })) {
          all.push({ id, source, tenant, status });
        }
      }
    }
  }
  await enqueue(db.sql, "webhook_billing");
  await enqueue(db.sql, "billing");
  for (const source of [undefined, ...sources, "none"]) {
    for (const tenant of [undefined, "a", "b", "c"]) {
      for (const status of [undefined, ...statuses]) {
        const expected = all.filter((each) =>
          (!source || each.source === source) && (!tenant || each.tenant === tenant) &&
          (!status || each.status === status)
        ).map(({ id }) => id).sort().reverse();
        const asked = { source, tenant, status };
        assert.deepEqual(await list({ ...asked, max_rows: 1000 }), expected, JSON.stringify(asked));
        assert.deepEqual(await list({ ...asked, max_rows: 3 }), expected.slice(0, 3));
      }
    }
  }
});

Deno.test("page by page each comes once, also when the last one of a page goes and others come meanwhile", async () => {
  for (const status of [null, "dead"]) {
    const ids = [...await add("billing", "dead", { count: 12 }), ...await add("shop", "dead", { count: 13 })];
    const seen: string[] = [];
    for (let before: string | null = null;;) {
      const page = await list({ status, max_rows: 7, before });
      seen.push(...page);
      before = page.at(-1) ?? null;
      if (!before) break;
      await db.sql`delete from jobs where id = ${before}`;
      await add("shop", "dead");
    }
    assert.deepEqual(seen, ids.sort().reverse());
    await db.sql`delete from jobs where true`;
  }
});

Deno.test("messages that came in one transaction come once each", async () => {
  await db.sql`select receive_webhook('billing', '{}', n::text) from generate_series(1, 20) n`;
  const first = await list({ max_rows: 10 });
  const second = await list({ max_rows: 10, before: first.at(-1) });
  assert.equal(new Set([...first, ...second]).size, 20);
});

Deno.test("what is no page or no status is refused", async () => {
  for (const max_rows of [0, 1001, -1, null]) {
    await assert.rejects(list({ max_rows }), { code: "22023", message: /between 1 and 1000/ });
  }
  for (const status of ["failed", "", "DEAD"]) {
    await assert.rejects(list({ status }), { code: "22023", message: /is not pending, running/ });
  }
});

Deno.test("a page costs no more beside twenty times as many messages, of many sources and tenants", async () => {
  await using db = await createDatabase();
  const { sql } = db;
  // A few are dead; a tenant has ten messages or so.
  const grow = async (count: number, dead: number) => {
    await sql`
      with added as (
        insert into jobs (kind, status, finished_at)
        select 'webhook_source_' || n % 40, case when n <= ${dead}::int then 'dead' else 'succeeded' end, clock_timestamp()
        from generate_series(1, ${count}::int) n returning id, kind
      )
      insert into webhook_inbox (id, source, tenant, message_id, body)
      select id, substr(kind, 9), 'tenant' || row_number() over () % ${count / 10}::int, id, '{}' from added`;
  };
  const pages = ["", "status => 'dead'", "status => 'succeeded'", "status => 'pending'"].flatMap((status) =>
    ["", "'source_7'", "tenant => 'tenant7'", "'source_7', 'tenant7'"].map((of) =>
      [of, status].filter(Boolean).join(", ")
    )
  );
  const measure = async () => {
    const found: number[] = [];
    for (const page of pages) {
      const query = `select * from list_webhooks(${[page, "max_rows => 5"].filter(Boolean).join(", ")})`;
      await cost(sql, query);
      found.push((await cost(sql, query)).buffers);
    }
    return found;
  };
  await sql`alter table jobs disable trigger user`;
  await grow(1_000, 80);
  const few = await measure(); // with statistics of no rows at all
  await grow(20_000, 0);
  for (const analyze of ["", "vacuum analyze"]) {
    await sql.unsafe(analyze);
    const many = await measure();
    pages.forEach((page, i) => {
      const [before = 0, after = 0] = [few[i], many[i]];
      // As many as the tenant has, or as are dead, and every source, are looked at.
      assert.ok(after < 2 * before + 200, `${page} ${analyze}: ${before} -> ${after} buffers`);
    });
  }
});

Deno.test("dead messages of a source, or of a tenant there, are processed again, with all their attempts, the first to come first", async () => {
  const mine = await add("billing", "dead", { count: 3 });
  const tenants = await add("billing", "dead", { count: 2, tenant: "acme" });
  const others = [
    ...await add("billing", "cancelled"),
    ...await add("billing", "succeeded"),
    ...await add("billing_2", "dead"),
    ...await add("shop", "dead", { tenant: "acme" }),
  ];
  const before = await Promise.all(others.map((id) => rowText(db.sql, id)));
  assert.deepEqual(await retry("source => 'none'"), []);
  assert.deepEqual(await retry("source => 'billing', tenant => 'acme'"), tenants);
  assert.deepEqual(await retry("source => 'billing', max_rows => 2"), mine.slice(0, 2));
  assert.deepEqual(await retry("source => 'billing'"), mine.slice(2));
  assert.deepEqual(await Promise.all(others.map((id) => rowText(db.sql, id))), before);
  const { status, attempts } = await job(db.sql, mine[0] ?? "");
  assert.deepEqual([status, attempts], ["pending", 0]);
});

Deno.test("by id, dead and cancelled messages are processed again, and nothing else is, of whatever kind", async () => {
  const dead = await add("billing", "dead");
  const cancelled = await add("shop", "cancelled");
  const untouched = [...await add("billing", "succeeded"), ...await add("billing", "running")];
  for (const kind of ["billing", "webhook_billing"]) { // jobs, but no messages
    const { id } = only(
      await db.sql`
      insert into jobs (kind, status, finished_at) values (${kind}, 'dead', now()) returning id`,
    );
    untouched.push(id);
  }
  const before = await Promise.all(untouched.map((id) => rowText(db.sql, id)));
  const ids = `ids => array['${
    [...dead, ...cancelled, ...untouched, crypto.randomUUID()].join("','")
  }']::uuid[]`;
  assert.deepEqual(await retry("ids => '{}'"), []);
  assert.deepEqual(await retry(`${ids}, tenant => 'acme'`), []);
  assert.deepEqual(await retry(`${ids}, source => 'shop'`), cancelled);
  assert.deepEqual(await retry(ids), dead);
  assert.deepEqual(await Promise.all(untouched.map((id) => rowText(db.sql, id))), before);
});

Deno.test("a retry of nothing in particular is refused, and so is one of no rows", async () => {
  for (const args of ["", "null", "null, null, null", "tenant => 'acme'", "ids => null, tenant => 'acme'"]) {
    await assert.rejects(retry(args), { code: "22023", message: /neither a source nor ids/ });
  }
  for (const max of ["0", "-1", "null", "100001"]) {
    await assert.rejects(retry(`source => 'billing', max_rows => ${max}`), {
      code: "22023",
      message: new RegExp(max),
    });
  }
});

Deno.test("of a tenant that leaves nothing stays, whatever his jobs do, and a worker that runs one is told", async () => {
  const statuses: Status[] = ["succeeded", "dead", "cancelled", "running"];
  for (const source of ["billing", "shop"]) {
    for (const status of statuses) await add(source, status, { tenant: "acme" });
    for (const tenant of [null, "acm", "acme2"]) await add(source, "dead", { tenant });
  }
  const { id } = only(await db.sql`select id from receive_webhook('billing', '{}', tenant => 'acme')`);
  const { lease_token } = only(await claim(db.sql, 1));
  const plain = await enqueue(db.sql, "webhook_billing");
  assert.equal(await purge("tenant => 'acme', source => 'shop'"), 4);
  assert.equal(await purge("tenant => 'acme'"), 5);
  assert.equal(await purge("tenant => 'acme'"), 0);
  assert.equal(only(await db.sql`select complete_job(${id}, ${lease_token}) as held`).held, false);
  assert.deepEqual(await left(), [6, 7, 6]);
  assert.equal((await job(db.sql, plain)).status, "pending");
  assert.equal(await purge("'billing'"), 3);
  assert.deepEqual(await left(), [3, 4, 3]);
});

Deno.test("older than, at most so many, and the oldest first", async () => {
  const ids = await add("billing", "pending", { count: 6 });
  await db.sql`
    update webhook_inbox set received_at = received_at - interval '1 day' where id = any (${
    ids.slice(0, 5)
  }::uuid[])`;
  assert.equal(await purge("'billing', older_than => '2 days'"), 0);
  assert.equal(await purge("'billing', older_than => '23 hours', max_rows => 2"), 2);
  assert.deepEqual(await list({ source: "billing" }), ids.slice(2).reverse());
  for (const max of ["0", "-1", "null"]) {
    await assert.rejects(purge(`'billing', max_rows => ${max}`), {
      code: "22023",
      message: /is not above 0/,
    });
  }
  for (const endless of ["1000000 days", "178000000 years"]) {
    assert.equal(await purge(`'billing', older_than => '${endless}'`), 0);
  }
  assert.equal(await purge("'billing', null, '23 hours'"), 3); // null spares nobody, but the time does
  const more = [
    ...await add("shop", "dead", { count: 3, tenant: "t" }),
    ...await add("zoo", "dead", { tenant: "t" }),
  ];
  assert.equal(await purge("tenant => 't', max_rows => 2"), 2);
  assert.equal(await purge("tenant => 't', max_rows => 3"), more.length - 2);
  assert.deepEqual(await list(), ids.slice(5));
});

Deno.test("a purge of nobody in particular is refused, since what found no tenant is not to mean all", async () => {
  await add("billing", "dead", { tenant: "acme" });
  const refused = [
    "",
    "''",
    "null",
    "null, null",
    "'billing', null",
    "null, 'acme'",
    "source => null, tenant => 'acme'",
  ];
  for (const args of refused) {
    await assert.rejects(
      purge(args),
      { code: "22023", message: /source or tenant is null, or neither/ },
      args,
    );
  }
  for (const age of ["null", "'-1 second'"]) {
    await assert.rejects(purge(`'billing', older_than => ${age}`), {
      code: "22023",
      message: /older_than .* is no time/,
    });
  }
  assert.deepEqual(await left(), [1, 1, 1]);
});

Deno.test("a message whose job somebody keeps locked stops the purge after a second, and nothing is deleted", async () => {
  await add("billing", "dead", { count: 2, tenant: "acme" });
  const [locked] = await add("shop", "dead", { tenant: "acme" });
  const holder = await openTransaction(db);
  await holder.sql`select from jobs where id = ${locked ?? ""} for no key update`;
  await assert.rejects(purge("tenant => 'acme'"), { code: "55P03" });
  await holder.sql`rollback`;
  assert.deepEqual(await left(), [3, 3, 3]);
  assert.equal(await purge("tenant => 'acme'"), 3);
});

Deno.test("what has ended goes after its time, message and job together, and for no source is that less than 4 days", async () => {
  await add("billing", "succeeded", { count: 2 });
  const [young = ""] = await add("billing", "succeeded");
  await db.sql`update jobs set finished_at = finished_at - interval '8 days' where id <> ${young}`;
  assert.equal(only(await db.sql`select purge_jobs() as deleted`).deleted, 2);
  assert.deepEqual(await left(), [1, 1, 1]);

  // Whatever anybody sets, as senders may send again.
  await db
    .sql`insert into job_kinds (kind, keep_succeeded, keep_dead, keep_cancelled) values ('webhook_billing', '0', '0', '0')`;
  const statuses = ["succeeded", "dead", "cancelled"] as const;
  const ids = (await Promise.all(statuses.map((status) => add("billing", status)))).flat();
  for (const [age, gone] of [["3 days 23 hours", 0], ["2 hours", 4]] as const) {
    await db.sql`update jobs set finished_at = finished_at - ${age}::interval`;
    assert.equal(only(await db.sql`select purge_jobs() as deleted`).deleted, gone, age);
  }
  assert.deepEqual([ids.length, ...await left()], [3, 0, 0, 0]);
});
