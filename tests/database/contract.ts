import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import postgres from "postgres";
import { only } from "./queue.ts";

/** What service_role may do, said once for both ways in: SQL and REST. */

type Row = Record<string, postgres.JSONValue>;

export interface Api {
  /** Calls a function with named arguments and gives back its rows, as JSON has them. */
  call<T>(name: string, args?: Row): Promise<T[]>;
  insert(table: string, rows: Row[]): Promise<void>;
  read<T>(table: string, column: string, value: string): Promise<T[]>;
  update(table: string, column: string, value: string, set: Row): Promise<void>;
  remove(table: string, column: string, value: string): Promise<void>;
}

/** Through a connection that has become service_role. */
export function sqlApi(sql: postgres.Sql): Api {
  return {
    async call<T>(name: string, args: Row = {}) {
      const list = Object.keys(args).map((arg, i) => `${arg} => $${i + 1}`).join(", ");
      const rows = await sql.unsafe<{ row: T }[]>(
        `select to_jsonb(r) as row from public.${name}(${list}) r`,
        // As Postgres reads it; the client would take it for the bytes of a text.
        Object.values(args).map((value) => String(value).startsWith("\\x") ? fromHex(String(value)) : value),
      );
      return rows.map(({ row }) => row);
    },
    async insert(table, rows) {
      await sql`insert into ${sql(table)} ${sql(rows)}`;
    },
    async read<T>(table: string, column: string, value: string) {
      const rows = await sql<{ row: T }[]>`
        select to_jsonb(t) as row from ${sql(table)} t where ${sql(column)} = ${value}`;
      return rows.map(({ row }) => row);
    },
    async update(table, column, value, set) {
      await sql`update ${sql(table)} set ${sql(set)} where ${sql(column)} = ${value}`;
    },
    async remove(table, column, value) {
      await sql`delete from ${sql(table)} where ${sql(column)} = ${value}`;
    },
  };
}

const fromHex = (text: string) => Buffer.from(text.slice(2), "hex");

/** Through REST, with these headers. Throws what it answers when that is an error. */
export function restApi(apiUrl: string, headers: Record<string, string>): Api {
  async function send<T>(method: string, path: string, body?: unknown): Promise<T[]> {
    const response = await fetch(`${apiUrl}/rest/v1/${path}`, {
      method,
      headers: { ...headers, "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    const text = await response.text();
    assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`);
    const answer = text === "" ? [] : JSON.parse(text);
    return Array.isArray(answer) ? answer : [answer];
  }
  return {
    call: <T>(name: string, args = {}) => send<T>("POST", `rpc/${name}`, args),
    insert: async (table, rows) => {
      await send("POST", table, rows);
    },
    read: <T>(table: string, column: string, value: string) =>
      send<T>("GET", `${table}?${column}=eq.${value}`),
    update: async (table, column, value, set) => {
      await send("PATCH", `${table}?${column}=eq.${value}`, set);
    },
    remove: async (table, column, value) => {
      await send("DELETE", `${table}?${column}=eq.${value}`);
    },
  };
}

/** Does everything that the contract lets service_role do, on a database without jobs; each call once at least. */
export async function useContract(api: Api): Promise<void> {
  await api.insert("jobs", [{ kind: "test", priority: 1 }]);
  const large = { kind: "test", payload: { text: "x".repeat(4_000_001) } };
  await assert.rejects(api.insert("jobs", [large]), /more than 4000000/);
  for (let i = 0; i < 4; i++) await api.call("enqueue_job", { kind: "test", delay: "0 s", context: {} });
  // Enough kinds for the claim to take turns.
  await api.insert("jobs", Array.from({ length: 40 }, (_, n) => ({ kind: `kind_${n}` })));
  const jobs = await api.call<{ id: string; lease_token: number }>("claim_jobs", {
    worker: "w",
    max_jobs: 100,
    awake_for: "1 second",
  });
  assert.ok(jobs.length >= 32, `claimed ${jobs.length}`);
  const [a, b, c, d, e] = jobs.map(({ id, lease_token }) => ({ id, lease_token, error: "x" }));
  assert.ok(a && b && c && d && e);
  assert.equal((await api.call("extend_jobs", { leases: [a] })).length, 1);
  assert.deepEqual(await api.call("complete_jobs", { completions: [a] }), [a.id]);
  const one = ({ id, lease_token }: typeof a) => ({ id, lease_token });
  assert.deepEqual(await api.call("complete_job", one(b)), [true]);
  assert.deepEqual(await api.call("checkpoint_job", { ...one(c), fields: { page: 1 } }), [true]);
  assert.equal((await api.call("fail_jobs", { failures: [c] })).length, 1);
  assert.deepEqual(await api.call("fail_job", { ...one(d), error: "x" }), ["pending"]);
  assert.deepEqual(await api.call("release_jobs", { releases: [e] }), [e.id]);
  await api.update("jobs", "status", "running", { lease_expires_at: "2020-01-01T00:00:00Z" });
  const rescued = only(await api.call<number>("rescue_expired_jobs"));
  assert.ok(rescued > 0);
  assert.equal((await api.call("take_lost_attempts", { max_attempts: 1000 })).length, rescued);
  assert.equal((await api.call("declare_job_kinds", { declarations: [{ kind: "test" }] })).length, 1);
  await api.update("job_kinds", "kind", "test", { max_attempts: 3 });
  assert.equal((await api.read("job_failures", "error", "x")).length, 2);
  await api.remove("jobs", "status", "succeeded");
  assert.equal((await api.read("jobs", "status", "succeeded")).length, 0);
  const batch = [{ kind: "test", dedupe_key: "a" }, { kind: "test", dedupe_key: "a", concurrency_key: "c" }];
  const enqueued = await api.call<{ id: string; created: boolean }>("enqueue_jobs", { jobs: batch });
  assert.deepEqual(enqueued.map(({ created }) => created), [true, false]);
  const again = await api.call<unknown>("enqueue_jobs_as_json", { jobs: batch });
  assert.deepEqual(again.flat(), enqueued.map(({ id }) => ({ id, created: false })));
  const replacement = { kind: "test", dedupe_key: "r", dedupe: "replace" };
  assert.deepEqual(await api.call("enqueue_job", replacement), await api.call("enqueue_job", replacement));
  const ids = enqueued.slice(0, 1).map(({ id }) => id);
  assert.deepEqual(await api.call("cancel_jobs", { ids }), ids);
  assert.deepEqual(await api.call("retry_jobs", { ids }), ids);
  assert.deepEqual(await api.call("reschedule_jobs", { ids, available_at: "2030-01-01T00:00:00Z" }), ids);
  assert.deepEqual(await api.call("list_dead_jobs", { kind: "test" }), []);
  await api.insert("jobs", [{ kind: "keyed", concurrency_key: "a" }]);
  await api.insert("job_kinds", [{ kind: "keyed", concurrency: 1, rate_limit: 2 }]);
  assert.equal((await api.call("claim_jobs", { worker: "w", kinds: ["keyed"] })).length, 1);
  assert.equal((await api.call("job_stats", { kinds: ["keyed", "test"] })).length, 2);
  assert.equal((await api.read("job_health", "kind", "keyed")).length, 1);
  assert.deepEqual(await api.call("purge_jobs"), [0]);
  const message = { source: "test", body: "\\x7b7d", message_id: "m", tenant: "t" };
  const received = only(await api.call<{ id: string; created: boolean }>("receive_webhook", message));
  assert.equal(received.created, true);
  const { id } = received;
  assert.deepEqual(await api.call("receive_webhook", message), [{ id, created: false }]);
  assert.equal(only(await api.call<Row>("read_webhook", { id })).body, "e30=");
  const inbox = await api.call<Row>("list_webhooks", { source: "test", tenant: "t", status: "pending" });
  assert.deepEqual(inbox.map((row) => row.id), [id]);
  assert.deepEqual((await api.read<Row>("webhook_inbox", "id", id)).map(({ payload }) => payload), [{}]);
  assert.deepEqual(await api.call("retry_webhooks", { source: "test" }), []);
  assert.deepEqual(await api.call("purge_webhooks", { tenant: "t" }), [1]);
  // A skipped time, so that the change of the clock is looked for.
  const cron = { cron: "30 2 * * *", time_zone: "Europe/Berlin", after: "2030-03-31T00:00:00Z" };
  assert.deepEqual(await api.call("next_cron_run", cron), ["2030-03-31T01:00:00+00:00"]);
  const schedule = {
    name: "app:b",
    cron: "0 9 * * *",
    kind: "test",
    tenant: "t",
    time_zone: "Europe/Berlin",
  };
  const next = await api.call("schedule_job", schedule);
  assert.deepEqual(await api.call("schedule_job", { ...schedule, overlap: "skip" }), next);
  const definitions = [{ name: "app:a", cron: "10 seconds", kind: "test", next_run: "2020-01-01T00:00:00Z" }];
  const ensured = { scheduled: ["app:a"], removed: ["app:b"] };
  const digest = "x";
  assert.deepEqual(await api.call("ensure_app_schedules", { digest, definitions }), [{
    ...ensured,
    error: null,
  }]);
  assert.deepEqual(await api.call("ensure_schedules", { definitions, prefix: "app:" }), [
    { scheduled: [], removed: [] },
  ]);
  assert.deepEqual(await api.call("enqueue_due_schedules"), [1]);
  assert.deepEqual(await api.call("enqueue_due_schedules_as_json"), [{ enqueued: 0, failed: [] }]);
  const listed = await api.call<Row>("list_schedules", { prefix: "app:" });
  assert.deepEqual(listed.map(({ name, last_status }) => [name, last_status]), [["app:a", "pending"]]);
  assert.equal((await api.read("schedules", "name", "app:a")).length, 1);
  assert.deepEqual(await api.call("pause_schedule", { name: "app:a" }), [true]);
  assert.equal((await api.call("resume_schedule", { name: "app:a" })).length, 1);
  assert.deepEqual(await api.call("unschedule_job", { name: "app:a" }), [true]);
  assert.deepEqual(await api.call("unschedule_jobs", { prefix: "app:", tenant: "t" }), [0]);
  const holder = only(await api.call<number>("acquire_lease", { key: "a", seconds: 30, scope: "s" }));
  assert.deepEqual(await api.call("acquire_lease", { key: "a", scope: "s" }), [null]);
  assert.deepEqual(await api.call("extend_lease", { key: "a", holder, scope: "s" }), [true]);
  assert.equal((await api.read("leases", "key", "a")).length, 1);
  assert.deepEqual(await api.call("release_lease", { key: "a", holder, scope: "s" }), [true]);
  const request = { key: "a", fingerprint: "f", lock_seconds: 30, ttl: "1 minute", scope: "s" };
  const begin = async () => only(await api.call<Row>("begin_idempotent_request", request));
  const [first, { outcome }] = [await begin(), await begin()];
  assert.deepEqual([first.outcome, outcome], ["started", "in_progress"]);
  const begun = { key: "a", holder: first.holder ?? null, scope: "s" };
  assert.deepEqual(await api.call("extend_idempotent_request", { ...begun, lock_seconds: 30 }), [true]);
  assert.deepEqual(await api.call("release_idempotent_request", begun), [true]);
  begun.holder = (await begin()).holder ?? null;
  const answer = { status: 201, headers: { ETag: "e" }, body: "\\x00ff" };
  assert.deepEqual(await api.call("complete_idempotent_request", { ...begun, ...answer }), [true]);
  assert.deepEqual(await begin(), { outcome: "replay", holder: null, ...answer });
  await api.update("idempotency_keys", "key", "a", { expires_at: "2020-01-01T00:00:00Z" });
  assert.deepEqual(await api.call("purge_expired_keys", { max_keys: 10 }), [1]);
  await api.call("disable_dispatch");
  await api.call("enable_dispatch");
  assert.ok((await api.call("job_dispatch_health")).length > 0);
}
