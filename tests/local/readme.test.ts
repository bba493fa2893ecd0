import assert from "node:assert/strict";
import { join } from "node:path";
import postgres from "postgres";
import { projectDir } from "../support.ts";
import { makeClone } from "./clone.ts";

/** The README's commands and examples are run as they stand there, in their order. */

const readme = await Deno.readTextFile(join(projectDir, "README.md"));

function blocks(language: string): string[] {
  return [...readme.matchAll(new RegExp(`^( *)\`\`\`${language}\\n([\\s\\S]*?)^ *\`\`\``, "gm"))]
    .map(([, indent = "", text = ""]) => text.replaceAll(new RegExp(`^${indent}`, "gm"), "").trim());
}

const ref = "abcdefghijklmnopqrst";

Deno.test("the README", async (t) => {
  await using clone = await makeClone();
  const api = recordManagementApi();
  await Deno.writeTextFile(
    join(clone.dir, "profile.yaml"),
    `name: test\napi_url: ${api.url}\ndashboard_url: ${api.url}\nproject_host: localhost\n`,
  );
  const env = {
    SUPABASE_PROFILE: join(clone.dir, "profile.yaml"),
    SUPABASE_ACCESS_TOKEN: `sbp_${"0".repeat(40)}`,
  };
  const databaseUrl = `postgresql://postgres:postgres@127.0.0.1:${clone.env.LOCAL_DB_PORT}/postgres`;

  for (const command of blocks("sh").flatMap((block) => block.split("\n"))) {
    if (command === "npm test") continue; // is running
    await t.step(command, async () => {
      if (command === "npm start") {
        await clone.start();
        return;
      }
      // There is no hosted database here: the push goes to the local one, where it finds nothing to do.
      const target = command === "npx supabase db push"
        ? ` --yes --db-url '${databaseUrl}?sslmode=disable'`
        : "";
      const { code, output } = await clone.run(command.replace("<ref>", ref) + target, env);
      assert.equal(code, 0, output);
    });
  }

  await t.step("what was deployed: three functions and their secrets", () => {
    const deployed = api.requests.filter((request) =>
      request.startsWith("POST") && request.includes("/functions/deploy")
    );
    for (const name of ["job-worker", "webhook-inbox", "drain"]) {
      assert.ok(
        deployed.some((request) => request.includes(`slug=${name}`)),
        `${name} in ${api.requests.join("\n")}`,
      );
    }
    assert.ok(api.requests.includes(`POST /v1/projects/${ref}/secrets`));
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

  await t.step(
    "the example kind, handler and enqueue fit together, and leaving one out is a type error",
    async () => {
      const [kind, handler, enqueue] = blocks("ts");
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
      await Deno.writeTextFile(join(app, "../example/index.ts"), enqueue ?? "");
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

  await api.stop();
});

/** Supabase's management API as far as link, secrets set and functions deploy ask it. */
function recordManagementApi() {
  const requests: string[] = [];
  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async (request) => {
    const { pathname, search } = new URL(request.url);
    await request.arrayBuffer();
    requests.push(`${request.method} ${pathname}${search}`);
    if (pathname === `/v1/projects/${ref}`) {
      return Response.json({
        id: ref,
        ref,
        name: "example",
        organization_id: "o",
        organization_slug: "o",
        region: "us-east-1",
        created_at: "2026-01-01T00:00:00Z",
        status: "ACTIVE_HEALTHY",
        database: {
          host: `db.${ref}.localhost`,
          version: "17.4.1",
          postgres_engine: "17",
          release_channel: "ga",
        },
      });
    }
    if (pathname.endsWith("/api-keys")) return Response.json([{ name: "anon", api_key: "a" }]);
    if (pathname.endsWith("/functions/deploy")) {
      const slug = new URLSearchParams(search).get("slug");
      return Response.json({ id: slug, slug, name: slug, status: "ACTIVE", version: 1 }, { status: 201 });
    }
    if (pathname.endsWith("/secrets")) return Response.json({}, { status: 201 });
    return Response.json(pathname.endsWith("/functions") ? [] : {});
  });
  return { url: `http://127.0.0.1:${server.addr.port}`, requests, stop: () => server.shutdown() };
}
