import postgres from "postgres";
import { type TestDatabase, type TestStack, until } from "../support.ts";

/** What tests share that kill things at a chosen moment. */

/** Ticks every second, and writes down each job that succeeds, in `completions`. */
export async function watchCompletions({ sql }: TestStack): Promise<void> {
  await sql`select cron.schedule('nightshift_tick', '1 second', 'select private.tick()')`;
  // Whatever becomes of a job is written down with it.
  await sql`create table completions (job_id uuid)`;
  await sql`
    create function note_completion() returns trigger language plpgsql security definer as $$
    begin
      insert into public.completions values (new.id);
      return null;
    end $$`;
  await sql`
    create trigger note_completion after update of status on jobs for each row
    when (new.status = 'succeeded') execute function note_completion()`;
}

/** A transaction that holds a lock until it is released. */
export async function hold(
  db: TestDatabase,
  lock: (sql: postgres.Sql) => Promise<unknown>,
): Promise<{ release(): Promise<void> }> {
  const sql = db.connect("postgres", { max: 1 });
  await sql`begin`;
  await lock(sql);
  return {
    async release() {
      await sql`commit`;
      await sql.end();
    },
  };
}

/** Waits until so many calls of this SQL function wait for a lock. */
export const untilBlocked = ({ sql }: TestStack, name: string, calls = 1): Promise<boolean> =>
  until(`${name} to wait for a lock`, async () => {
    const rows = await sql`
      select from pg_stat_activity
      where datname = current_database() and usename = 'authenticator' and wait_event_type = 'Lock' and query like ${`%${name}%`}`;
    return rows.length >= calls;
  });

/** The lease of a worker that is gone, as if its seconds were over. */
export const endLease = ({ sql }: TestStack, id: string) =>
  sql`update jobs set lease_expires_at = clock_timestamp() where id = ${id} and status = 'running'`;

export async function killGateway({ services }: TestStack): Promise<void> {
  const { gateway } = services;
  gateway.kill("SIGKILL");
  await gateway.status;
}

/** A superuser's client, connected to another database than the stack's, and the name of that. */
export function outside({ db }: TestStack): { admin: postgres.Sql; name: string } {
  const url = new URL(db.url("supabase_admin"));
  const name = url.pathname.slice(1);
  url.pathname = "/postgres";
  return { admin: postgres(url.href, { max: 1 }), name };
}

/** Ends every connection of the API to the database; fails when there is none. */
export async function endConnections(stack: TestStack): Promise<void> {
  const { admin, name } = outside(stack);
  const ended = await admin`
    select pg_terminate_backend(pid) from pg_stat_activity where datname = ${name} and usename = 'authenticator'`;
  await admin.end();
  if (ended.length === 0) throw new Error("the API has no connection to end");
}
