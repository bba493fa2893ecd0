import assert from "node:assert/strict";
import { join } from "node:path";
import { signJwt, verifyJwt } from "../../scripts/local/jwt.ts";
import { startFunction, startTestStack, type TestFunction, type TestStack } from "../support.ts";

/** Who asked for a job: contextOf reads it from a request, SQL from the same token, and asUser acts for that user. */

/** A function of an app's own: GET gives contextOf's answer, POST enqueues or calls the API as users, all with X-Key as key. */
const whoSource = `
import { asUser, contextOf, enqueueJob, JobError } from "../_shared/jobs.ts";
const realNow = Date.now;
async function answer(request) {
  if (request.method === "GET") return await contextOf(request);
  if (request.url.endsWith("/enqueue")) {
    return await enqueueJob("read_as_user", { table: "notes" }, { context: await contextOf(request) });
  }
  const { context, secondsLater } = await request.json();
  const user = asUser(context);
  let error = null;
  for (const seconds of secondsLater) {
    Date.now = () => realNow() + seconds * 1000;
    ({ error } = await user.from("rows").insert({}));
  }
  Date.now = realNow;
  try {
    user.auth.getUser();
  } catch (thrown) {
    return { error: error?.message, auth: thrown.message };
  }
}
Deno.serve(async (request) => {
  const key = request.headers.get("X-Key");
  if (key !== null) Deno.env.set("JWT_SIGNING_KEY", key);
  try {
    return Response.json(await answer(request));
  } catch (error) {
    if (!(error instanceof JobError)) throw error;
    return Response.json({ code: error.code, message: error.message }, { status: 400 });
  }
});
`;

async function addWho(appDir: string): Promise<void> {
  await Deno.mkdir(join(appDir, "supabase/functions/who"));
  await Deno.writeTextFile(join(appDir, "supabase/functions/who/index.ts"), whoSource);
}

type Claims = Record<string, unknown>;
const now = () => Math.floor(Date.now() / 1000);
const base64url = (data: Uint8Array<ArrayBuffer> | string) =>
  (typeof data === "string" ? new TextEncoder().encode(data) : data).toBase64({
    alphabet: "base64url",
    omitPadding: true,
  });

const algorithms = {
  ES256: { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" },
  RS256: {
    name: "RSASSA-PKCS1-v1_5",
    hash: "SHA-256",
    modulusLength: 2048,
    publicExponent: new Uint8Array([1, 0, 1]),
  },
};

/** A key pair with both halves as JWKs, and what signs tokens with it. */
async function makeKey(alg: keyof typeof algorithms, kid: string) {
  const pair = await crypto.subtle.generateKey(algorithms[alg], true, ["sign", "verify"]);
  if (!("privateKey" in pair)) throw new Error(`${alg} has no key pair`);
  const named = async (key: CryptoKey) => ({ ...await crypto.subtle.exportKey("jwk", key), alg, kid });
  return {
    privateJwk: await named(pair.privateKey),
    publicJwk: await named(pair.publicKey),
    async sign(claims: Claims, header: Claims = { alg, kid }): Promise<string> {
      const content = `${base64url(JSON.stringify(header))}.${base64url(JSON.stringify(claims))}`;
      const signature = await crypto.subtle
        .sign(algorithms[alg], pair.privateKey, new TextEncoder().encode(content));
      return `${content}.${base64url(new Uint8Array(signature))}`;
    },
  };
}

const ec = await makeKey("ES256", "the project's EC key");
const rsa = await makeKey("RS256", "the project's RSA key");
/** Says that it is the project's. */
const forger = await makeKey("ES256", "the project's EC key");
const legacySecret = "the project's JWT secret, of forty characters";
const octKey = { kty: "oct", kid: "the project's shared key", k: base64url(legacySecret) };

const userId = "11111111-1111-4111-8111-111111111111";
const act = { sub: "22222222-2222-4222-8222-222222222222" };
const identity = {
  ...{ sub: userId, role: "authenticated", aud: "authenticated", iss: "https://example.supabase.co/auth/v1" },
  ...{ email: "ada@example.com", app_metadata: { tenant_id: "acme" }, act },
};
const times = () => ({ iat: now(), exp: now() + 3600, jti: "one of many" });
const claims = (more: Claims = {}): Claims => ({ ...identity, ...times(), ...more });

/** Hosted Auth and API as far as they are asked here: public keys, whose token it is, and what a call's bearer was. */
const auth = {
  isDown: false,
  bearers: new Array<string>(),
  server: Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async (request) => {
    const { pathname } = new URL(request.url);
    const bearer = request.headers.get("Authorization")?.slice("Bearer ".length) ?? "";
    if (pathname === "/rest/v1/rows") {
      auth.bearers.push(bearer);
      return Response.json([]);
    }
    if (auth.isDown) return new Response("no healthy upstream", { status: 503 });
    if (pathname === "/auth/v1/.well-known/jwks.json") {
      return Response.json({ keys: [ec.publicJwk, rsa.publicJwk] });
    }
    assert.equal(pathname, "/auth/v1/user");
    return await verifyJwt(bearer, legacySecret).then(
      ({ sub }) => Response.json({ id: sub }),
      () => Response.json({ code: 403, error_code: "bad_jwt", msg: "invalid JWT" }, { status: 403 }),
    );
  }),
};

let stack: TestStack;
let who: TestFunction;
Deno.test.beforeAll(async () => {
  const env = {
    SUPABASE_URL: `http://127.0.0.1:${auth.server.addr.port}`,
    SUPABASE_SECRET_KEYS: '{"default": "sb_secret_of_this_project"}',
    SUPABASE_PUBLISHABLE_KEYS: '{"default": "sb_publishable_of_this_project"}',
  };
  [stack, who] = await Promise.all([
    startTestStack({ prepare: addWho, dispatch: false }),
    startFunction("who", env, addWho),
  ]);
  await stack.sql`
    create table notes (owner uuid not null default auth.uid(), text text not null);
    alter table notes enable row level security;
    create policy "one's own" on notes to authenticated using (owner = (select auth.uid()));
    grant select, insert on notes to authenticated;
    create function my_claims() returns jsonb language sql stable as 'select auth.jwt()';
    create function note_added() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
      perform public.enqueue_job('read_as_user', '{"table": "notes"}');
      return null;
    end $$;
    create trigger note_added after insert on notes for each row execute function note_added();
  `.simple();
});
Deno.test.afterAll(async () => {
  await auth.server.shutdown();
  await who[Symbol.asyncDispose]();
  await stack[Symbol.asyncDispose]();
});

/** What contextOf says of a request with this Authorization, where JWT_SIGNING_KEY is `key`. */
async function contextOf(authorization: string | null, key = ""): Promise<Claims | null> {
  const headers = { "X-Key": key, ...(authorization === null ? {} : { Authorization: authorization }) };
  return await (await who.fetch("", { headers })).json();
}

/** What comes of asUser in the function, and the bearers of its calls, of which there is one for each time. */
async function asUser(context: unknown, key: string, secondsLater = [0]) {
  auth.bearers.length = 0;
  const response = await who.fetch("", {
    method: "POST",
    headers: { "X-Key": key },
    body: JSON.stringify({ context, secondsLater }),
  });
  const answer: Record<string, string> = await response.json();
  return { answer, bearers: [...auth.bearers] };
}

const partOf = (token: string, n: 0 | 1): Claims =>
  JSON.parse(new TextDecoder().decode(
    Uint8Array.fromBase64(token.split(".")[n] ?? "", { alphabet: "base64url" }),
  ));

Deno.test("contextOf gives the user, the tenant and the claims of a token of each sort, without its times", async () => {
  const expected = { user_id: userId, tenant_id: "acme", claims: identity };
  for (
    const [what, token, key] of [
      ["ES256, by the project's public keys", await ec.sign(claims()), ""],
      ["RS256", await rsa.sign(claims()), ""],
      ["HS256, by the secret that is set", await signJwt(claims(), legacySecret), legacySecret],
      ["HS256, by Auth where no secret is set", await signJwt(claims(), legacySecret), ""],
      [
        "HS256, where the key that is set is another",
        await signJwt(claims(), legacySecret),
        JSON.stringify(octKey),
      ],
      ["ES256, where a secret is set", await ec.sign(claims()), legacySecret],
    ] as const
  ) assert.deepEqual(await contextOf(`Bearer ${token}`, key), expected, what);
});

Deno.test("the tenant is the claim tenant_id, then that in app_metadata, as text, else null", async () => {
  for (
    const [more, tenant] of [
      [{ tenant_id: "other" }, "other"],
      [{ tenant_id: 7 }, "7"],
      [{ tenant_id: null }, "acme"],
      [{ app_metadata: {} }, null],
      [{ app_metadata: undefined, user_metadata: { tenant_id: "what users may set" } }, null],
    ] as const
  ) {
    const context = await contextOf(`Bearer ${await ec.sign(claims(more))}`);
    assert.equal(context?.tenant_id, tenant, JSON.stringify(more));
  }
});

Deno.test("contextOf gives null when nobody is signed in", async () => {
  for (
    const authorization of [
      null,
      "Bearer sb_publishable_of_this_project",
      "Bearer sb_secret_of_this_project",
      `Bearer ${stack.keys.anonKey}`,
      `Bearer ${stack.keys.serviceRoleKey}`,
    ]
  ) assert.equal(await contextOf(authorization), null, String(authorization));
});

Deno.test("contextOf refuses what is forged, expired or damaged", async () => {
  const genuine = await ec.sign(claims());
  const [header = "", payload = "", signature = ""] = genuine.split(".");
  const other = base64url(JSON.stringify(claims({ sub: act.sub })));
  const none = (more: Claims) => `${base64url(JSON.stringify({ alg: "none", ...more }))}.${payload}`;
  const past = claims({ exp: now() - 1 });
  for (
    const [what, authorization] of [
      ["no token", "Bearer nonsense"],
      ["no token at all", "Bearer"],
      ["another scheme", "Basic YTpi"],
      ["two tokens", `Bearer ${genuine} ${genuine}`],
      ["a claim that was changed", `Bearer ${header}.${other}.${signature}`],
      ["another's key with the name of ours", `Bearer ${await forger.sign(claims())}`],
      ["another's key", `Bearer ${await forger.sign(claims(), { alg: "ES256", kid: "another" })}`],
      ["another's key without a name", `Bearer ${await forger.sign(claims(), { alg: "ES256" })}`],
      [
        "our key, of which it says that it is RSA",
        `Bearer ${await ec.sign(claims(), { alg: "RS256", kid: ec.publicJwk.kid })}`,
      ],
      ["no signature", `Bearer ${none({})}.`],
      ["no signature, alg none", `Bearer ${none({})}.${signature}`],
      ["alg none with the name of our key", `Bearer ${none({ kid: ec.publicJwk.kid })}.${signature}`],
      [
        "HS256 by the text of our public key",
        `Bearer ${await signJwt(claims(), JSON.stringify(ec.publicJwk))}`,
      ],
      ["HS256 by another secret", `Bearer ${await signJwt(claims(), "x".repeat(40))}`],
      ["expired", `Bearer ${await ec.sign(past)}`],
      ["expired, HS256", `Bearer ${await signJwt(past, legacySecret)}`],
      ["without an end", `Bearer ${await ec.sign(claims({ exp: undefined }))}`],
      ["an end that is no time", `Bearer ${await ec.sign(claims({ exp: "never" }))}`],
      ["not yet valid", `Bearer ${await ec.sign(claims({ nbf: now() + 600 }))}`],
    ] as const
  ) {
    for (const key of ["", legacySecret]) {
      const answer = await contextOf(authorization, key);
      assert.equal(answer?.code, "invalid_token", `${what}: ${JSON.stringify(answer)}`);
    }
  }
});

Deno.test("while Auth is down a token is not taken for a forged one, and one of a known key is still verified", async () => {
  const known = `Bearer ${await ec.sign(claims())}`;
  await contextOf(known);
  auth.isDown = true;
  try {
    assert.equal((await contextOf(known))?.user_id, userId);
    const unknown = await ec.sign(claims(), { alg: "ES256", kid: "made just now" });
    for (const token of [unknown, await signJwt(claims(), legacySecret)]) {
      assert.equal((await contextOf(`Bearer ${token}`))?.code, "unreachable");
    }
  } finally {
    auth.isDown = false;
  }
});

const recorded = { user_id: userId, tenant_id: "acme", claims: identity };

Deno.test("asUser's calls carry the user's claims for five minutes, signed by either form of key", async () => {
  for (
    const [key, kid] of [
      [legacySecret, undefined],
      [` ${legacySecret}\n`, undefined],
      [JSON.stringify(octKey), octKey.kid],
      [JSON.stringify(ec.privateJwk), ec.publicJwk.kid],
      [JSON.stringify(rsa.privateJwk), rsa.publicJwk.kid],
    ]
  ) {
    const { answer, bearers: [token = ""] } = await asUser(recorded, key ?? "");
    assert.equal(answer.error, undefined);
    assert.match(answer.auth ?? "", /accessing supabase.auth.getUser is not possible/);
    assert.equal(partOf(token, 0).kid, kid);
    const { iat, exp, ...rest } = partOf(token, 1);
    assert.deepEqual(rest, identity);
    assert(Number(exp) - Number(iat) === 300 && Number(exp) <= now() + 300 && Number(exp) > now() + 240);
    // And it verifies.
    assert.deepEqual(await contextOf(`Bearer ${token}`), recorded);
  }
});

Deno.test("a client that is kept signs anew when less than a minute is left", async () => {
  const { bearers } = await asUser(recorded, legacySecret, [0, 200, 270, 7200]);
  const [first, second, third, fourth] = bearers.map((token) => Number(partOf(token, 1).exp) - now());
  assert.equal(first, second);
  assert(Math.abs((third ?? 0) - 570) < 5 && Math.abs((fourth ?? 0) - 7500) < 5, String([third, fourth]));
});

Deno.test("a context made by hand is enough with a user, and cannot set what asUser sets", async () => {
  const alone = await asUser({ user_id: userId }, legacySecret);
  assert.deepEqual(Object.keys(partOf(alone.bearers[0] ?? "", 1)).sort(), ["exp", "iat", "role", "sub"]);
  const far = { exp: now() + 1e6, iat: 1, nbf: 1, jti: "x", sub: userId, role: "authenticated" };
  const { bearers: [token = ""] } = await asUser({ user_id: userId, claims: far }, legacySecret);
  const { exp, iat, ...rest } = partOf(token, 1);
  assert(Number(exp) <= now() + 300 && Number(iat) > now() - 60);
  assert.deepEqual(rest, { sub: userId, role: "authenticated" });
});

Deno.test("asUser refuses a context without a user, or with another's claims", async () => {
  for (
    const context of [
      null,
      "service_role",
      userId,
      [recorded],
      {},
      { user_id: "" },
      { user_id: null, claims: identity },
      { user_id: [userId] },
      { user_id: userId, claims: "all" },
      { user_id: userId, claims: [] },
      { user_id: userId, claims: { ...identity, role: "service_role" } },
      { user_id: userId, claims: { role: "anon" } },
      { user_id: userId, claims: { role: ["authenticated"] } },
      { user_id: userId, claims: { ...identity, sub: act.sub } },
    ]
  ) {
    const { answer, bearers } = await asUser(context, legacySecret);
    assert.equal(answer.code, "no_user", JSON.stringify(context));
    assert.deepEqual(bearers, []);
  }
});

Deno.test("without a usable JWT_SIGNING_KEY nothing is sent, and the error says why but quotes nothing of it", async () => {
  const { kid: _, ...nameless } = ec.privateJwk;
  for (
    const [key, why] of [
      ["", /is not set/],
      ["   ", /is not set/],
      ["a-secret-that-is-too-short", /shorter than 32 characters/],
      [JSON.stringify(ec.publicJwk), /is no private JWK/],
      [JSON.stringify(nameless), /is no private JWK with a kid/],
      [JSON.stringify({ ...ec.privateJwk, alg: "HS256" }), /is no private JWK/],
      [JSON.stringify({ ...octKey, k: "c2hvcnQta2V5" }), /is no private JWK/],
      [JSON.stringify(ec.privateJwk).slice(0, -9), /is no private JWK/],
      [JSON.stringify([ec.privateJwk]), /is neither the JWT secret nor a private JWK/],
      [stack.keys.serviceRoleKey, /is neither the JWT secret nor a private JWK/],
      [`sb_secret_${"x".repeat(40)}`, /is neither the JWT secret nor a private JWK/],
      ["-----BEGIN PRIVATE KEY----- MIGHAgEAMBMGByqGSM49AgEGCCqGSM49", /is neither/],
    ] as const
  ) {
    const { answer, bearers } = await asUser(recorded, key);
    assert.equal(answer.code, "not_configured", key);
    assert.match(answer.message ?? "", why);
    assert.match(answer.message ?? "", /supabase secrets set/);
    assert.deepEqual(bearers, []);
    for (const part of key.match(/[\w-]{12,}/g) ?? []) assert(!answer.message?.includes(part), part);
  }
  // What only the key's arithmetic shows fails the call itself.
  const damaged = JSON.stringify({ ...ec.privateJwk, d: "AAAA" });
  const { answer, bearers } = await asUser(recorded, damaged);
  assert.match(answer.error ?? "", /JWT_SIGNING_KEY is a damaged JWK/);
  assert.deepEqual(bearers, []);
});

/** Calls the stack's API as a user. */
const request = async (path: string, token: string, init: RequestInit = {}) =>
  await fetch(stack.apiUrl + path, {
    ...init,
    headers: {
      apikey: stack.keys.publishableKey,
      Authorization: `Bearer ${token}`,
      "Content-Type": "application/json",
    },
  });

/** Runs the jobs that wait, and gives back the last to be enqueued. */
async function runJobs() {
  await (await stack.call("job-worker", { wait: true })).body?.cancel();
  const [job] = await stack.sql`select * from jobs order by created_at desc limit 1`;
  assert(job);
  return job;
}

Deno.test("a job that a signed-in user's trigger enqueues reads that user's rows only, with act in its claims", async () => {
  await stack.sql`insert into notes (owner, text) values (${act.sub}, 'of another')`;
  const token = await signJwt(claims(), stack.keys.jwtSecret);
  const added = await request("/rest/v1/notes", token, { method: "POST", body: '{"text": "mine"}' });
  assert.equal(added.status, 201, await added.text());
  const job = await runJobs();
  assert.equal(job.status, "succeeded", job.last_error);
  assert.deepEqual(job.context, recorded);
  assert.deepEqual(job.result.rows, [{ owner: userId, text: "mine" }]);
  const { iat, exp, ...rest } = job.result.claims;
  assert.deepEqual(rest, identity);
  assert.equal(exp - iat, 300);

  // TypeScript records the same of the same token.
  assert.deepEqual(await (await request("/functions/v1/who", token)).json(), job.context);
  const enqueued = await request("/functions/v1/who/enqueue", token, { method: "POST" });
  const id = await enqueued.json();
  const same = await runJobs();
  assert.deepEqual([same.id, same.context, same.result.rows], [id, job.context, job.result.rows]);
});

Deno.test("a job without a user, or with a context that claims another role, is dead at once and reads nothing", async () => {
  const service = JSON.stringify({ user_id: userId, claims: { ...identity, role: "service_role" } });
  for (const context of [null, service]) {
    await stack.sql`
      select enqueue_job('read_as_user', '{"table": "notes"}', context => ${context}::text::jsonb)`;
    const { status, attempts, last_error, result } = await runJobs();
    assert.deepEqual([status, attempts, result], ["dead", 1, null]);
    assert.match(last_error, /JobError: asUser: the context/);
  }
});

Deno.test("a token that asUser made is refused minutes later", async () => {
  const sixMinutesAgo = now() - 360;
  const token = await signJwt(
    { ...identity, iat: sixMinutesAgo, exp: sixMinutesAgo + 300 },
    stack.keys.jwtSecret,
  );
  const response = await request("/rest/v1/notes", token);
  assert.equal(response.status, 401);
  assert.match(await response.text(), /JWT expired/);
});
