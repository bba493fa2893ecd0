import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { createHash, createHmac, generateKeyPairSync, sign as signEd25519 } from "node:crypto";
import {
  defineWebhookSource,
  readPayload,
  receiveWebhook,
  withWebhooks,
} from "../../supabase/functions/_webhooks/sources.ts";
import type { Verifier } from "../../supabase/functions/_webhooks/verifier.ts";
import { github } from "../../supabase/functions/_webhooks/github.ts";
import { hmac } from "../../supabase/functions/_webhooks/hmac.ts";
import { meta } from "../../supabase/functions/_webhooks/meta.ts";
import { paddle } from "../../supabase/functions/_webhooks/paddle.ts";
import { sharedHeader } from "../../supabase/functions/_webhooks/shared_header.ts";
import { shopify } from "../../supabase/functions/_webhooks/shopify.ts";
import { type Bytes, fromHeader, textAt } from "../../supabase/functions/_webhooks/signatures.ts";
import { slack } from "../../supabase/functions/_webhooks/slack.ts";
import { standardWebhooks } from "../../supabase/functions/_webhooks/standard_webhooks.ts";
import { stripe } from "../../supabase/functions/_webhooks/stripe.ts";
import { twilio } from "../../supabase/functions/_webhooks/twilio.ts";
import { type Message, signByPackages } from "../senders/senders.ts";
import { seeded } from "../support.ts";
import vectors from "./webhook_vectors.json" with { type: "json" };

/** What a verifier is asked, and how its sender makes a signature of it. */
interface Case {
  name: string;
  verifier: Verifier;
  secret: string;
  body: Bytes;
  url?: string;
  /** Beside that of the signature. */
  headers: Record<string, string>;
  /** The signature's header, and what stands in it around the signature. */
  header: string;
  before: string;
  signature: string;
  /** Seconds since 1970, and how far from that a message may be received; neither where no time is signed. */
  timestamp?: number;
  tolerance?: number;
  /** What is signed, and with what; undefined for public keys and shared secrets. */
  hash?: "sha1" | "sha256" | "sha512";
  encoding?: "hex" | "base64";
  signed?(body: Bytes): Bytes;
}

const bytes = (text: string | Uint8Array): Bytes => new Uint8Array(Buffer.from(text));
const secret = "A_SECRET";
const after = (prefix: string) => (body: Bytes) => bytes(Buffer.concat([Buffer.from(prefix), body]));

const standardCases = vectors.standard_webhooks.map((vector): Case => {
  const { id, timestamp, body, signature } = vector;
  const [scheme, base64 = ""] = signature.split(",");
  return {
    name: `Standard Webhooks ${scheme}`,
    verifier: standardWebhooks({ secret }),
    secret: vector.secret ?? vector.public_key ?? "",
    body: bytes(body),
    headers: { "webhook-id": id, "webhook-timestamp": String(timestamp) },
    header: "webhook-signature",
    before: `${scheme},`,
    signature: base64,
    timestamp,
    tolerance: 300,
    ...scheme === "v1" && { hash: "sha256", encoding: "base64", signed: after(`${id}.${timestamp}.`) },
  };
});

const cases: Case[] = [
  ...standardCases,
  {
    ...standardCases[0],
    name: "Standard Webhooks with the headers of Svix",
    headers: {
      "svix-id": vectors.standard_webhooks[0].id,
      "svix-timestamp": String(vectors.standard_webhooks[0].timestamp),
    },
    header: "svix-signature",
  },
  ...vectors.stripe.map(({ secret: key, timestamp, body, v1 }): Case => ({
    name: "Stripe",
    verifier: stripe({ secret }),
    secret: key,
    body: bytes(body),
    headers: {},
    header: "stripe-signature",
    before: `t=${timestamp},v1=`,
    signature: v1,
    timestamp,
    tolerance: 300,
    hash: "sha256",
    encoding: "hex",
    signed: after(`${timestamp}.`),
  })),
  ...vectors.github.flatMap(({ secret: key, body, sha256 }): Case[] =>
    [github({ secret }), meta({ secret, verifyToken: "A_TOKEN" })].map((verifier, index) => ({
      name: ["GitHub", "Meta"][index],
      verifier,
      secret: key,
      body: bytes(body),
      headers: {},
      header: "x-hub-signature-256",
      before: "sha256=",
      signature: sha256,
      hash: "sha256",
      encoding: "hex",
      signed: after(""),
    }))
  ),
  ...vectors.shopify.map(({ secret: key, body, hmac }): Case => ({
    name: "Shopify",
    verifier: shopify({ secret }),
    secret: key,
    body: bytes(body),
    headers: {},
    header: "x-shopify-hmac-sha256",
    before: "",
    signature: hmac,
    hash: "sha256",
    encoding: "base64",
    signed: after(""),
  })),
  ...vectors.slack.map(({ secret: key, timestamp, body, v0 }): Case => ({
    name: "Slack",
    verifier: slack({ secret }),
    secret: key,
    body: bytes(body),
    headers: { "x-slack-request-timestamp": String(timestamp) },
    header: "x-slack-signature",
    before: "v0=",
    signature: v0,
    timestamp,
    tolerance: 300,
    hash: "sha256",
    encoding: "hex",
    signed: after(`v0:${timestamp}:`),
  })),
  ...vectors.paddle.map(({ secret: key, timestamp, body, h1 }): Case => ({
    name: "Paddle",
    verifier: paddle({ secret }),
    secret: key,
    body: bytes(body),
    headers: {},
    header: "paddle-signature",
    before: `ts=${timestamp};h1=`,
    signature: h1,
    timestamp,
    tolerance: 5,
    hash: "sha256",
    encoding: "hex",
    signed: after(`${timestamp}:`),
  })),
  ...vectors.twilio.map(({ token, url, params, signature }): Case => ({
    name: "Twilio",
    verifier: twilio({ secret }),
    secret: token,
    body: bytes(new URLSearchParams(params).toString()),
    url,
    headers: { "content-type": "application/x-www-form-urlencoded" },
    header: "x-twilio-signature",
    before: "",
    signature,
  })),
  {
    name: "plain HMAC, by SHA-1 in hex (RFC 2202, case 2)",
    verifier: hmac({ secret, header: "x-sig", algorithm: "SHA-1", prefix: "sha1=" }),
    secret: "Jefe",
    body: bytes("what do ya want for nothing?"),
    headers: {},
    header: "x-sig",
    before: "sha1=",
    signature: "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79",
    hash: "sha1",
    encoding: "hex",
    signed: after(""),
  },
  {
    name: "plain HMAC, by SHA-512 in base64 (RFC 4231, case 2)",
    verifier: hmac({ secret, header: "x-sig", algorithm: "SHA-512", encoding: "base64" }),
    secret: "Jefe",
    body: bytes("what do ya want for nothing?"),
    headers: {},
    header: "x-sig",
    before: "",
    signature: Buffer.from(
      "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737",
      "hex",
    ).toString("base64"),
    hash: "sha512",
    encoding: "base64",
    signed: after(""),
  },
];

const shared: Case = {
  name: "shared header",
  verifier: sharedHeader({ secret, header: "authorization", prefix: "Bearer " }),
  secret: "a-shared-secret",
  body: bytes("{}"),
  headers: {},
  header: "authorization",
  before: "Bearer ",
  signature: "a-shared-secret",
};

interface Asked {
  body?: Bytes;
  secrets?: string[];
  /** Seconds since 1970. */
  at?: number;
  /** Headers that differ; null for one that is missing. */
  headers?: Record<string, string | null>;
  url?: string;
}

/** What a verifier says of a case, with something about it changed: null when it verifies, else a reason. */
async function ask(one: Case, { body, secrets, at, headers = {}, url }: Asked = {}): Promise<string | null> {
  const all = { ...one.headers, [one.header]: one.before + one.signature, ...headers };
  const why = await one.verifier.verify(
    {
      url: new URL(url ?? one.url ?? "https://example.com/functions/v1/webhook-inbox/one"),
      headers: new Headers(
        Object.entries(all).flatMap(([name, value]) => value === null ? [] : [[name, value]]),
      ),
      body: body ?? one.body,
    },
    secrets ?? [one.secret],
    new Date((at ?? one.timestamp ?? 0) * 1000),
  );
  assert(why === null || why.length > 0);
  return why;
}

const verifies = async (one: Case, asked: Asked = {}, said = JSON.stringify(asked)) =>
  assert.equal(await ask(one, asked), null, `${one.name}: ${said}`);
const refuses = async (one: Case, asked: Asked, said = JSON.stringify(asked)) =>
  assert.notEqual(await ask(one, asked), null, `${one.name} has verified: ${said}`);

/** The signature of a case's sender, made with a key. */
const signedWith = ({ hash, encoding, signed }: Case, key: string | Uint8Array, body: Bytes) =>
  createHmac(hash ?? "", key).update(signed?.(body) ?? "").digest(encoding ?? "hex");

const hmacs = cases.filter(({ hash }) => hash);

Deno.test("each vector verifies, until exactly the tolerance before and after its time", async () => {
  for (const one of [...cases, shared]) {
    await verifies(one);
    const { timestamp = 0, tolerance } = one;
    if (tolerance === undefined) {
      await verifies(one, { at: 2 ** 32 });
      continue;
    }
    for (const way of [1, -1]) {
      await verifies(one, { at: timestamp + way * tolerance });
      assert.match(
        await ask(one, { at: timestamp + way * (tolerance + 1) }) ?? "",
        way > 0 ? /past/ : /future/,
      );
    }
  }
});

Deno.test("no vector verifies with one byte changed, added or missing", async () => {
  for (const one of cases) {
    for (let place = 0; place < one.body.length; place++) {
      const body = bytes(one.body);
      body[place] ^= 1;
      await refuses(one, { body }, `byte ${place} changed`);
    }
    await refuses(one, { body: one.body.slice(1) }, "first byte missing");
    await refuses(one, { body: one.body.slice(0, -1) }, "last byte missing");
    await refuses(one, { body: bytes("") }, "no body");
    await refuses(one, { body: bytes(Buffer.concat([one.body, Buffer.from("1")])) }, "one more byte");
  }
});

Deno.test("no vector verifies with another secret, that of another source, none or an empty one", async () => {
  const secrets = [...cases, shared].map((one) => one.secret);
  for (const one of [...cases, shared]) {
    for (const other of [...secrets.filter((secret) => secret !== one.secret), `${one.secret}A`]) {
      await refuses(one, { secrets: [other] });
    }
    await refuses(one, { secrets: [] });
    for (const empty of ["", " ", "\n", "whsec_", "v1,whsec_", "v1,", "v1a,whpk_", "whsec_=", "|"]) {
      const signatures = one.hash ? [signedWith(one, "", one.body), signedWith(one, empty, one.body)] : [""];
      // Stripe's and Paddle's secrets are used as they are, with their prefixes.
      if (!one.name.startsWith("Standard") && empty.trim() !== "") signatures.pop();
      for (const signature of [...signatures, one.signature]) {
        await refuses(one, { secrets: [empty], headers: { [one.header]: one.before + signature } });
      }
    }
  }
});

Deno.test("no signature verifies that is cut short, longer, in another scheme or missing", async () => {
  for (const one of [...cases, shared]) {
    const whole = one.before + one.signature;
    const changed = [
      ...Array.from(whole, (_, length) => whole.slice(0, length)),
      ...["=", "A", "0", "00", ".", "é", "\t0", " x", ",", ";"].map((more) => whole + more),
      ...["v0", "v2", "v10", "v1b", "h2", "sha1", "SHA256"].map((scheme) =>
        whole.replace(/(v1a?|v0|h1|sha\d+)(?=[=,][^,=]+=*$)/, scheme)
      ).filter((header) => header !== whole),
      one.before.toUpperCase() + one.signature,
      one.before.replace(/[=, ]$/, "") + one.signature,
      one.before + one.signature.slice(1),
      `${one.before} ${one.signature}`,
    ].filter((header) => header.trim() !== whole);
    for (const header of changed) {
      // What stands in these is passed over by design: a list may go on, and Bearer may be written in any case.
      const list = /stripe|standard|paddle/i.test(one.name);
      if (list && /([,;]| x)$/.test(header) && header.startsWith(whole)) continue;
      if (one === shared && header.toLowerCase() === whole.toLowerCase()) continue;
      await refuses(one, { headers: { [one.header]: header } });
    }
    for (const name of [...Object.keys(one.headers), one.header]) {
      if (name === "content-type") continue;
      await refuses(one, { headers: { [name]: null } });
      await refuses(one, { headers: { [name]: "" } });
    }
  }
});

Deno.test("a time is read as digits and nothing else", async () => {
  const strange = ["abc", " 1", ".0", "e0", "n", "_0", "٣"];
  for (const one of cases) {
    const { timestamp, before } = one;
    if (timestamp === undefined) continue;
    const forms = [
      ...strange.flatMap((text) => [`${timestamp}${text}`, `${text}${timestamp}`]),
      `+${timestamp}`,
      `-${timestamp}`,
      `0x${timestamp.toString(16)}`,
      `${timestamp / 1e9}e9`,
      `${timestamp}000`,
      "NaN",
      "Infinity",
      "",
    ];
    for (const form of forms) {
      // Signed as it stands, so that only its form can be what is wrong.
      const header = Object.keys(one.headers).find((name) => name.endsWith("-timestamp"));
      const prefix = Buffer.from(one.signed?.(bytes("")) ?? []).toString().replace(String(timestamp), form);
      const again = { ...one, signed: after(prefix) };
      const signature = one.hash ? signedWith(again, keyOf(one), one.body) : one.signature;
      const headers = {
        [one.header]: before.replace(String(timestamp), form) + signature,
        ...header && { [header]: form },
      };
      const encodable = Object.fromEntries(
        Object.entries(headers).map(([name, text]) => [name, Buffer.from(text).toString("latin1")]),
      );
      await refuses(one, { headers: encodable });
    }
  }
});

/** The key in a secret. */
function keyOf({ name, secret }: Case): string | Uint8Array {
  return name.startsWith("Standard") ? Buffer.from(secret.replace("whsec_", ""), "base64") : secret;
}

Deno.test("while a secret is rotated, either one of two secrets and of two signatures will do", async () => {
  for (const one of [...cases, shared]) {
    const other = one.name.startsWith("Standard")
      ? "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oX"
      : "another-secret";
    await verifies(one, { secrets: [other, one.secret] });
    await verifies(one, { secrets: [one.secret, other] });
    await verifies(one, { secrets: [`${one.secret}\n`] });
    await refuses(one, { secrets: [other, `${other}2`] });
  }
  for (const one of cases) {
    const [, time = "", scheme = ""] = /^(?:(.*[,;]))?(v1|v1a|h1)[=,]$/.exec(one.before) ?? [];
    if (!scheme) continue;
    const wrong = one.signature.split("").reverse().join("").replace(/^=+/, "A").slice(0, 43);
    const bad = one.hash ? signedWith(one, "wrong", one.body) : wrong;
    const mark = one.before.slice(-1);
    const separators = time ? [time.slice(-1)] : [" ", ", "];
    for (const separator of separators) {
      for (
        const signatures of [
          [`${scheme}${mark}${bad}`, `${scheme}${mark}${one.signature}`],
          [`${scheme}${mark}${one.signature}`, `${scheme}${mark}${bad}`],
          [`v0${mark}${bad}`, "v9", `${scheme}${mark}`, `${scheme}${mark}${one.signature}`],
        ]
      ) {
        await verifies(one, { headers: { [one.header]: time + signatures.join(separator) } });
      }
      const many = Array<string>(10).fill(`${scheme}${mark}${bad}`);
      await refuses(one, {
        headers: { [one.header]: time + [...many, `${scheme}${mark}${one.signature}`].join(separator) },
      });
    }
  }
});

Deno.test("a header that came twice is refused where its sender has no lists", async () => {
  for (const one of [...cases, shared]) {
    const whole = one.before + one.signature;
    if (one.name.startsWith("Standard")) continue;
    await refuses(one, { headers: { [one.header]: `${whole}, ${whole}` } });
    const [time, separator = ""] = /^ts?=\d+([,;])/.exec(one.before) ?? [];
    if (time) await refuses(one, { headers: { [one.header]: `${whole}${separator}${time}` } });
    for (const [name, value] of Object.entries(one.headers)) {
      if (name !== "content-type") await refuses(one, { headers: { [name]: `${value}, ${value}` } });
    }
  }
});

Deno.test("hostile headers, secrets and times are refused with a reason, and nothing is thrown", async () => {
  const seed = Math.floor(Math.random() * 2 ** 32);
  console.log(`seed ${seed}`);
  const random = seeded(seed);
  const pick = <T>(from: readonly T[]): T => from[Math.floor(random() * from.length)];
  const pieces = [
    ...[
      "",
      " ",
      ",",
      ", ",
      ";",
      "=",
      "==",
      ".",
      "|",
      ":",
      "\t",
      "t=",
      "v1=",
      "v1,",
      "v1a,",
      "v0=",
      "h1=",
      "ts=",
      "sha256=",
    ],
    ...[
      "Bearer ",
      "whsec_",
      "0",
      "00",
      "A",
      "AAAA",
      "zz",
      "-1",
      "1e9",
      "NaN",
      "null",
      "undefined",
      "[object Object]",
    ],
    ...[
      "\u00e9",
      "\u00ff",
      "\u0080",
      "%00",
      "__proto__=1",
      "constructor",
      "a".repeat(9_000),
      "v1,A ".repeat(300),
    ],
  ];
  for (const one of [...cases, shared]) {
    const known = [one.before, one.signature, String(one.timestamp ?? 1)];
    for (let turn = 0; turn < 150; turn++) {
      const text = () =>
        Array.from({ length: 1 + Math.floor(random() * 6) }, () => pick([...pieces, ...known])).join("");
      const headers: Record<string, string | null> = { [one.header]: text() };
      for (const name of Object.keys(one.headers)) if (random() < 0.3) headers[name] = text();
      // What is put together of the right pieces may be right.
      if (headers[one.header]?.includes(one.signature)) {
        headers[one.header] = text().replaceAll(one.signature, "");
      }
      const url = `https://example.com/a?${encodeURI(text().slice(0, 200))}&bodySHA256=${
        pick(["", "0", "A"])
      }`;
      await refuses(one, { headers, url: random() < 0.5 ? url : undefined });
      const secret = text();
      if (one === shared && headers[one.header]?.includes(secret.trim())) continue;
      await refuses(one, { headers, secrets: [secret], at: pick([NaN, Infinity, -1, 0]) });
    }
  }
});

Deno.test("bytes are verified as they came: a byte order mark, and what is no UTF-8", async () => {
  const bodies = [[0xef, 0xbb, 0xbf, 0x7b, 0x7d], [0x7b, 0xff, 0xfe, 0xc3, 0x28, 0x7d], [
    0,
    0xed,
    0xa0,
    0x80,
  ]];
  for (const one of hmacs) {
    for (const body of bodies.map((body) => new Uint8Array(body))) {
      const headers = { [one.header]: one.before + signedWith(one, keyOf(one), body) };
      await verifies(one, { body, headers });
      await refuses(one, { body: bytes(new TextDecoder().decode(body)), headers });
    }
  }
});

Deno.test("a secret of Standard Webhooks works in every form in which it is handed out", async () => {
  const [hmacCase, , ed25519Case] = standardCases;
  // With both characters that the alphabets differ in, and padding.
  const key = Buffer.from("fbefbefffbefbefffbefbefffbefbefffbefbefffbefbefffbef", "hex");
  const one = { ...hmacCase, signature: signedWith(hmacCase, key, hmacCase.body) };
  const base64 = key.toString("base64");
  const other = "C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
  const forms = [base64, base64.replace(/=+$/, ""), key.toString("base64url")];
  for (const form of forms) {
    for (const prefix of ["", "whsec_", "v1,whsec_"]) {
      for (const around of [(secret: string) => secret, (secret: string) => ` ${secret}\r\n`]) {
        await verifies(one, { secrets: [around(prefix + form)] });
      }
    }
    await verifies(one, { secrets: [`v1,whsec_${other}|v1,whsec_${form}`] });
    await verifies(one, { secrets: [`v1,whsec_${form}|v1,whsec_${other}`] });
  }
  const { secret } = ed25519Case;
  const whsk = `whsk_${Buffer.alloc(64, 7).toString("base64")}`;
  for (const form of [secret, `v1a,${secret}`, `v1a,${secret}:${whsk}`, secret.replace(/=+$/, "")]) {
    await verifies(ed25519Case, { secrets: [form] });
    assert.equal(ed25519Case.verifier.checkSecret?.(form), null);
  }
});

Deno.test("a key is never used for the other scheme of Standard Webhooks", async () => {
  const { privateKey, publicKey } = generateKeyPairSync("ed25519");
  const raw = Buffer.from(publicKey.export({ format: "jwk" }).x ?? "", "base64url");
  const base64 = raw.toString("base64");
  const one = standardCases[0];
  const message = one.signed?.(one.body) ?? bytes("");
  const v1a = signEd25519(null, message, privateKey).toString("base64");
  // What anyone can make who takes the public key for an HMAC's.
  const v1 = signedWith(one, raw, one.body);
  const asked = (signature: string, secret: string) => ({
    secrets: [secret],
    headers: { "webhook-signature": signature },
  });
  await verifies(one, asked(`v1a,${v1a}`, `whpk_${base64}`));
  await verifies(one, asked(`v1,${v1} v1a,${v1a}`, `v1a,whpk_${base64}`));
  await verifies(one, asked(`v1,${v1}`, `whsec_${base64}`));
  for (const secret of [`whpk_${base64}`, `v1a,${base64}`, `v1,whpk_${base64}`]) {
    await refuses(one, asked(`v1,${v1}`, secret));
  }
  for (const secret of [`whsec_${base64}`, base64, `v1a,whsec_${base64}`, `whsk_${base64}`]) {
    await refuses(one, asked(`v1a,${v1a}`, secret));
  }
  await refuses(one, asked(`v1a,${v1}`, `whpk_${base64}`));
  await refuses(one, asked(`v1,${v1a}`, `whsec_${base64}`));
});

Deno.test("what is wrong with a secret of Standard Webhooks is said in words, without it", () => {
  const check = (text: string) => standardWebhooks({ secret }).checkSecret?.(text);
  for (const { secret } of standardCases) assert.equal(check(secret), null);
  const base64 = Buffer.alloc(32, 1).toString("base64");
  for (
    const [text, why] of [
      ["whsec_not base64!", /^is not base64$/],
      ["whsec_MfKQ9", /^is not base64$/],
      ["whsec_", /^is empty$/],
      [`v1,whsec_${base64}|v1,whsec_`, /^is empty$/],
      ["whpk_AAAA", /^is not a public key of ed25519/],
      [`whsk_${base64}`, /^is a private key/],
      [`v1,whpk_${base64}`, /^is of v1 by one of its prefixes/],
    ] as const
  ) {
    assert.match(check(text) ?? "", why);
  }
});

/** What a verifier reads of a verified request. */
function readBy(
  { id, type, tenant, format = "json" }: Verifier,
  body: string,
  headers: Record<string, string> = {},
) {
  const request = {
    url: new URL("https://example.com"),
    headers: new Headers(headers),
    body: bytes(body),
    payload: readPayload({ format }, bytes(body)),
  };
  return [id?.(request) ?? null, type?.(request) ?? null, tenant?.(request) ?? null];
}

Deno.test("a message is known by what its sender keeps the same over retries", () => {
  const json = { "content-type": "application/json" };
  const read = (verifier: Verifier, body: unknown, headers: Record<string, string> = json) =>
    readBy(verifier, typeof body === "string" ? body : JSON.stringify(body), headers);
  const event = { id: "evt_1", type: "invoice.paid" };
  assert.deepEqual(read(stripe({ secret }), event), ["evt_1", "invoice.paid", null]);
  assert.deepEqual(read(stripe({ secret }), { ...event, account: "acct_1" }), [
    "evt_1",
    "invoice.paid",
    "acct_1",
  ]);
  assert.deepEqual(
    read(paddle({ secret }), { event_id: "evt_1", notification_id: "ntf_1", event_type: "transaction.paid" }),
    ["evt_1", "transaction.paid", null],
  );
  assert.deepEqual(
    read(github({ secret }), {}, { "x-github-delivery": "72d3162e", "x-github-event": "push" }),
    ["72d3162e", "push", null],
  );
  const shop = { "x-shopify-topic": "orders/create", "x-shopify-shop-domain": "a.myshopify.com" };
  assert.deepEqual(
    read(shopify({ secret }), {}, {
      ...shop,
      "x-shopify-webhook-id": "b54557e4",
      "x-shopify-event-id": "98880550",
    }),
    ["b54557e4", "orders/create", "a.myshopify.com"],
  );
  assert.deepEqual(
    read(slack({ secret }), {
      event_id: "Ev1",
      team_id: "T1",
      type: "event_callback",
      event: { type: "message" },
    }),
    ["Ev1", "message", "T1"],
  );
  assert.deepEqual(
    readBy(slack({ secret }), vectors.slack[0].body),
    [null, "/webhook-collect", "T1DC2JH3J"],
  );
  assert.deepEqual(read(meta({ secret, verifyToken: "A" }), { object: "page" }), [null, "page", null]);
  assert.deepEqual(
    readBy(twilio({ secret }), "AccountSid=AC1&CallStatus=completed", {
      "i-twilio-idempotency-token": "c7d0",
    }),
    ["c7d0", "completed", "AC1"],
  );
  const standard = standardWebhooks({ secret });
  const both = {
    "svix-id": "svix",
    "svix-signature": "v1,A",
    "webhook-id": "msg",
    "webhook-signature": "v1,A",
  };
  assert.deepEqual(read(standard, { type: "user.created" }, { "webhook-id": "msg" }), [
    "msg",
    "user.created",
    null,
  ]);
  assert.deepEqual(read(standard, {}, both), ["msg", null, null]);
  assert.deepEqual(read(standard, {}, { ...both, "webhook-id": "", "svix-id": "svix" })[0], "");
  assert.deepEqual(
    read(standard, {}, { "svix-id": "svix", "svix-signature": "v1,A", "webhook-id": "no" })[0],
    "svix",
  );
});

Deno.test("a source can be declared with each verifier, and keeps none of the headers with a signature", () => {
  for (const { name, verifier, header } of [...cases, shared]) {
    const { headers } = defineWebhookSource("one", { verify: verifier, handler: () => {} });
    assert(!headers.includes(header), name);
    assert(verifier.secretHeaders.map((secret) => secret.toLowerCase()).includes(header), name);
  }
});

Deno.test("two sources with one name, or a source and a kind, are refused when the app is loaded", () => {
  const source = defineWebhookSource("one", { verify: null, handler: () => {} });
  const { kinds, handlers } = withWebhooks({ kinds: {}, handlers: {} }, [source]);
  assert.deepEqual([Object.keys(kinds), Object.keys(handlers)], [["webhook_one"], ["webhook_one"]]);
  assert.throws(
    () => withWebhooks({ kinds: {}, handlers: {} }, [source, source]),
    /webhook_one, which is taken/,
  );
  assert.throws(() => withWebhooks({ kinds, handlers }, [source]), /webhook_one, which is taken/);
});

Deno.test("a payload without JSON is no message", async () => {
  const source = defineWebhookSource("one", { verify: null, handler: () => {} });
  for (const payload of [undefined, () => {}, Symbol()]) {
    await assert.rejects(receiveWebhook(source, payload), { code: "invalid_payload" });
  }
});

Deno.test("an id that JSON has rounded, or that is no text, is no id", () => {
  for (const id of ["9007199254740993", "1.5", "true", "null", "{}", "[1]", "1e400"]) {
    assert.equal(textAt(JSON.parse(`{"id":${id}}`), "id"), undefined, id);
  }
  for (const payload of [null, undefined, 1, "id", [], { a: null }, { a: "text" }]) {
    assert.equal(textAt(payload, "a", "b"), undefined);
    assert.equal(textAt(payload, "constructor", "name"), undefined);
  }
  assert.equal(textAt({ id: 9007199254740991 }, "id"), "9007199254740991");
  assert.equal(textAt({ a: { b: "text" } }, "a", "b"), "text");
});

Deno.test("Slack's question for an address is answered with its challenge, as text; other messages are not", async () => {
  const { answer } = slack({ secret });
  const asked = (payload: unknown) =>
    answer?.({ url: new URL("https://example.com"), headers: new Headers(), body: bytes(""), payload }) ??
      null;
  const response = asked({ type: "url_verification", challenge: "<b>3eZbrw1a</b>", token: "x" });
  assert.equal(response?.status, 200);
  assert.equal(response.headers.get("content-type"), "text/plain; charset=utf-8");
  assert.equal(response.headers.get("x-content-type-options"), "nosniff");
  assert.equal(await response.text(), "<b>3eZbrw1a</b>");
  for (const challenge of [undefined, null, "", ["x"], {}, "x".repeat(1_001)]) {
    assert.equal(asked({ type: "url_verification", challenge }), null);
  }
  for (const payload of [{ type: "event_callback", challenge: "x" }, null, "url_verification", []]) {
    assert.equal(asked(payload), null);
  }
});

Deno.test("Meta's challenge is given back to whoever knows the verify token, and to no one else", async () => {
  const { challenge } = meta({ secret, verifyToken: "META_VERIFY_TOKEN" });
  assert.equal(challenge?.secret, "META_VERIFY_TOKEN");
  const asked = (query: string, secrets = ["old-token", "meatyhamhock"]) =>
    challenge.answer(new URL(`https://example.com/?${query}`), secrets);
  const right = "hub.mode=subscribe&hub.challenge=1158201444&hub.verify_token=meatyhamhock";
  const response = asked(right);
  assert.equal(response?.headers.get("x-content-type-options"), "nosniff");
  assert.match(response.headers.get("content-type") ?? "", /^text\/plain/);
  assert.equal(await response.text(), "1158201444");
  assert.notEqual(asked(right.replace("meatyhamhock", "old-token")), null);
  for (
    const wrong of [
      right.replace("meatyhamhock", "meatyhamhoc"),
      right.replace("meatyhamhock", "MeatyHamHock"),
      right.replace("meatyhamhock", ""),
      right.replace("subscribe", "unsubscribe"),
      right.replace("1158201444", ""),
      right.replace("1158201444", "1".repeat(1_001)),
      "hub.mode=subscribe&hub.challenge=1158201444",
      "",
    ]
  ) {
    assert.equal(asked(wrong), null, wrong);
  }
  assert.equal(asked(right.replace("meatyhamhock", ""), ["", " "]), null);
});

/** As Twilio signs: the address, and what of the form follows it. */
const byTwilio = (address: string, fields = "", hash = "sha1") =>
  createHmac(hash, "12345").update(address + fields).digest("base64");

Deno.test("Twilio's signature holds for each way in which it writes an address and a form", async () => {
  const one = cases.find(({ name }) => name === "Twilio");
  assert(one);
  const ask = (url: string, signature: string, form = "", more: Partial<Case> = {}, headers = {}) =>
    [
      { ...one, url, body: bytes(form), signature, ...more },
      { headers },
    ] as const;
  const page = "https://mycompany.com/myapp.php";
  const holds = [
    ask(page, byTwilio(page)),
    ask(page, byTwilio("https://mycompany.com:443/myapp.php")),
    ask("http://mycompany.com/a", byTwilio("http://mycompany.com:80/a")),
    ask("https://mycompany.com:8443/a", byTwilio("https://mycompany.com:8443/a")),
    ask("https://mycompany.com:8443/a", byTwilio("https://mycompany.com/a")),
    ask(`${page}?name=O'Neil&x=a+b`, byTwilio(`${page}?name=O'Neil&x=a+b`)),
    ask(`${page}?name=O'Neil`, byTwilio(`${page}?name=O%27Neil`)),
    ask(`${page}?x=a+b`, byTwilio(`${page}?x=a%20b`)),
    // Names by UTF-16, upper case first; each value of a name once, sorted; what is empty, and what is no ASCII.
    ask(page, byTwilio(page, "BZa1a2bé"), "b=%C3%A9&a=2&B=Z&a=1&a=2"),
    ask(page, byTwilio(page, "ax yb"), "b=&a=x+y"),
    ask("https://abc.supabase.co/functions/v1/webhook-inbox/sms?x=1", byTwilio(`${page}?x=1`), "", {
      verifier: twilio({ secret, url: page }),
    }),
    ask(page, byTwilio(page, "a1", "sha256"), "a=1", {}, {
      "x-twilio-webhooks-signature-settings": "key=webhooks_sharedkey_1,algorithm=HMAC_SHA256",
    }),
  ];
  for (const asked of holds) await verifies(...asked);

  const body = JSON.stringify({ a: 1 });
  const signed = `${page}?bodySHA256=${createHash("sha256").update(body).digest("hex")}`;
  const json = { "content-type": "application/json" };
  await verifies(...ask(signed, byTwilio(signed), body, {}, json));
  const wrong = [
    ask(signed, byTwilio(signed), `${body} `, {}, json),
    ask(page, byTwilio(page), body, {}, json),
    // A form that was signed, said to be JSON.
    ask(page, byTwilio(page, body), body, {}, json),
    ask(page, byTwilio(page, "a1", "sha256"), "a=1"),
    ask(`${page}?x=1`, byTwilio(page)),
    ask(page, byTwilio("http://mycompany.com/myapp.php")),
    ask("https://mycompany.com.evil.com/myapp.php", byTwilio(page)),
    ask(page, byTwilio(page), "", { verifier: twilio({ secret, url: "https://other.com/" }) }),
  ];
  for (const asked of wrong) await refuses(...asked);
  for (const url of ["mycompany.com", `${page}?x=1`, `${page}#x`, ""]) {
    assert.throws(() => twilio({ secret, url }), /no address without a query/);
  }
});

Deno.test("a form of nothing but fields takes little time, before it is verified and after", async () => {
  const one = cases.find(({ name }) => name === "Twilio");
  assert(one);
  const names = Array.from({ length: 50_000 }, (_, n) => n.toString(36)).join("&");
  const startedAt = performance.now();
  await refuses({ ...one, body: bytes(names) }, {});
  const payload = readPayload({ format: "form" }, bytes("a=1&".repeat(50_000)));
  const ms = performance.now() - startedAt;
  assert.deepEqual(payload, { a: Array(50_000).fill("1") });
  assert.ok(ms < 2_000, `${ms} ms`);
});

Deno.test("a shared secret is taken from the header that the source names, in whatever case its scheme is", async () => {
  const gitlab = {
    ...shared,
    verifier: sharedHeader({ secret, header: "X-Gitlab-Token" }),
    header: "x-gitlab-token",
  };
  await verifies({ ...gitlab, before: "" });
  await refuses({ ...gitlab, before: "Bearer " }, {});
  await verifies({ ...shared, before: "bearer " });
  for (const before of ["Basic ", "Bearez ", "", "Bearer"]) await refuses({ ...shared, before }, {});
  assert.equal(
    fromHeader("idempotency-key")({
      url: new URL("https://example.com"),
      headers: new Headers({ "Idempotency-Key": "a" }),
      body: bytes(""),
      payload: null,
    }),
    "a",
  );
});

Deno.test("what the senders' own npm packages sign is accepted, and nothing else that they have signed", async () => {
  const seed = Math.floor(Math.random() * 2 ** 32);
  console.log(`seed ${seed}`);
  const random = seeded(seed);
  const text = (length: number) =>
    Array.from(
      { length },
      () => String.fromCodePoint(Math.floor(random() * (random() < 0.1 ? 0xd7ff : 0x7f))),
    ).join("");
  const messages = Array.from({ length: 80 }, (_, index): Message => {
    const sender = (["standardwebhooks", "svix", "stripe", "github"] as const)[index % 4];
    const key = Buffer.from(Array.from({ length: 24 + index % 40 }, () => Math.floor(random() * 256)));
    return {
      sender,
      secret: sender === "github" ? key.toString("hex") : `whsec_${key.toString("base64")}`,
      body: JSON.stringify({ id: `evt_${index}`, text: text(Math.floor(random() * 200)) }),
      timestamp: 1_614_265_330 + index,
    };
  });
  const verifiers = {
    standardwebhooks: standardWebhooks({ secret }),
    svix: standardWebhooks({ secret }),
    stripe: stripe({ secret }),
    github: github({ secret }),
  };
  const signed = await signByPackages(messages);
  for (const [index, { sender, secret, body, timestamp }] of messages.entries()) {
    const verify = (body: Bytes, secrets: string[]) =>
      verifiers[sender].verify(
        { url: new URL("https://example.com"), headers: new Headers(signed[index]), body },
        secrets,
        new Date(timestamp * 1000),
      );
    assert.equal(await verify(bytes(body), [secret]), null, `${sender} ${index}`);
    assert.notEqual(await verify(bytes(`${body} `), [secret]), null);
    assert.notEqual(await verify(bytes(body), [messages[(index + 4) % messages.length].secret]), null);
  }
});
