import assert from "node:assert/strict";
import { join } from "node:path";
import postgres from "postgres";
import { recordManagementApi } from "../deploy/management_api.ts";
import { projectDir } from "../support.ts";
import { makeClone, type Start } from "./clone.ts";

/** The README's commands and examples are run as they stand there, in their order. */

const readme = await Deno.readTextFile(join(projectDir, "README.md"));

function blocks(language: string): string[] {
  return [...readme.matchAll(new RegExp(`^( *)\`\`\`${language}\\n([\\s\\S]*?)^ *\`\`\``, "gm"))]
    .map(([, indent = "", text = ""]) => text.replaceAll(new RegExp(`^${indent}`, "gm"), "").trim());
}

Deno.test("the README", async (t) => {
  await using clone = await makeClone();
  await using api = await recordManagementApi();
  const databaseUrl = `postgresql://postgres:postgres@127.0.0.1:${clone.env.LOCAL_DB_PORT}/postgres`;

  let start: Start | undefined;
  for (const command of blocks("sh").flatMap((block) => block.split("\n"))) {
    if (["npm test", "npm run test:chaos"].includes(command)) continue; // run here: tests/chaos is its short form
    await t.step(command, async () => {
      if (command === "npm start") {
        start = await clone.start();
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
    const printed = (label: string) => new RegExp(`${label} +(\\S+)`).exec(start?.output() ?? "")?.[1] ?? "";
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

  await t.step(
    "the example kind, handler and enqueues fit together, and leaving one out is a type error",
    async () => {
      const [kind, handler, enqueue, enqueueMany] = blocks("ts");
      assert.match(enqueueMany ?? "", /await enqueueJobs\(/);
      const app = join(clone.dir, "supabase/functions/_app");
      if ((await Deno.readTextFile(join(app, "kinds.ts"))).includes("resize_image")) return; // followed already
      const edit = async (file: string, from: string, to: string) => {
        const text = await Deno.readTextFile(join(app, file));
        assert.ok(text.includes(from), `${file} has ${from}`);
        await Deno.writeTextFile(join(app, file), text.replace(from, to));
      };
      const check = () => clone.run(`'${Deno.execPath()}' check supabase/functions`);
      await edit("kinds.ts", "export const kinds = {", `export const kinds = {\n${kind}`);
      await Deno.writeTextFile(join(app, "handlers/resize_image.ts"), handler ?? "");
      await Deno.mkdir(join(app, "../example"));
      await Deno.writeTextFile(
        join(app, "../example/index.ts"),
        [enqueue, enqueueMany].join("\n"),
      );
      const [signedIn, asUser] = blocks("ts").filter((block) => /contextOf|asUser/.test(block));
      await Deno.writeTextFile(join(app, "../example/signed_in.ts"), signedIn ?? "");
      await Deno.writeTextFile(join(app, "handlers/list_images.ts"), asUser ?? "");
      const without = await check();
      assert.notEqual(without.code, 0);
      assert.match(without.output, /resize_image/);
      await edit(
        "handlers.ts",
        "export const handlers: Handlers = {",
        "export const handlers: Handlers = {\n  resize_image: resizeImage,",
      );
      await edit(
        "handlers.ts",
        "import { sendEmail }",
        'import { resizeImage } from "./handlers/resize_image.ts";\nimport { sendEmail }',
      );
      const complete = await check();
      assert.equal(complete.code, 0, complete.output);
    },
  );
});
