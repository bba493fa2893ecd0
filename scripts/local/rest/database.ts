// The pool of connections, and the one transaction that each request is.

import { RestError } from "./errors.ts";
import { connect, type Connection, ConnectionLost, type Row, type Statement } from "./wire.ts";

/** A request's transaction: settings first (the role among them), then one statement. */
export interface Call extends Statement {
  settings: Record<string, string>;
  /** Looks at the row before the commit: what it throws rolls the transaction back. */
  check?: (row: Row) => void;
}

export interface Pool {
  /**
   * Runs a call in its own transaction and returns its only row. `generation` numbers the states of the schema: a
   * connection whose statements were prepared for an earlier one is replaced.
   * Throws a RestError if there is no connection to be had, otherwise a DatabaseError or ConnectionLost.
   */
  run(call: Call, generation: number): Promise<Row>;
  close(): void;
}

const maxConnections = 16;
const acquireMs = 10_000;
const applySettings = "select count(set_config(key, value, true)) from json_each_text($1::json)";

/** Opens a pool of up to 16 connections to Postgres, as role authenticator. It connects when it is needed. */
export function openPool(databaseUrl: string): Pool {
  const url = new URL(databaseUrl);
  const idle: Connection[] = [];
  const waiting: ((connection: Connection | null) => void)[] = [];
  let open = 0;
  let closed = false;

  async function acquire(generation: number): Promise<Connection> {
    let connection = idle.pop() ?? null;
    if (!connection && open >= maxConnections) {
      connection = await new Promise((resolve, reject) => {
        const timer = setTimeout(() => {
          waiting.splice(waiting.indexOf(take), 1);
          reject(new RestError(504, "PGRST003", "Timed out acquiring connection from connection pool."));
        }, acquireMs);
        const take = (released: Connection | null) => {
          clearTimeout(timer);
          resolve(released);
        };
        waiting.push(take);
      });
    } else if (!connection) {
      open += 1;
    }
    if (connection && connection.generation >= generation) return connection;
    connection?.close();
    try {
      return await connect(url, generation);
    } catch (error) {
      leave();
      const reason = error instanceof Error ? error.message : String(error);
      throw new RestError(503, "PGRST000", "Database connection error. Retrying the connection.", reason);
    }
  }

  // A place in the pool is free: whoever waits may connect.
  function leave(): void {
    const next = waiting.shift();
    if (next) next(null);
    else open -= 1;
  }

  function release(connection: Connection): void {
    const next = waiting.shift();
    if (next) return next(connection);
    if (closed) return connection.close();
    idle.push(connection);
    connection.idle().then((lost) => {
      const at = idle.indexOf(connection);
      if (!lost || at < 0) return;
      idle.splice(at, 1);
      connection.close();
      leave();
    });
  }

  async function run(call: Call, generation: number): Promise<Row> {
    const settings = { text: applySettings, params: [JSON.stringify(call.settings)] };
    for (let attempt = 1;; attempt++) {
      const connection = await acquire(generation);
      try {
        const row = await (call.check
          ? runChecked(connection, settings, call, call.check)
          : connection.run([settings, call]));
        release(connection);
        return row;
      } catch (error) {
        if (!(error instanceof ConnectionLost)) {
          release(connection);
          throw error;
        }
        leave();
        if (error.began || attempt === 3) throw error;
      }
    }
  }

  return {
    run,
    close() {
      closed = true;
      for (const connection of idle.splice(0)) connection.close();
    },
  };
}

async function runChecked(
  connection: Connection,
  settings: Statement,
  call: Statement,
  check: (row: Row) => void,
): Promise<Row> {
  const only = (text: string) => [{ text, params: [] }];
  try {
    const row = await connection.run([...only("begin"), settings, call]);
    check(row);
    await connection.run(only("commit"));
    return row;
  } catch (error) {
    if (!(error instanceof ConnectionLost)) await connection.run(only("rollback"));
    throw error;
  }
}
