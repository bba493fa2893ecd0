/** A mail that the outbox took instead of Resend. */
interface Mail {
  id: string;
  from: string;
  to: string[];
  subject: string;
  text: string;
}

/**
 * Speaks the part of Resend's API that send_email uses, prints each mail and sends nothing. The same Idempotency-Key
 * twice gives the first answer and no second mail, as Resend does. GET /emails lists the last hundred.
 */
export function startOutbox(
  port: number,
  print: (line: string) => void,
): { port: number; stop(): Promise<void> } {
  const mails: Mail[] = [];
  const byKey = new Map<string, Mail>();
  const server = Deno.serve({ hostname: "127.0.0.1", port, onListen() {} }, async (request) => {
    const { pathname } = new URL(request.url);
    if (pathname !== "/emails") {
      return Response.json({ name: "not_found", message: "Only /emails is here." }, { status: 404 });
    }
    if (request.method === "GET") return Response.json(mails);
    const key = request.headers.get("Idempotency-Key") ?? crypto.randomUUID();
    const sent = byKey.get(key);
    if (sent) return Response.json({ id: sent.id });
    const { from, to, subject, text }: Omit<Mail, "id"> = await request.json();
    const mail = { id: crypto.randomUUID(), from, to, subject, text };
    byKey.set(key, mail);
    mails.push(mail);
    if (mails.length > 100) mails.shift();
    // Whatever a mail holds, the terminal is not to act on it.
    const printable = `mail to ${to.join(", ")}: ${subject}\n${text.replaceAll(/^/gm, "    ")}`;
    print(printable.replaceAll(/[^\n\P{Cc}]/gu, "\ufffd"));
    return Response.json({ id: mail.id });
  });
  return { port: server.addr.port, stop: () => server.shutdown() };
}
