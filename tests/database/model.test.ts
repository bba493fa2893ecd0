import assert from "node:assert/strict";
import postgres from "postgres";
import { createDatabase, seeded, type TestDatabase, until } from "../support.ts";
import { only } from "./queue.ts";

/**
 * Random sequences of everything that is done to jobs, by 2 to 16 workers at once, against what must hold whatever they do.
 * MODEL_SEQUENCES=5000 runs that many instead of 150; MODEL_SEED=7 begins with that one, which a failure names. What each
 * worker does is the same again with the same seed; how they interleave is not.
 */

const sequences = Number(Deno.env.get("MODEL_SEQUENCES") ?? 150);
const firstSeed = Number(Deno.env.get("MODEL_SEED") ?? crypto.getRandomValues(new Uint32Array(1))[0]);
const lanes = 3;

/** Gives back one of some values. */
function picker(random: () => number): <T>(values: T[]) => T {
  return (values) => {
    const value = values[Math.floor(random() * values.length)];
    assert.ok(value !== undefined);
    return value;
  };
}

interface Held {
  id: string;
  lease_token: number;
}

/** What the workers of one sequence share: what they know, and what they saw. */
interface Sequence {
  seed: number;
  kinds: string[];
  mixedModes: boolean;
  held: Held[];
  /** Jobs that an enqueue says it has created, in a transaction that has committed. */
  created: Set<string>;
  /** Claims that a settle call says were held, by job and token: at most once each. */
  settled: Set<string>;
}

const modes = ["active", "waiting", "replace", "once"];

Deno.test("whatever is done to jobs at once: none is lost, ended twice, over a limit or twice under a key", async (t) => {
  await using db = await createDatabase();
  await db.sql.unsafe(`
    create table public.seen (n bigserial primary key, id uuid, kind text, old_status text, status text, lease_token int,
      locked_at timestamptz);
    create function public.see() returns trigger language plpgsql as $$
    begin
      insert into public.seen (id, kind, old_status, status, lease_token, locked_at)
      values (new.id, new.kind, case when tg_op = 'UPDATE' then old.status end, new.status, new.lease_token, new.locked_at);
      return null;
    end $$;
    create trigger see after insert or update on public.jobs for each row execute function public.see();
    create index on public.seen (kind);
    create table public.rates (kind text primary key, rate_limit int, rate_period interval, until bigint);
    grant all on public.seen, public.seen_n_seq to service_role;
  `).simple();
  await db.sql`select disable_dispatch()`;
  let next = 0;
  await t.step(`${sequences} sequences from seed ${firstSeed} on`, async () => {
    await Promise.all(Array.from({ length: lanes }, async (_, lane) => {
      const connection = { application_name: `model ${lane}` };
      const pool = db.connect("postgres", { max: 17, onnotice: () => {}, connection });
      while (next < sequences) {
        const seed = firstSeed + next++;
        try {
          await runSequence(db, pool, seed);
        } catch (error) {
          next = sequences;
          const where = error instanceof postgres.PostgresError ? `\n${error.where}` : "";
          throw new Error(`MODEL_SEED=${seed} MODEL_SEQUENCES=1 repeats it: ${error}${where}`, {
            cause: error,
          });
        }
      }
    }));
  });
});

async function runSequence(db: TestDatabase, pool: postgres.Sql, seed: number): Promise<void> {
  const random = seeded(seed);
  const pick = picker(random);
  const name = `m${crypto.randomUUID().slice(0, 8)}`;
  const sequence: Sequence = {
    seed,
    kinds: [`${name}_a`, `${name}_b`],
    mixedModes: random() < 0.3,
    held: [],
    created: new Set(),
    settled: new Set(),
  };
  for (const kind of sequence.kinds) {
    const settings = {
      kind,
      max_attempts: pick([1, 2, 5]),
      backoff_base: pick(["0", "10 seconds"]),
      concurrency: pick([null, null, 1, 2, 3]),
      key_concurrency: pick([null, 1, 2]),
      rate_limit: pick([null, null, 2, 4]),
      // A claim is overtaken by more than the shorter one now and then.
      rate_period: pick(["4 milliseconds", "60 milliseconds"]),
    };
    if (random() < 0.8) await pool`insert into job_kinds ${pool(settings)}`;
  }
  const workers = 2 + Math.floor(random() * 15);
  const operations = 20 + Math.floor(random() * 60);
  await Promise.all(Array.from({ length: workers }, async (_, n) => {
    const own = seeded(seed * 31 + n);
    for (let i = 0; i < operations / workers; i++) await operate(pool, sequence, own);
  }));
  await checkQuiet(pool, sequence);
  await drain(pool, sequence);
  await checkEnd(db, sequence);
}

async function operate(pool: postgres.Sql, sequence: Sequence, random: () => number): Promise<void> {
  const pick = picker(random);
  const newJob = () => {
    const key = pick([null, "x", "y", "z"]);
    return {
      kind: pick(sequence.kinds),
      payload: { n: Math.floor(random() * 1000) },
      priority: pick([0, 0, 5, -5]),
      ...(random() < 0.2 ? { delay: "20 milliseconds" } : {}),
      ...(key
        ? { dedupe_key: key, dedupe: sequence.mixedModes ? pick(modes) : modes["xyz".indexOf(key)] ?? "once" }
        : {}),
      ...(random() < 0.5 ? { concurrency_key: pick(["c1", "c2"]) } : {}),
    };
  };
  const some = () => sequence.held.filter(() => random() < 0.4);
  const settle = async (name: string, jobs: Held[], extra: Record<string, postgres.JSONValue> = {}) => {
    if (jobs.length === 0) return;
    // Some are kept, so that they are settled once more.
    sequence.held = sequence.held.filter((each) => !jobs.includes(each) || random() < 0.2);
    const argument = pool.json(jobs.map((each) => ({ ...each, ...extra })));
    const rows = await pool`select to_jsonb(s) as row from ${pool(name)}(${argument}) s`;
    for (const { row } of rows) {
      const id: string = typeof row === "string" ? row : row.id;
      const tokens = jobs.filter((each) => each.id === id).map((each) => each.lease_token);
      assert.ok(tokens.length > 0, `${name} settled ${id}, which it was not asked for`);
      // Two claims of one job in one call: only one of them can have been held.
      const key = `${id} ${tokens.length === 1 ? tokens[0] : Math.max(...tokens)}`;
      assert.ok(!sequence.settled.has(key), `${name}: ${key} is settled twice`);
      sequence.settled.add(key);
    }
  };
  const dice = random() * 100;
  if (dice < 24) {
    const {
      kind,
      payload,
      priority,
      delay = null,
      dedupe_key = null,
      dedupe = "active",
      concurrency_key = null,
    } = newJob();
    const [row] = await pool`
      select enqueue_job(${kind}, ${
      pool.json(payload)
    }, ${delay}::interval, null, ${priority}, null, ${dedupe_key}, ${dedupe},
        ${concurrency_key}) as id`;
    assert.ok(row?.id);
    if (!dedupe_key) sequence.created.add(row.id);
  } else if (dice < 32) {
    const jobs = Array.from({ length: 1 + Math.floor(random() * 6) }, newJob);
    const rows = await pool<{ id: string; created: boolean }[]>`
      select * from enqueue_jobs(${pool.json(jobs)})`;
    assert.equal(rows.length, jobs.length);
    for (const { id, created } of rows) if (created) sequence.created.add(id);
  } else if (dice < 36) {
    const { delay: _, ...columns } = newJob();
    try {
      const [row] = await pool`insert into jobs ${
        pool({ ...columns, payload: pool.json(columns.payload) })
      } returning id`;
      sequence.created.add(row?.id);
    } catch (error) {
      assert.equal(codeOf(error), "23505");
    }
  } else if (dice < 62) {
    const jobs = await pool<Held[]>`
      select id, lease_token from claim_jobs('w', ${pick([1, 2, 5, 20])}, 60, ${
      random() < 0.7 ? sequence.kinds : [pick(sequence.kinds)]
    })`;
    sequence.held.push(...jobs.map(({ id, lease_token }) => ({ id, lease_token })));
    await checkLimits(pool, sequence);
  } else if (dice < 72) {
    await settle("complete_jobs", some());
  } else if (dice < 79) {
    await settle("fail_jobs", some(), { error: "x", ...(random() < 0.2 ? { permanent: true } : {}) });
  } else if (dice < 84) {
    await settle("release_jobs", some(), random() < 0.3 ? { delay: "10 milliseconds" } : {});
  } else if (dice < 86) {
    const jobs = some();
    await pool`select extend_jobs(${pool.json(jobs.map((each) => ({ ...each })))})`;
    for (const { id, lease_token } of jobs) {
      await pool`select checkpoint_job(${id}, ${lease_token}, '{"x": 1}')`;
    }
  } else if (dice < 88) {
    const ids = await pool`
      select id from jobs where kind = any (${sequence.kinds}) and status in ('pending', 'running') limit 2`;
    if (random() < 0.5) await pool`select cancel_jobs(${ids.map(({ id }) => id)}::uuid[])`;
    else {await pool`select reschedule_jobs(${ids.map(({ id }) => id)}::uuid[], clock_timestamp() + ${
        pick(["0", "10 milliseconds"])
      }::interval)`;}
  } else if (dice < 91) {
    await pool`select retry_jobs(kind => ${pick(sequence.kinds)})`;
  } else if (dice < 93) {
    // A crash: whoever held these is gone.
    for (const { id } of some()) {
      await pool`update jobs set lease_expires_at = clock_timestamp() where id = ${id} and status = 'running'`;
    }
    await pool`select rescue_expired_jobs()`;
  } else if (dice < 96) {
    const kind = pick(sequence.kinds);
    if (pausedKinds.has(kind)) return;
    pausedKinds.add(kind);
    // In a transaction: the client has the answer of a statement a moment before that commits.
    await pool.begin((sql) =>
      sql`insert into job_kinds (kind, paused) values (${kind}, true) on conflict (kind) do update set paused = true`
    );
    const { since } = only(await pool`select clock_timestamp()::text as since`);
    await pool`select pg_sleep(${random() * 0.005})`;
    // As text, since the client would cut a time to milliseconds.
    const during = await pool`
      select id, locked_at::text, ${since} as since, clock_timestamp()::text as seen_at from seen
      where kind = ${kind} and status = 'running' and old_status = 'pending' and locked_at > ${since}::text::timestamptz`;
    assert.deepEqual([...during], [], "claimed while paused");
    await pool`update job_kinds set paused = false where kind = ${kind}`;
    pausedKinds.delete(kind);
  } else {
    await enqueueInTransaction(pool, sequence, newJob(), random);
  }
}

/** By one worker at a time. */
const pausedKinds = new Set<string>();

async function enqueueInTransaction(
  pool: postgres.Sql,
  sequence: Sequence,
  job: Record<string, postgres.JSONValue>,
  random: () => number,
): Promise<void> {
  const connection = await pool.reserve();
  try {
    const repeatable = random() < 0.3;
    await connection.unsafe(`begin isolation level ${repeatable ? "repeatable read" : "read committed"}`);
    if (repeatable) await connection`select 1`;
    const [row] = await connection<{ id: string; created: boolean }[]>`select * from enqueue_jobs(${
      connection.json([job])
    })`;
    assert.ok(row);
    const { status, dedupe } = only(await connection`select status, dedupe from jobs where id = ${row.id}`);
    await connection`select pg_sleep(${random() * 0.004})`;
    // Of the other modes a holder may have been running when it absorbed this one.
    if (!row.created && status === "pending" && ["waiting", "replace"].includes(dedupe)) {
      const now = only(await connection`select status from jobs where id = ${row.id}`);
      assert.equal(
        now.status,
        "pending",
        `${row.id} was claimed before the transaction that it absorbed had ended`,
      );
    }
    if (random() < 0.3) await connection`rollback`;
    else {
      await connection`commit`;
      if (row.created) sequence.created.add(row.id);
    }
  } catch (error) {
    await connection`rollback`;
    assert.equal(codeOf(error), "40001", String(error));
  } finally {
    connection.release();
  }
}

function codeOf(error: unknown): unknown {
  if (!(error instanceof postgres.PostgresError)) throw error;
  return error.code;
}

/** At any moment, and so in any snapshot: what runs is within the limits, and a key has one holder. */
async function checkLimits(pool: postgres.Sql, sequence: Sequence): Promise<void> {
  const broken = await pool`
    select j.kind || ': ' || count(*) || ' run' as what from jobs j join job_kinds k using (kind)
    where j.kind = any (${sequence.kinds}) and j.status = 'running' group by j.kind, k.concurrency
    having count(*) > k.concurrency
    union all
    select j.kind || ' ' || j.concurrency_key || ': ' || count(*) || ' run' from jobs j left join job_kinds k using (kind)
    where j.kind = any (${sequence.kinds}) and j.status = 'running' and j.concurrency_key is not null
    group by j.kind, j.concurrency_key, k.key_concurrency having count(*) > coalesce(k.key_concurrency, 1)
    union all
    select j.kind || ' ' || j.dedupe_key || ': held ' || count(*) || ' times' from jobs j
    where j.kind = any (${sequence.kinds}) and j.dedupe_key is not null
      and (j.status = 'pending' or j.dedupe = 'once' or (j.dedupe = 'active' and j.status = 'running'))
    group by j.kind, j.dedupe_key having count(*) > 1`;
  assert.deepEqual([...broken], []);
}

/** With nobody else at work, a claim that gives nothing leaves nothing that could start. */
async function checkQuiet(pool: postgres.Sql, sequence: Sequence): Promise<void> {
  // The client may have the answer of a statement a moment before that commits. No lock does instead: the claims of the other
  // lanes would wait for it, and a claim passes over a kind whose turn it cannot get within 100 ms.
  await until("the end of the last transactions", async () =>
    (await pool`
    select from pg_stat_activity where application_name = current_setting('application_name')
      and xact_start is not null and pid <> pg_backend_pid()`).count === 0);
  for (let i = 0; i < 100; i++) {
    const jobs = await pool<Held[]>`select id, lease_token from claim_jobs('w', 3, 60, ${sequence.kinds})`;
    sequence.held.push(...jobs.map(({ id, lease_token }) => ({ id, lease_token })));
    await checkLimits(pool, sequence);
    if (jobs.length > 0) continue;
    const left = await pool`
      with at as materialized (select max(s.locked_at) as at from seen s where s.kind = any (${sequence.kinds}))
      select j.* from jobs j left join job_kinds k using (kind) cross join at
      where j.kind = any (${sequence.kinds}) and j.status = 'pending' and j.available_at <= at.at
        and k.paused is not true and k.rate_limit is null
        and (k.concurrency is null
          or (select count(*) from jobs r where r.kind = j.kind and r.status = 'running') < k.concurrency)
        and (j.concurrency_key is null or coalesce(k.key_concurrency, 1) > (
          select count(*) from jobs r
          where r.kind = j.kind and r.concurrency_key = j.concurrency_key and r.status = 'running'))`;
    assert.deepEqual([...left], [], "could start, but a claim gave nothing");
    return;
  }
  assert.fail("a hundred claims did not empty the kinds");
}

/** Runs everything that is left to its end. */
async function drain(pool: postgres.Sql, sequence: Sequence): Promise<void> {
  // The rates are checked at the end, and only up to here.
  await pool`
    insert into rates select k.kind, k.rate_limit, k.rate_period, (select max(n) from seen) from job_kinds k
    where k.kind = any (${sequence.kinds}) and k.rate_limit is not null`;
  await pool`
    update job_kinds set concurrency = null, rate_limit = null, paused = false, key_concurrency = 1000
    where kind = any (${sequence.kinds})`;
  await pool`
    update jobs set lease_expires_at = clock_timestamp() where kind = any (${sequence.kinds}) and status = 'running'`;
  await pool`select rescue_expired_jobs(10000)`;
  for (let i = 0; i < 1000; i++) {
    await pool`
      update jobs set available_at = clock_timestamp() where kind = any (${sequence.kinds}) and status = 'pending'
        and available_at > clock_timestamp()`;
    const jobs = await pool<Held[]>`select id, lease_token from claim_jobs('w', 1000, 60, ${sequence.kinds})`;
    const { waiting } = only(
      await pool`
      select count(*)::int as waiting from jobs where kind = any (${sequence.kinds}) and status in ('pending', 'running')`,
    );
    if (jobs.length === 0 && waiting === 0) return;
    if (jobs.length > 0) await pool`select complete_jobs(${pool.json(jobs.map((each) => ({ ...each })))})`;
  }
  assert.fail("the rest cannot be run");
}

async function checkEnd(db: TestDatabase, sequence: Sequence): Promise<void> {
  const jobs = await db.sql`
    select j.*, coalesce(j.max_attempts, k.max_attempts, 5) as most from jobs j left join job_kinds k using (kind)
    where kind = any (${sequence.kinds})`;
  const ids = new Set(jobs.map(({ id }) => id));
  for (const id of sequence.created) assert.ok(ids.has(id), `${id} was enqueued and is gone`);
  for (const { id, status, attempts, most } of jobs) {
    assert.ok(["succeeded", "dead", "cancelled"].includes(status), `${id} is ${status}`);
    assert.ok(attempts <= most, `${id}: ${attempts} attempts of ${most}`);
  }
  const broken = await db.sql`
    select 'completed twice: ' || id as what from seen where kind = any (${sequence.kinds}) and status = 'succeeded'
      and old_status <> 'succeeded' group by id having count(*) > 1
    union all
    select 'the token of ' || id || ' fell' from (
      select id, lease_token - lag(lease_token) over (partition by id order by n) as step from seen
      where kind = any (${sequence.kinds})
    ) s where step < 0
    union all
    -- A window that ends with a claim; the claims of a sequence have one limit.
    select 'rate: ' || c.kind || ' ' || count(*) from (
      select distinct kind, locked_at from seen where kind = any (${sequence.kinds}) and status = 'running'
    ) c
    join rates r using (kind)
    join seen s on s.kind = c.kind and s.status = 'running' and s.old_status = 'pending' and s.n <= r.until
      and s.locked_at <= c.locked_at and s.locked_at > c.locked_at - r.rate_period
    group by c.kind, c.locked_at, r.rate_limit having count(*) > r.rate_limit`;
  assert.deepEqual([...broken], []);
  await db.sql`delete from seen where kind = any (${sequence.kinds})`;
  await db.sql`delete from jobs where kind = any (${sequence.kinds})`;
  await db.sql`delete from job_kinds where kind = any (${sequence.kinds})`;
}
