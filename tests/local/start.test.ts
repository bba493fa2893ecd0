import assert from "node:assert/strict";
import { join } from "node:path";
import { until } from "../support.ts";
import { makeClone, processes } from "./clone.ts";

const sendWelcome =
  `npm run -s sql -- "select enqueue_job('send_email', '{\\"to\\":\\"a@example.com\\",\\"template\\":\\"welcome\\"}')"`;

const npmRunDrain = "npm run -s drain";
const scheduleWelcome = `npm run -s sql -- "select schedule_job('ticked', '@yearly', 'send_email',
  '{\\"to\\":\\"t@example.com\\",\\"template\\":\\"welcome\\"}', next_run => now())"`;

const signup = `
import { enqueueJob } from "../_shared/jobs.ts";

Deno.serve(async () => new Response(await enqueueJob("send_email", { to: "c@example.com", template: "welcome" })));
`;

Deno.test("npm start, from a clone", async (t) => {
  await using clone = await makeClone();
  const migration = join(clone.dir, "supabase/migrations/20990101000000_broken.sql");
  const drain = join(clone.dir, "supabase/functions/drain/index.ts");
  const npmStart = "npm start --silent";

  await t.step("says which port is taken, and how to choose another", async () => {
    for (const variable of ["LOCAL_API_PORT", "LOCAL_DB_PORT", "LOCAL_MAIL_PORT"]) {
      const taken = Deno.listen({ hostname: "127.0.0.1", port: 0 });
      const { code, output } = await clone.run(npmStart, { [variable]: String(taken.addr.port) });
      taken.close();
      assert.equal(code, 1);
      assert.match(output, new RegExp(`${taken.addr.port}.*taken.*${variable}`));
    }
  });

  await t.step("prints ready, delivers a mail, and stops at Ctrl-C without a process left", async () => {
    const start = await clone.start();
    assert.equal((await clone.run(sendWelcome)).code, 0);
    await until("the mail", () => start.output().includes("mail to a@example.com: Welcome, there"));
    const { output } = await clone.run(`npm run -s sql -- "select status from jobs"`);
    assert.match(output, /succeeded/);
    assert.deepEqual(await clone.run(npmRunDrain), {
      code: 0,
      output: '{"schedules":0,"queues":{},"budgetExhausted":false,"errors":0}\n',
    });
    // What the tick makes of it is looked at later.
    assert.equal((await clone.run(scheduleWelcome)).code, 0);
    await start.end("SIGINT");
    const without = await clone.run(npmRunDrain);
    assert.equal(without.code, 1);
    assert.match(without.output, /^There is no local stack: run npm start first\.$/m);
  });

  await t.step("keeps what it made: secrets for the owner only, and the data", async (t) => {
    for (const file of ["supabase/.env", "supabase/functions/.env", ".local/keys.json"]) {
      const { mode } = await Deno.stat(join(clone.dir, file));
      assert.equal((mode ?? 0) & 0o777, 0o600, file);
    }
    await Deno.mkdir(join(clone.dir, "supabase/functions/signup"));
    await Deno.writeTextFile(join(clone.dir, "supabase/functions/signup/index.ts"), signup);
    const start = await clone.start();
    const counts = await clone.run(`npm run -s sql -- "select count(*), count(*) + 1 as count from jobs"`);
    assert.match(counts.output, /^1 +\| 2$/m, "two columns of one name are two");

    await t.step("serves a function of one's own, which enqueues a job, to callers with a JWT", async () => {
      const url = `http://127.0.0.1:${clone.env.LOCAL_API_PORT}/functions/v1/signup`;
      const refused = await fetch(url, { method: "POST" });
      await refused.body?.cancel();
      assert.equal(refused.status, 401);
      const { anonKey } = JSON.parse(await Deno.readTextFile(join(clone.dir, ".local/keys.json")));
      const answer = await fetch(url, { method: "POST", headers: { Authorization: `Bearer ${anonKey}` } });
      assert.match(await answer.text(), /^[0-9a-f-]{36}$/);
      await until("the mail", () => start.output().includes("mail to c@example.com"));
    });

    Deno.kill(await start.supervisor(), "SIGKILL");
    await until("functions and gateway to follow their killed parent", async () => {
      // Postgres outlives it, and is stopped by the next start.
      const left = await processes(clone.dir);
      return left.every(({ command }) => command.includes("/bin/postgres "));
    });
  });

  await t.step("starts again after kill -9, goes on with a job, and stops when npm is killed", async (t) => {
    const start = await clone.start();
    await clone.run(sendWelcome);
    await until("the mail", () => start.output().includes("mail to a@example.com"));

    await t.step(
      "reloads the functions when a file changes, and survives a change that does not compile",
      async () => {
        const source = await Deno.readTextFile(drain);
        await Deno.writeTextFile(drain, source + "\nconst x = ;\n");
        await until("the error", () => start.output().includes("The function drain does not start"));
        await Deno.writeTextFile(drain, source);
        await until("the drain to answer again", async () => {
          const answer = await fetch(`http://127.0.0.1:${clone.env.LOCAL_API_PORT}/functions/v1/drain`);
          await answer.body?.cancel();
          return answer.status === 401;
        });
      },
    );
    await t.step("ticks: what was due by a schedule was enqueued and run", async () => {
      const query = `npm run -s sql -- "select status from jobs where schedule = 'ticked'"`;
      await until("its job", async () => (await clone.run(query)).output.includes("succeeded"));
    });
    await start.end("SIGTERM");
  });

  await t.step(
    "starts Postgres again when it is killed, twice in a row too, and stops when the terminal is closed",
    async () => {
      const start = await clone.start();
      const { dataDir } = JSON.parse(await Deno.readTextFile(join(clone.dir, ".local/stack.json")));
      const [pid = 0] = (await Deno.readTextFile(join(dataDir, "postmaster.pid"))).split("\n").map(Number);
      Deno.kill(pid, "SIGKILL");
      // The next one too, while it starts.
      const next = await until("another Postgres", async () => {
        const found = await processes(dataDir);
        return found.find(({ pid: other, command }) => other !== pid && command.includes("bin/postgres "))
          ?.pid;
      });
      Deno.kill(next, "SIGKILL");
      await until("Postgres to be started again", () => start.output().includes("Postgres ended (SIGKILL)"));
      try {
        await until("an answer", async () => (await clone.run(sendWelcome)).code === 0);
      } catch (cause) {
        throw new Error(`no answer, and npm start has printed:\n${start.output()}`, { cause });
      }
      await until("the mail", () => start.output().includes("mail to a@example.com"));
      await start.end("SIGHUP");
    },
  );

  await t.step("names the file, the line and Postgres's message when a migration fails", async () => {
    await Deno.writeTextFile(
      migration,
      "create table a (id int);\n\ncreate table b (\n  id nosuchtype\n);\n",
    );
    const wrongType = await clone.run(npmStart);
    assert.equal(wrongType.code, 1);
    assert.match(wrongType.output, /20990101000000_broken\.sql:4: ERROR: type "nosuchtype" does not exist/);

    await Deno.writeTextFile(
      migration,
      "select 1;\n-- why\ndo $$ begin\n  raise exception 'oops';\nend $$;\n",
    );
    const raised = await clone.run(npmStart);
    assert.equal(raised.code, 1);
    assert.match(raised.output, /20990101000000_broken\.sql:3: ERROR: oops/);
    await Deno.remove(migration);
  });

  await t.step("shows what the compiler says about a function that does not compile", async () => {
    await Deno.writeTextFile(drain, "\nconst x = ;\n", { append: true });
    const { code, output } = await clone.run(npmStart);
    assert.equal(code, 1);
    assert.match(output, /The function drain does not start:[\s\S]*drain\/index\.ts/);
    assert.deepEqual(await processes(clone.dir), []);
  });
});
