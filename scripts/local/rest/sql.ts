// Builds the one statement of a request. Names are quoted, values are always parameters; the result is one row:
// body (JSON made by Postgres), rows, total (when counted) and inserted (by an upsert).

import { type Statement } from "./database.ts";
import { type Condition, type Field, operators, type OrderTerm, type Query } from "./query.ts";
import { type Payload } from "./request.ts";
import { type Column, type Routine, type Table, takesBody } from "./schema.ts";

/** What the answer is to hold: all rows as an array, the only row, or nothing. */
export type Shape = "array" | "single" | "none";

/** Reads a table or view; `count` also counts the rows that match, whatever the limit. */
export function readStatement(table: Table, query: Query, shape: Shape, count: boolean): Statement {
  const build = start();
  const from = tableName(table);
  const where = whereClause(build, query.conditions, from, table.columns);
  const items = selectItems(build, query, from, table.columns);
  const order = orderClause(build, query.order, from, table.columns);
  return finish(
    build,
    `page as (select ${items} from ${from}${where}${order}${limitClause(build, query)})`,
    shape,
    "page",
    count ? `(select count(*)::int from ${from}${where})` : "null::int",
  );
}

/** Calls a function with arguments from a JSON body, or from the query string (text) when `body` is null. */
export function callStatement(
  routine: Routine,
  body: Payload | null,
  query: Query,
  shape: Shape,
  count: boolean,
): Statement {
  const build = start();
  const scalar = routine.returns !== "composite";
  const name = `"public".${quote(routine.name)}`;
  const call = (args: string) =>
    scalar ? `(select ${name}(${args}) as pgrst_scalar) as called` : `${name}(${args}) as called`;
  const columns = scalar ? "called.pgrst_scalar" : "called.*";
  const args = routine.args.filter(({ name }) =>
    body?.keys.includes(name) ?? query.args.some(([key]) => key === name)
  );
  let source: string;
  if (body && takesBody(routine)) {
    source = `select ${columns} from ${call(`${build.bind(body.json)}::json::${routine.args[0].type}`)}`;
  } else if (args.length === 0) {
    source = `select ${columns} from ${call("")}`;
  } else if (body) {
    const list = args.map(({ name, variadic }) =>
      `${variadic ? "variadic " : ""}${quote(name)} := body.${quote(name)}`
    );
    const rows = bodyRows(build, body, args, false);
    const first = body.object ? rows : `(select * from ${rows} limit 1) as body`;
    source = `select ${columns} from ${first} cross join lateral ${call(list.join(", "))}`;
  } else {
    const list = args.map(({ name, type, variadic }) => {
      const given = query.args.filter(([key]) => key === name).map(([, value]) => value);
      const value = variadic ? arrayLiteral(given) : given[given.length - 1];
      return `${variadic ? "variadic " : ""}${quote(name)} := ${build.bind(value)}::text::${type}`;
    });
    source = `select ${columns} from ${call(list.join(", "))}`;
  }
  if (routine.returns === "void") return finish(build, `page as (${source})`, "none", "page", "null::int");
  const where = whereClause(build, query.conditions, "called", []);
  const items = scalar ? "called.pgrst_scalar" : selectItems(build, query, "called", []);
  const order = orderClause(build, query.order, "called", []);
  const single = shape === "array" && !routine.set ? "single" : shape;
  return finish(
    build,
    `called as (${source}), page as (select ${items} from called${where}${order}${
      limitClause(build, query)
    })`,
    single,
    scalar ? "page.pgrst_scalar" : "page",
    count ? `(select count(*)::int from called${where})` : "null::int",
  );
}

/** Inserts the rows of a JSON body; `onConflict` says what becomes of rows that exist already. */
export function insertStatement(
  table: Table,
  body: Payload,
  columns: Column[],
  query: Query,
  shape: Shape,
  options: { defaults: boolean; onConflict: "merge" | "ignore" | null },
): Statement {
  const build = start();
  const names = columns.map(({ name }) => quote(name));
  const rows = `select ${names.map((name) => `body.${name}`).join(", ")} from ${
    bodyRows(build, body, columns, options.defaults)
  }`;
  const keys = (query.onConflict ?? table.primaryKey).map(quote);
  let conflict = "";
  if (options.onConflict && keys.length > 0) {
    const set = names.map((name) => `${name} = excluded.${name}`).join(", ");
    const action = options.onConflict === "merge" && set ? `do update set ${set}` : "do nothing";
    conflict = ` on conflict (${keys.join(", ")}) ${action}`;
  }
  // A row that an upsert only updated carries the updating transaction in xmax.
  const upsert = options.onConflict === "merge" && conflict !== "" && !table.view;
  const insert = `insert into ${tableName(table)} ${
    names.length ? `(${names.join(", ")}) ` : ""
  }${rows}${conflict}`;
  return changeStatement(build, table, insert, query, shape, upsert);
}

/** Updates the rows that match with the columns of a JSON body. There must be at least one column. */
export function updateStatement(
  table: Table,
  body: Payload,
  columns: Column[],
  query: Query,
  shape: Shape,
  options: { defaults: boolean },
): Statement {
  const build = start();
  const set = columns.map(({ name }) => `${quote(name)} = body.${quote(name)}`).join(", ");
  const rows = bodyRows(build, body, columns, options.defaults);
  const where = whereClause(build, query.conditions, tableName(table), table.columns);
  return changeStatement(
    build,
    table,
    `update ${tableName(table)} set ${set} from ${rows}${where}`,
    query,
    shape,
    false,
  );
}

/** Deletes the rows that match. */
export function deleteStatement(table: Table, query: Query, shape: Shape): Statement {
  const build = start();
  const where = whereClause(build, query.conditions, tableName(table), table.columns);
  return changeStatement(build, table, `delete from ${tableName(table)}${where}`, query, shape, false);
}

interface Build {
  params: string[];
  /** Adds a value and returns the placeholder for it. */
  bind(value: string): string;
}

function start(): Build {
  const params: string[] = [];
  return { params, bind: (value) => `$${params.push(value)}` };
}

function finish(
  build: Build,
  parts: string,
  shape: Shape,
  row: string,
  total: string,
  inserted = "null::int",
): Statement {
  const body = {
    array: `coalesce(json_agg(${row}), '[]')::text`,
    single: `coalesce(json_agg(${row}) -> 0, 'null')::text`,
    none: "null::text",
  }[shape];
  const text =
    `with ${parts} select ${body} as body, count(*)::int as rows, ${total} as total, ${inserted} as inserted from page`;
  return { text, params: build.params };
}

function changeStatement(
  build: Build,
  table: Table,
  change: string,
  query: Query,
  shape: Shape,
  upsert: boolean,
): Statement {
  const from = tableName(table);
  const marker = quote("is inserted");
  const mark = upsert ? `${from}.xmax = 0 as ${marker}` : "";
  const inserted = upsert ? `(select count(*) filter (where ${marker})::int from changed)` : "null::int";
  if (shape === "none") {
    const parts = `changed as (${change} returning ${mark || "1"}), page as (select from changed)`;
    return finish(build, parts, shape, "page", "null::int", inserted);
  }
  // Only what is asked for comes back: returning a column takes the privilege to read it.
  const asked = [...query.select, ...query.order].map(({ field }) => field.name);
  const all = query.select.length === 0 || asked.includes("*");
  const names = all ? table.columns.map(({ name }) => name) : [...new Set(asked)];
  const returning = [...names.map((name) => `${from}.${quote(name)}`), ...(mark ? [mark] : [])].join(", ");
  const select = all ? query.select.filter(({ field }) => field.name !== "*") : query.select;
  const whole = all ? table.columns.map(({ name }) => `changed.${quote(name)}`) : [];
  const items = [
    ...whole,
    ...(select.length ? [selectItems(build, { ...query, select }, "changed", table.columns)] : []),
  ].join(", ");
  const order = orderClause(build, query.order, "changed", table.columns);
  const parts =
    `changed as (${change} returning ${returning}), page as (select ${items} from changed${order})`;
  return finish(build, parts, shape, "page", "null::int", inserted);
}

// The rows of a JSON body as a from item named "body", with the columns' types.
function bodyRows(
  build: Build,
  body: Payload,
  columns: { name: string; type: string; default?: string | null }[],
  defaults: boolean,
): string {
  const kind = defaults ? "jsonb" : "json";
  if (columns.length === 0 && body.object) return "(values (1)) as body";
  const json = `${build.bind(body.json)}::${kind}`;
  if (columns.length === 0) return `${kind}_array_elements(${json}) as body`;
  const types = columns.map(({ name, type }) => `${quote(name)} ${type}`).join(", ");
  const unpack = `${kind}_to_record${body.object ? "" : "set"}`;
  if (!defaults) return `${unpack}(${json}) as body(${types})`;
  const values = columns.flatMap((column) =>
    column.default ? [`${literal(column.name)}, ${column.default}`] : []
  );
  const filled = `jsonb_build_object(${values.join(", ")}) ||`;
  const whole = body.object
    ? `select ${filled} ${json} as value`
    : `select coalesce(jsonb_agg(${filled} element), '[]') as value from jsonb_array_elements(${json}) as element`;
  return `(${whole}) as whole cross join lateral ${unpack}(whole.value) as body(${types})`;
}

function whereClause(build: Build, conditions: Condition[], from: string, columns: Column[]): string {
  if (conditions.length === 0) return "";
  return ` where ${
    conditions.map((condition) => conditionSql(build, condition, from, columns)).join(" and ")
  }`;
}

function conditionSql(build: Build, condition: Condition, from: string, columns: Column[]): string {
  const not = condition.negated ? "not " : "";
  if ("junction" in condition) {
    const branches = condition.branches.map((branch) => conditionSql(build, branch, from, columns));
    return `${not}(${branches.join(` ${condition.junction} `)})`;
  }
  const { operator, quantifier, value } = condition;
  const field = fieldSql(build, condition.field, from, columns);
  if (Array.isArray(value)) {
    // `in ()` is the list with one empty value.
    const list = value.length === 1 && value[0] === "" ? [] : value;
    return `${not}${field} = any(${build.bind(arrayLiteral(list))})`;
  }
  if (operator === "is") return `${not}${field} is ${value.toLowerCase().replace("_", " ")}`;
  const pattern = operator === "like" || operator === "ilike" ? value.replaceAll("*", "%") : value;
  const operand = quantifier ? `${quantifier}(${build.bind(pattern)})` : build.bind(pattern);
  return `${not}${field} ${operators[operator]} ${operand}`;
}

function selectItems(build: Build, query: Query, from: string, columns: Column[]): string {
  if (query.select.length === 0) return `${from}.*`;
  return query.select.map(({ field, alias, cast }) => {
    if (field.name === "*") return `${from}.*`;
    const value = fieldSql(build, field, from, columns);
    const lastKey = field.path.findLast(({ key }) => typeof key === "string")?.key;
    const name = alias ?? (field.path.length ? String(lastKey ?? field.name) : field.name);
    return `${cast ? `cast(${value} as ${cast})` : value} as ${quote(name)}`;
  }).join(", ");
}

function orderClause(build: Build, order: OrderTerm[], from: string, columns: Column[]): string {
  if (order.length === 0) return "";
  const terms = order.map(({ field, direction, nulls }) =>
    [fieldSql(build, field, from, columns), direction, nulls && `nulls ${nulls}`].filter(Boolean).join(" ")
  );
  return ` order by ${terms.join(", ")}`;
}

function limitClause(build: Build, query: Query): string {
  const limit = query.limit === null ? "" : ` limit ${build.bind(String(query.limit))}`;
  return `${limit}${query.offset ? ` offset ${build.bind(String(query.offset))}` : ""}`;
}

function fieldSql(build: Build, field: Field, from: string, columns: Column[]): string {
  const column = `${from}.${quote(field.name)}`;
  if (field.path.length === 0) return column;
  const json = columns.find(({ name }) => name === field.name)?.json ? column : `to_jsonb(${column})`;
  const path = field.path.map(({ text, key }) =>
    `${text ? "->>" : "->"}${typeof key === "number" ? `(${key})` : `${build.bind(key)}::text`}`
  );
  return `(${json}${path.join("")})`;
}

function tableName(table: Table): string {
  return `"public".${quote(table.name)}`;
}

function quote(name: string): string {
  return `"${name.replaceAll('"', '""')}"`;
}

function literal(text: string): string {
  return `'${text.replaceAll("'", "''")}'`;
}

function arrayLiteral(values: string[]): string {
  return `{${values.map((value) => `"${value.replace(/["\\]/g, "\\$&")}"`).join(",")}}`;
}
