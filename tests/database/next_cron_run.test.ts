import assert from "node:assert/strict";
import { Cron } from "croner";
import postgres from "postgres";
import { seeded } from "../support.ts";
import { sharedDatabase } from "./queue.ts";

const db = sharedDatabase();

/** A schedule and the time after which to look, in ms since 1970. */
interface Case {
  cron: string;
  zone: string;
  after: number;
}

/** What next_cron_run says to each of many cases, in one call: a time in ms, or the message of its refusal. */
async function nextRuns(cases: Case[]): Promise<(number | string)[]> {
  await db.sql`
    create or replace function public.next_run_or_error(cron text, zone text, after float8) returns text language plpgsql as $$
    begin
      return date_part('epoch', public.next_cron_run(cron, zone, to_timestamp(after / 1000))) * 1000;
    exception when others then return sqlerrm;
    end $$`;
  const rows = await db.sql<{ run: string }[]>`
    select public.next_run_or_error(c.cron, c.zone, c.after) as run from unnest(
      ${cases.map(({ cron }) => cron)}::text[], ${cases.map(({ zone }) => zone)}::text[],
      ${cases.map(({ after }) => after)}::float8[]
    ) with ordinality c(cron, zone, after, n) order by c.n`;
  return rows.map(({ run }) => /^-?\d+(\.\d+)?$/.test(run) ? Number(run) : run);
}

const at = (time: string) => Date.parse(time.replace(" ", "T") + "Z");
const iso = (run: number | string | undefined) => typeof run === "number" ? new Date(run).toISOString() : run;
const text = ({ cron, zone, after }: Case) => `${cron} in ${zone} after ${iso(after)}`;

async function assertRuns(table: [cron: string, zone: string, after: string, run: string][]): Promise<void> {
  const cases = table.map(([cron, zone, after]) => ({ cron, zone, after: at(after) }));
  const runs = await nextRuns(cases);
  const all = cases.map((each, n) => `${text(each)}: ${iso(runs[n])}`);
  assert.deepEqual(all, cases.map((each, n) => `${text(each)}: ${iso(at(table[n]?.[3] ?? ""))}`));
}

Deno.test("fields are lists, ranges, steps and names; the days are as in Vixie cron; a run comes after the time given", async () => {
  await assertRuns([
    ["* * * * *", "UTC", "2024-01-01 00:00", "2024-01-01 00:01"],
    ["* * * * *", "UTC", "2024-01-01 00:00:59.999", "2024-01-01 00:01"],
    ["0 9 * * *", "UTC", "2024-01-01 08:59:59.999", "2024-01-01 09:00"],
    ["0 9 * * *", "UTC", "2024-01-01 09:00", "2024-01-02 09:00"],
    ["10-20/5,45 6,18 * * *", "UTC", "2024-01-01 06:20", "2024-01-01 06:45"],
    ["40/10 * * * *", "UTC", "2024-01-01 06:50", "2024-01-01 07:40"],
    ["0 0 1 jan,Jul-SEP *", "UTC", "2024-01-01 00:00", "2024-07-01 00:00"],
    ["0 9 * * mon-fri", "UTC", "2024-01-05 10:00", "2024-01-08 09:00"],
    ["0 9 * * FRI-SUN", "UTC", "2024-01-06 10:00", "2024-01-07 09:00"],
    ["0 9 * * 7", "UTC", "2024-01-01 00:00", "2024-01-07 09:00"],
    ["0 9 * * 0", "UTC", "2024-01-01 00:00", "2024-01-07 09:00"],
    ["0 9 * * 5/1", "UTC", "2024-01-06 10:00", "2024-01-12 09:00"],
    ["0 0 L * *", "UTC", "2024-02-01 00:00", "2024-02-29 00:00"],
    ["0 0 15,L * *", "UTC", "2023-02-15 00:00", "2023-02-28 00:00"],
    // Either day, when both are given; both, when one begins with *.
    ["0 0 13 * FRI", "UTC", "2024-09-06 00:00", "2024-09-13 00:00"],
    ["0 0 13 * FRI", "UTC", "2024-08-09 00:00", "2024-08-13 00:00"],
    ["0 0 */13 * FRI", "UTC", "2024-01-01 00:00", "2024-03-01 00:00"],
    ["0 0 13 * */5", "UTC", "2024-01-01 00:00", "2024-09-13 00:00"],
    ["0 0 29 2 *", "UTC", "2096-03-01 00:00", "2104-02-29 00:00"],
    ["0 0 29 2 */7", "UTC", "2072-01-01 00:00", "2088-02-29 00:00"],
    ["0 0 29 2 */7", "UTC", "2088-03-01 00:00", "2128-02-29 00:00"],
    ["30 4 1 1 *", "Europe/Berlin", "1931-06-01 00:00", "1932-01-01 03:30"],
    ["  0\t9 \n * *   * ", "europe/berlin", "2024-01-01 00:00", "2024-01-01 08:00"],
    ["0 9 * * *", "Etc/GMT+3", "2024-01-01 00:00", "2024-01-01 12:00"],
    ["0 9 * * *", "Etc/GMT-14", "2024-01-01 00:00", "2024-01-01 19:00"],
  ]);
});

Deno.test("@daily and the like are names, and intervals count from the time given", async () => {
  await assertRuns([
    ["@hourly", "UTC", "2024-05-05 05:05:05", "2024-05-05 06:00"],
    ["@daily", "UTC", "2024-05-05 05:05:05", "2024-05-06 00:00"],
    ["@Midnight", "UTC", "2024-05-05 05:05:05", "2024-05-06 00:00"],
    ["@weekly", "UTC", "2024-05-06 05:05:05", "2024-05-12 00:00"],
    ["@monthly", "UTC", "2024-05-05 05:05:05", "2024-06-01 00:00"],
    ["@yearly", "UTC", "2024-05-05 05:05:05", "2025-01-01 00:00"],
    ["@annually", "UTC", "2024-05-05 05:05:05", "2025-01-01 00:00"],
    ["10 seconds", "UTC", "2024-05-05 05:05:05.5", "2024-05-05 05:05:15.5"],
    ["5minutes", "UTC", "2024-05-05 05:05:05", "2024-05-05 05:10:05"],
    [" 1  HOUR ", "UTC", "2024-05-05 05:05:05", "2024-05-05 06:05:05"],
    ["366 days", "UTC", "2024-01-01 00:00", "2025-01-01 00:00"],
    // A day has 24 hours, whatever the clock does.
    ["1 day", "Europe/Berlin", "2024-03-30 12:00", "2024-03-31 12:00"],
  ]);
});

Deno.test("09:00 stays 09:00; a skipped time runs after the gap; a repeated one once, unless the schedule runs on", async () => {
  await assertRuns([
    ["0 9 * * *", "Europe/Berlin", "2024-03-30 08:00", "2024-03-31 07:00"],
    ["30 2 * * *", "Europe/Berlin", "2024-03-31 00:00", "2024-03-31 01:00"],
    ["*/5 2 * * *", "Europe/Berlin", "2024-03-31 00:00", "2024-03-31 01:00"],
    ["*/5 2 * * *", "Europe/Berlin", "2024-03-31 01:00", "2024-04-01 00:00"],
    ["30 * * * *", "Europe/Berlin", "2024-03-31 00:30", "2024-03-31 01:30"],
    ["30 2 * * *", "Europe/Berlin", "2024-10-27 00:00", "2024-10-27 00:30"],
    ["30 2 * * *", "Europe/Berlin", "2024-10-27 00:30", "2024-10-28 01:30"],
    ["30 2 * * *", "Europe/Berlin", "2024-10-27 01:00", "2024-10-28 01:30"],
    ["30 * * * *", "Europe/Berlin", "2024-10-27 00:30", "2024-10-27 01:30"],
    ["30 0-23 * * *", "Europe/Berlin", "2024-10-27 00:30", "2024-10-27 01:30"],
    ["*/30 2 * * *", "Europe/Berlin", "2024-10-27 00:30", "2024-10-27 01:00"],
    // Half an hour; at midnight; and a day that was not: 30 December 2011.
    ["15 2 * * *", "Australia/Lord_Howe", "2024-10-05 15:00", "2024-10-05 15:30"],
    ["45 1 * * *", "Australia/Lord_Howe", "2024-04-06 14:45", "2024-04-07 15:15"],
    ["0 0 * * *", "Africa/Cairo", "2024-04-25 12:00", "2024-04-25 22:00"],
    ["0 9 * * *", "Pacific/Apia", "2011-12-29 19:00", "2011-12-30 10:00"],
    ["0 9 * * *", "Pacific/Apia", "2011-12-30 10:00", "2011-12-30 19:00"],
    ["0 9 30 12 *", "Pacific/Apia", "2011-12-01 00:00", "2011-12-30 10:00"],
    ["@hourly", "Pacific/Apia", "2011-12-30 09:00", "2011-12-30 10:00"],
  ]);
});

Deno.test("what is not usable is refused, naming the field and the value", async () => {
  const table: [cron: string | null, message: string, hint: string][] = [
    ["60 * * * *", "minute: 60 is not within 0-59", ""],
    ["0 24 * * *", "hour: 24 is not within 0-23", ""],
    ["0 0 0 * *", "day of month: 0 is not within 1-31", ""],
    ["0 0 1,20-32 * *", "day of month: 20-32 is not within 1-31", ""],
    ["0 0 * 13 *", "month: 13 is not within 1-12", ""],
    ["0 0 * * 8", "day of week: 8 is not within 0-7", ""],
    ["999999999 * * * *", "minute: 999999999 is not within 0-59", ""],
    ["*/0 * * * *", "minute: the step of */0 is not within 1-59", ""],
    ["0 0 */32 * *", "day of month: the step of */32 is not within 1-31", ""],
    ["0 22-2 * * *", "hour: 22-2 runs backward", "Write 22-23,0-2."],
    ["0 0 * NOV-FEB *", "month: NOV-FEB runs backward", "Write 11-12,1-2."],
    ["0 0 * * SAT-TUE", "day of week: SAT-TUE runs backward", "Write 6-7,0-2."],
    ["a * * * *", "minute: 'A' cannot be read", "Give a list of"],
    ["1,,2 * * * *", "minute: '' cannot be read", "Give a list of"],
    ["-1 * * * *", "minute: '-1' cannot be read", "Give a list of"],
    ["1-2-3 * * * *", "minute: '1-2-3' cannot be read", "Give a list of"],
    ["*-5 * * * *", "minute: '*-5' cannot be read", "Give a list of"],
    ["1.5 * * * *", "minute: '1.5' cannot be read", "Give a list of"],
    ["٣ * * * *", "minute: '٣' cannot be read", "Give a list of"],
    ["L * * * *", "minute: 'L' cannot be read", "Give a list of"],
    ["0 0 L-3 * *", "day of month: 'L-3' cannot be read", "Give a list of"],
    ["0 0 15W * *", "day of month: '15W' cannot be read", "Give a list of"],
    ["0 0 ? * *", "day of month: '?' cannot be read", "Give a list of"],
    ["0 0 JAN * *", "day of month: 'JAN' cannot be read", "Give a list of"],
    ["0 0 * JANUARY *", "month: 'JANUARY' cannot be read", "Give a list of"],
    ["0 0 * * MON#2", "day of week: 'MON#2' cannot be read", "Give a list of"],
    ["0 0 * * 5L", "day of week: '5L' cannot be read", "Give a list of"],
    ["0 0 30 2 *", "'0 0 30 2 *' never runs", "None of its months has such a day."],
    ["0 0 31 4,6,9,11 */2", "'0 0 31 4,6,9,11 */2' never runs", "None of its months has such a day."],
    ["0 0 9 * * *", "'0 0 9 * * *' does not have 5 fields", "Give minute, hour"],
    ["@reboot", "'@reboot' does not have 5 fields", "Give minute, hour"],
    ["2 weeks", "'2 weeks' does not have 5 fields", "Give minute, hour"],
    [" ", "' ' does not have 5 fields", "Give minute, hour"],
    ["9 seconds", "9 seconds is not within 10 seconds to 366 days", ""],
    ["999999999 days", "999999999 days is not within 10 seconds to 366 days", ""],
    ["1,".repeat(100) + " * * * *", "cron has more than 200 characters", ""],
    [null, "cron is null", ""],
  ];
  for (const [cron, message, hint] of table) {
    await assert.rejects(db.sql`select next_cron_run(${cron})`, (error: postgres.PostgresError) => {
      assert.equal(error.message, `next_cron_run: ${message}`);
      assert.equal(error.code, "22023");
      assert.ok(hint === "" ? !error.hint : error.hint?.startsWith(hint), `${message}: ${error.hint}`);
      return true;
    });
  }
  for (
    const zone of [
      null,
      "",
      "CET",
      "EST5EDT",
      "Berlin",
      "Foo/Bar",
      "Foo/Bar3",
      "Europe/Berlin2",
      "+02:00",
      "<a>-2",
      "Japan",
      "Etc/GMT+13",
      "Etc/GMT-15",
      "etc/gmt5",
    ]
  ) {
    for (const cron of ["0 0 * * *", "5 minutes"]) {
      await assert.rejects(db.sql`select next_cron_run(${cron}, ${zone})`, {
        code: "22023",
        message: `next_cron_run: time_zone ${zone === null ? "null" : `'${zone}'`} is not a time zone`,
        hint: "Give a name with a / of the tz database, such as Europe/Berlin, or UTC.",
      });
    }
  }
  for (const after of [null, "infinity", "-infinity", "1899-12-31 23:59:59Z"]) {
    await assert.rejects(db.sql`select next_cron_run('@daily', 'UTC', ${after}::text::timestamptz)`, {
      code: "22023",
      message: /^next_cron_run: after is (null|-?infinity|1899-)/,
    });
  }
});

// An oracle: the rules once more, tried minute by minute.

/** When a zone's clock was changed: minutes since 1970, and its minutes ahead of UTC before and after. */
interface Change {
  at: number;
  before: number;
  after: number;
}

const zones = [
  "America/New_York",
  "America/Santiago",
  "America/Havana",
  "America/Sao_Paulo",
  "Europe/Berlin",
  "Africa/Cairo",
  "Africa/Casablanca",
  "Asia/Beirut",
  "Australia/Lord_Howe",
  "Pacific/Chatham",
];

let changes = new Map<string, Change[]>();
Deno.test.beforeAll(async () => {
  changes = await clockChanges();
});

/** All changes from 1999 to 2090 by Postgres's own account, a day looked at after the other and then each 15 minutes. */
async function clockChanges(): Promise<typeof changes> {
  const rows = await db.sql<(Change & { zone: string })[]>`
    with days as (
      select zone, day, (day at time zone zone) - (day at time zone 'UTC') as after,
        lag((day at time zone zone) - (day at time zone 'UTC')) over (partition by zone order by day) as before
      from unnest(${zones}::text[]) zone, generate_series('1999-01-01Z'::timestamptz, '2090-01-01Z', '24 hours') day
    )
    select d.zone, date_part('epoch', m.at) / 60 as at,
      date_part('epoch', d.before) / 60 as before, date_part('epoch', d.after) / 60 as after
    from days d cross join lateral (
      select min(at) as at from generate_series(d.day - interval '24 hours', d.day, '15 minutes') at
      where (at at time zone d.zone) - (at at time zone 'UTC') = d.after
    ) m
    where d.before <> d.after or d.before is null order by d.zone, d.day`;
  return Map.groupBy(rows, ({ zone }) => zone);
}

const names = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"];
const monthNames = ["", "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];

/** The values of a field, by trying each. */
function valuesOf(field: string, low: number, high: number, names: string[] = []): Set<number> {
  const number = (text: string) => names.includes(text) ? names.indexOf(text) : Number(text);
  const found = new Set<number>();
  for (const part of field.split(",").filter((part) => part !== "L")) {
    const [range = "", step] = part.split("/");
    const [from = "", to] = range.split("-");
    const first = from === "*" ? low : number(from);
    let last = to !== undefined ? number(to) : from === "*" || step !== undefined ? high : first;
    if (names[0] === "SUN" && last < first) last = 7;
    for (let value = first; value <= last; value++) {
      if ((value - first) % Number(step ?? 1) === 0) found.add(names[0] === "SUN" ? value % 7 : value);
    }
  }
  return found;
}

function parse(cron: string) {
  const [minute = "", hour = "", day = "", month = "", weekday = ""] = cron.split(" ");
  const minutes = valuesOf(minute, 0, 59);
  const hours = valuesOf(hour, 0, 23);
  const days = valuesOf(day, 1, 31);
  const months = valuesOf(month, 1, 12, monthNames);
  const weekdays = valuesOf(weekday, 0, 6, names);
  const either = !day.startsWith("*") && !weekday.startsWith("*");
  const seen = new Map<number, boolean>(); // whether a day matches
  const everyHour = hours.size === 24;
  const matchesHour = (local: number) => hours.has(Math.floor(local / 60) % 24);
  return {
    everyHour,
    runsOn: everyHour || minute.startsWith("*") || hour.startsWith("*"),
    matchesDay(local: number): boolean {
      const known = seen.get(Math.floor(local / 1440));
      if (known !== undefined) return known;
      const date = new Date(local * 60_000);
      const last = new Date((local + 1440) * 60_000).getUTCDate() === 1;
      const byDay = days.has(date.getUTCDate()) || last && day.split(",").includes("L");
      const byWeekday = weekdays.has(date.getUTCDay());
      const matches = months.has(date.getUTCMonth() + 1) &&
        (either ? byDay || byWeekday : byDay && byWeekday);
      seen.set(Math.floor(local / 1440), matches);
      return matches;
    },
    matchesHour,
    matchesTime: (local: number) => minutes.has(local % 60) && matchesHour(local),
  };
}

/** The first run after `after`, in ms; undefined when there is none before 2089. */
function nextByOracle({ cron, zone, after }: Case): number | undefined {
  const rule = parse(cron);
  const known = changes.get(zone) ?? [];
  const matches = (local: number) => rule.matchesTime(local) && rule.matchesDay(local);
  let minute = Math.floor(after / 60_000) + 1;
  let i = known.findLastIndex(({ at }) => at <= minute);
  for (const end = Date.UTC(2089, 1) / 60_000; minute < end; minute++) {
    const following = known[i + 1];
    if (following && following.at <= minute) i++;
    const change = known[i];
    assert.ok(change);
    const local = minute + change.after;
    if (minute === change.at && !rule.everyHour) {
      for (let skipped = minute + change.before; skipped < local; skipped++) {
        if (matches(skipped)) return minute * 60_000;
      }
    }
    const shownBefore = local < change.at + change.before;
    if (matches(local) && (rule.runsOn || !shownBefore)) return minute * 60_000;
    // Where the clock is not changed soon, what cannot match is passed over.
    if (minute + 1440 < (following?.at ?? Infinity)) {
      if (!rule.matchesDay(local)) minute += 1439 - local % 1440;
      else if (!rule.matchesHour(local)) minute += 59 - local % 60;
    }
  }
}

function randomly() {
  const seed = crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
  const random = seeded(seed);
  const below = (n: number) => Math.floor(random() * n);
  const pick = <T>(from: readonly T[]): T => {
    const found = from[below(from.length)];
    assert.ok(found !== undefined);
    return found;
  };
  return { seed, below, pick };
}

const hour = 3600_000;

Deno.test("around every change of a clock from 2024 to 2030 in ten zones, runs follow each other as the rules say", async () => {
  const { seed, below } = randomly();
  const cases: Case[] = [];
  const expected: (number | undefined)[] = [];
  const add = (given: Case) => {
    const run = nextByOracle(given);
    cases.push(given);
    expected.push(run);
    return run ?? Infinity;
  };
  let count = 0;
  for (const zone of zones) {
    for (const change of changes.get(zone) ?? []) {
      const instant = change.at * 60_000;
      if (instant < Date.UTC(2024, 0) || instant >= Date.UTC(2031, 0)) continue;
      count++;
      // A time that is skipped or repeated.
      const minutes = below(Math.abs(change.after - change.before)) + Math.min(change.after, change.before);
      const local = new Date(instant + minutes * 60_000);
      const [minute, h] = [local.getUTCMinutes(), local.getUTCHours()];
      for (
        const cron of [
          `${minute} ${h} * * *`,
          `${minute} ${h} ${local.getUTCDate()} ${local.getUTCMonth() + 1} *`,
          `${minute},${(minute + 20) % 60} ${h},${(h + 1) % 24} * * *`,
          `*/20 ${h} * * *`,
          `${minute} */2 * * *`,
          `${minute} * * * *`,
          `${minute} 0-23 * * *`,
          `*/${15 + below(20)} * * * *`,
          "0 0 L,1 * MON",
        ]
      ) {
        for (let after = instant - 3 * hour; after < instant + 2 * hour;) after = add({ cron, zone, after });
        for (const ms of [-1, 0, 1, below(hour) - hour, below(hour)]) {
          add({ cron, zone, after: instant + ms });
        }
      }
    }
  }
  assert.ok(count > 100, `${count} changes`);
  const runs = await nextRuns(cases);
  cases.forEach((each, n) => assert.equal(iso(runs[n]), iso(expected[n]), `${text(each)} (seed ${seed})`));
});

/** A field of a random form. */
function randomField(random: ReturnType<typeof randomly>, low: number, high: number, names: string[] = []) {
  const { below, pick } = random;
  const value = () => low + below(high - low + 1);
  const named = (n: number) => below(3) === 0 ? names[n] ?? String(n) : String(n);
  const range = () => {
    const [a, b] = [value(), value()];
    return `${named(Math.min(a, b))}-${named(Math.max(a, b))}`;
  };
  const step = () => 1 + below(high);
  const part = pick([
    () => "*",
    () => named(value()),
    () => named(value()),
    range,
    () => `${range()}/${step()}`,
    () => `*/${step()}`,
    () => `${value()}/${step()}`,
  ]);
  return Array.from({ length: below(3) === 0 ? 1 + below(3) : 1 }, part).join(",");
}

/** What croner says, with the rules of Vixie cron where it has them; undefined: never. */
function croner({ cron, zone, after }: Case): number | undefined {
  const options = {
    timezone: zone,
    mode: "5-part",
    sloppyRanges: true,
    fixedTimeRule: "no-wildcard",
  } as const;
  return new Cron(cron, options).nextRun(new Date(after))?.getTime();
}

/** Where croner says something else: why, a case of it, and how to tell it. `run` is ours, `theirs` croner's. */
interface Disagreement {
  why: string;
  example: [cron: string, zone: string, after: string];
  applies(cron: string[], run: number | string | undefined, theirs: number, zone: Change[]): boolean;
}

/** The first that applies counts. */
const disagreements: Disagreement[] = [
  {
    why: "? is any day to croner; here it is refused",
    example: ["0 0 ? * *", "Europe/Berlin", "2024-01-01 00:00"],
    applies: ([, , day]) => day === "?",
  },
  {
    why:
      "a day field such as */2 or *,5 counts as given to croner, so that either day matches; in Vixie cron both must",
    example: ["0 0 */2 * MON", "Europe/Berlin", "2024-01-01 00:00"],
    applies: ([, , day = "", , weekday = ""]) => /^\*./.test(day) || /^\*./.test(weekday),
  },
  {
    why: "7/2 has no day to croner; here it begins with Sunday",
    example: ["0 0 * * 7/2", "Europe/Berlin", "2024-01-01 00:00"],
    applies: ([, , , , weekday = ""]) => /(^|,)7\//.test(weekday),
  },
  {
    why: "0-SUN and SUN-SUN are 0-7 to croner, which is every day; here they end where they start",
    example: ["0 0 * * SUN-SUN", "Europe/Berlin", "2024-01-01 00:00"],
    applies: ([, , , , weekday = ""]) => /(^|,)(0|SUN)-SUN/.test(weekday),
  },
  {
    why:
      "what is skipped is left out by croner when minutes or hours have * or a step; here when every hour is given",
    example: ["*/5 2 * * *", "Europe/Berlin", "2024-03-31 00:00"],
    applies: (_, run, __, zone) =>
      zone.some(({ at, before, after }) => before < after && at * 60_000 === run),
  },
  {
    why:
      "a step in minutes or hours makes croner run twice in a repeated hour; here only a * at their beginning",
    example: ["0 0-8/2 * * *", "Europe/Berlin", "2024-10-27 00:00"],
    applies: ([minute = "", hours = ""], _, theirs, zone) =>
      /\d\//.test(`${minute} ${hours}`) && zone.some((change) => repeats(change, theirs)),
  },
  {
    why: "0-23 runs once in a repeated hour with croner; here it is every hour, as * is",
    example: ["0 0-23 * * *", "Europe/Berlin", "2024-10-27 00:00"],
    applies: (_, run, __, zone) => zone.some((change) => typeof run === "number" && repeats(change, run)),
  },
];

/** Whether that is within the time that a clock shows once more. */
const repeats = ({ at, before, after }: Change, run: number) =>
  run >= at * 60_000 && run < (at + before - after) * 60_000;

Deno.test("20,000 random schedules agree with croner, but for what is listed", async () => {
  const random = randomly();
  const { below, pick, seed } = random;
  const [from, to] = [Date.UTC(2000, 0), Date.UTC(2035, 0)];
  const examples = disagreements.map(({ example: [cron, zone, after] }) => ({
    cron,
    zone,
    after: at(after),
  }));
  const cases = Array.from({ length: 20_000 }, (_, n): Case => {
    const example = examples[n];
    if (example) return example;
    const field = (often: string, low: number, high: number, names?: string[]) =>
      below(3) === 0 ? often : randomField(random, low, high, names);
    // Mostly without what the two read in different ways; and without 7/2, at which croner looks for 50 ms.
    const days: typeof field = (...form) =>
      field(...form).replace(/^\*.+/, (all) => pick(["*", "*", "*", all])).replace(/(?<![-\d])7\//g, "6/");
    const minute = field("0", 0, 59);
    const hours = field("0", 0, 23);
    const day = below(10) === 0 ? pick(["L", "15,L", "?"]) : days("*", 1, 31);
    const cron = `${minute} ${hours} ${day} ${field("*", 1, 12, monthNames)} ${days("*", 0, 7, names)}`;
    const zone = pick(zones);
    if (below(4) > 0) return { cron, zone, after: from + below((to - from) / 1000) * 1000 };
    const near = pick((changes.get(zone) ?? []).filter(({ at }) => at > from / 60_000 && at < to / 60_000));
    return { cron, zone, after: near.at * 60_000 - 18 * hour + below(24 * hour) };
  });
  const ours = nextRuns(cases);
  const theirs: (number | undefined)[] = [];
  for (const each of cases) {
    theirs.push(croner(each));
    // The database works meanwhile.
    if (theirs.length % 1000 === 0) await new Promise((resolve) => setTimeout(resolve));
  }
  const runs = await ours;
  const counts = new Map<Disagreement, number>();
  for (const [n, each] of cases.entries()) {
    const run = String(runs[n]).endsWith("never runs") ? undefined : runs[n];
    if (run === theirs[n]) continue;
    const zone = changes.get(each.zone) ?? [];
    const found = disagreements.find(({ applies }) =>
      applies(each.cron.split(" "), run, theirs[n] ?? Infinity, zone)
    );
    const said = `${text(each)}: ${iso(run)}, croner ${iso(theirs[n])} (seed ${seed})`;
    assert.ok(found, said);
    counts.set(found, (counts.get(found) ?? 0) + 1);
    if (each.cron.includes("?")) assert.match(String(run), /day of month: '\?' cannot be read$/, said);
    else assert.equal(iso(run), iso(nextByOracle(each)), said);
  }
  const listed = disagreements.map((each) => `${counts.get(each) ?? 0} times: ${each.why}`);
  console.log([`20,000 schedules, seed ${seed}`, ...listed].join("\n"));
  assert.equal(counts.size, disagreements.length, "each example is one of its own sort");
});
