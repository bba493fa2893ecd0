import postgres from "postgres";
import { only } from "./queue.ts";

/** What the tests of schedules say often. */

/** Inserts schedules of every hour, for the kind test, whose next run is years away. */
export async function addSchedules(sql: postgres.Sql, names: string[]): Promise<void> {
  await sql`
    insert into schedules (name, cron, kind, next_run) select n, '@hourly', 'test', '2040-01-01' from unnest(${names}::text[]) n`;
}

/** A schedule's row; fails when it is not there. */
export async function schedule(sql: postgres.Sql, name: string): Promise<postgres.Row> {
  return only(await sql`select * from schedules where name = ${name}`);
}

/** The names of all schedules, in order. */
export async function allSchedules(sql: postgres.Sql): Promise<string[]> {
  return (await sql<{ name: string }[]>`select name from schedules order by name`).map(({ name }) => name);
}

/** Moves the next run of a schedule into the past, and gives it back. */
export async function makeDue(sql: postgres.Sql, name: string, ago = "1 minute"): Promise<Date> {
  return only(
    await sql<{ due: Date }[]>`
      update schedules set next_run = date_trunc('milliseconds', clock_timestamp() - ${ago}::interval) where name = ${name}
      returning next_run as due`,
  ).due;
}
