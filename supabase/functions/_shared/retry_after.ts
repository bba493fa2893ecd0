const MAX_SECONDS = 86_400;

/** The three forms of an HTTP-date (RFC 9110, section 5.6.7). Date.parse alone takes "soon 5" for a day in May. */
const HTTP_DATE =
  /^(?:\w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT|\w{6,9}, \d\d-\w{3}-\d\d [\d:]{8} GMT|\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})$/;

/**
 * For how many seconds a response asks to wait in Retry-After (RFC 9110, section 10.2.3), as RetryAfterError takes them:
 * at most a day, whatever it says. A date counts from the response's own Date header when it has one, since the two clocks
 * may differ. Undefined without the header, or when that is neither digits nor a date to come.
 */
export function retryAfterSeconds({ headers }: Response): number | undefined {
  const value = headers.get("Retry-After")?.trim() ?? "";
  if (/^\d+$/.test(value)) return Math.min(Number(value), MAX_SECONDS);
  const now = httpDate(headers.get("Date") ?? "") ?? Date.now();
  const seconds = Math.ceil(((httpDate(value) ?? now) - now) / 1000);
  return seconds > 0 ? Math.min(seconds, MAX_SECONDS) : undefined;
}

/** Milliseconds since 1970; undefined when it is no HTTP-date. */
function httpDate(text: string): number | undefined {
  if (!HTTP_DATE.test(text)) return undefined;
  // The third form, of C's asctime(), names no zone: it is GMT too.
  const time = Date.parse(text.endsWith("GMT") ? text : `${text} GMT`);
  return Number.isNaN(time) ? undefined : time;
}
