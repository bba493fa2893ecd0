import assert from "node:assert/strict";
import { join } from "node:path";
import { sideBySide, startTestStack, type TestStack, until } from "../support.ts";

/** withLease, in functions of an app's own: two processes that know nothing of each other. */

const source = `
import { serviceClient } from "../_shared/database.ts";
import { acquireLease, extendLease, releaseLease, withLease } from "../_shared/jobs.ts";
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const call = async (name, args) => {
  const { data, error } = await serviceClient().rpc(name, args);
  if (error) throw new Error(error.message);
  return data;
};
const actions = {
  /** Callers who all want the lease of one of the keys, and what became of each. */
  crowd: ({ callers, keys, wait }) => Promise.all(Array.from({ length: callers }, async (_, n) => {
    const key = "k" + n % keys;
    const { acquired, result } = await withLease(key, async ({ holder }) => {
      const alone = await call("enter", { key, holder });
      await call("leave", { key });
      return alone;
    }, { wait });
    return acquired && result;
  })),
  /** Holds a lease for so long; gives what was seen of it. */
  async hold({ key, ms, busyMs = 0, fails, waitAfter = 0, more, ...options }) {
    let abortedAt = null;
    const began = performance.now();
    const { acquired, result } = await withLease(key, async (lease) => {
      lease.signal.addEventListener("abort", () => abortedAt = Date.now());
      const acquiredAfter = performance.now() - began;
      for (const end = Date.now() + busyMs; Date.now() < end;);
      for (const end = performance.now() + ms; performance.now() < end && !lease.signal.aborted;) await pause(10);
      if (more) await lease.extend(more);
      await pause(waitAfter);
      if (fails) throw new Error("of its own");
      return { holder: lease.holder, aborted: lease.signal.aborted, reason: lease.signal.reason?.code, abortedAt, acquiredAfter };
    }, options);
    return { acquired, ...result };
  },
  wait: async ({ wait }) => (await withLease("w", () => 7, { wait: wait === "NaN" ? NaN : wait })).result,
  each: async () => {
    const holder = await acquireLease("e", { seconds: 5, scope: "s" });
    return [
      await acquireLease("e", { scope: "s" }), await extendLease("e", holder, { seconds: 9, scope: "s" }),
      await extendLease("e", holder), await releaseLease("e", holder, { scope: "s" }), await releaseLease("e", holder, { scope: "s" }),
    ];
  },
  refused: () => acquireLease(""),
};
Deno.serve(async (request) => {
  const { action, ...args } = await request.json();
  try {
    return Response.json(await actions[action](args));
  } catch (error) {
    return Response.json({ code: error.code, message: error.message }, { status: 400 });
  }
});
`;

let stack: TestStack;
const names = ["one", "two"] as const;

Deno.test.beforeAll(async () => {
  stack = await startTestStack({
    dispatch: false,
    prepare: async (appDir) => {
      for (const name of names) {
        await Deno.mkdir(join(appDir, "supabase/functions", name));
        await Deno.writeTextFile(join(appDir, "supabase/functions", name, "index.ts"), source);
        const section = `\n[functions.${name}]\nverify_jwt = false\nimport_map = "./functions/deno.json"\n`;
        await Deno.writeTextFile(join(appDir, "supabase/config.toml"), section, { append: true });
      }
    },
  });
  await stack
    .sql`create table held (key text primary key, holder bigint not null default 0, at_work boolean not null default false)`;
  await stack.sql`insert into held select 'k' || n from generate_series(0, 9) n`;
  // True when nobody is in there, and nobody with a higher number has been.
  await stack.sql.unsafe(`
    create function enter(key text, holder bigint) returns boolean language plpgsql as $$
    begin
      update held h set holder = enter.holder, at_work = true
      where h.key = enter.key and h.holder < enter.holder and not at_work;
      return found;
    end $$;
    create function leave(key text) returns void language sql as
      'update held h set at_work = false where h.key = leave.key';
    grant select, update on held to service_role;
    grant execute on function enter, leave to service_role`).simple();
  // The API's schema is read anew at the first call of a function that it does not know.
  await ask("one", { action: "crowd", callers: 1, keys: 1, wait: 0 });
});
Deno.test.afterAll(async () => await stack[Symbol.asyncDispose]());

/** What a function answers. */
async function ask(name: (typeof names)[number], body: Record<string, unknown>) {
  const response = await stack.call(name, body);
  return await response.json();
}

/** Holds a lease in a function, and says when it has it. */
async function hold(key: string, options: Record<string, unknown>, name: (typeof names)[number] = "one") {
  const answer = ask(name, { action: "hold", key, ...options });
  await until(`the lease ${key}`, async () => (await row(key)) !== undefined);
  return { answer };
}
async function row(key: string): Promise<{ holder: number; expiresAt: number } | undefined> {
  const [found] = await stack.sql<{ holder: number; expires_at: Date }[]>`
    select holder::float8, expires_at from leases where key = ${key}`;
  return found && { holder: found.holder, expiresAt: found.expires_at.getTime() };
}
async function acquire(key: string, seconds = 60): Promise<number | null> {
  const [found] = await stack.sql<
    { holder: number | null }[]
  >`select acquire_lease(${key}, ${seconds})::float8 as holder`;
  return found?.holder ?? null;
}

Deno.test("a thousand callers on ten keys, from two processes: never two at once, and all get their turn", async () => {
  const began = performance.now();
  const crowds = await Promise.all(
    names.flatMap((name) =>
      [1, 2].map(() => ask(name, { action: "crowd", callers: 250, keys: 10, wait: 120 }))
    ),
  );
  const results: unknown[] = crowds.flat();
  assert.deepEqual([results.length, results.filter((alone) => alone !== true)], [1000, []]);
  assert.equal((await stack.sql`select from leases where key like 'k%'`).count, 0, "all are given back");
  console.log(`1,000 callers on 10 keys: ${Math.round(performance.now() - began)} ms`);
});

Deno.test("without a wait those who come later are told at once", async () => {
  const [one, two] = await Promise.all(
    names.map((name) => ask(name, { action: "crowd", callers: 50, keys: 2, wait: 0 })),
  );
  const results: unknown[] = [...one, ...two];
  assert.ok(results.every((each) => each === true || each === false));
  assert.ok(results.filter(Boolean).length >= 2);
});

Deno.test("what the function throws goes on, and the lease is given back", async () => {
  const answer = await ask("one", { action: "hold", key: "thrown", ms: 0, fails: true });
  assert.equal(answer.message, "of its own");
  assert.ok(await acquire("thrown"));
});

sideBySide({
  "a lease is extended as long as its function runs, and then given back": async () => {
    const { answer } = await hold("renewed", { seconds: 1, ms: 2200 });
    const before = await row("renewed");
    await until(
      "an extension",
      async () => ((await row("renewed"))?.expiresAt ?? 0) > (before?.expiresAt ?? 0),
    );
    assert.equal(await acquire("renewed"), null);
    assert.deepEqual({ ...await answer, acquiredAfter: 0 }, {
      ...{ acquired: true, holder: before?.holder, aborted: false, abortedAt: null, acquiredAfter: 0 },
    });
    assert.ok(await acquire("renewed"));
  },

  "lease.extend sets when it ends, and what follows makes it no shorter": async () => {
    const { answer } = await hold("extended", { seconds: 30, ms: 0, more: 600, waitAfter: 300 });
    await until(
      "the extension",
      async () => ((await row("extended"))?.expiresAt ?? 0) > Date.now() + 500_000,
    );
    assert.equal((await answer).aborted, false);
    const longer = await hold("longer", { seconds: 1, ms: 0, more: 4, waitAfter: 1700 });
    await until("the extension", async () => ((await row("longer"))?.expiresAt ?? 0) > Date.now() + 3_000);
    const before = (await row("longer"))?.expiresAt ?? 0;
    await until("its renewal", async () => ((await row("longer"))?.expiresAt ?? 0) !== before);
    assert.ok(((await row("longer"))?.expiresAt ?? 0) > before, "it is not made shorter");
    assert.equal((await longer.answer).aborted, false);
  },

  "a lease that is taken away aborts its signal at the next extension, and the log says so": async () => {
    const { answer } = await hold("taken", { seconds: 1, ms: 5000 });
    await stack.sql`delete from leases where key = 'taken'`;
    const next = await acquire("taken");
    const { aborted, reason, holder } = await answer;
    assert.deepEqual([aborted, reason], [true, "lease_lost"]);
    assert.ok(next && next > holder);
    assert.equal((await row("taken"))?.holder, next, "a late holder gives back nothing");
    await until(
      "a line in the log",
      () => stack.lines.some((line) => line.includes('"lease_lost"') && line.includes("taken")),
    );
  },

  "an extension that fails for a while loses nothing; one that fails to the end aborts before that":
    async () => {
      const locked = async (key: string, seconds: number, ms: number) => {
        const { answer } = await hold(key, { seconds, ms: ms + 1000 });
        const before = await row(key);
        const own = stack.db.connect("postgres", { max: 1 });
        await own.begin(async (sql) => {
          await sql`select from leases where key = ${key} for update`;
          await sql`select pg_sleep(${ms / 1000})`;
        });
        return { ...await answer, expiredAt: before?.expiresAt ?? 0 };
      };
      const [short, long] = await Promise.all([locked("locked", 4, 2000), locked("lost", 1, 2000)]);
      assert.equal(short.aborted, false);
      assert.deepEqual([long.aborted, long.reason], [true, "lease_lost"]);
      assert.ok(
        long.abortedAt <= long.expiredAt + 50,
        `${long.abortedAt - long.expiredAt} ms after the lease`,
      );
    },

  "who waits gets the lease soon after it is given back, and is told when the wait is over": async () => {
    const holder = await acquire("waited");
    const [gone, ...waiting] = [ask("one", { action: "hold", key: "waited", ms: 0, wait: 0.3 })].concat(
      [20, 1e9].map((wait) => ask("one", { action: "hold", key: "waited", ms: 0, wait })),
    );
    assert.deepEqual(await gone, { acquired: false });
    await stack.sql`select release_lease('waited', ${holder})`;
    const releasedAt = performance.now();
    for (const each of await Promise.all(waiting)) assert.equal(each.acquired, true);
    assert.ok(performance.now() - releasedAt < 3000);
  },
});

Deno.test("a process that slept beyond its lease is told when it wakes, and has a lower number than the next", async () => {
  const { answer } = await hold("slept", { seconds: 1, ms: 10_000 }, "two");
  Deno.kill(stack.pid("two"), "SIGSTOP");
  const next = await until("the end of the lease", () => acquire("slept"));
  Deno.kill(stack.pid("two"), "SIGCONT");
  const { aborted, reason, holder } = await answer;
  assert.deepEqual([aborted, reason], [true, "lease_lost"]);
  assert.ok(holder < next);
  assert.equal((await row("slept"))?.holder, next);
});

Deno.test("a function that lets no timer run until its lease is over is told right afterwards", async () => {
  const { answer } = await hold("busy", { seconds: 1, ms: 200, busyMs: 1300 });
  const next = await until("the end of the lease", () => acquire("busy"));
  const { aborted, holder } = await answer;
  assert.ok(aborted && holder < next);
});

Deno.test("a process that is killed holds a lease until its time is over, and no longer", async () => {
  const { answer } = await hold("killed", { seconds: 1, ms: 60_000 }, "two");
  await stack.restart("SIGKILL", "two");
  await answer.catch(() => {});
  const { expiresAt = 0 } = await row("killed") ?? {};
  await until("the end of the lease", () => acquire("killed"));
  assert.ok(Date.now() >= expiresAt);
});

Deno.test("a wait that is no number of seconds is refused", async () => {
  for (const wait of ["NaN", -1]) {
    assert.deepEqual(await ask("one", { action: "wait", wait }), {
      code: "22023",
      message: "withLease: wait is not a number of seconds",
    });
  }
});

Deno.test("acquireLease, extendLease and releaseLease do what the functions of SQL do", async () => {
  assert.deepEqual(await ask("one", { action: "each" }), [null, true, false, true, false]);
  const { code, message } = await ask("one", { action: "refused" });
  assert.deepEqual([code, message], ["22023", "acquire_lease: key does not have 1 to 512 characters"]);
});
