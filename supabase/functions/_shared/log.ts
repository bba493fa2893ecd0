/**
 * Writes one line of JSON to the function's log. Fields name things (job id, kind, attempt) and carry error texts; they
 * never carry secrets or payloads.
 */
export function log(level: "info" | "error", event: string, fields: Record<string, unknown> = {}): void {
  const line = JSON.stringify({ level, event, ...fields });
  if (level === "error") console.error(line);
  else console.log(line);
}
