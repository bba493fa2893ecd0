// The REST API of the local stack: the part of PostgREST that supabase-js uses in this project, with PostgREST's
// statuses, errors and settings. What it does not do it answers with 501.

import { type Call, type CallResult, openPool, runCall } from "./rest/database.ts";
import { errorResponse, fromDatabase, notImplemented, RestError } from "./rest/errors.ts";
import { parseQuery, type Query } from "./rest/query.ts";
import { createSchemaCache, findColumns, findRoutine, findTable, type Schema } from "./rest/schema.ts";
import {
  callStatement,
  deleteStatement,
  insertStatement,
  type Payload,
  readStatement,
  type Shape,
  type Statement,
  updateStatement,
} from "./rest/sql.ts";

/** Who calls: the role that the transaction takes, and the token's claims as JSON. */
export interface Caller {
  role: string;
  claims: string;
}

export interface RestRequest {
  method: string;
  /** Below /rest/v1, as sent (not decoded). */
  path: string;
  params: URLSearchParams;
  /** Names in lower case. */
  headers: Record<string, string>;
  caller: Caller;
  /** Reads the body; called at most once. */
  text: () => Promise<string>;
}

export interface Rest {
  handle(request: RestRequest): Promise<Response>;
  stop(): Promise<void>;
}

const maxRows = 1000;

/**
 * Opens the REST API on a database (the URL's role is authenticator). Nothing is connected before the first request.
 * `handle` answers every request, errors included, and never throws.
 */
export function openRest(databaseUrl: string): Rest {
  const pool = openPool(databaseUrl);
  const cache = createSchemaCache(pool);
  // A reload may have been announced while nobody listened: after every (re)connect the schema counts as old.
  const listening = pool.listen("pgrst", cache.expire, cache.expire).catch(() => {});

  async function answer(request: RestRequest): Promise<Response> {
    const began = performance.now();
    const read = readRequest(request);
    const body = await readBody(request, read);
    let plan: Plan;
    const schema = await cache.current();
    try {
      plan = planRequest(schema, read, body);
    } catch (error) {
      // Something unknown may be younger than the schema that was read last.
      if (!(error instanceof RestError && error.code.startsWith("PGRST2")) || schema.since >= began) {
        throw error;
      }
      plan = planRequest(await cache.newerThan(began), read, body);
    }
    if ("response" in plan) return plan.response;
    const result = await runCall(pool, { ...plan, settings: settingsFor(request, schema, plan.settings) });
    return plan.respond(result);
  }

  return {
    async handle(request) {
      try {
        return await answer(request);
      } catch (error) {
        const failure = fromDatabase(error, request.caller.role === "anon");
        // The statement may have been built for a schema that is no more.
        if (failure.code.startsWith("42")) cache.expire();
        return errorResponse(failure);
      }
    },
    async stop() {
      await pool.end({ timeout: 1 });
      await listening;
    },
  };
}

interface Preferences {
  return: string | null;
  count: boolean;
  resolution: "merge" | "ignore" | null;
  defaults: boolean;
  maxAffected: number | null;
  applied: string[];
}

interface ReadRequest {
  method: string;
  kind: "table" | "function";
  name: string;
  query: Query;
  prefer: Preferences;
  /** One object was asked for, not an array. */
  single: boolean;
}

type Plan =
  | { response: Response }
  | Pick<Call, "readOnly" | "text" | "params" | "check"> & {
    settings: Record<string, string>;
    respond: (result: CallResult) => Response;
  };

function readRequest({ method, path, params, headers }: RestRequest): ReadRequest {
  const parts = path.split("/").filter((part) => part !== "").map(decode);
  const kind = parts[0] === "rpc" && parts.length === 2 ? "function" : "table";
  if (parts.length === 0) throw notImplemented("describing the API (OpenAPI)");
  if (kind === "table" && parts.length > 1) {
    throw new RestError(404, "PGRST125", "Invalid path specified in request URL");
  }
  const name = parts[parts.length - 1];
  const reads = method === "GET" || method === "HEAD";
  if (method === "PUT") throw notImplemented("PUT");
  if (kind === "function" && !reads && method !== "POST") {
    throw new RestError(405, "PGRST101", `Cannot use the ${method} method on RPC`);
  }
  if (!reads && method !== "POST" && method !== "PATCH" && method !== "DELETE") {
    throw new RestError(405, "PGRST117", `Unsupported HTTP method: ${method}`);
  }
  const profile = headers[reads ? "accept-profile" : "content-profile"];
  if (profile !== undefined && profile !== "public") {
    const hint = "Only the following schemas are exposed: public";
    throw new RestError(406, "PGRST106", `Invalid schema: ${profile}`, null, hint);
  }
  const query = parseQuery(params, kind === "function" && reads);
  if (method === "GET") applyRange(query, headers.range);
  return { method, kind, name, query, prefer: readPreferences(headers), single: wantsSingle(headers) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    throw new RestError(404, "PGRST125", "Invalid path specified in request URL");
  }
}

function applyRange(query: Query, range: string | undefined): void {
  const found = /^(\d+)-(\d*)$/.exec(range ?? "");
  if (!found) return;
  const first = Math.max(Number(found[1]), query.offset);
  const ends = [
    ...(found[2] ? [Number(found[2]) + 1] : []),
    ...(query.limit === null ? [] : [query.offset + query.limit]),
  ];
  query.offset = first;
  query.limit = ends.length ? Math.min(...ends) - first : null;
  if (query.limit !== null && query.limit < 0) {
    const why = "The lower boundary must be lower than or equal to the upper boundary in the Range header.";
    throw new RestError(416, "PGRST103", "Requested range not satisfiable", why);
  }
}

function readPreferences(headers: RestRequest["headers"]): Preferences {
  const given = (headers.prefer ?? "").split(",").map((text) => text.trim()).filter(Boolean);
  const value = (name: string) =>
    given.find((text) => text.startsWith(`${name}=`))?.slice(name.length + 1) ?? null;
  const count = value("count");
  if (count === "planned") throw notImplemented("count=planned");
  if (value("return") === "headers-only") throw notImplemented("return=headers-only");
  const resolution = value("resolution");
  const strict = value("handling") === "strict";
  const maxAffected = strict ? value("max-affected") : null;
  const known = /^(return|count|resolution|missing|handling|max-affected|tx|timezone)=/;
  const unknown = given.filter((text) => !known.test(text));
  if (strict && unknown.length) {
    const details = `Invalid preferences: ${unknown.join(", ")}`;
    throw new RestError(400, "PGRST122", "Invalid preferences given with handling=strict", details);
  }
  return {
    return: value("return"),
    count: count === "exact" || count === "estimated",
    resolution: resolution === "merge-duplicates"
      ? "merge"
      : resolution === "ignore-duplicates"
      ? "ignore"
      : null,
    defaults: value("missing") === "default",
    maxAffected: maxAffected === null ? null : Number(maxAffected),
    applied: given.filter((text) => /^(return|count|resolution|missing|handling)=/.test(text)),
  };
}

const singleType = "application/vnd.pgrst.object+json";

function wantsSingle(headers: RestRequest["headers"]): boolean {
  const accept = headers.accept ?? "*/*";
  for (const entry of accept.split(",")) {
    const [type, ...options] = entry.split(";").map((text) => text.trim().toLowerCase());
    if (options.includes("nulls=stripped")) throw notImplemented("nulls=stripped");
    if (type === singleType || type === "application/vnd.pgrst.object") return true;
    if (["application/json", "*/*", "application/*", "application/vnd.pgrst.array+json"].includes(type)) {
      return false;
    }
    if (
      /^text\/(csv|plain|xml)$|^application\/(geo\+json|vnd\.pgrst\.plan.*|octet-stream|openapi\+json)$/.test(
        type,
      )
    ) {
      throw notImplemented(`answers of type ${type}`);
    }
  }
  throw new RestError(406, "PGRST107", `None of these media types are available: ${accept}`);
}

async function readBody(request: RestRequest, { method, kind, query }: ReadRequest): Promise<Payload | null> {
  if (method !== "POST" && method !== "PATCH") return null;
  const type = (request.headers["content-type"] ?? "application/json").split(";")[0].trim().toLowerCase();
  if (type !== "application/json" && !type.startsWith("application/vnd.pgrst.")) {
    throw notImplemented(`bodies of type ${type}`);
  }
  const json = await request.text();
  const object = /^[ \t\r\n]*\{/.test(json);
  // Named columns are taken as given, and the JSON is left for Postgres to check.
  if (query.columns) return { json, keys: query.columns, object };
  if (kind === "function" && json === "") return { json: "{}", keys: [], object: true };
  let value: unknown;
  try {
    value = JSON.parse(json);
  } catch {
    throw new RestError(400, "PGRST102", "Empty or invalid json");
  }
  if (!Array.isArray(value)) {
    if (typeof value === "object" && value !== null) return { json, keys: Object.keys(value), object };
    return { json: "[]", keys: [], object };
  }
  const rows: unknown[] = value;
  if (rows.length === 0) return { json, keys: [], object };
  const keys = keysOf(rows[0]);
  const uniform = keys && rows.every((row) => {
    const others = keysOf(row);
    return others?.length === keys.length && keys.every((key) => others.includes(key));
  });
  if (!keys || !uniform) throw new RestError(400, "PGRST102", "All object keys must match");
  return { json, keys, object };
}

function keysOf(row: unknown): string[] | null {
  return typeof row === "object" && row !== null && !Array.isArray(row) ? Object.keys(row) : null;
}

function planRequest(schema: Schema, read: ReadRequest, body: Payload | null): Plan {
  return read.kind === "function" ? planCall(schema, read, body) : planTable(schema, read, body);
}

function planCall(schema: Schema, read: ReadRequest, body: Payload | null): Plan {
  const { method, name, query, prefer, single } = read;
  const keys = body?.keys ?? [...new Set(query.args.map(([key]) => key))];
  const routine = findRoutine(schema, name, keys, body !== null);
  if (prefer.maxAffected !== null && !routine.set) {
    const message =
      "Function must return SETOF or TABLE when max-affected preference is used with handling=strict";
    throw new RestError(400, "PGRST128", message);
  }
  const shape = method === "HEAD" ? "none" : single ? "single" : "array";
  const statement = callStatement(routine, body, limited(query), shape, prefer.count);
  return {
    ...statement,
    readOnly: body === null || !routine.volatile,
    settings: routine.settings,
    check: rowCheck(single && routine.returns !== "void", prefer.maxAffected),
    respond: (result) =>
      routine.returns === "void"
        ? new Response(null, { status: 204, headers: { "content-range": rangeOf(0, result) } })
        : rowsResponse(result, read),
  };
}

function planTable(schema: Schema, read: ReadRequest, body: Payload | null): Plan {
  const { method, name, query, prefer, single } = read;
  const table = findTable(schema, name);
  if (method === "GET" || method === "HEAD") {
    return {
      ...readStatement(
        table,
        limited(query),
        method === "HEAD" ? "none" : single ? "single" : "array",
        prefer.count,
      ),
      readOnly: true,
      settings: {},
      check: rowCheck(single, null),
      respond: (result) => rowsResponse(result, read),
    };
  }
  const shown = prefer.return === "representation";
  const shape: Shape = !shown ? "none" : single ? "single" : "array";
  const change = (statement: Statement): Plan => ({
    ...statement,
    readOnly: false,
    settings: {},
    check: rowCheck(single, method === "POST" ? null : prefer.maxAffected),
    respond: (result) => changeResponse(result, read),
  });
  if (method === "DELETE") {
    refuseWithoutFilter(query, method);
    return change(deleteStatement(table, query, shape));
  }
  if (!body) throw new RestError(400, "PGRST102", "Empty or invalid json");
  const columns = findColumns(table, body.keys);
  if (method === "POST") {
    const options = { defaults: prefer.defaults, onConflict: prefer.resolution };
    return change(insertStatement(table, body, columns, query, shape, options));
  }
  // A body without columns changes nothing, filter or not.
  if (columns.length === 0) {
    return { response: changeResponse({ body: "[]", rows: 0, total: null, inserted: null }, read) };
  }
  refuseWithoutFilter(query, "UPDATE");
  return change(updateStatement(table, body, columns, query, shape, { defaults: prefer.defaults }));
}

// Hosted projects load safeupdate, which refuses these. Here it is the API that does, in the same words.
function refuseWithoutFilter(query: Query, verb: "UPDATE" | "DELETE"): void {
  if (query.conditions.length === 0) throw new RestError(400, "21000", `${verb} requires a WHERE clause`);
}

function limited(query: Query): Query {
  return { ...query, limit: Math.min(query.limit ?? maxRows, maxRows) };
}

function rowCheck(single: boolean, maxAffected: number | null): Call["check"] {
  if (!single && maxAffected === null) return undefined;
  return ({ rows }) => {
    if (single && rows !== 1) {
      const message = "Cannot coerce the result to a single JSON object";
      throw new RestError(406, "PGRST116", message, `The result contains ${rows} rows`);
    }
    if (maxAffected !== null && rows > maxAffected) {
      const message = "Query result exceeds max-affected preference constraint";
      throw new RestError(400, "PGRST124", message, `The query affects ${rows} rows`);
    }
  };
}

function rangeOf(offset: number, { rows, total }: CallResult): string {
  return `${rows > 0 && total !== 0 ? `${offset}-${offset + rows - 1}` : "*"}/${total ?? "*"}`;
}

function answerHeaders(read: ReadRequest, range: string, applied: string[], withBody: boolean): Headers {
  const headers = new Headers({ "content-range": range });
  if (withBody) {
    headers.set("content-type", `${read.single ? singleType : "application/json"}; charset=utf-8`);
  }
  if (applied.length) headers.set("preference-applied", applied.join(", "));
  return headers;
}

function rowsResponse(result: CallResult, read: ReadRequest): Response {
  const { offset } = read.query;
  const { rows, total, body } = result;
  if (total !== null && offset > total) {
    const details = `An offset of ${offset} was requested, but there are only ${total} rows.`;
    throw new RestError(416, "PGRST103", "Requested range not satisfiable", details);
  }
  const applied = read.prefer.applied.filter((text) => /^(count|handling)=/.test(text));
  const headers = answerHeaders(read, rangeOf(offset, result), applied, true);
  return new Response(body, { status: total !== null && rows < total ? 206 : 200, headers });
}

function changeResponse(result: CallResult, read: ReadRequest): Response {
  const { method, prefer } = read;
  const total = prefer.count ? result.rows : null;
  const range = method === "PATCH" ? rangeOf(0, { ...result, total }) : `*/${total ?? "*"}`;
  const shown = prefer.return === "representation";
  const headers = answerHeaders(read, range, prefer.applied, shown);
  const created = method === "POST" && !(prefer.resolution === "merge" && result.inserted === 0);
  const status = created ? 201 : shown || method === "POST" ? 200 : 204;
  return new Response(shown ? result.body : null, { status, headers });
}

function settingsFor(
  { method, path, headers, caller }: RestRequest,
  schema: Schema,
  ofFunction: Record<string, string>,
): Record<string, string> {
  const { cookie: _, ...shown } = headers;
  return {
    search_path: '"public", "extensions"',
    ...schema.roleSettings.get(caller.role),
    role: caller.role,
    "request.jwt.claims": caller.claims,
    "request.method": method,
    "request.path": path,
    "request.headers": JSON.stringify(shown),
    "request.cookies": "{}",
    ...ofFunction,
  };
}
