import type { WebhookSource } from "../_webhooks/sources.ts";

/** The sources of webhooks that this app takes, each declared in a file of webhooks/. */
export const webhooks = [] satisfies WebhookSource[];
