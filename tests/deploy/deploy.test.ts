import assert from "node:assert/strict";
import { dirname, join, normalize } from "node:path";
import postgres from "postgres";
import { makeKeys } from "../../scripts/local/keys.ts";
import { pushMigrations, supabaseCli } from "../../scripts/local/migrations.ts";
import { startOutbox } from "../../scripts/local/outbox.ts";
import { freePort } from "../../scripts/local/ports.ts";
import { startPostgres } from "../../scripts/local/postgres.ts";
import { startServices } from "../../scripts/local/stack.ts";
import { makeClone } from "../local/clone.ts";
import { cronSecret, projectDir, templateMigrations, until } from "../support.ts";
import { recordManagementApi, type Upload } from "./management_api.ts";

/**
 * .github/workflows/deploy.yml, run from a clone with the real Supabase CLI: the database is pushed to, the functions go to
 * a server that records them, and what it was sent then runs on that database.
 */

const names = ["drain", "job-worker", "webhook-inbox"];
const planted = "planted-secret-that-is-in-no-upload";

/** The CLI's version 3 (TEST_SUPABASE_CLI, or on PATH), which this project does not install. */
async function findCli3(): Promise<string | undefined> {
  // Within npm the PATH begins with the project's own.
  const folders = (Deno.env.get("PATH") ?? "").split(":").filter((path) => !path.includes("node_modules"));
  const candidates = [Deno.env.get("TEST_SUPABASE_CLI"), ...folders.map((path) => join(path, "supabase"))];
  for (const cli of candidates) {
    if (!cli || !await Deno.stat(cli).then(() => true, () => false)) continue;
    const { stdout } = await new Deno.Command(cli, { args: ["--version"], env: { DO_NOT_TRACK: "1" } })
      .output();
    if (new TextDecoder().decode(stdout).startsWith("3.")) return cli;
  }
}

/** What deploy.yml runs once everything is installed. */
async function deployScript(): Promise<string> {
  const workflow = await Deno.readTextFile(join(projectDir, ".github/workflows/deploy.yml"));
  const block = /^( +)run: \|\n((?:\1 {2}.*\n|\n)+)/m.exec(workflow)?.[2];
  assert(block && block.includes("npx supabase db push"));
  return block;
}

/** What each file of an upload imports, as its text says it. */
function importsOf({ files }: Upload): { from: string; what: string }[] {
  return [...files].filter(([path]) => path.endsWith(".ts")).flatMap(([from, text]) =>
    [...text.matchAll(/(?:\bfrom|\bimport|\bimport\()\s*"([^"]+)"/g)].map(([, what = ""]) => ({ from, what }))
  );
}

const cli3 = await findCli3();
for (
  const { title, cli } of [
    { title: "deploying with the Supabase CLI of package.json", cli: supabaseCli },
    {
      title: `deploying with version 3 of the CLI${cli3 ? "" : " (not here: name it in TEST_SUPABASE_CLI)"}`,
      cli: cli3,
    },
  ]
) {
  Deno.test({ name: title, ignore: !cli, fn: (t) => deploy(t, cli ?? "") });
}

async function deploy(t: Deno.TestContext, cli: string): Promise<void> {
  await using used = new AsyncDisposableStack();
  const api = used.use(await recordManagementApi());
  const clone = used.use(await makeClone());
  const server = await startPostgres({ projectDir, port: freePort(), temporary: true });
  used.defer(() => server.stop());
  const sql = postgres(server.url("postgres"), { max: 2, onnotice: () => {} });
  used.defer(() => sql.end({ timeout: 1 }));

  const apiPort = freePort();
  const env = {
    ...api.env,
    SUPABASE_PROJECT_REF: api.ref,
    SUPABASE_DB_PASSWORD: "postgres",
    CRON_SECRET: cronSecret,
    PROJECT_URL: `http://127.0.0.1:${apiPort}`,
  };
  const script = await deployScript();
  await Deno.writeTextFile(
    join(clone.dir, "deploy.sh"),
    // There is no hosted database here, so the push is told where the database is.
    script.replaceAll("npx supabase", `'${cli}'`)
      .replace("--linked", `--db-url '${server.url("postgres")}?sslmode=disable'`),
  );
  const runScript = (changes: Record<string, string> = {}) =>
    clone.run("bash -e deploy.sh", { ...env, ...changes });

  await t.step(
    "without the repository's secrets nothing happens, and one that is missing is named",
    async () => {
      const none = await runScript({ SUPABASE_PROJECT_REF: "", CRON_SECRET: "" });
      assert.equal(none.code, 0);
      assert.match(none.output, /^::notice::.*SUPABASE_PROJECT_REF/);
      const without = await runScript({ CRON_SECRET: "" });
      assert.equal(without.code, 1);
      assert.match(without.output, /^::error::.*CRON_SECRET/);
      assert.deepEqual([...api.uploads.keys()], []);
    },
  );

  await t.step("all that there is to do is done", async () => {
    // Whatever else may lie about in a project.
    for (
      const path of [
        "supabase/functions/.env",
        "supabase/functions/job-worker/.env",
        "supabase/functions/deno.lock",
        "supabase/functions/_shared/queue.test.ts",
        "supabase/functions/job-worker/notes.md",
      ]
    ) await Deno.writeTextFile(join(clone.dir, path), `# ${planted}\n`);
    const schedules = join(clone.dir, "supabase/functions/_app/schedules.ts");
    const declared = 'schedules = { hello: { cron: "@yearly", kind: "send_email", payload: ' +
      '{ to: "ada@example.com", template: "welcome" } } }';
    await Deno.writeTextFile(
      schedules,
      (await Deno.readTextFile(schedules)).replace("schedules = {}", declared),
    );
    const { code, output } = await runScript();
    assert.equal(code, 0, output);
    assert.deepEqual(names.filter((name) => !api.uploads.has(name)), []);
    assert.deepEqual(api.secrets, { CRON_SECRET: cronSecret });
  });

  const uploads = names.flatMap((name) => api.uploads.get(name) ?? []);
  const files = new Map(uploads.flatMap((upload) => [...upload.files]));

  await t.step("no function wants a JWT, which CRON_SECRET is not", () => {
    assert.deepEqual(
      uploads.map(({ slug, metadata }) => [slug, metadata.verify_jwt]),
      names.map((name) => [name, false]),
    );
  });

  const size = [...files.values()].reduce((sum, text) => sum + new Blob([text]).size, 0);
  await t.step(`${(size / 1000).toFixed()} kB are uploaded, fewer than 200, and only sources`, () => {
    assert(size > 10_000 && size < 200_000);
    for (const [path, text] of files) {
      assert.match(
        path,
        /^supabase\/functions\/(deno\.json|(_app|_schedules|_shared|_webhooks|drain|job-worker|webhook-inbox)\/[\w\/-]+\.ts)$/,
      );
      assert(!text.includes(planted) && !text.includes(cronSecret), path);
    }
  });

  await t.step("each upload has all that it imports, or its import map names an exact version", () => {
    for (const upload of uploads) {
      const { entrypoint_path, import_map_path } = upload.metadata;
      assert.equal(entrypoint_path, `supabase/functions/${upload.slug}/index.ts`);
      assert.equal(import_map_path, "supabase/functions/deno.json");
      assert(upload.files.has(entrypoint_path));
      const { imports }: { imports: Record<string, string> } = JSON.parse(
        upload.files.get(import_map_path) ?? "",
      );
      const imported = importsOf(upload);
      assert(imported.length > 0);
      for (const { from, what } of imported) {
        const found = what.startsWith(".")
          ? upload.files.has(normalize(join(dirname(from), what)))
          : /^(npm:(@\w+\/)?[\w-]+@\d+\.\d+\.\d+|node:\w+)$/.test(imports[what] ?? what);
        assert(found, `${from} imports ${what}`);
      }
      const hasDrain = ["_schedules/drain.ts", "_app/drain.ts"].map((path) =>
        upload.files.has(`supabase/functions/${path}`)
      );
      const isDrain = upload.slug === "drain";
      assert.deepEqual(hasDrain, [isDrain, isDrain], `${upload.slug} loads what only the drain needs`);
    }
  });

  await t.step(
    "Vault has what config.toml names, and a second push changes nothing",
    async () => {
      const state = async () => ({
        secrets: Object.fromEntries(
          (await sql`select name, decrypted_secret from vault.decrypted_secrets`)
            .map(({ name, decrypted_secret }) => [name, decrypted_secret]),
        ),
        versions: (await sql`select version from supabase_migrations.schema_migrations order by 1`)
          .map(({ version }) => version),
        objects: (await sql`
        select format('%s %s', c.oid, c.relname) as object from pg_class c
        where c.relnamespace in ('public'::regnamespace, 'private'::regnamespace)
        union all
        select format('%s %s %s', p.oid, p.proname, p.xmin) from pg_proc p
        where p.pronamespace in ('public'::regnamespace, 'private'::regnamespace)
        union all
        select format('%s %s', s.name, s.updated_at) from vault.secrets s
        order by 1`).map(({ object }) => object),
      });
      const before = await state();
      assert.deepEqual(before.secrets, { project_url: env.PROJECT_URL, cron_secret: env.CRON_SECRET });
      assert.deepEqual(
        before.versions,
        (await templateMigrations()).map((path) => path.match(/\d{14}/)?.[0]),
      );
      // With another value, since a push without a pending migration leaves Vault alone.
      await pushMigrations(clone.dir, server.url("postgres"), { ...env, PROJECT_URL: "http://other" }, cli);
      assert.deepEqual(await state(), before);
    },
  );

  await t.step("the uploaded files alone run jobs", async () => {
    const dir = await Deno.makeTempDir({ prefix: "nightshift-uploaded-" });
    used.defer(() => Deno.remove(dir, { recursive: true }));
    for (const [path, text] of files) {
      await Deno.mkdir(join(dir, dirname(path)), { recursive: true });
      await Deno.writeTextFile(join(dir, path), text);
    }
    // Of the project's settings a function keeps this one.
    await Deno.writeTextFile(
      join(dir, "supabase/config.toml"),
      uploads.map(({ slug, metadata }) => `[functions.${slug}]\nverify_jwt = ${metadata.verify_jwt}\n`).join(
        "",
      ),
    );
    const lines: string[] = [];
    const outbox = startOutbox(0, (line) => lines.push(line));
    used.defer(() => outbox.stop());
    const services = await startServices({
      projectDir: dir,
      apiPort,
      databaseUrl: server.url,
      keys: await makeKeys(),
      env: () =>
        Promise.resolve({
          ...api.secrets,
          RESEND_API_KEY: "re_test",
          RESEND_BASE_URL: `http://127.0.0.1:${outbox.port}`,
          EMAIL_FROM: "Nightshift <night@example.com>",
        }),
      watch: false,
      log: (line) => lines.push(line),
    });
    used.defer(() => services.stop());
    const call = (path: string) =>
      fetch(`${services.apiUrl}/functions/v1/${path}`, {
        method: "POST",
        headers: { Authorization: `Bearer ${cronSecret}` },
      });
    const enqueue = async (to: string) => {
      const [row] = await sql`
        select enqueue_job('send_email', ${sql.json({ to, template: "welcome" })}) as id`;
      return async () => {
        const [job] = await sql`select status, last_error from jobs where id = ${row?.id}`;
        assert.notEqual(job?.status, "dead", job?.last_error);
        return job?.status === "succeeded";
      };
    };

    // Nobody has called a function yet: the tick does, while it knows of no schedules of an app.
    await sql`select private.tick()`;
    await until(
      "the app's schedule",
      async () => (await sql`select from schedules where name = 'app:hello'`).count === 1,
    );

    // By the poke that the insert sends, with the address and the secret that the push put into Vault.
    await until("the mail's job", await enqueue("ada@example.com"), 20_000);
    assert(lines.some((line) => line.startsWith("mail to ada@example.com: Welcome")), lines.join("\n"));

    await sql`select disable_dispatch()`;
    const drained = await enqueue("grace@example.com");
    const drain = await call("drain");
    assert.equal(drain.status, 200);
    await drain.body?.cancel();
    await until("the drained mail's job", drained);
    assert(lines.some((line) => line.startsWith("mail to grace@example.com: Welcome")), lines.join("\n"));

    const inbox = await call("webhook-inbox/nobody");
    assert.equal(inbox.status, 404);
    assert.match((await inbox.json()).detail, /no webhook source "nobody"/);
  });

  await t.step("a migration that fails is reported with its file and line", async () => {
    await Deno.writeTextFile(
      join(clone.dir, "supabase/migrations/20990101000000_broken.sql"),
      "select 1;\n\nselect wrong;\n",
    );
    await assert.rejects(pushMigrations(clone.dir, server.url("postgres"), env, cli), {
      message: /20990101000000_broken\.sql:3: .*column "wrong" does not exist/,
    });
  });
}
