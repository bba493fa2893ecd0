-- Cron: when a schedule runs next.
--
-- next_cron_run() reads five fields, a name such as @daily, or an interval, and gives the first run after a time. It
-- keeps nothing: a schedule is due when its next run has come, and then this says the one after it.
--
-- Invariants
--   * Fields are matched against the local time of the zone; its offsets are Postgres's own. 09:00 stays 09:00.
--   * A skipped local time runs right after the gap, once however many were skipped. A schedule of every hour goes on.
--   * Of a repeated hour a fixed time runs the first time only. Where the minutes or hours begin with *, or every hour is
--     given, the schedule runs on through both.
--   * What cannot be read or never runs is refused: there is always an answer.

-- A field as bits, one for each value from 0 on: 1-3 of 0-7 is 01110000. Sunday is 0, and L the 0 of the day of month.
create function private.cron_field(name text, field text, low int, high int, names text[] default '{}')
returns bit varying language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  value constant text := array_to_string(array['[0-9]{1,9}'] || names, '|');
  bits bit varying := repeat('0', high + 1);
  part text;
  bounds text[];
  first int;
  last int;
  step int;
begin
  foreach part in array string_to_array(field, ',') loop
    if part = 'L' and high = 31 then bits := set_bit(bits, 0, 1); continue; end if;
    -- Only whether it matches: to be told the groups, by regexp_match, takes ten times as long.
    if part !~ format('^(\*|(%s)(-(%1$s))?)(/[0-9]{1,9})?$', value) then
      raise exception 'next_cron_run: %: % cannot be read', name, quote_literal(left(part, 80)) using errcode = '22023',
        hint = 'Give a list of *, 5, 1-5, */10, 5/10 or 1-31/2, of names (JAN, MON), and of L for a month''s last day.';
    end if;
    bounds := string_to_array(split_part(part, '/', 1), '-');
    first := case
      when bounds[1] = '*' then low else coalesce(array_position(names, bounds[1]) - 1 + low, bounds[1]::int)
    end;
    last := case
      when bounds[2] is not null then coalesce(array_position(names, bounds[2]) - 1 + low, bounds[2]::int)
      when bounds[1] <> '*' and position('/' in part) = 0 then first
      when high = 7 then greatest(first, 6) -- 1/2 ends at FRI, not at Sunday as 7
      else high
    end;
    if high = 7 and first > 0 and last = 0 then last := 7; end if;
    step := coalesce(nullif(split_part(part, '/', 2), '')::int, 1);
    if least(first, last) < low or greatest(first, last) > high then
      raise exception 'next_cron_run: %: % is not within %-%', name, part, low, high using errcode = '22023';
    elsif step not between 1 and high then
      raise exception 'next_cron_run: %: the step of % is not within 1-%', name, part, high using errcode = '22023';
    elsif first > last then
      raise exception 'next_cron_run: %: % runs backward', name, part
        using errcode = '22023', hint = format('Write %s-%s,%s-%s.', first, high, low, last);
    end if;
    for n in first .. last by step loop
      bits := set_bit(bits, case when high = 7 then n % 7 else n end, 1);
    end loop;
  end loop;
  return bits;
end $$;

-- The first local minute after `after` that the five fields match, null when there is none. A day matches when its day of
-- month or its day of week does, if `either`; else when both do. A 29 February is 8 years away at most, on a Sunday 40:
-- months that in 9 years have had no such day never have.
create function private.next_local_run(fields bit varying[], either boolean, after timestamp) returns timestamp
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  week constant bit varying := substring(fields[5] for 7);
  weeks constant bit varying := week || week || week || week || week || week; -- so that a month may begin on any day
  at timestamp := date_trunc('minute', after) + interval '1 minute';
  month timestamp;
  length int;
  days bit varying;
  by_week bit varying;
  possible boolean := false; -- whether a month has had such a day of month
  ahead int; -- which value from here on is the first to match; 0: none
begin
  while at < after + case when possible then interval '41 years' else interval '9 years' end loop
    ahead := position(B'1' in substring(fields[4] from date_part('month', at)::int + 1));
    if ahead = 0 then at := date_trunc('year', at) + interval '1 year'; continue; end if;
    month := date_trunc('month', at) + make_interval(months => ahead - 1);
    at := greatest(at, month);

    length := date_part('day', month + interval '1 month -1 day');
    days := fields[3];
    if get_bit(days, 0) = 1 then days := set_bit(days, length, 1); end if;
    days := substring(days from 2 for length);
    possible := possible or either or position(B'1' in days) > 0;
    by_week := substring(weeks from date_part('dow', month)::int + 1 for length);
    days := case when either then days | by_week else days & by_week end;
    ahead := position(B'1' in substring(days from date_part('day', at)::int));
    if ahead = 0 then at := month + interval '1 month'; continue; end if;
    at := greatest(at, date_trunc('day', at) + make_interval(days => ahead - 1));

    ahead := position(B'1' in substring(fields[2] from date_part('hour', at)::int + 1));
    if ahead = 0 then at := date_trunc('day', at) + interval '1 day'; continue; end if;
    at := greatest(at, date_trunc('hour', at) + make_interval(hours => ahead - 1));

    ahead := position(B'1' in substring(fields[1] from date_part('minute', at)::int + 1));
    if ahead > 0 then return at + make_interval(mins => ahead - 1); end if;
    at := date_trunc('hour', at) + interval '1 hour';
  end loop;
  return null;
end $$;

-- The instant within the 24 hours up to `until` at which a zone's clock was changed; null when there is none.
create function private.clock_change(time_zone text, until timestamptz) returns timestamptz
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  at constant timestamptz := date_trunc('second', until);
  clock constant timestamp := at at time zone time_zone;
  since interval := '0'; -- for so long up to `at` the offset has been the same
  longer interval;
begin
  if (at - interval '24 hours') at time zone time_zone = clock - interval '24 hours' then return null; end if;
  for power in reverse 16 .. 0 loop
    longer := since + make_interval(secs => 1 << power);
    if (at - longer) at time zone time_zone = clock - longer then since := longer; end if;
  end loop;
  return at - since;
end $$;

-- The first run after `after` of
--
--   five fields   minute 0-59, hour 0-23, day of month 1-31 or L (the last), month 1-12 or JAN-DEC, day of week 0-7 or
--                 SUN-SAT (0 and 7 are Sunday): lists of *, n and a-b, each with /step or without; n/step has no end.
--                 When both days are given either one matches; when one begins with * both must, as in Vixie cron.
--   a name        @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually
--   an interval   '30 seconds', '5 minutes', '2 hours', '1 day' of 24 hours: from 10 seconds to 366 days after `after`
--
-- time_zone is a name with a / of the tz database, or UTC. Raises 22023 saying which part is not usable.
--
-- Measured: 75 to 160 µs, a 29 February included; 180 µs where that is to be a Sunday, 40 years on; 100 to 200 µs to find
-- that there is no run; 12 µs for an interval.
create function public.next_cron_run(
  cron text, time_zone text default 'UTC', after timestamptz default clock_timestamp()
) returns timestamptz
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  day constant interval := '24 hours'; -- '1 day' goes by the session's time zone
  given constant text := upper(btrim(regexp_replace(left(cron, 201), '\s+', ' ', 'g')) collate "C");
  period constant float8 := case
    when given ~ '^[0-9]{1,9} ?(SECOND|MINUTE|HOUR|DAY)S?$' then date_part('epoch', given::interval)
  end;
  fields constant text[] := string_to_array(case given
    when '@HOURLY' then '0 * * * *' when '@DAILY' then '0 0 * * *' when '@MIDNIGHT' then '0 0 * * *'
    when '@WEEKLY' then '0 0 * * 0' when '@MONTHLY' then '0 0 1 * *'
    when '@YEARLY' then '0 0 1 1 *' when '@ANNUALLY' then '0 0 1 1 *' else given
  end, ' ');
  bits bit varying[];
  either boolean;
  every_hour boolean;
  change timestamptz;
  clock timestamp; -- the local time after which to look
  next timestamp;
  run timestamptz;
  earlier timestamptz;
  wrong text;
  hint text := '';
begin
  if cron is null then wrong := 'cron is null';
  elsif length(cron) > 200 then wrong := 'cron has more than 200 characters';
  elsif period is null and cardinality(fields) <> 5 then
    wrong := format('%s does not have 5 fields', quote_literal(left(cron, 80)));
    hint := 'Give minute, hour, day of month, month and day of week, without seconds; or an interval, such as 30 seconds '
      'or 1 day; or a name, such as @daily.';
  elsif period not between 10 and 366 * 86400 then wrong := format('%s is not within 10 seconds to 366 days', cron);
  elsif after is null or after not between '1900-01-01 00:00:00Z' and '2999-12-31 00:00:00Z' then
    wrong := format('after is %s', coalesce(after::text, 'null')); hint := 'Give a time from 1900 to 2999.';
  else
    begin
      -- Abbreviations and POSIX rules, which Postgres takes as well, have one offset all the year, or the wrong one.
      if time_zone ~* '^([a-z_]+(/[a-z_-]+)+|etc/gmt([+-]?0|[+-]([1-9]|1[0-2])|-1[34])|utc|gmt)$' then
        clock := after at time zone time_zone;
      end if;
    exception when invalid_parameter_value then null;
    end;
    if clock is null then
      wrong := format('time_zone %s is not a time zone', coalesce(quote_literal(left(time_zone, 80)), 'null'));
      hint := 'Give a name with a / of the tz database, such as Europe/Berlin, or UTC.';
    end if;
  end if;
  if wrong is not null then raise exception 'next_cron_run: %', wrong using errcode = '22023', hint = hint; end if;
  if period is not null then return after + make_interval(secs => period); end if;

  bits := array[
    private.cron_field('minute', fields[1], 0, 59), private.cron_field('hour', fields[2], 0, 23),
    private.cron_field('day of month', fields[3], 1, 31),
    private.cron_field('month', fields[4], 1, 12, '{JAN,FEB,MAR,APR,MAY,JUN,JUL,AUG,SEP,OCT,NOV,DEC}'),
    private.cron_field('day of week', fields[5], 0, 7, '{SUN,MON,TUE,WED,THU,FRI,SAT}')
  ];
  either := left(fields[3], 1) <> '*' and left(fields[5], 1) <> '*';
  every_hour := position(B'0' in bits[2]) = 0;
  if every_hour or left(fields[1], 1) = '*' or left(fields[2], 1) = '*' then
    change := private.clock_change(time_zone, after + day);
  else
    -- What the clock showed before it went back has been, though it shows it again.
    clock := greatest(clock, (private.clock_change(time_zone, after) - interval '1 microsecond') at time zone time_zone);
  end if;
  loop
    next := private.next_local_run(bits, either, clock);
    if next is null then
      raise exception 'next_cron_run: % never runs', quote_literal(cron)
        using errcode = '22023', hint = 'None of its months has such a day.';
    end if;
    -- Postgres takes a skipped time by the offset from before the gap, and of two instants the later one.
    run := next at time zone time_zone;
    if run at time zone time_zone = next then
      earlier := run - ((run - day) at time zone time_zone + day - next);
      if earlier > after and earlier at time zone time_zone = next then run := earlier; end if;
      -- After a change ahead the clock may show again what it has shown up to now.
      if change is null or run < change then return run; end if;
    else
      change := private.clock_change(time_zone, run);
      if not every_hour then return change; end if;
    end if;
    clock := (change at time zone time_zone) - interval '1 microsecond';
    change := null;
  end loop;
end $$;

revoke all on function private.cron_field, private.next_local_run, private.clock_change, public.next_cron_run
  from public, anon, authenticated, service_role;
grant execute on function private.cron_field, private.next_local_run, private.clock_change, public.next_cron_run
  to service_role;
