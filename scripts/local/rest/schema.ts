// What the REST API knows about schema public: functions, tables, and the settings of the roles it may take.

import { type Pool } from "./database.ts";
import { RestError } from "./errors.ts";

export interface Argument {
  /** "" if it has none. */
  name: string;
  /** The type as SQL to be pasted: qualified and quoted, without length. */
  type: string;
  /** The type as people write it. */
  label: string;
  required: boolean;
  variadic: boolean;
}

export interface Routine {
  name: string;
  args: Argument[];
  returns: "void" | "scalar" | "composite";
  set: boolean;
  volatile: boolean;
  /** Settings of the function that must hold before it is called: its statement_timeout. */
  settings: Record<string, string>;
}

export interface Column {
  name: string;
  type: string;
  json: boolean;
  default: string | null;
}

export interface Table {
  name: string;
  view: boolean;
  columns: Column[];
  primaryKey: string[];
}

export interface Schema {
  /** Counts the times that a change was seen. */
  generation: number;
  /** When its reading began: whatever was committed before is in it. Milliseconds, as performance.now(). */
  since: number;
  routines: Map<string, Routine[]>;
  tables: Map<string, Table>;
  roleSettings: Map<string, Record<string, string>>;
}

export interface SchemaCache {
  current(): Promise<Schema>;
  newerThan(moment: number): Promise<Schema>;
  expire(): void;
}

const minimumAgeMs = 100;

/**
 * Keeps the schema as last read. `current` reads it when there is none or it was expired; `newerThan` reads it again
 * if it was read before the moment given (performance.now()), ten times a second at most, waiting for its turn.
 * Both throw a RestError (503 PGRST002) while Postgres cannot be asked.
 */
export function createSchemaCache(pool: Pool): SchemaCache {
  let schema: Schema | null = null;
  let json: string | null = null;
  let expired = false;
  let loading: Promise<Schema> | null = null;

  async function load(): Promise<Schema> {
    const age = performance.now() - (schema?.since ?? -Infinity);
    if (age < minimumAgeMs) await new Promise((resolve) => setTimeout(resolve, minimumAgeMs - age));
    expired = false;
    const since = performance.now();
    try {
      // With nothing on the search path, names come qualified.
      const call = { settings: { search_path: "" }, text: schemaQuery, params: [] };
      const { body: found } = await pool.run(call, 0);
      schema = schema && found === json
        ? { ...schema, since }
        : readSchema(found ?? "{}", since, (schema?.generation ?? 0) + 1);
      json = found;
      return schema;
    } catch (error) {
      expired = true;
      const reason = error instanceof Error ? error.message : String(error);
      const message = "Could not query the database for the schema cache. Retrying.";
      throw new RestError(503, "PGRST002", message, reason);
    }
  }

  function reload(): Promise<Schema> {
    loading ??= load().finally(() => loading = null);
    return loading;
  }

  return {
    current: () => schema && !expired ? Promise.resolve(schema) : reload(),
    async newerThan(moment) {
      let found = schema ?? await reload();
      while (found.since < moment) found = await reload();
      return found;
    },
    expire() {
      expired = true;
    },
  };
}

function readSchema(json: string, since: number, generation: number): Schema {
  const found: { routines: Routine[]; tables: Table[]; roles: Record<string, Record<string, string>> } = JSON
    .parse(json);
  return {
    since,
    generation,
    routines: Map.groupBy(found.routines, ({ name }) => name),
    tables: new Map(found.tables.map((table) => [table.name, table])),
    roleSettings: new Map(Object.entries(found.roles)),
  };
}

// Functions whose arguments all have names, or with a single nameless one that takes the whole body.
const routinesQuery = `
  select coalesce(json_agg(json_build_object(
    'name', p.proname,
    'args', coalesce(a.args, '[]'),
    'returns', case
      when p.prorettype = 'void'::regtype then 'void'
      when t.typtype = 'c' or p.proargmodes::text[] && '{t,b,o}' then 'composite'
      else 'scalar' end,
    'set', p.proretset,
    'volatile', p.provolatile = 'v',
    'settings', coalesce(s.settings, '{}')
  ) order by p.oid), '[]')
  from pg_proc p
  join pg_type t on t.oid = p.prorettype
  cross join lateral (
    select
      json_agg(json_build_object(
        'name', coalesce(name, ''),
        'type', quote_ident(n.nspname) || '.' || quote_ident(ty.typname),
        'label', format_type(ty.oid, null),
        'required', input <= p.pronargs - p.pronargdefaults,
        'variadic', mode is not distinct from 'v'
      ) order by input) as args,
      count(*) filter (where coalesce(name, '') = '') as nameless,
      bool_and(ty.oid in ('json'::regtype, 'jsonb'::regtype)) as json
    from (
      select name, type, mode, row_number() over (order by place) as input
      from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargnames, p.proargmodes::text[])
        with ordinality as _(type, name, mode, place)
      where mode is null or mode in ('i', 'b', 'v')
    ) i
    join pg_type ty on ty.oid = i.type
    join pg_namespace n on n.oid = ty.typnamespace
  ) a
  left join lateral (
    select json_object_agg(split_part(config, '=', 1), substr(config, strpos(config, '=') + 1)) as settings
    from unnest(p.proconfig) config
    where config like 'statement\\_timeout=%'
  ) s on true
  where p.pronamespace = 'public'::regnamespace and p.prokind = 'f' and p.prorettype <> 'trigger'::regtype
    and (a.nameless = 0 or a.nameless = 1 and p.pronargs = 1 and a.json)`;

const tablesQuery = `
  select coalesce(json_agg(json_build_object(
    'name', c.relname,
    'view', c.relkind not in ('r', 'p'),
    'columns', (
      select coalesce(json_agg(json_build_object(
        'name', a.attname,
        'type', quote_ident(n.nspname) || '.' || quote_ident(t.typname),
        'json', t.oid in ('json'::regtype, 'jsonb'::regtype),
        'default', case
          when a.attidentity = 'd'
            then format('nextval(%L)', pg_get_serial_sequence(c.oid::regclass::text, a.attname))
          when a.attgenerated = '' then pg_get_expr(d.adbin, d.adrelid) end
      ) order by a.attnum), '[]')
      from pg_attribute a
      join pg_type t on t.oid = a.atttypid
      join pg_namespace n on n.oid = t.typnamespace
      left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
      where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    ),
    'primaryKey', (
      select coalesce(json_agg(a.attname), '[]')
      from pg_index i
      join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
      where i.indrelid = c.oid and i.indisprimary
    )
  ) order by c.oid), '[]')
  from pg_class c
  where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'v', 'm', 'f', 'p')`;

// Only what any user may set: the rest would need a grant that hosted roles do not have.
const rolesQuery = `
  select coalesce(json_object_agg(r.rolname, r.settings order by r.rolname), '{}')
  from (
    select rolname, json_object_agg(s.name, substr(config, strpos(config, '=') + 1) order by s.name) as settings
    from pg_roles, unnest(rolconfig) config
    join pg_settings s on s.name = split_part(config, '=', 1) and s.context = 'user'
    group by rolname
  ) r`;

const schemaQuery = `
  select json_build_object('routines', (${routinesQuery}), 'tables', (${tablesQuery}), 'roles', (${rolesQuery}))::text
      as body,
    1 as rows, null::int as total, null::int as inserted`;

/**
 * The function that a call with these argument names means. Throws a RestError: PGRST202 (404) if there is none,
 * PGRST203 (300) if there are several.
 */
export function findRoutine(schema: Schema, name: string, keys: string[], withBody: boolean): Routine {
  const named = schema.routines.get(name) ?? [];
  const matching = named.filter((routine) => takes(routine, keys));
  const candidates = matching.length || !withBody ? matching : named.filter(takesBody);
  if (candidates.length === 1) return candidates[0];
  if (candidates.length > 1) {
    const list = candidates.map(({ args }) =>
      `public.${name}(${args.map((arg) => `${arg.name} => ${arg.label}`).join(", ")})`
    );
    throw new RestError(
      300,
      "PGRST203",
      `Could not choose the best candidate function between: ${list.join(", ")}`,
      null,
      "Try renaming the parameters or the function itself in the database so function overloading can be resolved",
    );
  }
  const sorted = keys.toSorted();
  const given = keys.length ? `(${sorted.join(", ")})` : " without parameters";
  const searched = keys.length
    ? ` with parameter${keys.length > 1 ? "s" : ""} ${sorted.join(", ")}`
    : " without parameters";
  const others = named.map(({ args }) => `(${args.map((arg) => arg.name).toSorted().join(", ")})`);
  const meant = named.length
    ? name + (closest(`(${sorted.join(", ")})`, others) ?? others[0])
    : closest(name, schema.routines.keys());
  throw new RestError(
    404,
    "PGRST202",
    `Could not find the function public.${name}${given} in the schema cache`,
    `Searched for the function public.${name}${searched}${
      withBody && keys.length ? " or with a single unnamed json/jsonb parameter" : ""
    }, but no matches were found in the schema cache.`,
    meant ? `Perhaps you meant to call the function public.${meant}` : null,
  );
}

/** Whether a function takes the request's whole body as its single nameless argument. */
export function takesBody(routine: Routine): boolean {
  return routine.args.length === 1 && routine.args[0].name === "";
}

/** The table or view of that name. Throws a RestError (404 PGRST205) if there is none. */
export function findTable(schema: Schema, name: string): Table {
  const table = schema.tables.get(name);
  if (table) return table;
  const meant = closest(name, schema.tables.keys());
  throw new RestError(
    404,
    "PGRST205",
    `Could not find the table 'public.${name}' in the schema cache`,
    null,
    meant ? `Perhaps you meant the table 'public.${meant}'` : null,
  );
}

/** The columns of those names. Throws a RestError (400 PGRST204) for the first that the table does not have. */
export function findColumns(table: Table, names: string[]): Column[] {
  return names.map((name) => {
    const column = table.columns.find((candidate) => candidate.name === name);
    if (column) return column;
    throw new RestError(
      400,
      "PGRST204",
      `Could not find the '${name}' column of '${table.name}' in the schema cache`,
    );
  });
}

function takes(routine: Routine, keys: string[]): boolean {
  if (takesBody(routine)) return false;
  const known = new Set(routine.args.map((arg) => arg.name));
  return keys.every((key) => known.has(key)) &&
    routine.args.every((arg) => !arg.required || keys.includes(arg.name));
}

// The candidate that shares the most pairs of letters, if it shares at least half of them.
function closest(wanted: string, candidates: Iterable<string>): string | null {
  const pairs = (word: string) => new Set(Array.from(word, (_, at) => word.slice(at, at + 2)));
  const mine = pairs(wanted);
  let best: string | null = null;
  let bestScore = 0.5;
  for (const candidate of candidates) {
    const theirs = pairs(candidate);
    const score = 2 * mine.intersection(theirs).size / (mine.size + theirs.size);
    if (score >= bestScore) [best, bestScore] = [candidate, score];
  }
  return best;
}
