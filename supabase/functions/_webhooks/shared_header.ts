import { isOneOf } from "../_shared/secrets.ts";
import type { Verifier } from "./verifier.ts";

export interface SharedHeaderOptions {
  /** The environment variable that holds the secret. */
  secret: string;
  /** The header with the secret. */
  header: string;
  /** What stands before the secret, such as `Bearer `; in any case, as RFC 9110 has it for the schemes of Authorization. */
  prefix?: string;
}

/**
 * The secret itself in a header, for senders that sign nothing. It proves who sends, and nothing about the body or its age; while
 * it is being rotated the variable holds both. A message is known by the hash of its body unless the source says otherwise.
 *
 * Supabase's database webhooks: add a header to the webhook, and `type: fromPayload("type")`. They have no id, and two changes of
 * a row can have one body: `id: () => crypto.randomUUID()` keeps both, and nothing is sent twice.
 * https://supabase.com/docs/guides/database/webhooks
 *
 * GitLab: X-Gitlab-Token, `id: fromHeader("idempotency-key")`, which stays the same over retries, and
 * `type: fromHeader("x-gitlab-event")`. With a signing token it is standardWebhooks() instead.
 * https://docs.gitlab.com/user/project/integrations/webhooks/
 */
export function sharedHeader({ secret, header, prefix = "" }: SharedHeaderOptions): Verifier {
  return {
    secret,
    secretHeaders: [header],
    verify({ headers }, secrets) {
      const value = headers.get(header) ?? "";
      const matches = value.slice(0, prefix.length).toLowerCase() === prefix.toLowerCase() &&
        isOneOf(value.slice(prefix.length), secrets);
      return Promise.resolve(matches ? null : `its ${header} is missing, or holds another secret`);
    },
  };
}
