import { sign } from "@octokit/webhooks-methods";
import { Webhook } from "standardwebhooks";
import Stripe from "stripe";
import { Webhook as SvixWebhook } from "svix";
import type { Message } from "./senders.ts";

// Reads messages from standard input, and prints the headers of each.

const stripe = new Stripe("sk_test_not_used");

async function headersOf({ sender, secret, body, timestamp }: Message, index: number) {
  const id = `msg_${index}`;
  const at = new Date(timestamp * 1000);
  switch (sender) {
    case "standardwebhooks":
      return {
        "webhook-id": id,
        "webhook-timestamp": String(timestamp),
        "webhook-signature": new Webhook(secret).sign(id, at, body),
      };
    case "svix":
      return {
        "svix-id": id,
        "svix-timestamp": String(timestamp),
        "svix-signature": new SvixWebhook(secret).sign(id, at, body),
      };
    case "stripe":
      return {
        "stripe-signature": await stripe.webhooks.generateTestHeaderStringAsync({
          payload: body,
          secret,
          timestamp,
        }),
      };
    case "github":
      return {
        "x-hub-signature-256": await sign(secret, body),
        "x-github-delivery": id,
        "x-github-event": "push",
      };
  }
}

const messages: Message[] = await new Response(Deno.stdin.readable).json();
console.log(JSON.stringify(await Promise.all(messages.map(headersOf))));
