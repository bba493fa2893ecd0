// The pool of connections, and the one transaction that each request is.

import postgres from "postgres";
import { RestError } from "./errors.ts";

export interface Statement {
  text: string;
  params: string[];
}

/** The row that every statement returns. */
export interface Result {
  /** JSON made by Postgres. */
  body: string | null;
  rows: number;
  /** How many rows match, whatever the limit: only when they were counted. */
  total: number | null;
  /** How many rows of an upsert are new. */
  inserted: number | null;
}

/** A request's transaction: settings first (the role among them), then one statement. */
export interface Call extends Statement {
  settings: Record<string, string>;
  /** Looks at the result before the commit: what it throws rolls the transaction back. */
  check?: (result: Result) => void;
}

export interface Pool {
  /**
   * Runs a call in its own transaction and returns its only row. `generation` numbers the states of the schema: a
   * connection whose statements were prepared for an earlier one is replaced.
   * Throws what Postgres raised (a PostgresError), the RestError of `check`, or one of its own when there is no
   * connection to be had (PGRST000, PGRST003) or it was lost on the way (PGRST001).
   */
  run(call: Call, generation: number): Promise<Result>;
  close(): Promise<void>;
}

/** One connection, made when it is first used, and made again after Postgres ended it. */
interface Slot {
  sql: postgres.Sql;
  generation: number;
}

const maxConnections = 16;
const acquireMs = 10_000;
const connectSeconds = 5;
const applySettings = "select count(set_config(key, value, true)) from json_each_text($1::json)";

// Values are text already: postgres.js would turn these types into JSON, dates and bytes once more.
const asGiven = {
  to: 25,
  from: [16, 17, 114, 1082, 1114, 1184, 3802],
  serialize: (text: string) => text,
  parse: (text: string) => text,
};

/** Opens a pool of up to 16 connections to Postgres, as role authenticator. It connects when it is needed. */
export function openPool(databaseUrl: string): Pool {
  const slots = Array.from({ length: maxConnections }, (): Slot => ({ sql: open(), generation: 0 }));
  const idle = [...slots];
  const waiting: ((slot: Slot) => void)[] = [];
  let closed = false;

  function open(): postgres.Sql {
    return postgres(databaseUrl, {
      max: 1,
      max_lifetime: null,
      connect_timeout: connectSeconds,
      fetch_types: false,
      types: { asGiven },
      connection: { application_name: "postgrest" },
      onnotice: () => {},
    });
  }

  function acquire(): Slot | Promise<Slot> {
    return idle.pop() ?? new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        waiting.splice(waiting.indexOf(take), 1);
        reject(new RestError(504, "PGRST003", "Timed out acquiring connection from connection pool."));
      }, acquireMs);
      const take = (slot: Slot) => {
        clearTimeout(timer);
        resolve(slot);
      };
      waiting.push(take);
    });
  }

  function release(slot: Slot): void {
    const next = waiting.shift();
    if (next) next(slot);
    else idle.push(slot);
  }

  // After a loss too: a client that was cut off in the middle of a query may report that to its next one.
  function renew(slot: Slot): void {
    slot.sql.end({ timeout: 0 });
    if (!closed) slot.sql = open();
  }

  async function run(call: Call, generation: number): Promise<Result> {
    const slot = await acquire();
    try {
      if (slot.generation < generation) {
        renew(slot);
        slot.generation = generation;
      }
      for (let attempt = 1;; attempt++) {
        let began = false;
        try {
          return await slot.sql.begin((transaction) => {
            began = true;
            return runIn(transaction, call, slot.sql);
          });
        } catch (error) {
          if (error instanceof RestError || began && error instanceof postgres.PostgresError) throw error;
          renew(slot);
          const reason = error instanceof Error ? error.message : String(error);
          if (began) {
            throw new RestError(503, "PGRST001", "Database client error. Retrying the connection.", reason);
          }
          // Nothing was run: perhaps Postgres had ended the connection. A new one is worth one attempt.
          if (attempt === 2) {
            throw new RestError(
              503,
              "PGRST000",
              "Database connection error. Retrying the connection.",
              reason,
            );
          }
        }
      }
    } finally {
      release(slot);
    }
  }

  return {
    run,
    async close() {
      closed = true;
      await Promise.all(slots.map(({ sql }) => sql.end({ timeout: 1 })));
    },
  };
}

async function runIn(
  transaction: postgres.TransactionSql,
  call: Call,
  client: postgres.Sql,
): Promise<Result> {
  // Sent together: if the settings fail Postgres refuses the statement, and the error of the settings is what is thrown.
  const [, [result]] = await Promise.all([
    transaction.unsafe(applySettings, [JSON.stringify(call.settings)], { prepare: true }),
    transaction.unsafe<Result[]>(call.text, call.params, { prepare: true }),
  ]).catch((error: unknown) => {
    if (error instanceof postgres.PostgresError) throw error;
    // The connection is lost. If begin heard of it here, it would write a rollback to the closed socket, which ends the
    // process. It hears of it anyway, when the socket is closed.
    client.end({ timeout: 0 });
    return new Promise<never>(() => {});
  });
  call.check?.(result);
  return result;
}
