import postgres from "postgres";
import { pushMigrations } from "../../scripts/local/migrations.ts";
import { freePort } from "../../scripts/local/ports.ts";
import { startPostgres } from "../../scripts/local/postgres.ts";
import { chosenPostgres } from "../postgres_15/install.ts";
import { makeApp, projectDir } from "../support.ts";

/** Databases before their first migration, for tests of what the migrations find and leave. */

export interface BareDatabase {
  sql: postgres.Sql;
  admin: postgres.Sql;
  url(user: string): string;
  /** A client of one connection that has become one of the API's roles. */
  as(role: string): Promise<postgres.Sql>;
  /** Applies the migrations with the real CLI, with these variables to fill in config.toml. */
  push(env?: Record<string, string>): Promise<void>;
}

export interface BareServer extends AsyncDisposable {
  createDatabase(name: string): Promise<BareDatabase>;
}

/**
 * A Postgres of its own, since no database can be copied from one that other tests are connected to: the one that npm has
 * installed in `installDir`, or the one that all tests run on.
 */
export async function startBareServer(installDir?: string): Promise<BareServer> {
  const server = await startPostgres({
    projectDir,
    port: freePort(),
    temporary: true,
    installDir: installDir ?? await chosenPostgres(),
  });
  const app = await makeApp();
  const clients: postgres.Sql[] = [];
  const connect = (user: string, database: string, max = 5) => {
    const client = postgres(server.url(user, database), { max, onnotice: () => {} });
    clients.push(client);
    return client;
  };
  return {
    async createDatabase(name) {
      const maker = postgres(server.url("supabase_admin", "template1"), { max: 1, onnotice: () => {} });
      await maker`create database ${maker(name)} template postgres owner postgres`;
      await maker.end();
      return {
        sql: connect("postgres", name),
        admin: connect("supabase_admin", name, 1),
        url: (user) => server.url(user, name),
        async as(role) {
          const client = connect("authenticator", name, 1);
          await client`set role ${client(role)}`;
          return client;
        },
        push: (env = {}) =>
          pushMigrations(app, server.url("postgres", name), { PROJECT_URL: "", CRON_SECRET: "", ...env }),
      };
    },
    async [Symbol.asyncDispose]() {
      await Promise.all(clients.map((client) => client.end({ timeout: 1 })));
      await server.stop();
      await Deno.remove(app, { recursive: true });
    },
  };
}
