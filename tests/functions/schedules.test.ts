import assert from "node:assert/strict";
import { connectDirectly } from "../../scripts/direct.ts";
import { useTransport } from "../../supabase/functions/_shared/database.ts";
import {
  type AppSchedules,
  enqueueDueSchedules,
  ensureSchedules,
  JobError,
  listSchedules,
  nextCronRun,
  pauseSchedule,
  resumeSchedule,
  scheduleJob,
  unscheduleJob,
  unscheduleJobs,
} from "../../supabase/functions/_shared/jobs.ts";
import { createDatabase, type TestDatabase } from "../support.ts";

/** Schedules as an app's functions make them, with the kinds of the app as it is shipped. */

let db: TestDatabase;

Deno.test.beforeAll(async () => {
  db = await createDatabase();
  // Over REST the answers are the same: see promises.test.ts. An environment would be shared with other test files.
  useTransport(connectDirectly(db.url("postgres")));
});
Deno.test.afterAll(async () => await db[Symbol.asyncDispose]());

const welcome = { to: "ada@example.com", template: "welcome" } as const;

/** What a call throws, which must be a JobError; no schedule may come of it. */
async function refusal(call: () => Promise<unknown>): Promise<JobError> {
  const before = await db.sql`select * from schedules order by name`;
  const error = await call().then(() => null, (error: unknown) => error);
  assert(error instanceof JobError, String(error));
  assert.deepEqual(await db.sql`select * from schedules order by name`, before, "nothing is written");
  return error;
}

Deno.test("scheduleJob writes all that it is given, and gives back the next run", async () => {
  const nextRun = new Date("2100-01-01T09:30:00.123Z");
  const options = {
    timeZone: "Europe/Berlin",
    nextRun,
    tenant: "t",
    context: { by: "a test" },
    priority: 7,
    maxAttempts: 2,
    overlap: "skip",
  } as const;
  assert.deepEqual(await scheduleJob("report", "0 9 * * MON-FRI", "send_email", welcome, options), nextRun);
  const [row] = await db.sql`
    select cron, kind, payload, time_zone, next_run, tenant, context, priority, max_attempts, overlap from schedules`;
  const { timeZone, maxAttempts, nextRun: next_run, ...same } = options;
  const given = { cron: "0 9 * * MON-FRI", kind: "send_email", payload: welcome, ...same };
  assert.deepEqual({ ...row }, { ...given, time_zone: timeZone, max_attempts: maxAttempts, next_run });

  const plain = await scheduleJob("plain", "@yearly", "send_email", welcome);
  assert.deepEqual([plain.getUTCMonth(), plain.getUTCDate(), plain.getUTCHours()], [0, 1, 0]);
});

Deno.test("what does not fit is refused before anything is written, and says what it is", async () => {
  const unknown: string = "sned_email";
  const date = new Date(NaN);
  const refusals: [call: () => Promise<unknown>, code: string, detail: RegExp][] = [
    [
      () => scheduleJob("a", "@daily", "send_email", { ...welcome, to: "nobody" }),
      "invalid_payload",
      /^scheduleJob: payload of send_email: to: /,
    ],
    [
      // @ts-expect-error: a kind that this app does not declare
      () => scheduleJob("a", "@daily", unknown, welcome),
      "unknown_kind",
      /^scheduleJob: no kind "sned_email"/,
    ],
    [() => scheduleJob("a", "61 * * * *", "send_email", welcome), "22023", /minute: 61/],
    [
      () => scheduleJob("a", "@daily", "send_email", welcome, { nextRun: date }),
      "22023",
      /^scheduleJob: nextRun is not a Date with a time/,
    ],
    [
      () =>
        ensureSchedules([
          { name: "p:a", cron: "@daily", kind: "send_email", payload: welcome },
          { name: "p:b", cron: "@daily", kind: "send_email", payload: { ...welcome, to: "" } },
        ], { prefix: "p:" }),
      "invalid_payload",
      /^ensureSchedules: entry 1: payload of send_email: to: /,
    ],
    [() => nextCronRun("@daily", { after: date }), "22023", /^nextCronRun: after is not a Date/],
    [() => nextCronRun("@daily", { timeZone: "Berlin" }), "22023", /Berlin/],
    [() => unscheduleJobs({}), "22023", /neither prefix nor tenant/],
  ];
  for (const [call, code, detail] of refusals) {
    const error = await refusal(call);
    assert.equal(error.code, code, error.message);
    assert.match(error.detail, detail);
  }
});

Deno.test("a payload that is not its kind's is a type error", () => {
  const schedules = {
    right: { cron: "@daily", kind: "send_email", payload: welcome, overlap: "skip" },
    // @ts-expect-error: another template than there are
    template: { cron: "@daily", kind: "send_email", payload: { ...welcome, template: "other" } },
    // @ts-expect-error: no such kind
    kind: { cron: "@daily", kind: "sned_email", payload: welcome },
    // @ts-expect-error: an app's schedule has no tenant
    tenant: { cron: "@daily", kind: "send_email", payload: welcome, tenant: "t" },
  } satisfies AppSchedules;
  assert.equal(Object.keys(schedules).length, 4);
});

Deno.test("ensureSchedules says what it scheduled and removed, and leaves the rest alone", async () => {
  const daily = (name: string) => ({ name, cron: "@daily", kind: "send_email", payload: welcome }) as const;
  const options = { prefix: "user 7:", tenant: "seven" };
  const ensure = (...names: string[]) => ensureSchedules(names.map(daily), options);
  assert.deepEqual(await ensure("user 7:a", "user 7:b"), {
    scheduled: ["user 7:a", "user 7:b"],
    removed: [],
  });
  assert.deepEqual(await ensure("user 7:b", "user 7:c"), { scheduled: ["user 7:c"], removed: ["user 7:a"] });
  assert.deepEqual(await ensure("user 7:b", "user 7:c"), { scheduled: [], removed: [] });
  const listed = await listSchedules(options);
  assert.deepEqual(listed.map(({ name, tenant }) => [name, tenant]), [
    ["user 7:b", "seven"],
    ["user 7:c", "seven"],
  ]);
  assert.deepEqual(
    (await listSchedules({ ...options, maxRows: 1, after: "user 7:b" })).map(({ name }) => name),
    ["user 7:c"],
  );
  assert.equal(await unscheduleJobs(options), 2);
});

Deno.test("a schedule that is due is enqueued, listed with its last job, paused, resumed and removed", async () => {
  const nextRun = new Date("2026-01-01T00:00:00Z");
  await scheduleJob("due", "5 minutes", "send_email", welcome, { nextRun });
  assert.equal(await enqueueDueSchedules(), 1);
  assert.equal(await enqueueDueSchedules(), 0);
  const [listed] = await listSchedules({ prefix: "due" });
  assert(listed);
  const { nextRun: next, lastJobId, ...rest } = listed;
  assert(next.getTime() > Date.now() && (next.getTime() - nextRun.getTime()) % 300_000 === 0);
  assert.match(lastJobId ?? "", /^[0-9a-f-]{36}$/);
  assert.deepEqual(rest, {
    name: "due",
    cron: "5 minutes",
    timeZone: "UTC",
    kind: "send_email",
    payload: welcome,
    tenant: null,
    overlap: "allow",
    paused: false,
    lastRun: nextRun,
    lastStatus: "pending",
    lastError: null,
  });
  assert.equal(await pauseSchedule("due"), true);
  assert.equal((await listSchedules({ prefix: "due" }))[0]?.paused, true);
  assert.deepEqual(await resumeSchedule("due"), next);
  assert.equal(await unscheduleJob("due"), true);
  assert.deepEqual(
    [await pauseSchedule("due"), await resumeSchedule("due"), await unscheduleJob("due")],
    [false, null, false],
  );
});

Deno.test("nextCronRun looks ahead from now, or from another time, in a zone", async () => {
  const after = new Date("2026-03-28T12:00:00Z");
  const run = await nextCronRun("30 2 * * *", { timeZone: "Europe/Berlin", after });
  assert.deepEqual(run, new Date("2026-03-29T01:00:00Z"));
  const soon = (await nextCronRun("* * * * *")).getTime() - Date.now();
  assert(soon > -5_000 && soon <= 60_000, `${soon}`);
});
