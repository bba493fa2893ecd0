import type { Handlers } from "../_shared/jobs.ts";
import { sendEmail } from "./handlers/send_email.ts";

/** Which handler runs which kind. A kind without one is a type error. */
export const handlers: Handlers = {
  send_email: sendEmail,
};
