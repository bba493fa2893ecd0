import assert from "node:assert/strict";

/** A server that speaks Sentry's envelope endpoint (https://develop.sentry.dev/sdk/data-model/envelopes/), for tests. */

export interface SentryEvent {
  event_id: string;
  level: string;
  message?: string;
  environment?: string;
  release?: string;
  fingerprint?: string[];
  tags: Record<string, string>;
  extra: Record<string, unknown>;
  exception?: {
    values: {
      type: string;
      value: string;
      stacktrace?: { frames: { function?: string; filename?: string; lineno?: number; in_app: boolean }[] };
    }[];
  };
}

/** https://develop.sentry.dev/sdk/telemetry/check-ins/ */
export interface SentryCheckIn {
  check_in_id: string;
  monitor_slug: string;
  status: string;
  duration?: number;
  environment?: string;
  release?: string;
  monitor_config?: unknown;
}

export interface SentryServer extends AsyncDisposable {
  dsn: string;
  /** What it took, in the order of arrival. */
  events: SentryEvent[];
  checkIns: SentryCheckIn[];
  /** Everything that was sent to it: request line, headers and body as it came, and decompressed. */
  received: string[];
  /** Requests that it has answered to the end. */
  answered: number;
  /** How it answers; as Sentry does when undefined. */
  respond?: () => Response | Promise<Response>;
  /** How it behaves as a TCP server. */
  connections: "serve" | "reset" | "garbage" | "refuse";
}

/** Starts one on a free port. */
export function startSentry(key = "0123456789abcdef0123456789abcdef"): SentryServer {
  const http = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async (request) => {
    const body = new Uint8Array(await request.arrayBuffer());
    const text = await decompressed(body, request.headers.get("Content-Encoding"));
    server.received.push(`${request.method} ${request.url}\n${JSON.stringify([...request.headers])}`);
    server.received.push(new TextDecoder().decode(body), text);
    const response = await server.respond?.() ?? take(request, text);
    server.answered++;
    return response;
  });

  function take(request: Request, text: string): Response {
    const { pathname, searchParams } = new URL(request.url);
    if (request.method !== "POST" || pathname !== "/api/42/envelope/") {
      return new Response(null, { status: 404 });
    }
    const auth = /sentry_key=(\w+)/.exec(request.headers.get("X-Sentry-Auth") ?? "")?.[1];
    if ((auth ?? searchParams.get("sentry_key")) !== key) return new Response(null, { status: 403 });
    const { id, type, payload } = parse(text);
    if (type === "check_in") {
      server.checkIns.push(JSON.parse(payload));
      return Response.json({});
    }
    const event: SentryEvent = JSON.parse(payload);
    assert.equal(type, "event");
    assert.match(id, /^[0-9a-f]{32}$/);
    assert.equal(event.event_id, id);
    server.events.push(event);
    return Response.json({ id });
  }

  // In front of it, since a server that resets connections or answers nonsense is none of HTTP's.
  let listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const { port } = listener.addr;
  const accepting = new Set([accept(listener)]);
  const open = new Set<Deno.Conn>();

  async function accept(from: Deno.Listener): Promise<void> {
    for await (const connection of from) forward(connection);
  }

  async function forward(connection: Deno.Conn): Promise<void> {
    open.add(connection);
    try {
      if (connections === "reset") return;
      if (connections === "garbage") {
        await connection.read(new Uint8Array(1024));
        await connection.write(new TextEncoder().encode("220 mail.example.com ESMTP\r\n"));
        return;
      }
      using back = await Deno.connect({ hostname: "127.0.0.1", port: http.addr.port });
      await Promise.all([
        connection.readable.pipeTo(back.writable),
        back.readable.pipeTo(connection.writable),
      ]);
    } catch {
      // The caller has gone.
    } finally {
      close(connection);
    }
  }

  function close(connection: Deno.Conn): void {
    open.delete(connection);
    try {
      connection.close();
    } catch {
      // The other side was quicker.
    }
  }

  let connections: SentryServer["connections"] = "serve";
  const server: SentryServer = {
    dsn: `http://${key}@127.0.0.1:${port}/42`,
    events: [],
    checkIns: [],
    received: [],
    answered: 0,
    get connections() {
      return connections;
    },
    set connections(how) {
      if (connections === "refuse") {
        listener = Deno.listen({ hostname: "127.0.0.1", port });
        accepting.add(accept(listener));
      }
      connections = how;
      // Callers keep connections for their next request.
      open.forEach(close);
      if (how === "refuse") listener.close();
    },
    async [Symbol.asyncDispose]() {
      if (connections !== "refuse") listener.close();
      open.forEach(close);
      await Promise.all(accepting);
      await http.shutdown();
    },
  };
  return server;
}

async function decompressed(body: Uint8Array<ArrayBuffer>, encoding: string | null): Promise<string> {
  const stream = new Blob([body]).stream();
  return await new Response(
    encoding === "gzip" ? stream.pipeThrough(new DecompressionStream("gzip")) : stream,
  ).text();
}

/** The one item of an envelope, whose items are lines: header, then payload. */
function parse(envelope: string): { id: string; type: string; payload: string } {
  const [header = "", itemHeader = "", payload = "", ...rest] = envelope.split("\n");
  assert.equal(rest.join(""), "");
  const { event_id: id } = JSON.parse(header);
  const { type, length } = JSON.parse(itemHeader);
  if (length !== undefined) assert.equal(length, new TextEncoder().encode(payload).length);
  return { id, type, payload };
}
