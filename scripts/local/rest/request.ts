// Reads a REST request: method, path, headers and body. It asks nothing of the database.

import { notImplemented, RestError } from "./errors.ts";
import { parseQuery, type Query } from "./query.ts";

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

export interface Preferences {
  return: string | null;
  count: boolean;
  resolution: "merge" | "ignore" | null;
  defaults: boolean;
  maxAffected: number | null;
  applied: string[];
}

export interface ReadRequest {
  method: string;
  kind: "table" | "function";
  name: string;
  query: Query;
  prefer: Preferences;
  /** One object was asked for, not an array. */
  single: boolean;
}

/** A JSON body as it came, the keys that count, and whether it is one object or an array of them. */
export interface Payload {
  json: string;
  keys: string[];
  object: boolean;
}

/**
 * Reads all of a request but its body. Throws a RestError: 4xx for what PostgREST refuses, 501 for what this does not do.
 */
export function readRequest({ method, path, params, headers }: RestRequest): ReadRequest {
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

/** The media type of one object instead of an array. */
export const singleType = "application/vnd.pgrst.object+json";

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

/**
 * Reads the JSON body of a POST or PATCH, null for other methods. Throws a RestError if it is no JSON (400 PGRST102),
 * or of another type (501).
 */
export async function readBody(
  request: RestRequest,
  { method, kind, query }: ReadRequest,
): Promise<Payload | null> {
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
