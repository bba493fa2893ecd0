// The REST API of the local stack: the part of PostgREST that supabase-js uses in this project, with PostgREST's
// statuses, errors and settings. What it does not do it answers with 501.

import postgres from "postgres";
import { openPool, type Result, type Statement } from "./rest/database.ts";
import { errorResponse, fromDatabase, RestError } from "./rest/errors.ts";
import { type Query } from "./rest/query.ts";
import {
  type Payload,
  readBody,
  type ReadRequest,
  readRequest,
  type RestRequest,
  singleType,
} from "./rest/request.ts";
import { createSchemaCache, findColumns, findRoutine, findTable, type Schema } from "./rest/schema.ts";
import {
  callStatement,
  deleteStatement,
  insertStatement,
  readStatement,
  type Shape,
  updateStatement,
} from "./rest/sql.ts";

export interface Rest {
  handle(request: RestRequest): Promise<Response>;
  stop(): Promise<void>;
}

const maxRows = 1000;

// What Postgres says when the statement does not fit the schema.
const staleCodes = ["0A000", "42703", "42804", "42883", "42P01", "42P18"];

/**
 * Opens the REST API on a database (the URL's role is authenticator). Nothing is connected before the first request.
 * `handle` answers errors too, as PostgREST does; it throws only what is a fault of its own.
 */
export function openRest(databaseUrl: string): Rest {
  const pool = openPool(databaseUrl);
  const cache = createSchemaCache(pool);
  const listener = postgres(databaseUrl, {
    max: 1,
    fetch_types: false,
    backoff: () => 1,
    onnotice: () => {},
  });
  // A reload may have been announced while nobody listened: after every (re)connect the schema counts as old.
  listener.listen("pgrst", cache.expire, cache.expire).catch(() => {});

  async function answer(request: RestRequest): Promise<Response> {
    const began = performance.now();
    const read = readRequest(request);
    const body = await readBody(request, read);
    let schema = await cache.current();
    let plan: Plan;
    try {
      plan = planRequest(schema, read, body);
    } catch (error) {
      // Something unknown may be younger than the schema that was read last.
      if (!(error instanceof RestError && error.code.startsWith("PGRST2")) || schema.since >= began) {
        throw error;
      }
      schema = await cache.newerThan(began);
      plan = planRequest(schema, read, body);
    }
    if ("response" in plan) return plan.response;
    const { statement, readOnly, check, respond } = plan;
    const settings = { ...settingsFor(request, schema, readOnly), ...plan.settings };
    return respond(await pool.run({ ...statement, settings, check }, schema.generation));
  }

  return {
    async handle(request) {
      try {
        return await answer(request);
      } catch (error) {
        const failure = fromDatabase(error, request.caller.role === "anon");
        // The statement may have been built for a schema that is no more.
        if (staleCodes.includes(failure.code)) cache.expire();
        return errorResponse(failure);
      }
    },
    async stop() {
      await Promise.all([pool.close(), listener.end({ timeout: 1 })]);
    },
  };
}

type Plan = { response: Response } | {
  statement: Statement;
  readOnly: boolean;
  settings?: Record<string, string>;
  check?: (result: Result) => void;
  respond: (result: Result) => Response;
};

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
    statement,
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
      statement: readStatement(
        table,
        limited(query),
        method === "HEAD" ? "none" : single ? "single" : "array",
        prefer.count,
      ),
      readOnly: true,
      check: rowCheck(single, null),
      respond: (result) => rowsResponse(result, read),
    };
  }
  const shown = prefer.return === "representation";
  const shape: Shape = !shown ? "none" : single ? "single" : "array";
  const change = (statement: Statement): Plan => ({
    statement,
    readOnly: false,
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
    const nothing = { body: "[]", rows: 0, total: null, inserted: null };
    rowCheck(single, null)?.(nothing);
    return { response: changeResponse(nothing, read) };
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

function rowCheck(single: boolean, maxAffected: number | null): ((result: Result) => void) | undefined {
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

function rangeOf(offset: number, { rows, total }: Result): string {
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

function rowsResponse(result: Result, read: ReadRequest): Response {
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

function changeResponse(result: Result, read: ReadRequest): Response {
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
  readOnly: boolean,
): Record<string, string> {
  const { cookie: _, ...shown } = headers;
  return {
    ...(readOnly ? { transaction_read_only: "on" } : {}),
    search_path: '"public", "extensions"',
    ...schema.roleSettings.get(caller.role),
    role: caller.role,
    "request.jwt.claims": caller.claims,
    "request.method": method,
    "request.path": path,
    "request.headers": JSON.stringify(shown),
    "request.cookies": "{}",
  };
}
