import assert from "node:assert/strict";
import postgres from "postgres";
import {
  type Claim,
  claim,
  expireLeases,
  job,
  only,
  openTransaction,
  queuedPokes,
  rowText,
  setUpDispatch,
  sharedDatabase,
  untilBlocking,
} from "./queue.ts";

/** Dedupe keys: what an enqueue meets, and what a state change does when its key is taken. */

const db = sharedDatabase();

type Mode = "active" | "waiting" | "replace" | "once";
const modes: Mode[] = ["active", "waiting", "replace", "once"];

interface Options {
  n?: number;
  key?: string;
  delay?: string;
  priority?: number;
  sql?: postgres.Sql;
}

/** Enqueues a job of kind test with the key k; its id, and whether it is a new one. */
async function put(
  dedupe: Mode,
  { n = 0, key = "k", delay = "0", priority = 0, sql = db.sql }: Options = {},
) {
  const jobs = [{ kind: "test", payload: { n }, dedupe_key: key, dedupe, delay, priority }];
  return only(
    await sql<{ id: string; created: boolean }[]>`select id, created from enqueue_jobs(${sql.json(jobs)})`,
  );
}

async function claimOne(): Promise<Claim> {
  return only(await claim(db.sql));
}

async function fail({ id, lease_token }: Claim, options = "", sql = db.sql): Promise<string | null> {
  return only(await sql.unsafe(`select fail_job('${id}', ${lease_token}, 'boom'${options}) as status`))
    .status;
}

/** Brings the holder of the key, just enqueued, into a state. */
const states: Record<string, (id: string) => Promise<void>> = {
  waiting: async () => {},
  delayed: async (id) => {
    await db.sql`update jobs set available_at = available_at + interval '1 hour' where id = ${id}`;
  },
  "in backoff": async () => {
    await fail(await claimOne());
  },
  running: async () => {
    await claimOne();
  },
  succeeded: async () => {
    const { id, lease_token } = await claimOne();
    await db.sql`select complete_job(${id}, ${lease_token})`;
  },
  dead: async () => {
    await fail(await claimOne(), ", permanent => true");
  },
  cancelled: async (id) => {
    await db.sql`select cancel_jobs(${[id]}::uuid[])`;
  },
};

const absorbedWhile: Record<Mode, string[]> = {
  active: ["waiting", "delayed", "in backoff", "running"],
  waiting: ["waiting", "delayed", "in backoff"],
  replace: ["waiting", "delayed", "in backoff"],
  once: Object.keys(states),
};

for (const mode of modes) {
  Deno.test(`${mode}: a second enqueue is absorbed while the first is ${absorbedWhile[mode].join(", ")}`, async () => {
    for (const [state, bring] of Object.entries(states)) {
      await db.sql`truncate jobs cascade`;
      const first = await put(mode);
      await bring(first.id);
      const before = await rowText(db.sql, first.id);
      const second = await put(mode, { n: 1 });
      const absorbed = absorbedWhile[mode].includes(state);
      assert.deepEqual([second.created, second.id === first.id], [!absorbed, absorbed], state);
      if (mode !== "replace" || !absorbed) {
        assert.equal(await rowText(db.sql, first.id), before, `${state}: the holder is as it was`);
      }
      const single = only(
        await db.sql`select enqueue_job('test', dedupe_key => 'k', dedupe => ${mode}) as id`,
      );
      assert.equal(single.id, second.id, `${state}: enqueue_job gives back the holder's id`);
      assert.equal((await put(mode, { key: "other" })).created, true);
    }
  });
}

Deno.test("the same key of another kind is another key", async () => {
  await put("once");
  const answer = only(
    await db
      .sql`select created from enqueue_jobs('[{"kind": "other", "dedupe_key": "k", "dedupe": "once"}]')`,
  );
  assert.equal(answer.created, true);
});

Deno.test("how long a key is held is up to the job that holds it, whatever mode the next enqueue asks for", async () => {
  for (const holder of modes) {
    for (const state of ["waiting", "running", "succeeded"]) {
      for (const mode of modes.filter((each) => each !== holder)) {
        await db.sql`truncate jobs cascade`;
        const first = await put(holder);
        await states[state]?.(first.id);
        const before = await rowText(db.sql, first.id);
        const { id, created } = await put(mode, { n: 1 });
        const what = `${mode} meets ${holder} that is ${state}`;
        const absorbed = absorbedWhile[holder].includes(state);
        assert.deepEqual([created, id === first.id], [!absorbed, absorbed], what);
        const changed = await rowText(db.sql, first.id) !== before;
        assert.equal(
          changed,
          mode === "replace" && state === "waiting",
          `${what}: only what waits is replaced`,
        );
      }
    }
  }
});

Deno.test("once ends with the row", async () => {
  const { id } = await put("once");
  await states.succeeded?.(id);
  assert.equal((await put("once")).created, false);
  await db.sql`delete from jobs where id = ${id}`;
  assert.equal((await put("once")).created, true);
});

Deno.test("replace gives a waiting job the newest values, and its attempts anew", async () => {
  const { id } = await put("replace");
  await fail(await claimOne());
  const jobs = [{
    kind: "test",
    payload: { n: 1 },
    dedupe_key: "k",
    dedupe: "replace",
    delay: "1 hour",
    priority: 9,
    max_attempts: 2,
    concurrency_key: "c",
    context: { who: "new" },
  }];
  assert.equal(only(await db.sql`select id from enqueue_jobs(${db.sql.json(jobs)})`).id, id);
  const row = await job(db.sql, id);
  assert.deepEqual(
    [
      row.payload,
      row.priority,
      row.max_attempts,
      row.concurrency_key,
      row.context,
      row.attempts,
      row.last_error,
    ],
    [{ n: 1 }, 9, 2, "c", { who: "new" }, 0, null],
  );
  assert.ok(row.available_at - Date.now() > 3_500_000, "due an hour from now");
});

Deno.test("replace that makes a delayed job due wakes a worker", async () => {
  await setUpDispatch(db);
  await put("replace", { delay: "1 hour" });
  assert.equal(await queuedPokes(db.sql), 0);
  await put("replace", { delay: "30 minutes" });
  assert.equal(await queuedPokes(db.sql), 0, "sooner, but not due");
  await put("replace");
  assert.equal(await queuedPokes(db.sql), 1);
});

Deno.test("a plain insert of a key that is held raises 23505, and on conflict do nothing goes with it", async () => {
  const insert = "insert into jobs (kind, dedupe_key) values ('test', 'k')";
  await db.sql.unsafe(insert);
  await assert.rejects(db.sql.unsafe(insert), { code: "23505", constraint_name: "jobs_dedupe" });
  await db.sql.unsafe(`${insert} on conflict do nothing`);
  assert.equal((await db.sql`select from jobs`).count, 1);
  assert.equal((await put("active")).created, false);
});

Deno.test("of 16 enqueues of one key at once one is created, and all give back its id", async () => {
  const sql = db.connect("postgres", { max: 16 });
  for (const mode of modes) {
    for (let round = 0; round < 8; round++) {
      const key = `${mode} ${round}`;
      const answers = await Promise.all(Array.from({ length: 16 }, (_, n) => put(mode, { n, key, sql })));
      assert.equal(answers.filter(({ created }) => created).length, 1, key);
      assert.equal(new Set(answers.map(({ id }) => id)).size, 1, key);
    }
  }
});

Deno.test("an enqueue waits for an open one of its key: a rollback loses nothing, a commit absorbs it", async () => {
  for (const mode of modes) {
    for (const end of ["rollback", "commit"]) {
      const key = `${mode} ${end}`;
      const open = await openTransaction(db);
      const first = await put(mode, { key, sql: open.sql });
      const second = put(mode, { n: 1, key });
      await untilBlocking(db, open.pid);
      await open.sql.unsafe(end);
      const { id, created } = await second;
      assert.deepEqual([created, id === first.id], [end === "rollback", end === "commit"], key);
      const { n } = only(await db.sql`select payload -> 'n' as n from jobs where dedupe_key = ${key}`);
      assert.equal(n, end === "rollback" || mode === "replace" ? 1 : 0, key);
    }
  }
});

Deno.test("in a repeatable read transaction an enqueue raises 40001 where it does not see the holder, or is right", async () => {
  for (const mode of modes) {
    const key = mode;
    const sql = db.connect("postgres", { max: 1 });
    await sql`begin isolation level repeatable read`;
    await sql`select from jobs`;
    const { id } = await put(mode, { key });
    await assert.rejects(put(mode, { key, sql }), { code: "40001" }, mode);
    await sql`rollback`;
    await sql`begin isolation level repeatable read`;
    assert.deepEqual(await put(mode, { key, sql }), { id, created: false }, "repeated, it sees the holder");
    assert.equal((await put(mode, { key: `new ${key}`, sql })).created, true);
    await sql`commit`;
  }
});

Deno.test("a job that has absorbed an enqueue is not claimed before that transaction ends, however it ends", async () => {
  for (const mode of modes) {
    for (const end of ["commit", "rollback"]) {
      await db.sql`truncate jobs cascade`;
      const { id } = await put(mode);
      const open = await openTransaction(db);
      assert.equal((await put(mode, { n: 1, sql: open.sql })).id, id);
      assert.deepEqual(await claim(db.sql), [], `${mode}: while it is open`);
      await open.sql.unsafe(end);
      const claimed = only(await db.sql`select id, payload -> 'n' as n from claim_jobs('w')`);
      assert.deepEqual(
        { ...claimed },
        { id, n: mode === "replace" && end === "commit" ? 1 : 0 },
        `${mode} ${end}`,
      );
    }
  }
});

/** The ways back to pending for a job that runs. */
const waysBack: Record<string, (claimed: Claim, sql?: postgres.Sql) => Promise<unknown>> = {
  fail_jobs: (claimed, sql) => fail(claimed, ", '1 hour'", sql),
  release_jobs: async ({ id, lease_token }, sql = db.sql) => {
    await sql`select release_jobs(${sql.json([{ id, lease_token }])})`;
  },
  rescue_expired_jobs: async (_, sql = db.sql) => {
    await expireLeases(sql);
    await sql`select rescue_expired_jobs()`;
  },
};

Deno.test("a running job whose key a newer waiting job holds is cancelled when it goes back, its payload kept", async () => {
  for (const [name, goBack] of Object.entries(waysBack)) {
    await db.sql`truncate jobs cascade`;
    const older = await put("waiting");
    const claimed = await claimOne();
    const newer = await put("waiting", { n: 1 });
    const before = await rowText(db.sql, newer.id);
    await goBack(claimed);
    const row = await job(db.sql, older.id);
    assert.deepEqual([row.status, row.payload, row.lease_expires_at], ["cancelled", { n: 0 }, null], name);
    assert.match(row.last_error, /superseded: another job holds its dedupe key$/, name);
    assert.ok(row.lease_token > claimed.lease_token && row.finished_at, name);
    assert.equal(await rowText(db.sql, newer.id), before, name);
    const failures = name === "release_jobs" ? 0 : 1;
    assert.equal((await db.sql`select from job_failures where retry_at is null`).count, failures, name);
  }
});

Deno.test("of two the newer waits: an older one that holds the key is cancelled when the newer goes back", async () => {
  for (const [name, goBack] of Object.entries(waysBack)) {
    await db.sql`truncate jobs cascade`;
    const older = await put("waiting");
    const olderClaim = await claimOne();
    const newer = await put("waiting", { n: 1 });
    const newerClaim = await claimOne();
    assert.equal(newerClaim.id, newer.id);
    await db.sql`select release_jobs(${
      db.sql.json([{ id: older.id, lease_token: olderClaim.lease_token }])
    })`;
    await goBack(newerClaim);
    assert.equal((await job(db.sql, newer.id)).status, "pending", name);
    const { status, last_error, payload } = await job(db.sql, older.id);
    assert.deepEqual([status, payload], ["cancelled", { n: 0 }], name);
    assert.match(last_error, /superseded/, name);
  }
});

Deno.test("two of one key that go back in one call: the newer waits", async () => {
  const older = await put("waiting");
  const first = await claimOne();
  const newer = await put("waiting", { n: 1 });
  const second = await claimOne();
  const failures = [first, second].map(({ id, lease_token }) => ({ id, lease_token, error: "boom" }));
  const answers = await db.sql`select id, status from fail_jobs(${db.sql.json(failures)})`;
  assert.deepEqual(
    new Map(answers.map(({ id, status }) => [id, status])),
    new Map([[older.id, "cancelled"], [newer.id, "pending"]]),
  );
});

Deno.test("a dead or cancelled job whose key is held stays so when it is retried, and says why; its failures are kept", async () => {
  for (const state of ["dead", "cancelled"]) {
    await db.sql`truncate jobs cascade`;
    const older = await put("waiting");
    await states[state]?.(older.id);
    const newer = await put("waiting", { n: 1 });
    const { lease_token } = await job(db.sql, older.id);
    for (let time = 0; time < 2; time++) {
      assert.equal((await db.sql`select retry_jobs(${[older.id]}::uuid[])`).count, 0);
      const row = await job(db.sql, older.id);
      assert.deepEqual([row.status, row.payload, row.lease_token], [state, { n: 0 }, lease_token]);
      assert.equal(
        row.last_error,
        `${state === "dead" ? "boom\n" : ""}superseded: another job holds its dedupe key`,
        "said once",
      );
    }
    await db.sql`select cancel_jobs(${[newer.id]}::uuid[])`;
    assert.equal(
      (await db.sql`select retry_jobs(${[older.id]}::uuid[])`).count,
      1,
      "when the key is free again",
    );
  }
});

Deno.test("a job of a kind that was unknown stays dead when its key is held, and declaring the kind raises nothing", async () => {
  const { id } = await put("waiting");
  const { lease_token } = await claimOne();
  await db.sql`select fail_job(${id}, ${lease_token}, 'unknown_kind: test', permanent => true)`;
  const newer = await put("waiting", { n: 1 });
  await db.sql`select declare_job_kinds('[{"kind": "test"}]')`;
  assert.equal((await job(db.sql, id)).status, "dead");
  assert.match((await job(db.sql, id)).last_error, /superseded/);
  assert.equal((await job(db.sql, newer.id)).status, "pending");
});

Deno.test("a state change that meets an open enqueue of its key raises nothing, is back within about a second, and the rescue brings the job home", async () => {
  for (const [name, goBack] of Object.entries(waysBack)) {
    for (const end of ["commit", "rollback"]) {
      const what = `${name}, ${end}`;
      await db.sql`truncate jobs cascade`;
      const older = await put("waiting");
      const claimed = await claimOne();
      const open = await openTransaction(db);
      const newer = await put("waiting", { n: 1, sql: open.sql });
      const startedAt = performance.now();
      await goBack(claimed);
      const tookMs = performance.now() - startedAt;
      assert.ok(tookMs < 1_200, `${what}: ${tookMs} ms`);
      const left = only(
        await db.sql`
          select status, lease_expires_at <= clock_timestamp() as expired, last_error from jobs where id = ${older.id}`,
      );
      assert.deepEqual([left.status, left.expired], ["running", true], what);
      assert.match(
        left.last_error,
        /not put back yet: an enqueue with its dedupe key is not committed$/,
        what,
      );
      const noted = await db.sql`select retry_at from job_failures where job_id = ${older.id}`;
      // The rescue meets it as well, and leaves it once more.
      await db.sql`select rescue_expired_jobs()`;
      assert.equal((await job(db.sql, older.id)).status, "running", what);

      await open.sql.unsafe(end);
      await db.sql`select rescue_expired_jobs()`;
      const row = await job(db.sql, older.id);
      if (end === "commit") {
        assert.deepEqual([row.status, row.payload], ["cancelled", { n: 0 }], what);
        assert.match(row.last_error, /superseded/, what);
        assert.equal((await job(db.sql, newer.id)).status, "pending");
      } else {
        assert.equal(row.status, "pending", what);
        assert.doesNotMatch(row.last_error, /not put back yet/, what);
      }
      const failures = await db.sql`select error, retry_at from job_failures where job_id = ${older.id}`;
      assert.equal(failures.length, 1, `${what}: recorded once`);
      if (name === "fail_jobs") {
        assert.equal(failures[0]?.error, "boom", what);
        if (end === "rollback") {
          assert.deepEqual(row.available_at, noted[0]?.retry_at, "the wait that the failure gave it is kept");
        }
      }
    }
  }
});

Deno.test("a job that is given back on its last attempt, while an enqueue of its key is open, is not dead of it", async () => {
  const { id } = await put("waiting");
  await db.sql`update jobs set max_attempts = 1 where id = ${id}`;
  const { lease_token } = await claimOne();
  const open = await openTransaction(db);
  await put("waiting", { n: 1, sql: open.sql });
  await db.sql`select release_jobs(${db.sql.json([{ id, lease_token }])})`;
  await open.sql`rollback`;
  await db.sql`select rescue_expired_jobs()`;
  assert.deepEqual(
    [(await job(db.sql, id)).status, (await claimOne()).attempts],
    ["pending", 1],
    "the attempt that was given back is not counted",
  );
});

Deno.test("retry_jobs and declare_job_kinds that meet an open enqueue of a key leave its job dead, and raise nothing", async () => {
  const { id } = await put("waiting");
  const { lease_token } = await claimOne();
  await db.sql`select fail_job(${id}, ${lease_token}, 'unknown_kind: test', permanent => true)`;
  const open = await openTransaction(db);
  await put("waiting", { n: 1, sql: open.sql });
  for (const call of ["retry_jobs(kind => 'test')", `declare_job_kinds('[{"kind": "test"}]')`]) {
    const startedAt = performance.now();
    await db.sql.unsafe(`select * from ${call}`);
    assert.ok(performance.now() - startedAt < 1_200, call);
    assert.equal((await job(db.sql, id)).status, "dead", call);
  }
  await open.sql`rollback`;
  assert.equal((await db.sql`select retry_jobs(kind => 'test')`).count, 1);
});

Deno.test("of a batch of 100 failures 5 are blocked by open enqueues: the other 95 are settled within two seconds", async () => {
  for (let n = 0; n < 100; n++) await put("waiting", { key: `${n}` });
  const failures = (await claim(db.sql, 100)).map(({ id, lease_token }) => ({
    id,
    lease_token,
    error: "boom",
  }));
  assert.equal(failures.length, 100);
  const open = await openTransaction(db);
  for (const n of [3, 30, 50, 77, 99]) await put("waiting", { key: `${n}`, sql: open.sql });
  const startedAt = performance.now();
  const answers = await db.sql`select status from fail_jobs(${db.sql.json(failures)})`;
  const tookMs = performance.now() - startedAt;
  assert.ok(tookMs < 2_000, `${tookMs} ms`);
  assert.equal(answers.filter(({ status }) => status === "pending").length, 95);
  assert.equal(answers.length, 95);
  assert.equal((await db.sql`select from jobs where status = 'running'`).count, 5);
  await open.sql`rollback`;
  assert.equal(only(await db.sql`select rescue_expired_jobs() as n`).n, 5);
  assert.equal((await db.sql`select from job_failures`).count, 100);
});

Deno.test("an open enqueue that then wants the row of the job that goes back is never a deadlock's victim", async () => {
  for (const [name, goBack] of Object.entries(waysBack)) {
    await db.sql`truncate jobs cascade`;
    const older = await put("waiting");
    const claimed = await claimOne();
    const open = await openTransaction(db);
    await put("waiting", { n: 1, sql: open.sql });
    const back = goBack(claimed);
    await untilBlocking(db, open.pid);
    await open.sql`select from jobs where id = ${older.id} for update`;
    await open.sql`commit`;
    await back;
    await expireLeases(db.sql);
    await db.sql`select rescue_expired_jobs()`;
    assert.equal((await job(db.sql, older.id)).status, "cancelled", name);
  }
});

Deno.test("a job's row that somebody keeps locked is still waited for a second, and then it is 55P03", async () => {
  const { id } = await put("waiting");
  const { lease_token } = await claimOne();
  const open = await openTransaction(db);
  await open.sql`select from jobs where id = ${id} for update`;
  const leases = db.sql.json([{ id, lease_token }]);
  for (const name of ["fail_jobs", "release_jobs", "complete_jobs"]) {
    const startedAt = performance.now();
    await assert.rejects(
      async () => await db.sql`select ${db.sql(name)}(${leases})`,
      { code: "55P03" },
      name,
    );
    const tookMs = performance.now() - startedAt;
    assert.ok(tookMs > 900 && tookMs < 2_000, `${name}: ${tookMs} ms`);
  }
  await open.sql`rollback`;
});
