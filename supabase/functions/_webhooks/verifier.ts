/** How a sender of webhooks is told from a forger: what every verifier in this folder is. */

/** A request as it came. Its URL is the one that the sender knows. */
export interface SignedRequest {
  url: URL;
  headers: Headers;
  body: Uint8Array<ArrayBuffer>;
}

/** A request that is known to come from the source. */
export interface ReceivedRequest extends SignedRequest {
  /** The body as the source's format has it: JSON.parse's value, a form's fields, or its text. */
  payload: unknown;
}

/** Reads something from a request; undefined or null when it is not there. */
export type Reader = (request: ReceivedRequest) => string | null | undefined;

/**
 * How a body is read: JSON, and nothing else is taken (`json`); a form, or JSON where it begins with a brace
 * (`form`); as text, whatever it is (`text`).
 */
export type WebhookFormat = "json" | "form" | "text";

/** How one provider signs, and where it puts what a message is known by. */
export interface Verifier {
  /** The environment variable that holds its secret, or several, separated by commas, while one is being rotated. */
  secret: string;
  /** Null when one of the secrets has signed the request, at about `now`; else why that is not so, for the log. Never throws. */
  verify(request: SignedRequest, secrets: string[], now: Date): Promise<string | null>;
  /** What is wrong with a secret, in words that do not quote it; null when it can be used. */
  checkSecret?(secret: string): string | null;
  /** Headers with signatures or secrets: never kept. */
  secretHeaders: string[];
  /** Headers to keep, beside those that the source names. */
  headers?: string[];
  /** How the body is read unless the source says otherwise; json by default. */
  format?: WebhookFormat;
  /** What a message is known by, unless the source says otherwise. */
  id?: Reader;
  type?: Reader;
  tenant?: Reader;
  /** An answer for a request that is no message, such as the question whether this endpoint is the sender's own. */
  answer?(request: ReceivedRequest): Response | null;
  /** Answers GET: the variable of another secret, and what it answers to whoever knows one of its values; else null. */
  challenge?: { secret: string; answer(url: URL, secrets: string[]): Response | null };
}

/** Whether a Content-Type is application/json, or another type in JSON such as application/cloudevents+json. */
export const isJson = (contentType: string | null) =>
  /^application\/(json|[\w.-]+\+json) *(;|$)/i.test(contentType ?? "");

/** Whether a body that may be JSON or a form is JSON: by how it begins, since nobody signs a Content-Type. */
export const beginsAsJson = (text: string) => /^\s*\{/.test(text);

/** The values of each name, in the order they came. In one pass: a body of 1 MiB may hold half a million fields. */
export function valuesByName(entries: Iterable<[string, string]>): Map<string, string[]> {
  const values = new Map<string, string[]>();
  for (const [name, value] of entries) {
    const known = values.get(name);
    if (known) known.push(value);
    else values.set(name, [value]);
  }
  return values;
}
