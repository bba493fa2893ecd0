import assert from "node:assert/strict";
import { join } from "node:path";
import { setVaultSecrets } from "../../scripts/local/stack.ts";
import { createSecretFilter } from "../../supabase/functions/_shared/secrets.ts";
import {
  copyTree,
  cronSecret,
  projectDir,
  startFunction,
  startTestStack,
  type TestStack,
  until,
} from "../support.ts";
import { type SentryServer, startSentry } from "./sentry_server.ts";

/**
 * No secret in any log, answer, table of the template or Sentry event: secrets are planted, everything that can fail is made
 * to fail, and then all that came out of it is searched.
 */

const planted = {
  OLD_CRON_SECRET: "planted0-cron-secret-that-is-being-rotated-out",
  RESEND_API_KEY: "re_planted1_0123456789",
  SENTRY_KEY: "f1a2b3c4d5e6f708192a3b4c5d6e7f80",
  FOO_TOKEN: 'planted2"with/signs+and=quotes\\',
  PARTS_TOKEN: "planted3-first-part",
  DATABASE_PASSWORD: "planted4/of@a#database",
  PRIVATE_KEY: "planted5-a-private-key-in-json",
  WRONG_KEY: "sb_secret_planted6_of_another_project",
  WRONG_VAULT_SECRET: "planted7-a-secret-that-only-vault-has-got-00",
  SHORT_CRON_SECRET: "planted8-too-short",
  WEBHOOK_SECRET: "planted0-secret-of-a-webhook-source",
};
/** In payloads and contexts. */
const marker = "planted9";

const variables: Record<string, string> = {
  TEST_WEBHOOK_SECRET: planted.WEBHOOK_SECRET,
  CRON_SECRET: `${cronSecret}, ${planted.OLD_CRON_SECRET}`,
  RESEND_API_KEY: planted.RESEND_API_KEY,
  FOO_TOKEN: planted.FOO_TOKEN,
  PARTS_TOKEN: `${planted.PARTS_TOKEN};unimportant`,
  REPORTS: `postgresql://reports:${
    encodeURIComponent(planted.DATABASE_PASSWORD)
  }@db.example.com:5432/postgres`,
  GOOGLE_CREDENTIALS: JSON.stringify({ key: { private_key: planted.PRIVATE_KEY } }),
};
/** What a handler may have in hand of them. */
const values: Record<string, string> = {
  ...variables,
  PART_OF_CRON: planted.OLD_CRON_SECRET,
  PART_OF_PARTS: planted.PARTS_TOKEN,
  PART_OF_REPORTS: planted.DATABASE_PASSWORD,
  PART_OF_GOOGLE: planted.PRIVATE_KEY,
  PART_OF_SENTRY: planted.SENTRY_KEY,
};

let stack: TestStack;
let sentry: SentryServer;
let resend: Deno.HttpServer<Deno.NetAddr>;
let answerOfResend: (request: Request) => Response;
/** All that was answered over HTTP: status, headers and body. */
const answers: string[] = [];
/** What functions beside those of the stack have logged. */
const lines: string[] = [];

Deno.test.beforeAll(async () => {
  sentry = startSentry(planted.SENTRY_KEY);
  resend = Deno.serve(
    { hostname: "127.0.0.1", port: 0, onListen() {} },
    (request) => answerOfResend(request),
  );
  Object.assign(variables, {
    SENTRY_DSN: sentry.dsn,
    EMAIL_FROM: "night@example.com",
    RESEND_BASE_URL: `http://127.0.0.1:${resend.addr.port}`,
  });
  stack = await startTestStack({
    dispatch: false,
    env: variables,
    // The kinds of tests/app together with those of the app as it is shipped.
    async prepare(appDir) {
      const app = join(appDir, "supabase/functions/_app");
      const shipped = join(projectDir, "supabase/functions/_app");
      const names = ["kinds", "handlers"];
      for (const name of names) await Deno.rename(join(app, `${name}.ts`), join(app, `test_${name}.ts`));
      await copyTree(shipped, app);
      await Deno.copyFile(join(projectDir, "tests/app/webhooks.ts"), join(app, "webhooks.ts"));
      for (const name of names) {
        await Deno.rename(join(app, `${name}.ts`), join(app, `shipped_${name}.ts`));
        await Deno.writeTextFile(
          join(app, `${name}.ts`),
          `import * as shipped from "./shipped_${name}.ts";
          import * as tests from "./test_${name}.ts";
          export const ${name} = { ...shipped.${name}, ...tests.${name} };`,
        );
      }
    },
  });
  Object.assign(values, {
    SUPABASE_SERVICE_ROLE_KEY: stack.keys.serviceRoleKey,
    SUPABASE_SECRET_KEYS: JSON.stringify({ default: stack.keys.secretKey }),
    PART_OF_SECRET_KEYS: stack.keys.secretKey,
    SENTRY_DSN: sentry.dsn,
  });
});
Deno.test.afterAll(async () => {
  await stack[Symbol.asyncDispose]();
  await sentry[Symbol.asyncDispose]();
  await resend.shutdown();
});

async function record(response: Response): Promise<number> {
  answers.push(`${response.status} ${JSON.stringify([...response.headers])}\n${await response.text()}`);
  return response.status;
}

const ask = async (path: string, init: RequestInit = {}) =>
  await record(await fetch(`${stack.apiUrl}${path}`, { method: "POST", ...init }));

const bearer = (secret: string) => ({ Authorization: `Bearer ${secret}` });

async function run(): Promise<void> {
  assert.equal(await record(await stack.call("job-worker", { wait: true })), 200);
}

async function enqueue(kind: string, payload: Record<string, unknown>): Promise<string> {
  const [row] = await stack.sql`
    insert into jobs (kind, payload, context)
    values (${kind}, ${
    stack.sql.json(JSON.parse(JSON.stringify({ ...payload, more: marker })))
  }, ${`"${marker}"`}::jsonb)
    returning id`;
  return row?.id;
}

async function lastError(id: string): Promise<string> {
  const [row] = await stack.sql`select last_error from jobs where id = ${id}`;
  return row?.last_error ?? "";
}

const untilLogged = (event: string, from = stack.lines) =>
  until(`the line ${event}`, () => from.some((line) => line.includes(`"event":"${event}"`)));

Deno.test("secrets are replaced by the names of their variables, whole or in part, plain or encoded", () => {
  const secret = "a+secret/with=signs";
  const { replace } = createSecretFilter({
    ONE_SECRET: `${secret},another-secret`,
    MY_KEYS: '{"default": "the-default-key", "old": ["the-older-key"]}',
    REPORTS: "postgresql://reports:p%40ssword-of-reports@db.example.com/postgres",
    SENTRY_DSN: "https://0123456789abcdef@o1.ingest.example.com/42",
    SHORT_TOKEN: "eleven-char",
    PUBLIC: "nothing-secret",
  });
  for (
    const [text, replaced] of [
      [`${secret},another-secret`, "[ONE_SECRET]"],
      [`?a=${secret}&b=another-secret`, "?a=[ONE_SECRET]&b=[ONE_SECRET]"],
      [`?a=${encodeURIComponent(secret)}`, "?a=[ONE_SECRET]"],
      ["the-default-key, the-older-key", "[MY_KEYS], [MY_KEYS]"],
      ["password p@ssword-of-reports or p%40ssword-of-reports", "password [REPORTS] or [REPORTS]"],
      ["reports at db.example.com", "reports at db.example.com"],
      ["0123456789abcdef at o1.ingest.example.com", "[SENTRY_DSN] at o1.ingest.example.com"],
      ["eleven-char and nothing-secret", "eleven-char and nothing-secret"],
    ] as const
  ) assert.equal(replace(text), replaced);
  for (let before = 0; before < 4; before++) {
    const text = btoa("x".repeat(before) + secret + "y".repeat(before));
    assert.match(replace(text), /^.{0,6}\[ONE_SECRET\].{0,6}=*$/, text);
  }
});

Deno.test("callers are refused", async () => {
  for (const name of ["job-worker", "drain", "webhook-inbox/some"]) {
    const path = `/functions/v1/${name}`;
    for (
      const secret of [planted.FOO_TOKEN.replaceAll(/\W/g, ""), `${cronSecret}x`, stack.keys.serviceRoleKey]
    ) {
      await ask(path, { headers: bearer(secret) });
    }
    for (
      const body of [`{"kinds": "${marker}`, `"${marker}"`, `{"wait": "${marker}"}`, marker.repeat(10_000)]
    ) {
      await ask(path, { headers: bearer(planted.OLD_CRON_SECRET), body });
    }
    await ask(path, { method: "DELETE", headers: bearer(planted.OLD_CRON_SECRET) });
  }
  for (const key of [stack.keys.serviceRoleKey, stack.keys.secretKey, planted.WRONG_KEY]) {
    await ask("/rest/v1/rpc/claim_jobs", {
      headers: { apikey: key, ...bearer(key) },
      body: '{"no": "argument"}',
    });
    await ask("/rest/v1/nothing", { headers: { apikey: key, ...bearer(key) } });
    await ask("/functions/v1/not-there", { headers: { apikey: key, ...bearer(key) } });
  }
  const statuses = answers.map((answer) => answer.slice(0, 3));
  for (const status of ["400", "401", "404", "405", "413"]) assert(statuses.includes(status), status);
});

Deno.test("handlers fail with secrets in what they throw", async () => {
  const places = [
    "message",
    "end of a long message",
    "again and again",
    "cause",
    "name",
    "stack",
    "text",
    "object",
    "base64",
    "url",
    "nobody's promise",
  ];
  const ids = new Map<string, string>();
  for (const value of Object.values(values)) {
    for (const where of places) ids.set(await enqueue("tell", { reversed: reversed(value), where }), where);
  }
  await run();
  const rows = await stack.sql`select id, last_error from jobs where id = any(${[...ids.keys()]})`;
  const named = rows.filter(({ last_error }) => /\[[A-Z_]+\]/.test(last_error));
  const shown = (where: string) => named.filter(({ id }) => ids.get(id) === where).length;
  for (const where of ["message", "cause", "name", "text", "object", "base64", "url"]) {
    assert.equal(shown(where), Object.keys(values).length, where);
  }
  await until("Sentry to have all", () => sentry.events.length >= ids.size);
});

/** As a payload has it: the table shows what the app itself has put there. */
const reversed = (text: string) => [...text].reverse().join("");

Deno.test("payloads are refused", async () => {
  for (
    const [kind, payload, error] of [
      ["not_declared", {}, "unknown_kind: not_declared"],
      [
        "tell",
        { reversed: 5, where: marker },
        "invalid_payload: reversed: Invalid input: expected string, received number",
      ],
      ["send_email", { to: marker, template: "welcome" }, "invalid_payload: to: Invalid email address"],
      ["poisonous_result", { what: "bigint" }, "the result cannot be stored"],
    ] as const
  ) {
    const id = await enqueue(kind, payload);
    await run();
    assert((await lastError(id)).startsWith(error), await lastError(id));
  }
});

Deno.test("claims and settle calls fail", async () => {
  const { sql } = stack;
  const id = await enqueue("echo", {});
  await sql`revoke execute on function claim_jobs, complete_jobs from service_role`;
  const running = run();
  await untilLogged("claim_failed");
  await sql`grant execute on function claim_jobs to service_role`;
  await untilLogged("settle_repeated");
  await sql`grant execute on function complete_jobs to service_role`;
  await running;
  const [row] = await sql`select status from jobs where id = ${id}`;
  assert.equal(row?.status, "succeeded");
});

Deno.test("functions are set up wrongly", async () => {
  const right = { CRON_SECRET: cronSecret, SUPABASE_URL: stack.apiUrl, SENTRY_DSN: sentry.dsn };
  for (
    const [env, event] of [
      [{ SUPABASE_SECRET_KEYS: JSON.stringify({ default: planted.WRONG_KEY }) }, "worker_failed"],
      [{ SUPABASE_SECRET_KEYS: planted.WRONG_KEY }, "not_configured"],
      [{ SUPABASE_SERVICE_ROLE_KEY: planted.WRONG_KEY, SUPABASE_URL: "http://127.0.0.1:2" }, "worker_failed"],
      [{ CRON_SECRET: planted.SHORT_CRON_SECRET }, "cron_secret_unusable"],
      [
        { SENTRY_DSN: `${planted.SENTRY_KEY}@sentry`, SUPABASE_SERVICE_ROLE_KEY: planted.WRONG_KEY },
        "sentry_dsn_unusable",
      ],
    ] as const
  ) {
    await using worker = await startFunction("job-worker", { ...right, ...env });
    for (const body of ["{}", '{"wait": true}']) {
      await record(await worker.fetch("", { method: "POST", headers: bearer(cronSecret), body }));
    }
    await untilLogged(event, worker.lines);
    lines.push(...worker.lines);
  }
});

Deno.test("mails cannot be sent", async () => {
  for (
    const [answer, error] of [
      [
        ({ headers }) => Response.json(`what is ${headers.get("Authorization")}?`, { status: 401 }),
        "PermanentError: Resend answered 401: ",
      ],
      [
        ({ headers }) => Response.json([...headers], { status: 500 }),
        "Error: Resend answered 500",
      ],
      [() => Response.redirect(`http://127.0.0.1:2/${planted.RESEND_API_KEY}`), ""],
    ] satisfies [(request: Request) => Response, string][]
  ) {
    answerOfResend = answer;
    const id = await enqueue("send_email", { to: `${marker}@example.com`, template: "welcome" });
    await run();
    assert((await lastError(id)).startsWith(error), await lastError(id));
  }
});

Deno.test("webhooks are refused, cannot be read, and fail", async () => {
  const send = async (source: string, secret: string, body: string, type = "application/json") => {
    const headers = { "X-Test-Secret": secret, "Content-Type": type, "X-Kept": planted.WEBHOOK_SECRET };
    return await ask(`/functions/v1/webhook-inbox/${source}`, { headers, body });
  };
  const secret = planted.WEBHOOK_SECRET;
  const said = JSON.stringify({ id: 7, text: marker });
  for (
    const [status, source, given, body, type] of [
      [401, "orders", planted.WRONG_KEY, said],
      [401, "slack", secret, said],
      [415, "orders", secret, said, "text/plain"],
      [413, "texts", secret, marker.repeat(200)],
      [400, "orders", secret, `{"${marker}": ${marker}`],
      [400, "odd", secret, said],
      [500, "stripe", secret, said],
    ] as const
  ) assert.equal(await send(source, given, body, type), status);
  assert.equal(await send("orders", secret, JSON.stringify({ text: marker, fail: "permanent" })), 202);
  await stack.sql`select receive_webhook('trusted', ${`{"amount": "${marker}"}`}::text::bytea)`;
  await run();
  const [row] = await stack.sql`
    select count(*)::int as ended from jobs where kind like 'webhook_%' and finished_at is not null`;
  assert.equal(row?.ended, 2);
});

Deno.test("a poke is refused, since Vault holds another secret than the function", async () => {
  const { sql } = stack;
  await setVaultSecrets(stack.db.url("postgres"), {
    project_url: stack.apiUrl,
    cron_secret: planted.WRONG_VAULT_SECRET,
  });
  await enqueue("echo", {});
  await until(
    "the answer",
    async () => (await sql`select from net._http_response where status_code = 401`).length > 0,
  );
  const [worker] = await sql`select ok, detail from job_dispatch_health() where item = 'worker'`;
  assert.equal(worker?.ok, false);
});

Deno.test("nothing of what was planted is in any log, answer, table or Sentry event", async () => {
  const { sql } = stack;
  const tables = await sql`
    select n.nspname as schema, c.relname as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname in ('public', 'private') and c.relkind in ('r', 'p', 'v', 'm') order by 1, 2`;
  const rows: string[] = [];
  const withoutPayloads: string[] = [];
  for (const { schema, name } of tables) {
    const found = await sql`
      select t::text as row, (to_jsonb(t) - array['payload', 'context', 'body'])::text as rest from ${
      sql(schema)
    }.${sql(name)} t`;
    rows.push(...found.map(({ row }) => `${schema}.${name}: ${row}`));
    withoutPayloads.push(...found.map(({ rest }) => rest));
  }
  assert(tables.length >= 7 && rows.length > 100);
  const health = await sql`select h::text as row from job_dispatch_health() h`;
  const responses = await sql`select r::text as row from net._http_response r`;
  await stack.services.functions.stop(); // what is still to be reported is then
  const reported = sentry.received.map((text) => text.replace(`sentry_key=${planted.SENTRY_KEY}`, ""));
  const places: Record<string, string[]> = {
    "what a table has beside payloads": withoutPayloads,
    "job_dispatch_health()": health.map(({ row }) => row),
    "an answer to a poke": responses.map(({ row }) => row),
    "a log": [...stack.lines, ...lines],
    "an answer": answers,
    "a Sentry event": reported,
  };
  const secrets = [cronSecret, stack.keys.serviceRoleKey, stack.keys.secretKey, ...Object.values(planted)];
  const forms = secrets.flatMap((secret) => [
    secret,
    encodeURIComponent(secret),
    JSON.stringify(secret).slice(1, -1),
    btoa(secret).slice(0, -4),
    btoa(`user:${secret}`).slice(8, -4),
    // The beginning alone, where a text was cut.
    /planted\d/.exec(secret)?.[0] ?? secret,
  ]);
  for (const [place, texts] of Object.entries({ "a table": rows, ...places })) {
    assert(texts.length > 0, place);
    for (const form of forms) {
      const text = texts.find((text) => text.includes(form));
      assert(!text, `${form} is in ${place}: ${text}`);
    }
  }
  for (const [place, texts] of Object.entries(places)) {
    const text = texts.find((text) => text.includes(marker));
    assert(!text, `a payload is in ${place}: ${text}`);
  }
});
