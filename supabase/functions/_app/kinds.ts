import { z } from "zod";
import type { KindDeclarations } from "../_shared/kinds.ts";

/**
 * The kinds of jobs that this app has. To add one: declare it here, write its handler in handlers/, and name that in
 * handlers.ts.
 */
export const kinds = {
  send_email: {
    schema: z.object({
      to: z.email(),
      template: z.enum(["welcome", "password_changed"]),
      data: z.record(z.string(), z.string()).default({}),
    }),
    timeoutMs: 20_000,
  },
} satisfies KindDeclarations;
