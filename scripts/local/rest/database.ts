// The pool of connections, and the one transaction that each request is.

import postgres from "postgres";
import { isConnectionLost, RestError } from "./errors.ts";

export type Pool = ReturnType<typeof openPool>;

/** A request's transaction: settings first (the role among them), then one statement. */
export interface Call {
  readOnly: boolean;
  settings: Record<string, string>;
  text: string;
  params: string[];
  /** Looks at the result before the commit: what it throws rolls the transaction back. */
  check?: (result: CallResult) => void;
}

export interface CallResult {
  body: string | null;
  rows: number;
  total: number | null;
  inserted: number | null;
}

const same = (value: unknown) => value;

/**
 * Opens a pool of connections to Postgres, as role authenticator. Nothing is connected until it is needed.
 * Parameters are sent as the text they are: Postgres reads each as the type the statement gives it.
 */
export function openPool(databaseUrl: string) {
  return postgres(databaseUrl, {
    max: 16,
    fetch_types: false,
    connect_timeout: 5,
    max_lifetime: null,
    // Soon back after a restart of Postgres; a request is refused meanwhile, not queued.
    backoff: (failures: number) => Math.min(0.05 * failures, 1),
    onnotice: () => {},
    // With nothing on the search path, whatever the schema cache reads from the catalog comes qualified.
    connection: { application_name: "postgrest", search_path: '""' },
    types: {
      json: { to: 114, from: [114, 3802], serialize: same, parse: (text: string) => JSON.parse(text) },
      boolean: { to: 16, from: [16], serialize: same, parse: (text: string) => text === "t" },
      date: { to: 1184, from: [1082, 1114, 1184], serialize: same, parse: same },
      bytea: { to: 17, from: [17], serialize: same, parse: same },
    },
  });
}

const applySettings = "select count(set_config(key, value, true)) from json_each_text($1::json)";

/**
 * Runs a call in its own transaction and returns the statement's only row.
 * All of it goes out in one round trip (twice as fast as awaiting `begin`): Postgres answers a commit after an
 * error with a rollback. A connection found dead before it took `begin` is replaced by another.
 * Throws a RestError if there is no connection, or what Postgres raised.
 */
export async function runCall(pool: Pool, call: Call): Promise<CallResult> {
  for (let attempt = 1;; attempt++) {
    const connection = await pool.reserve().catch((error: unknown) => {
      const reason = error instanceof Error ? error.message : String(error);
      throw new RestError(503, "PGRST000", "Database connection error. Retrying the connection.", reason);
    });
    const results = await Promise.allSettled([
      connection.unsafe(call.readOnly ? "begin read only" : "begin"),
      connection.unsafe(applySettings, [JSON.stringify(call.settings)], { prepare: true }),
      connection.unsafe<CallResult[]>(call.text, call.params, { prepare: true }),
      ...(call.check ? [] : [connection.unsafe("commit")]),
    ]);
    const failed = results.findIndex((result) => result.status === "rejected");
    const failure = results[failed];
    let problem: unknown = failure?.status === "rejected" ? failure.reason : null;
    if (problem && isConnectionLost(problem)) {
      // The pool drops a connection that closed: it must not be released into it again.
      if (failed === 0 && attempt < 3) continue;
      throw problem;
    }
    const row = results[2].status === "fulfilled" ? results[2].value[0] : undefined;
    if (call.check) {
      try {
        if (row) call.check(row);
      } catch (error) {
        problem = error;
      }
      const [end] = await Promise.allSettled([connection.unsafe(problem ? "rollback" : "commit")]);
      if (end.status === "rejected") {
        if (isConnectionLost(end.reason)) throw end.reason;
        problem ??= end.reason;
      }
    }
    connection.release();
    if (problem) throw problem;
    if (!row) {
      throw new RestError(500, "LOCAL500", "The statement gave no row; please report this.", call.text);
    }
    return row;
  }
}
