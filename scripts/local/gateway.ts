// The API of the local stack on one port: what hosted Supabase's gateway does with keys and paths, in front of the
// REST API and the Edge Functions. As a process of its own it reads its options from LOCAL_GATEWAY.

import { checkTimes, type Claims, JwtError, verifyJwt } from "./jwt.ts";
import { portHint } from "./ports.ts";
import { openRest, type Rest } from "./rest.ts";
import { errorResponse, RestError } from "./rest/errors.ts";
import { type Caller } from "./rest/request.ts";

export interface LocalKeys {
  jwtSecret: string;
  publishableKey: string;
  secretKey: string;
  /** JWTs signed with jwtSecret, for the roles anon and service_role. */
  anonKey: string;
  serviceRoleKey: string;
}

export interface GatewayOptions {
  /** 0 picks a free one. */
  port: number;
  /** 127.0.0.1 if absent. */
  hostname?: string;
  /** Connects as role authenticator. */
  databaseUrl: string;
  keys: LocalKeys;
  /** Unix socket path by function name. */
  functions: Record<string, string>;
  /** Functions that only a valid JWT reaches, as bearer: those without `verify_jwt = false` in config.toml. */
  jwtFunctions?: string[];
  log?: (line: string) => void;
}

export interface Gateway {
  port: number;
  stop(): Promise<void>;
}

const bodyLimit = 16 * 1024 * 1024;
const functionStartMs = 5_000;
const functionAnswerMs = 150_000;
const stopMs = 1_000;

/**
 * Starts the gateway and returns once it listens. Postgres and the functions need not be up yet.
 * Throws if the port is taken, or if anonKey or serviceRoleKey is not signed with jwtSecret.
 */
export async function startGateway(options: GatewayOptions): Promise<Gateway> {
  const { keys, log = () => {} } = options;
  const authorize = await createAuthorizer(keys);
  const rest = openRest(options.databaseUrl);
  const functions = new Map(
    Object.entries(options.functions).map(([name, path]) => [name, openFunction(name, path, log)]),
  );

  async function handle(request: Request, info: Deno.ServeHandlerInfo<Deno.NetAddr>): Promise<Response> {
    const url = new URL(request.url);
    if (url.pathname === "/rest/v1" || url.pathname.startsWith("/rest/v1/")) {
      return withCors(
        request.method === "OPTIONS"
          ? preflight(request)
          : await callRest(rest, authorize, request, url, info),
      );
    }
    const name = /^\/functions\/v1\/([^/]+)/.exec(url.pathname)?.[1];
    if (name !== undefined) {
      const call = functions.get(name);
      if (call) {
        const refused = options.jwtFunctions?.includes(name) &&
          await refuseWithoutJwt(request, keys.jwtSecret);
        if (refused) return refused;
        const headers = new Headers(request.headers);
        for (const [key, value] of Object.entries(forwardingHeaders(request, url, info))) {
          headers.set(key, value);
        }
        return await call.forward(request, url, headers);
      }
      return problem(404, "NOT_FOUND", "Requested function was not found");
    }
    const message = `The local stack has no ${url.pathname}: it serves /rest/v1 and /functions/v1. ` +
      "Run `supabase start` (it needs Docker) for the rest of Supabase.";
    return problem(501, "NOT_IMPLEMENTED", message);
  }

  const abort = new AbortController();
  const close = async () => {
    for (const call of functions.values()) call.close();
    await rest.stop();
  };
  let server: Deno.HttpServer<Deno.NetAddr>;
  try {
    server = listen(options, abort.signal, handle, log);
  } catch (error) {
    await close();
    throw error;
  }
  return {
    port: server.addr.port,
    async stop() {
      // Requests under way may finish, but a slow function must not hold the stop up.
      const timer = setTimeout(() => abort.abort(), stopMs);
      await server.shutdown();
      await server.finished;
      clearTimeout(timer);
      await close();
    },
  };
}

function listen(
  { port, hostname = "127.0.0.1" }: GatewayOptions,
  signal: AbortSignal,
  handler: Deno.ServeHandler<Deno.NetAddr>,
  log: (line: string) => void,
): Deno.HttpServer<Deno.NetAddr> {
  try {
    return Deno.serve({
      port,
      hostname,
      signal,
      onListen: () => {},
      onError(error) {
        log(`gateway: ${error instanceof Error ? error.stack : error}`);
        return problem(500, "INTERNAL_ERROR", "The gateway failed; its log says why");
      },
    }, handler);
  } catch (error) {
    if (!(error instanceof Deno.errors.AddrInUse)) throw error;
    throw new Error(`Port ${port} (api) is taken. ${portHint("api")}`, { cause: error });
  }
}

function problem(status: number, code: string, message: string): Response {
  return Response.json({ code, message }, { status, headers: { "sb-error-code": code } });
}

// ---- Cross-origin requests ----

const exposedHeaders =
  "Content-Encoding, Content-Location, Content-Range, Content-Type, Date, Location, Server, Transfer-Encoding, Range-Unit";

function preflight(request: Request): Response {
  return new Response(null, {
    headers: {
      "access-control-allow-methods": "GET,HEAD,PUT,PATCH,POST,DELETE,OPTIONS,TRACE,CONNECT",
      "access-control-allow-headers": request.headers.get("access-control-request-headers") ?? "*",
      "access-control-max-age": "3600",
    },
  });
}

function withCors(response: Response): Response {
  response.headers.set("access-control-allow-origin", "*");
  response.headers.set("access-control-expose-headers", exposedHeaders);
  return response;
}

/** What the gateway adds to a request's headers, by name. */
function forwardingHeaders(
  request: Request,
  url: URL,
  { remoteAddr }: Deno.ServeHandlerInfo<Deno.NetAddr>,
): Record<string, string> {
  const earlier = request.headers.get("x-forwarded-for");
  return {
    "x-forwarded-for": earlier ? `${earlier}, ${remoteAddr.hostname}` : remoteAddr.hostname,
    "x-forwarded-host": url.hostname,
    "x-forwarded-port": url.port,
    "x-forwarded-proto": "http",
  };
}

// ---- REST ----

type Authorizer = (apiKey: string | null, authorization: string | null) => Promise<Caller>;

/** A request that the gateway itself refuses: no key, or not a key of this project. */
class KeyError extends Error {
  constructor(message: string, readonly hint: string) {
    super(message);
  }
}

// The apikey lets a request in; the role comes from the bearer, unless that is a key of the new style (sb_…), which
// counts in apikey only: there it stands for the token of its role.
async function createAuthorizer(keys: LocalKeys): Promise<Authorizer> {
  const known = new Map<string, Claims>();
  for (const token of [keys.anonKey, keys.serviceRoleKey]) {
    known.set(token, await verifyJwt(token, keys.jwtSecret));
  }
  const tokens = new Map([
    [keys.publishableKey, keys.anonKey],
    [keys.secretKey, keys.serviceRoleKey],
  ]);
  return async (apiKey, authorization) => {
    if (apiKey === null) {
      throw new KeyError("No API key found in request", "No `apikey` request header or url param was found.");
    }
    if (!tokens.has(apiKey) && !known.has(apiKey)) {
      throw new KeyError("Invalid API key", "Double check your Supabase `anon` or `service_role` API key.");
    }
    const bearer = /^bearer +(.*)$/i.exec(authorization ?? "")?.[1].trim();
    const token = bearer === undefined || bearer.startsWith("sb_") ? tokens.get(apiKey) : bearer;
    if (token === undefined) return { role: "anon", claims: '{"role":"anon"}' };
    const claims = known.get(token) ?? await verifyJwt(token, keys.jwtSecret);
    checkTimes(claims);
    const role = typeof claims.role === "string" ? claims.role : "anon";
    return { role, claims: JSON.stringify({ ...claims, role }) };
  };
}

async function callRest(
  rest: Rest,
  authorize: Authorizer,
  request: Request,
  url: URL,
  info: Deno.ServeHandlerInfo<Deno.NetAddr>,
): Promise<Response> {
  const params = url.searchParams;
  const apiKey = request.headers.get("apikey") ?? params.get("apikey");
  params.delete("apikey");
  try {
    const caller = await authorize(apiKey, request.headers.get("authorization"));
    return await rest.handle({
      method: request.method,
      path: url.pathname.slice("/rest/v1".length) || "/",
      params,
      headers: { ...Object.fromEntries(request.headers), ...forwardingHeaders(request, url, info) },
      caller,
      text: () => readText(request),
    });
  } catch (error) {
    if (error instanceof KeyError) {
      return Response.json({ message: error.message, hint: error.hint }, { status: 401 });
    }
    if (error instanceof JwtError) {
      const code = error.kind === "decode" ? "PGRST301" : "PGRST303";
      return errorResponse(new RestError(401, code, error.message, error.details));
    }
    throw error;
  }
}

async function readText(request: Request): Promise<string> {
  const tooLarge = () =>
    new RestError(
      413,
      "LOCAL413",
      `The body is larger than ${bodyLimit} bytes, more than the local stack takes.`,
    );
  if (Number(request.headers.get("content-length") ?? 0) > bodyLimit) throw tooLarge();
  if (request.headers.has("content-length")) return await request.text();
  const decoder = new TextDecoder();
  let text = "";
  let size = 0;
  for await (const chunk of request.body ?? []) {
    size += chunk.length;
    if (size > bodyLimit) throw tooLarge();
    text += decoder.decode(chunk, { stream: true });
  }
  return text + decoder.decode();
}

// ---- Edge Functions ----

/** What hosted answers, before the function is asked, to a caller without a JWT of this project; a preflight has none. */
async function refuseWithoutJwt(request: Request, jwtSecret: string): Promise<Response | null> {
  if (request.method === "OPTIONS") return null;
  const token = /^bearer +(.*)$/i.exec(request.headers.get("authorization") ?? "")?.[1]?.trim();
  const refuse = (message: string) => Response.json({ code: 401, message }, { status: 401 });
  if (token === undefined) return refuse("Missing authorization header");
  return await verifyJwt(token, jwtSecret).then(() => null, () => refuse("Invalid JWT"));
}

interface LocalFunction {
  forward(request: Request, url: URL, headers: Headers): Promise<Response>;
  close(): void;
}

function openFunction(name: string, path: string, log: (line: string) => void): LocalFunction {
  // No idle connections are kept: one that a restarted function has left behind would fail the next request.
  const client = Deno.createHttpClient({ proxy: { transport: "unix", path }, poolMaxIdlePerHost: 0 });
  const forward = async (request: Request, url: URL, headers: Headers) => {
    if (!await waitForSocket(path, request.signal)) {
      log(`gateway: function ${name} does not listen on ${path}`);
      return problem(503, "BOOT_ERROR", "Function failed to start (please check logs)");
    }
    const late = new AbortController();
    const timer = setTimeout(() => late.abort(), functionAnswerMs);
    try {
      return await fetch(`http://${url.host}${url.pathname.slice("/functions/v1".length)}${url.search}`, {
        client,
        method: request.method,
        headers,
        body: request.body,
        redirect: "manual",
        signal: AbortSignal.any([request.signal, late.signal]),
      });
    } catch (error) {
      if (late.signal.aborted) return problem(504, "IDLE_TIMEOUT", "Function did not answer in 150 s");
      if (!request.signal.aborted) log(`gateway: function ${name}: ${error}`);
      return problem(500, "WORKER_ERROR", "Function exited due to an error (please check logs)");
    } finally {
      clearTimeout(timer);
    }
  };
  return { forward, close: () => client.close() };
}

// A function that is being restarted has no socket, or one that nobody listens on. Nothing of the request has been
// sent by then, so it can wait.
async function waitForSocket(path: string, signal: AbortSignal): Promise<boolean> {
  const deadline = performance.now() + functionStartMs;
  while (true) {
    try {
      (await Deno.connect({ transport: "unix", path })).close();
      return true;
    } catch {
      if (signal.aborted || performance.now() > deadline) return false;
      await new Promise((resolve) => setTimeout(resolve, 25));
    }
  }
}

if (import.meta.main) {
  // Ctrl-C in a terminal and its end reach every process of the stack: it is the parent that ends them, in order.
  for (const signal of ["SIGINT", "SIGHUP"] as const) Deno.addSignalListener(signal, () => {});
  const options: GatewayOptions = JSON.parse(Deno.env.get("LOCAL_GATEWAY") ?? "{}");
  const gateway = await startGateway({ ...options, log: (line) => console.error(line) });
  console.log(`listening ${gateway.port}`);
  const end = Promise.withResolvers<void>();
  Deno.addSignalListener("SIGTERM", end.resolve);
  // The parent holds the other end of stdin: when it is gone, so is the reason to run.
  Deno.stdin.readable.pipeTo(new WritableStream()).then(end.resolve, end.resolve);
  await end.promise;
  await gateway.stop();
  Deno.exit();
}
