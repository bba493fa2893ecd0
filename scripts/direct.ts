import postgres from "postgres";
import { databaseError, tooLarge, type Transport } from "../supabase/functions/_shared/database.ts";
import { JobError } from "../supabase/functions/_shared/errors.ts";
import { after } from "../supabase/functions/_shared/timer.ts";

/** As over REST: eight seconds for the statement, ten for its answer. */
const STATEMENT_MS = 8_000;
const ANSWER_MS = 10_000;
const CONNECT_SECONDS = 5;
/** So that none is used that a firewall has forgotten. */
const IDLE_SECONDS = 60;

/** What the text of a call depends on. */
interface Routine {
  name: string;
  /** Types of the arguments by name, as SQL. */
  types: Record<string, string>;
  composite: boolean;
  set: boolean;
}

const describeText = `
  select format('%I.%I', n.nspname, p.proname) as name, p.proretset as set,
    t.typtype = 'c' or coalesce(p.proargmodes::text[] && '{t,b,o}', false) as composite,
    coalesce((
      select json_object_agg(p.proargnames[a.place], format_type(a.type, null))
      from unnest(p.proargtypes::oid[]) with ordinality a (type, place)
    ), '{}') as types
  from pg_proc p join pg_namespace n on n.oid = p.pronamespace join pg_type t on t.oid = p.prorettype
  where n.nspname = 'public' and p.proname = $1`;

/**
 * Calls SQL functions on a database itself, with the answers that REST gives: Postgres makes the same JSON of them. Needs no
 * prepared statements and no session state, so it works behind a transaction pooler. A call throws JobError with the
 * database's SQLSTATE, message and hint, or `unreachable` when there was no answer within ten seconds: it may or may not have
 * taken effect, and its connection is closed.
 */
export function connectDirectly(databaseUrl: string): Transport {
  const routines = new Map<string, Routine>();
  let client = open();

  return async (name, args) => {
    const keys = Object.keys(args).filter((key) => args[key] !== undefined);
    const json = toJson(name, args);
    try {
      const routine = routines.get(name) ?? await describe(name);
      const unknown = keys.find((key) => !Object.hasOwn(routine.types, key));
      if (unknown) throw notThere(`${name} has no argument ${unknown}`);
      const [row] = await run<{ answer: unknown }>(callText(routine, keys), keys.length > 0 ? [json] : []);
      return row?.answer;
    } catch (error) {
      // It may have been made anew by a migration.
      routines.delete(name);
      throw error;
    }
  };

  function open(): postgres.Sql {
    return postgres(databaseUrl, {
      prepare: false,
      fetch_types: false,
      connect_timeout: CONNECT_SECONDS,
      idle_timeout: IDLE_SECONDS,
      max_lifetime: null,
      // Whoever calls waits before calling again.
      backoff: () => 0,
      onnotice: () => {},
      connection: { application_name: "nightshift worker" },
      ...(/[?&]ssl(mode)?=/.test(databaseUrl) ? {} : { ssl: "prefer" as const }),
    });
  }

  async function describe(name: string): Promise<Routine> {
    const [routine] = await run<Routine>(describeText, [name]);
    if (!routine) throw notThere(`there is no function public.${name}`);
    routines.set(name, routine);
    return routine;
  }

  async function run<Row extends object>(text: string, params: string[]): Promise<Row[]> {
    const asked = client;
    const query = asked.unsafe<Row[]>(text, params);
    const late = Promise.withResolvers<never>();
    const cancels = [
      after(STATEMENT_MS, () => query.cancel()),
      after(ANSWER_MS, () => {
        late.reject(new Error("no answer within 10 s"));
        // What else is under way on it has its own ten seconds.
        if (client === asked) client = open();
        asked.end({ timeout: ANSWER_MS / 1000 });
      }),
    ];
    try {
      return await Promise.race([query, late.promise]);
    } catch (error) {
      if (error instanceof postgres.PostgresError) {
        const { message, detail: details, hint } = error;
        // What Supabase's pooler says of a wrong user has the code of what is over after a while.
        const code = error.code === "XX000" && /tenant or user not found/i.test(message)
          ? "28P01"
          : error.code;
        throw databaseError({ code, message, details, hint });
      }
      // Connecting to several addresses fails with one error for each, and no message.
      const reason = error instanceof AggregateError ? error.errors[0] : error;
      const why = reason instanceof Error ? reason.message : String(reason);
      throw new JobError(
        "unreachable",
        `the database: ${why}`,
        "Check DATABASE_URL, and that the database is up.",
      );
    } finally {
      for (const cancel of cancels) cancel();
    }
  }
}

function toJson(name: string, args: Record<string, unknown>): string {
  try {
    return JSON.stringify(args);
  } catch (error) {
    if (error instanceof RangeError) throw tooLarge(name);
    throw error;
  }
}

const notThere = (what: string) => new JobError("42883", what);

/** The call as PostgREST makes it: arguments from a JSON object, by the function's own types, and JSON back. */
function callText({ name, types, composite, set }: Routine, keys: string[]): string {
  const args = keys.map((key) => `"${key}" => given."${key}"`).join(", ");
  const columns = keys.map((key) => `"${key}" ${types[key]}`).join(", ");
  const given = keys.length > 0
    ? `json_to_record($1::text::json) as given(${columns})`
    : "(values (1)) as given";
  const rows = composite ? `select * from ${name}(${args})` : `select ${name}(${args}) as value`;
  const item = composite ? "called" : "called.value";
  const answer = set ? `coalesce(json_agg(${item}), '[]')` : `json_agg(${item}) -> 0`;
  return `select ${answer} as answer from ${given} cross join lateral (${rows}) as called`;
}
