import assert from "node:assert/strict";
import { join } from "node:path";
import { createHmac } from "node:crypto";
import postgres from "postgres";
import { parse } from "yaml";
import { recordManagementApi } from "../deploy/management_api.ts";
import { startWorker } from "../functions/worker_process.ts";
import { exists } from "../../scripts/local/binaries.ts";
import { readEnv } from "../../scripts/setup.ts";
import { projectDir, until } from "../support.ts";
import { makeClone, type Start } from "./clone.ts";

/** The README's commands and examples are run as they stand there, in their order. */

const readme = await Deno.readTextFile(join(projectDir, "README.md"));

function blocks(language: string): string[] {
  return [...readme.matchAll(new RegExp(`^( *)\`\`\`${language}\\n([\\s\\S]*?)^ *\`\`\``, "gm"))]
    .map(([, indent = "", text = ""]) => text.replaceAll(new RegExp(`^${indent}`, "gm"), "").trim());
}

const [webhookSource = ""] = blocks("ts").filter((block) => block.includes("defineWebhookSource("));

Deno.test("the README", async (t) => {
  await using clone = await makeClone();
  await using api = await recordManagementApi();
  const databaseUrl = `postgresql://postgres:postgres@127.0.0.1:${clone.env.LOCAL_DB_PORT}/postgres`;

  // Before the first start: afterwards it would take another.
  const [endpoint = ""] = blocks("ts").filter((block) => block.includes("idempotency.handle("));
  const followed = await exists(join(clone.dir, "supabase/functions/orders"));
  if (!followed) {
    await Deno.mkdir(join(clone.dir, "supabase/functions/orders"));
    await Deno.writeTextFile(join(clone.dir, "supabase/functions/orders/index.ts"), endpoint);
    await Deno.writeTextFile(join(clone.dir, "supabase/config.toml"), `\n${blocks("toml")[0]}\n`, {
      append: true,
    });
  }

  let start: Start | undefined;
  const printed = (label: string) => new RegExp(`${label} +(\\S+)`).exec(start?.output() ?? "")?.[1] ?? "";
  for (const command of blocks("sh").flatMap((block) => block.split("\n"))) {
    if (["npm test", "npm run test:chaos"].includes(command)) continue; // run here: tests/chaos is its short form
    await t.step(command, async () => {
      if (command === "npm start") {
        start = await clone.start();
        return;
      }
      if (command === "npm run worker") {
        const env = { ...clone.env, DATABASE_URL: "", SUPABASE_URL: "" };
        await using worker = await startWorker({ appDir: clone.dir }, env, [], command.split(" "));
        assert.equal(await worker.end(), 0);
        return;
      }
      // There is no hosted database here: the push goes to the local one, where it finds nothing to do.
      const target = `--yes --db-url '${databaseUrl}?sslmode=disable'`;
      const { code, output } = await clone.run(
        command.replace("<ref>", api.ref).replace("--linked", target),
        api.env,
      );
      assert.equal(code, 0, output);
    });
  }

  await t.step("what was deployed: three functions and their secrets", () => {
    for (const name of ["job-worker", "webhook-inbox", "drain"]) assert.ok(api.uploads.has(name), name);
    assert.ok(api.secrets.CRON_SECRET);
  });

  await t.step("the SQL examples run on the local database", async () => {
    const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} });
    try {
      for (const block of blocks("sql")) await sql.unsafe(block).simple();
      await sql`insert into images (path) values ('cat.jpg')`;
      const [job] =
        await sql`select payload from jobs where kind = 'resize_image' and payload ->> 'path' = 'cat.jpg' limit 1`;
      assert.deepEqual(job?.payload, { path: "cat.jpg", width: 400 });
    } finally {
      await sql.end();
    }
  });

  await t.step("what the test user adds has a job that knows who it was", async () => {
    const [insert = "", query = ""] = blocks("bash").join("\n").replaceAll("\\\n", "")
      .replace("54321", clone.env.LOCAL_API_PORT ?? "")
      .replace("$KEY", printed("publishable key")).replace("$TOKEN", printed("a user's token")).split("\n");
    // Not by curl, which is not everywhere.
    const [, url = "", body] = /^curl (\S+) .* -d '(.*)'$/.exec(insert) ?? [];
    const headers = new Headers();
    for (const [, name = "", value = ""] of insert.matchAll(/-H "(.*?): (.*?)"/g)) headers.set(name, value);
    const answer = await fetch(url, { method: "POST", headers, body });
    assert.equal(answer.status, 201, await answer.text());
    const { output } = await clone.run(query);
    for (const text of ["00000000-0000-4000-8000-000000000001", "test-tenant", "test@example.com"]) {
      assert.match(output, new RegExp(text));
    }
  });

  await t.step("a signed-in user's reminder has a schedule, which follows it and ends with it", async () => {
    const request = async (method: string, query = "", body?: object) => {
      const url = `http://127.0.0.1:${clone.env.LOCAL_API_PORT}/rest/v1/reminders${query}`;
      const headers = {
        apikey: printed("publishable key"),
        Authorization: `Bearer ${printed("a user's token")}`,
        "Content-Type": "application/json",
      };
      const answer = await fetch(url, { method, headers, body: body && JSON.stringify(body) });
      return { status: answer.status, text: await answer.text() };
    };
    const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} });
    const schedules = () => sql`select cron, payload from schedules where name like 'reminder:%'`;
    try {
      assert.equal((await request("POST", "", { cron: "0 9 * * MON" })).status, 201);
      const payload = { to: "test@example.com", template: "welcome" };
      assert.deepEqual([...await schedules()], [{ cron: "0 9 * * MON", payload }]);
      const wrong = await request("PATCH", "?id=gt.0", { cron: "61 9 * * MON" });
      assert.equal(wrong.status, 400);
      assert.match(wrong.text, /schedule_job: minute: 61 is not within 0-59/);
      assert.equal((await request("PATCH", "?id=gt.0", { cron: "0 8 * * *" })).status, 204);
      assert.deepEqual([...await schedules()], [{ cron: "0 8 * * *", payload }]);
      assert.equal((await request("DELETE", "?id=gt.0")).status, 204);
      assert.deepEqual([...await schedules()], []);
    } finally {
      await sql.end();
    }
  });

  await t.step("an order that is sent again is placed once, over HTTP and in SQL", async () => {
    if (followed) return;
    const user = `Bearer ${printed("a user's token")}`;
    const [curl = ""] = blocks("bash").filter((block) => block.includes("Idempotency-Key"));
    const [, url = ""] = /^curl -i (\S+)/.exec(curl.replace("54321", clone.env.LOCAL_API_PORT ?? "")) ?? [];
    const [, key = ""] = /"Idempotency-Key: (.+?)"/.exec(curl) ?? [];
    const [, body = ""] = /-d '(.+)'$/.exec(curl) ?? [];
    const send = async (more: { key?: string; body?: string } = {}) => {
      const headers = new Headers({ Authorization: user });
      if (more.key !== "") headers.set("Idempotency-Key", more.key ?? key);
      const answer = await fetch(url, { method: "POST", headers, body: more.body ?? body });
      return {
        status: answer.status,
        replayed: answer.headers.get("Idempotency-Replayed"),
        text: await answer.text(),
      };
    };
    const rpc = async (item: string) => {
      const answer = await fetch(
        `http://127.0.0.1:${clone.env.LOCAL_API_PORT}/rest/v1/rpc/create_order`,
        {
          method: "POST",
          headers: {
            apikey: printed("publishable key"),
            Authorization: user,
            "Content-Type": "application/json",
          },
          body: JSON.stringify({ request: "in SQL", item, quantity: 1 }),
        },
      );
      return { status: answer.status, text: await answer.text() };
    };
    const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} });
    try {
      const first = await Promise.all(Array.from({ length: 10 }, () => send()));
      assert.ok(first.every(({ status }) => [201, 409].includes(status)), JSON.stringify(first));
      const [order, ...others] = await sql`select id, item, quantity from orders`;
      assert.deepEqual([others, order?.item, order?.quantity], [[], "book", 2]);
      assert.deepEqual(await send(), {
        status: 201,
        replayed: "true",
        text: JSON.stringify({ order: Number(order?.id) }),
      });
      assert.equal((await sql`select from jobs where dedupe_key = ${`order ${order?.id}`}`).count, 1);
      assert.equal((await send({ body: '{"item": "car", "quantity": 2}' })).status, 422);
      assert.equal((await send({ key: "" })).status, 400);
      assert.equal((await send({ key: "other", body: "{" })).status, 400);
      const made = await Promise.all([rpc("pen"), rpc("pen"), rpc("pen")]);
      assert.equal(made[0]?.status, 200, made[0]?.text);
      assert.deepEqual(made, [made[0], made[0], made[0]]);
      assert.equal((await rpc("car")).status, 422);
      assert.equal((await sql`select from orders where item <> 'book'`).count, 1);
    } finally {
      await sql.end();
    }
  });

  await t.step("the drain is called as GitHub, Kubernetes and Vercel would", async () => {
    const [actions, cronJob] = blocks("yaml").map((block) => parse(block));
    const { containers: [container] } = cronJob.spec.jobTemplate.spec.template.spec;
    const { CRON_SECRET: secret = "" } = await readEnv(join(clone.dir, "supabase/functions/.env"));
    const env: Record<string, string> = {
      PROJECT_URL: `http://127.0.0.1:${clone.env.LOCAL_API_PORT}`,
      CRON_SECRET: secret,
    };
    const fill = (text = "") => text.replaceAll(/\$(\w+)/g, (_, name) => env[name] ?? "");
    for (const command of [actions.jobs.drain.steps[0].run, ...container.args]) {
      // Not by curl, which is not everywhere.
      const [, url, name = "", value] = /^curl -fsS -m 150 "(\S+)" -H "(\S+): (.+)"\n$/.exec(command) ?? [];
      const answer = await fetch(fill(url), { headers: { [name]: fill(value) } });
      assert.deepEqual([answer.status, (await answer.json()).errors], [200, 0]);
    }
    Deno.env.set("PROJECT_URL", env.PROJECT_URL ?? "");
    try {
      const { GET } = await import(`data:text/javascript,${encodeURIComponent(blocks("js")[0] ?? "")}`);
      const call = (bearer: string) =>
        GET(new Request("http://localhost/", { headers: { Authorization: `Bearer ${bearer}` } }));
      const answers: Response[] = [await call(secret), await call("x".repeat(32))];
      assert.deepEqual(answers.map(({ status }) => status), [200, 401]);
      for (const answer of answers) await answer.body?.cancel();
    } finally {
      Deno.env.delete("PROJECT_URL");
    }
  });

  await t.step(
    "the example kind, handler and enqueues fit together, and leaving one out is a type error",
    async () => {
      const [kind, handler, enqueue, enqueueMany, payKind, payHandler] = blocks("ts");
      assert.match(enqueueMany ?? "", /await enqueueJobs\(/);
      const app = join(clone.dir, "supabase/functions/_app");
      if ((await Deno.readTextFile(join(app, "kinds.ts"))).includes("resize_image")) return; // followed already
      const edit = async (file: string, from: string, to: string) => {
        const text = await Deno.readTextFile(join(app, file));
        assert.ok(text.includes(from), `${file} has ${from}`);
        await Deno.writeTextFile(join(app, file), text.replace(from, to));
      };
      const check = () => clone.run(`'${Deno.execPath()}' check supabase/functions`);
      await edit("kinds.ts", "export const kinds = {", `export const kinds = {\n${kind}\n${payKind}`);
      await Deno.writeTextFile(join(app, "handlers/resize_image.ts"), handler ?? "");
      await Deno.writeTextFile(join(app, "handlers/pay_order.ts"), payHandler ?? "");
      await Deno.mkdir(join(app, "../example"));
      await Deno.writeTextFile(
        join(app, "../example/index.ts"),
        [enqueue, enqueueMany].join("\n"),
      );
      await Deno.mkdir(join(app, "webhooks"), { recursive: true });
      await Deno.writeTextFile(join(app, "webhooks/billing.ts"), webhookSource);
      const having = (text: string) => blocks("ts").filter((block) => block.includes(text)).join("\n");
      await Deno.writeTextFile(join(app, "../example/schedule.ts"), having("await scheduleJob("));
      await Deno.writeTextFile(join(app, "../example/lease.ts"), having("await withLease("));
      await Deno.writeTextFile(join(app, "schedules.ts"), having("satisfies AppSchedules"));
      await Deno.writeTextFile(join(app, "drain.ts"), having(": DrainHooks"));
      const [signedIn, asUser] = blocks("ts").filter((block) => /contextOf|asUser/.test(block));
      await Deno.writeTextFile(join(app, "../example/signed_in.ts"), signedIn ?? "");
      await Deno.writeTextFile(join(app, "handlers/list_images.ts"), asUser ?? "");
      const without = await check();
      assert.notEqual(without.code, 0);
      assert.match(without.output, /resize_image/);
      await edit(
        "handlers.ts",
        "export const handlers: Handlers = {",
        "export const handlers: Handlers = {\n  pay_order: payOrder,\n  resize_image: resizeImage,",
      );
      await edit(
        "handlers.ts",
        "import { sendEmail }",
        'import { payOrder } from "./handlers/pay_order.ts";\nimport { resizeImage } from "./handlers/resize_image.ts";\n' +
          "import { sendEmail }",
      );
      const complete = await check();
      assert.equal(complete.code, 0, complete.output);
    },
  );

  await t.step("an order that is paid too early snoozes, and is charged once", async () => {
    const kinds = await Deno.readTextFile(join(clone.dir, "supabase/functions/_app/kinds.ts"));
    if (!kinds.includes("pay_order")) return; // see above
    const charges: string[] = [];
    await using shop = Deno.serve({ port: 0, hostname: "127.0.0.1", onListen: () => {} }, async (request) => {
      charges.push(await request.text());
      return charges.length === 1 ? new Response("", { status: 425 }) : Response.json({ charge: "ch_1" });
    });
    const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} });
    try {
      const payload = { order: 7, email: "a@example.com", shop: `http://127.0.0.1:${shop.addr.port}` };
      const enqueue = () => sql`select enqueue_job('pay_order', ${sql.json(payload)}) as id`;
      let [job] = await enqueue();
      const row = async () => {
        const [found] = await sql`
          select *, available_at > now() + interval '9 minutes' as waits from jobs where id = ${job?.id}`;
        return found ?? {};
      };
      await until("the snooze", async () => {
        // Until the functions have been loaded anew they do not know it.
        if ((await row()).status === "dead") [job] = await enqueue();
        return (await row()).waits;
      });
      assert.equal((await row()).attempts, 0);
      for (const block of blocks("sql").filter((text) => text.includes("pay_order"))) {
        await sql.unsafe(block).simple();
      }
      await until("the end", async () => (await row()).status === "succeeded");
      const { result, progress } = await row();
      assert.deepEqual(result, { charge: "ch_1" });
      assert.deepEqual([progress.charge, progress.steps["charge card"]], ["ch_1", "ch_1"]);
      assert.deepEqual(charges, ['{"order":7}', '{"order":7}']);
      // The worker that was started has brought the app's schedules in step.
      await until("the app's schedule", async () => {
        const [schedule] = await sql`
          select next_run at time zone 'Europe/Berlin' = date_trunc('week', next_run at time zone 'Europe/Berlin')
            + interval '9 hours' as monday_at_nine
          from schedules where name = 'app:weekly_digest'`;
        return schedule?.monday_at_nine;
      });
      const receipts = await sql`select from jobs where dedupe_key = ${job?.id} and kind = 'send_email'`;
      assert.equal(receipts.length, 1);
    } finally {
      await sql.end();
    }
  });

  await t.step("Stripe's message about a checkout sends one mail, however often it comes", async () => {
    const app = join(clone.dir, "supabase/functions/_app");
    const list = await Deno.readTextFile(join(app, "webhooks.ts"));
    if (list.includes("billing")) return; // followed already
    await Deno.mkdir(join(app, "webhooks"), { recursive: true });
    await Deno.writeTextFile(join(app, "webhooks/billing.ts"), webhookSource);
    await Deno.writeTextFile(
      join(app, "webhooks.ts"),
      `import { billing } from "./webhooks/billing.ts";\n${list.replace("= []", "= [billing]")}`,
    );
    const secret = "whsec_0123456789abcdef";
    const env = join(clone.dir, "supabase/functions/.env");
    await Deno.writeTextFile(env, `\nSTRIPE_WEBHOOK_SECRET=${secret}\n`, { append: true });

    // Signed as https://docs.stripe.com/webhooks#verify-manually says.
    const send = (id: string) => {
      const object = { object: "checkout.session", customer_email: "buyer@example.com" };
      const body = JSON.stringify({ id, type: "checkout.session.completed", data: { object } });
      const timestamp = Math.floor(Date.now() / 1000);
      const v1 = createHmac("sha256", secret).update(`${timestamp}.${body}`).digest("hex");
      return fetch(`http://127.0.0.1:${clone.env.LOCAL_API_PORT}/functions/v1/webhook-inbox/billing`, {
        method: "POST",
        headers: { "Content-Type": "application/json", "Stripe-Signature": `t=${timestamp},v1=${v1}` },
        body,
      });
    };
    const { id } = await until("the source", async () => {
      const response = await send("evt_1"); // until the functions have been loaded anew it is not there
      const answer = await response.json();
      return response.status === 202 && answer;
    });
    const again = await send("evt_1");
    assert.deepEqual([again.status, await again.json()], [200, { id, created: false }]);
    const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} });
    try {
      await until("the end", async () => {
        const [job] = await sql`select status from jobs where id = ${id}`;
        // A worker that was started before does not know it yet.
        if (job?.status === "dead") await sql`select retry_webhooks(ids => array[${id}::uuid])`;
        return job?.status === "succeeded";
      });
      const mails = await sql`select payload from jobs where kind = 'send_email' and dedupe_key = 'evt_1'`;
      assert.deepEqual(mails.map(({ payload }) => payload.to), ["buyer@example.com"]);
      const [, , query = ""] = blocks("sql").filter((text) => text.includes("list_webhooks")).join("\n")
        .split("\n");
      assert.deepEqual((await sql.unsafe(query)).map(({ payload }) => payload.id), ["evt_1"]);
    } finally {
      await sql.end();
    }
  });
});
