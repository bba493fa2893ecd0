import { z } from "zod";
import {
  defineWebhookSource,
  PermanentError,
  RetryAfterError,
  type WebhookMessage,
} from "../_shared/jobs.ts";
import { github } from "../_webhooks/github.ts";
import { meta } from "../_webhooks/meta.ts";
import { slack } from "../_webhooks/slack.ts";
import { standardWebhooks } from "../_webhooks/standard_webhooks.ts";
import { stripe } from "../_webhooks/stripe.ts";
import type { Verifier } from "../_webhooks/verifier.ts";
import { dieOnce } from "./die_once.ts";

const append = (file: string, line: string) => Deno.writeTextFileSync(file, `${line}\n`, { append: true });

/** Signed by whoever sends the secret; dies when it is told to. */
const plain: Verifier = {
  secret: "TEST_WEBHOOK_SECRET",
  secretHeaders: ["X-Test-Secret"],
  verify: ({ headers }, secrets) => {
    const die = headers.get("X-Test-Die");
    if (die) dieOnce(die);
    return Promise.resolve(
      secrets.includes(headers.get("X-Test-Secret") ?? "") ? null : "the secret is missing or wrong",
    );
  },
};

/** All that a handler is told of its message. */
function describe({ signal, raw, checkpoint: _, step: __, progress, ...message }: WebhookMessage<unknown>) {
  return { ...message, progress, raw: [...raw()], aborted: signal.aborted };
}

const fields = z.looseObject({ id: z.string(), type: z.string(), tenant: z.string() }).partial();

/** Over HTTP it is not there. */
export const trusted = defineWebhookSource("trusted", {
  verify: null,
  schema: z.object({ amount: z.coerce.number() }),
  handler: describe,
});

/** Sources for tests. */
export const webhooks = [
  /** Gives back what it was told; fails, dies or keeps something when its payload says so. */
  defineWebhookSource("orders", {
    verify: plain,
    id: ({ payload }) => fields.safeParse(payload).data?.id,
    type: ({ payload }) => fields.safeParse(payload).data?.type,
    tenant: ({ payload }) => fields.safeParse(payload).data?.tenant,
    headers: ["X-Kept"],
    maxAttempts: 3,
    async handler(message) {
      const { payload } = message;
      const { data } = z.object({
        file: z.string().optional(),
        ms: z.number().optional(),
        die: z.string().optional(),
        fail: z.enum(["once", "permanent"]).optional(),
        page: z.number().optional(),
      }).safeParse(payload);
      if (data?.file) append(data.file, message.id);
      if (data?.ms) await new Promise((resolve) => setTimeout(resolve, data.ms));
      if (data?.die) dieOnce(data.die);
      if (data?.fail === "permanent") throw new PermanentError("never");
      if (data?.page) await message.checkpoint({ page: Number(message.progress.page ?? 0) + data.page });
      if (data?.fail === "once" && message.attempts === 1) throw new RetryAfterError(0, "once");
      return describe(message);
    },
  }),
  /** One at a time of a customer; reads what is no text, too. */
  defineWebhookSource("odd", {
    verify: plain,
    types: ["taken"],
    schema: z.object({ n: z.number() }),
    id: ({ payload }) => z.object({ id: z.custom<string>() }).partial().parse(payload).id,
    type: ({ payload }) => fields.parse(payload).type,
    concurrencyKey: ({ payload }) =>
      z.looseObject({ customer: z.string() }).partial().parse(payload).customer,
    handler: describe,
  }),
  defineWebhookSource("forms", { verify: plain, format: "form", handler: describe }),
  defineWebhookSource("texts", { verify: plain, format: "text", maxBodyBytes: 1_000, handler: describe }),
  trusted,
  defineWebhookSource("standard", {
    verify: standardWebhooks({ secret: "TEST_STANDARD_SECRET" }),
    handler: describe,
  }),
  defineWebhookSource("stripe", { verify: stripe({ secret: "TEST_STRIPE_SECRET" }), handler: describe }),
  defineWebhookSource("github", { verify: github({ secret: "TEST_WEBHOOK_SECRET" }), handler: describe }),
  defineWebhookSource("slack", { verify: slack({ secret: "TEST_WEBHOOK_SECRET" }), handler: describe }),
  defineWebhookSource("meta", {
    verify: meta({ secret: "TEST_WEBHOOK_SECRET", verifyToken: "TEST_VERIFY_TOKEN" }),
    handler: describe,
  }),
];
