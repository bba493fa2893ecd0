// Reads the query string of a REST request: select, filters, order. What it does not know it refuses.

import { notImplemented, RestError } from "./errors.ts";

export interface Field {
  name: string;
  path: { text: boolean; key: string | number }[];
}

export interface SelectItem {
  field: Field;
  alias: string | null;
  cast: string | null;
}

export interface Filter {
  field: Field;
  negated: boolean;
  operator: string;
  /** `any` or `all`, of a list. */
  quantifier: string | null;
  /** The list of an `in`. */
  value: string | string[];
}

export interface Tree {
  negated: boolean;
  junction: "and" | "or";
  branches: Condition[];
}

export type Condition = Filter | Tree;

export interface OrderTerm {
  field: Field;
  direction: "asc" | "desc" | null;
  nulls: "first" | "last" | null;
}

export interface Query {
  /** Empty means every column. */
  select: SelectItem[];
  conditions: Condition[];
  order: OrderTerm[];
  offset: number;
  limit: number | null;
  columns: string[] | null;
  onConflict: string[] | null;
  /** Arguments of a function called by GET. */
  args: [string, string][];
}

/** What each operator is in SQL. */
export const operators: Record<string, string> = {
  eq: "=",
  neq: "<>",
  gt: ">",
  gte: ">=",
  lt: "<",
  lte: "<=",
  like: "like",
  ilike: "ilike",
  match: "~",
  imatch: "~*",
  is: "is",
  isdistinct: "is distinct from",
  in: "in",
  cs: "@>",
  cd: "<@",
  ov: "&&",
  sl: "<<",
  sr: ">>",
  nxr: "&<",
  nxl: "&>",
  adj: "-|-",
};

const quantified = ["eq", "gt", "gte", "lt", "lte", "like", "ilike", "match", "imatch"];
const isValues = ["null", "not_null", "true", "false", "unknown"];

/**
 * Reads a query string. `callByGet`: a parameter whose value is no filter is an argument of the function.
 * Throws a RestError: 400 for what cannot be read, 501 for what the local stack does not do.
 */
export function parseQuery(params: URLSearchParams, callByGet: boolean): Query {
  const query: Query = {
    select: [],
    conditions: [],
    order: [],
    offset: 0,
    limit: null,
    columns: null,
    onConflict: null,
    args: [],
  };
  for (const [key, value] of params) {
    // Names go into the statement's text, which a zero byte would end.
    if (`${key}${value}`.includes("\0")) {
      throw new RestError(400, "22021", 'invalid byte sequence for encoding "UTF8": 0x00');
    }
    if (key === "select") query.select = parseSelect(value);
    else if (key === "order") query.order = parseOrder(value);
    else if (key === "limit") query.limit = parseCount(value);
    else if (key === "offset") query.offset = parseCount(value) ?? 0;
    else if (key === "columns") query.columns = parseNames(value, "columns");
    else if (key === "on_conflict") query.onConflict = parseNames(value, "on_conflict");
    else if (/^(not\.)?(and|or)$/.test(key)) query.conditions.push(parseTree(key, value));
    else if (callByGet && !looksLikeFilter(value)) query.args.push([key, value]);
    else query.conditions.push(parseFilter(key, value));
  }
  return query;
}

// A place in a text that is being read. `what` names the text in error messages.
interface Cursor {
  text: string;
  at: number;
  what: string;
}

function fail(cursor: Cursor, expected: string): never {
  const found = cursor.at < cursor.text.length ? JSON.stringify(cursor.text[cursor.at]) : "end of input";
  throw new RestError(
    400,
    "PGRST100",
    `"failed to parse ${cursor.what} (${cursor.text})" (line 1, column ${cursor.at + 1})`,
    `unexpected ${found} expecting ${expected}`,
  );
}

function eat(cursor: Cursor, token: string): boolean {
  if (!cursor.text.startsWith(token, cursor.at)) return false;
  cursor.at += token.length;
  return true;
}

function eatPattern(cursor: Cursor, pattern: RegExp): string | null {
  const sticky = new RegExp(pattern, "uy");
  sticky.lastIndex = cursor.at;
  const found = sticky.exec(cursor.text)?.[0] ?? null;
  if (found !== null) cursor.at += found.length;
  return found;
}

function isDone(cursor: Cursor): boolean {
  return cursor.at === cursor.text.length;
}

function eatQuoted(cursor: Cursor): string | null {
  return eatPattern(cursor, /"(?:[^"\\]|\\.)*"/s)?.slice(1, -1).replace(/\\(.)/gs, "$1") ?? null;
}

function eatName(cursor: Cursor): string {
  const name = eatQuoted(cursor) ?? eatPattern(cursor, /(?:[\p{L}\p{N}_ $]|-(?!>))+/u)?.trim();
  return name ? name : fail(cursor, "field name (* or [a..z0..9_$])");
}

function eatField(cursor: Cursor): Field {
  const field: Field = { name: eatName(cursor), path: [] };
  while (true) {
    const arrow = eatPattern(cursor, /->>?/);
    if (!arrow) return field;
    const text = arrow === "->>";
    const index = eatPattern(cursor, /-?\d+(?=->|::|[.,)]|$)/);
    const key = index ?? eatQuoted(cursor) ?? eatPattern(cursor, /(?:[^(\-:.,>)]|-(?!>))+/)?.trim();
    if (!key) fail(cursor, "any non reserved character different from: .,>()");
    field.path.push({ text, key: index === null ? key : Number(index) });
  }
}

function eatList<T>(cursor: Cursor, item: (cursor: Cursor) => T): T[] {
  const items: T[] = [];
  do {
    eatPattern(cursor, /\s*/);
    items.push(item(cursor));
    eatPattern(cursor, /\s*/);
  } while (eat(cursor, ","));
  return items;
}

function parseSelect(text: string): SelectItem[] {
  if (text === "" || text === "*") return [];
  const cursor: Cursor = { text, at: 0, what: "select parameter" };
  const items = eatList(cursor, eatSelectItem);
  if (!isDone(cursor)) fail(cursor, '"," or end of input');
  return items;
}

function eatSelectItem(cursor: Cursor): SelectItem {
  if (eat(cursor, "*")) return { field: { name: "*", path: [] }, alias: null, cast: null };
  if (eat(cursor, "...")) throw notImplemented("embedding other tables in a select");
  const start = cursor.at;
  const first = eatName(cursor);
  let alias: string | null = null;
  if (cursor.text[cursor.at] === ":" && cursor.text[cursor.at + 1] !== ":") {
    cursor.at += 1;
    alias = first;
    if (eat(cursor, "...")) throw notImplemented("embedding other tables in a select");
  } else {
    cursor.at = start;
  }
  const field = eatField(cursor);
  const next = cursor.text[cursor.at];
  if (next === "(" && field.name !== "count" || next === "!") {
    throw notImplemented("embedding other tables in a select");
  }
  const cast = eat(cursor, "::")
    ? eatPattern(cursor, /[A-Za-z_][A-Za-z0-9_ ]*/)?.trim() ?? fail(cursor, "a type")
    : null;
  if (next === "(" || cursor.text[cursor.at] === ".") {
    throw new RestError(400, "PGRST123", "Use of aggregate functions is not allowed");
  }
  return { field, alias, cast };
}

function parseOrder(text: string): OrderTerm[] {
  const cursor: Cursor = { text, at: 0, what: "order" };
  const terms = eatList(cursor, (cursor): OrderTerm => {
    const field = eatField(cursor);
    if (cursor.text[cursor.at] === "(") throw notImplemented("ordering by an embedded table");
    const direction = eat(cursor, ".asc") ? "asc" : eat(cursor, ".desc") ? "desc" : null;
    const nulls = eat(cursor, ".nullsfirst") ? "first" : eat(cursor, ".nullslast") ? "last" : null;
    return { field, direction, nulls };
  });
  if (!isDone(cursor)) fail(cursor, '"asc", "desc", "nullsfirst" or "nullslast"');
  return terms;
}

function parseNames(text: string, what: string): string[] {
  const cursor: Cursor = { text, at: 0, what: `${what} parameter` };
  const names = eatList(cursor, eatName);
  if (!isDone(cursor)) fail(cursor, '"," or end of input');
  return [...new Set(names)];
}

function parseCount(text: string): number | null {
  if (!/^-?\d+$/.test(text)) return null;
  const count = Number(text);
  if (count < 0) {
    const why = "Limit should be greater than or equal to zero.";
    throw new RestError(416, "PGRST103", "Requested range not satisfiable", why);
  }
  return Math.min(count, Number.MAX_SAFE_INTEGER);
}

function looksLikeFilter(value: string): boolean {
  const operator = /^(?:not\.)?([a-z]+)(?:\([a-z]+\))?\./.exec(value)?.[1];
  return operator !== undefined && Object.hasOwn(operators, operator);
}

function parseFilter(key: string, value: string): Filter {
  const name: Cursor = { text: key, at: 0, what: "tree path" };
  const field = eatField(name);
  if (eat(name, ".")) {
    const message = `'${field.name}' is not an embedded resource in this request`;
    const hint = `Verify that '${field.name}' is included in the 'select' query parameter.`;
    throw new RestError(400, "PGRST108", message, null, hint);
  }
  if (!isDone(name)) fail(name, "field name (* or [a..z0..9_$])");
  const cursor: Cursor = { text: value, at: 0, what: "filter" };
  const filter = eatFilter(cursor, field, (cursor) => {
    const rest = cursor.text.slice(cursor.at);
    cursor.at = cursor.text.length;
    return rest;
  });
  if (!isDone(cursor)) fail(cursor, "end of input");
  return filter;
}

function eatFilter(cursor: Cursor, field: Field, eatValue: (cursor: Cursor) => string): Filter {
  const negated = eat(cursor, "not.");
  const start = cursor.at;
  const operator = eatPattern(cursor, /[a-z]+/) ?? "";
  if (/^(pl|ph|w)?fts$/.test(operator)) throw notImplemented("full-text search filters");
  if (!Object.hasOwn(operators, operator)) {
    cursor.at = start;
    fail(cursor, "operator (eq, gt, ...)");
  }
  const quantifier = quantified.includes(operator)
    ? eatPattern(cursor, /\((?:any|all)\)/)?.slice(1, -1) ?? null
    : null;
  if (!eat(cursor, ".")) fail(cursor, "delimiter (.)");
  if (operator === "in") {
    if (!eat(cursor, "(")) fail(cursor, '"("');
    const value = eatList(cursor, (cursor) => eatQuotedWhole(cursor) ?? eatPattern(cursor, /[^,)]*/) ?? "");
    if (!eat(cursor, ")")) fail(cursor, '"," or ")"');
    return { field, negated, operator, quantifier, value };
  }
  const place = cursor.at;
  const value = eatValue(cursor);
  if (operator === "is" && !isValues.includes(value.toLowerCase())) {
    cursor.at = place;
    fail(cursor, "isVal: (null, not_null, true, false, unknown)");
  }
  return { field, negated, operator, quantifier, value };
}

// A quoted value counts as one only if nothing but the end of the list or a comma follows.
function eatQuotedWhole(cursor: Cursor): string | null {
  const start = cursor.at;
  const value = eatQuoted(cursor);
  if (value !== null && /^\s*(?:[,)]|$)/.test(cursor.text.slice(cursor.at))) return value;
  cursor.at = start;
  return null;
}

function parseTree(key: string, value: string): Tree {
  const cursor: Cursor = { text: key + value, at: 0, what: "logic tree" };
  const tree = eatCondition(cursor);
  if (!isDone(cursor) || !("junction" in tree)) fail(cursor, "end of input");
  return tree;
}

function eatCondition(cursor: Cursor): Condition {
  const start = /(not\.)?(and|or)\s*\(/y;
  start.lastIndex = cursor.at;
  const found = start.exec(cursor.text);
  if (found) {
    cursor.at = start.lastIndex;
    const branches = eatList(cursor, eatCondition);
    if (!eat(cursor, ")")) fail(cursor, '"," or ")"');
    return { negated: found[1] !== undefined, junction: found[2] === "or" ? "or" : "and", branches };
  }
  const field = eatField(cursor);
  if (!eat(cursor, ".")) fail(cursor, "delimiter (.)");
  return eatFilter(
    cursor,
    field,
    (cursor) => eatQuotedWhole(cursor) ?? eatPattern(cursor, /\{[^{}]*\}|[^,)]*/) ?? "",
  );
}
