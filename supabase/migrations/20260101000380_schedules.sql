-- Schedules: jobs that come again and again.
--
-- A schedule is one row with its next run. When that is due, enqueue_due_schedules() enqueues its job and moves next_run
-- on, in one transaction; the tick calls it every ten seconds, and the drain function. What a job has, its run has:
-- retries, limits, an end as dead.
--
-- Invariants
--   * Each due run is enqueued once, however many call at once, and whoever of them is killed: who moves next_run on has
--     the row locked, and the others skip it.
--   * Runs that were missed are one run, due at the first of them. An interval keeps its phase.
--   * A schedule whose job cannot be enqueued holds up no other: last_error says why, and it goes on with its next run.
--     One that has no next run, as when its time zone is gone, is paused.
--   * Names are taken in their order, so that two calls that write many of them cannot deadlock.

create table public.schedules (
  name text collate "C" primary key check (length(name) between 1 and 200 and name !~ '[\x01-\x1f\x7f-\x9f]'),
  cron text not null,
  time_zone text not null default 'UTC',
  kind text not null check (kind ~ '^[a-z][a-z0-9_]{0,62}$'),
  payload jsonb not null default '{}',
  priority int not null default 0 check (priority between -100 and 100),
  max_attempts int check (max_attempts between 1 and 1000),
  context jsonb,
  overlap text not null default 'allow' check (overlap in ('allow', 'skip')),
  tenant text check (octet_length(tenant) between 1 and 512),
  paused boolean not null default false,
  next_run timestamptz not null check (isfinite(next_run)),
  last_run timestamptz,
  last_job_id uuid,
  last_error text,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
comment on table public.schedules is 'One row per schedule. Written by schedule_job() and its neighbours.';
comment on column public.schedules.overlap is 'skip: no run while the job of the one before waits or runs.';
comment on column public.schedules.paused is 'With last_error: for want of a next run, until it is scheduled anew.';
comment on column public.schedules.last_run is 'When the last run that was enqueued was due: due_at of its job.';
comment on column public.schedules.last_error is 'Why the last due run was not enqueued, or there is no next one.';

create index schedules_due on public.schedules (next_run) where not paused;
create index schedules_tenant on public.schedules (tenant, name) where tenant is not null;
create index schedules_failed on public.schedules (name) where last_error is not null;

-- Which of the app's own schedules, those in _app/schedules.ts, were last brought in step.
create table private.app_schedules (
  one boolean primary key default true check (one),
  digest text not null,
  error text -- why those that came after them were refused
);

alter table public.schedules enable row level security;
alter table private.app_schedules enable row level security;
revoke all on public.schedules, private.app_schedules from public, anon, authenticated, service_role;
grant select, insert, update, delete on public.schedules, private.app_schedules to service_role;

-- Schedules a job, or changes the schedule of that name, and returns its next run.
--
--   name        of the schedule: up to 200 characters
--   cron, time_zone  see next_cron_run(). While these stay as they are, so does the next run
--   next_run    when it is to run next instead, once; a time that has passed: at the next tick
--   tenant      whose it is, for unschedule_jobs and list_schedules; up to 512 bytes
--   overlap     skip: a run is left out while the job of the one before waits or runs
--   kind, payload, context, priority, max_attempts  of its jobs: see enqueue_job()
--
-- A paused schedule stays paused. Raises 22023 naming the argument that is not usable.
create function public.schedule_job(
  name text, cron text, kind text, payload jsonb default '{}', time_zone text default 'UTC',
  next_run timestamptz default null, tenant text default null, context jsonb default null, priority int default 0,
  max_attempts int default null, overlap text default 'allow'
) returns timestamptz
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  first_run timestamptz;
  wrong text;
  hint text := '';
begin
  if name is null or length(name) not between 1 and 200 or name ~ '[\x01-\x1f\x7f-\x9f]' then
    wrong := format('name %s does not have 1 to 200 characters, none of them a control character',
      coalesce(quote_literal(left(name, 80)), 'null'));
  elsif octet_length(tenant) not between 1 and 512 then wrong := 'tenant does not have 1 to 512 bytes';
  elsif overlap is null or overlap not in ('allow', 'skip') then
    wrong := format('overlap %s is not allow or skip', coalesce(quote_literal(left(overlap, 80)), 'null'));
  elsif next_run not between '1900-01-01 00:00:00Z' and '2999-12-31 00:00:00Z' then
    wrong := format('next_run is %s', next_run); hint := 'Give a time from 1900 to 2999.';
  elsif private.is_too_large(payload) or private.is_too_large(context) then
    wrong := 'payload or context has more than 4000000 bytes of JSON';
    hint := 'Keep it in Storage or in a table of yours, and schedule where it is.';
  else
    begin
      perform private.check_job(row(kind, payload, null, null, priority, max_attempts, null, 'active', null, context));
      first_run := public.next_cron_run(cron, time_zone);
    exception when data_exception then
      get stacked diagnostics hint = pg_exception_hint;
      wrong := regexp_replace(sqlerrm, '^(enqueue_job|next_cron_run): ', '');
    end;
  end if;
  if wrong is not null then raise exception 'schedule_job: %', wrong using errcode = '22023', hint = hint; end if;

  insert into public.schedules as s
    (name, cron, kind, payload, time_zone, next_run, tenant, context, priority, max_attempts, overlap)
  values (name, cron, kind, payload, time_zone, coalesce(next_run, first_run), tenant,
    coalesce(context, private.request_context()), priority, max_attempts, overlap)
  on conflict on constraint schedules_pkey do update set cron = excluded.cron, kind = excluded.kind,
    payload = excluded.payload, time_zone = excluded.time_zone, tenant = excluded.tenant, context = excluded.context,
    priority = excluded.priority, max_attempts = excluded.max_attempts, overlap = excluded.overlap,
    updated_at = excluded.updated_at, last_error = null,
    -- One that was paused for want of a next run has one now.
    paused = s.paused and s.last_error is null,
    next_run = case
      when next_run is null and s.cron = excluded.cron and s.time_zone = excluded.time_zone
        and not (s.paused and s.last_error is not null) then s.next_run
      else excluded.next_run end
  returning s.next_run into first_run;
  return first_run;
end $$;

-- Deletes a schedule; its jobs stay. Returns whether there was one.
create function public.unschedule_job(name text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  delete from public.schedules s where s.name = unschedule_job.name;
  return found;
end $$;

-- Raises 22023 for a tenant that is '': a variable that was not filled would mean everybody's.
create function private.check_tenant(who text, tenant text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if tenant = '' then
    raise exception '%: tenant is empty', who using errcode = '22023', hint = 'Give null for the schedules of all.';
  end if;
end $$;

-- Deletes the schedules whose names start with that, or of that tenant, or those of the tenant that do, and returns how
-- many. Null is not given; raises 22023 with neither.
create function public.unschedule_jobs(prefix text default null, tenant text default null) returns int
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan as $$
#variable_conflict use_variable
declare
  deleted int;
begin
  perform private.check_tenant('unschedule_jobs', tenant);
  if coalesce(prefix, '') = '' and tenant is null then
    raise exception 'unschedule_jobs: neither prefix nor tenant is given' using errcode = '22023',
      hint = 'Give one of them, or both.';
  end if;
  delete from public.schedules d
  where d.name = any (array(
    select s.name from public.schedules s
    where starts_with(s.name, coalesce(prefix, '')) and (tenant is null or s.tenant = tenant)
    order by s.name for update
  ));
  get diagnostics deleted = row_count;
  return deleted;
end $$;

-- Pauses a schedule; its jobs go on. Returns whether there is one.
create function public.pause_schedule(name text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  update public.schedules s set paused = true, last_error = null, updated_at = clock_timestamp()
  where s.name = pause_schedule.name;
  return found;
end $$;

-- Ends a pause, and returns the schedule's next run: the first from now on. Null where there is no such schedule. Raises
-- 22023 where there is no next run.
create function public.resume_schedule(name text) returns timestamptz
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  next_run timestamptz;
begin
  update public.schedules s set paused = false, last_error = null, updated_at = clock_timestamp(),
    next_run = case when s.paused and s.next_run <= clock_timestamp()
      then public.next_cron_run(s.cron, s.time_zone) else s.next_run end
  where s.name = resume_schedule.name returning s.next_run into next_run;
  return next_run;
end $$;

create type private.listed_schedule as (
  name text, cron text, time_zone text, kind text, payload jsonb, priority int, max_attempts int, context jsonb,
  overlap text, tenant text, paused boolean, next_run timestamptz, last_run timestamptz, last_job_id uuid,
  last_error text, created_at timestamptz, updated_at timestamptz, last_status text
);

-- Schedules by name: whose names start with that, of a tenant, at most `max_rows` (1 to 1000), and after that name, the
-- last of the page before. last_status is that of the last run's job; null when it is purged. Raises 22023 for another
-- max_rows.
create function public.list_schedules(
  prefix text default null, tenant text default null, max_rows int default 1000, after text default null
) returns setof private.listed_schedule
language plpgsql stable set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
#variable_conflict use_variable
begin
  perform private.check_argument('list_schedules: max_rows', max_rows, 1, 1000);
  perform private.check_tenant('list_schedules', tenant);
  return query
  select s.*, (select j.status from public.jobs j where j.id = s.last_job_id) from public.schedules s
  where starts_with(s.name, coalesce(prefix, '')) and s.name > coalesce(after, '')
    and (tenant is null or s.tenant = tenant)
  order by s.name limit max_rows;
end $$;

-- Makes the schedules whose names start with `prefix` those in [{"name", "cron", "kind", …}], each with the arguments of
-- schedule_job, or those of one tenant, who is then the tenant of each, and touches no other's. Returns which it has
-- written and which it has deleted, as they were not defined. One that is there as defined is left alone, with its next
-- run and its pause. Raises 22023 naming the entry, from 0 on, and what of it is not usable; nothing is written then.
create function public.ensure_schedules(
  definitions jsonb, prefix text, tenant text default null, out scheduled text[], out removed text[]
)
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan as $$
#variable_conflict use_variable
declare
  defaults constant jsonb := jsonb_build_object('name', null, 'cron', null, 'kind', null, 'payload', '{}'::jsonb,
    'time_zone', 'UTC', 'next_run', null, 'tenant', tenant, 'context', private.request_context(),
    'priority', 0, 'max_attempts', null, 'overlap', 'allow');
  fields constant text[] := array(select jsonb_object_keys(defaults));
  entry record;
  new public.schedules;
  hint text;
begin
  perform private.check_tenant('ensure_schedules', tenant);
  if coalesce(prefix, '') = '' then
    raise exception 'ensure_schedules: prefix is not given' using errcode = '22023',
      hint = 'Give what the names of these schedules, and of no others, start with.';
  elsif jsonb_typeof(definitions) is distinct from 'array' then
    raise exception 'ensure_schedules: definitions is %, not an array', coalesce(jsonb_typeof(definitions), 'null')
      using errcode = '22023', hint = 'Give [{"name": "…", "cron": "…", "kind": "…"}, …].';
  end if;
  scheduled := '{}';
  removed := '{}';
  for entry in
    select e.value, e.n - 1 as n, s.name from jsonb_array_elements(definitions) with ordinality e(value, n)
    full join (
      select s.name from public.schedules s
      where starts_with(s.name, prefix) and (tenant is null or s.tenant = tenant)
    ) s on s.name = e.value ->> 'name'
    order by coalesce(s.name, e.value ->> 'name'), e.n
  loop
    if entry.n is null then
      delete from public.schedules s where s.name = entry.name;
      if found then removed := removed || entry.name; end if;
      continue;
    end if;
    begin
      if jsonb_typeof(entry.value) <> 'object' then
        raise exception 'it is %, not an object', jsonb_typeof(entry.value) using errcode = '22023';
      elsif entry.value - fields <> '{}' then
        raise exception 'there is no field %', (
          select quote_literal(left(k, 80)) from jsonb_object_keys(entry.value - fields) k limit 1
        ) using errcode = '22023', hint = 'There are ' || array_to_string(fields, ', ') || '.';
      elsif not starts_with(entry.value ->> 'name', prefix) then
        raise exception 'name % does not start with %', quote_literal(left(entry.value ->> 'name', 80)),
          quote_literal(prefix) using errcode = '22023';
      elsif entry.value ->> 'name' = new.name then
        raise exception 'name % is there already', quote_literal(left(new.name, 80)) using errcode = '22023';
      end if;
      -- What is null is as if it were not there.
      entry.value := defaults || (
        select coalesce(jsonb_object_agg(f.key, f.value), '{}') from jsonb_each(entry.value) f where f.value <> 'null'
      );
      new := jsonb_populate_record(null::public.schedules, entry.value);
      if new.tenant is distinct from coalesce(tenant, new.tenant) then
        raise exception 'tenant % is not that of the call', quote_literal(left(new.tenant, 80)) using errcode = '22023',
          hint = 'Leave it out, or call without a tenant.';
      elsif tenant is not null and exists (
        select from public.schedules s where s.name = new.name and s.tenant is distinct from tenant
      ) then
        raise exception 'name % is that of another tenant''s schedule', quote_literal(new.name) using errcode = '22023',
          hint = 'Give it another name, or unschedule that first.';
      end if;
      if not exists (
        select from public.schedules s
        where s.name = new.name and jsonb_populate_record(s, entry.value - 'next_run') is not distinct from s
      ) then
        perform public.schedule_job(new.name, new.cron, new.kind, new.payload, new.time_zone, new.next_run, new.tenant,
          new.context, new.priority, new.max_attempts, new.overlap);
        scheduled := scheduled || new.name;
      end if;
    exception when data_exception then
      get stacked diagnostics hint = pg_exception_hint;
      raise exception 'ensure_schedules: entry %: %', concat_ws(', ', entry.n, quote_literal(left(entry.value ->> 'name', 80))),
        regexp_replace(sqlerrm, '^schedule_job: ', '') using errcode = '22023', hint = hint;
    end;
  end loop;
end $$;

-- Brings the app's own schedules in step, whose names start with app:, as ensure_schedules() does, when `digest` is not
-- the one that was last brought in step; else looks at nothing. So what an operator pauses or unschedules stays so until
-- the app declares something else. Of those who call at once with one digest one does it, and the others wait for that, a
-- second at most. What is not usable is not raised, but said in `error`, and in job_dispatch_health(); nothing is changed
-- then.
create function public.ensure_app_schedules(
  digest text, definitions jsonb, out scheduled text[], out removed text[], out error text
)
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s' as $$
#variable_conflict use_column
begin
  scheduled := '{}';
  removed := '{}';
  if exists (
    select from private.app_schedules a where a.digest = ensure_app_schedules.digest and a.error is null
  ) then return; end if;
  begin
    insert into private.app_schedules as a (digest) values (ensure_app_schedules.digest)
    on conflict (one) do update set digest = excluded.digest, error = null
      where a.digest <> excluded.digest or a.error is not null;
    if found then
      select e.scheduled, e.removed into scheduled, removed from public.ensure_schedules(definitions, 'app:') e;
    end if;
  -- What passes by itself, such as a lock, is raised.
  exception when data_exception or integrity_constraint_violation or raise_exception then
    error := sqlerrm;
    insert into private.app_schedules as a (digest, error) values ('', sqlerrm)
    on conflict (one) do update set error = excluded.error where a.error is distinct from excluded.error;
  end;
end $$;

-- When schedules with that cron and zone run next after `at`; where never, why; and the period, if it is an interval.
create function private.run_after(
  cron text, time_zone text, at timestamptz, out run timestamptz, out error text, out period float8
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  run := public.next_cron_run(cron, time_zone, at);
  if cron ~ '^\s*\d+\s*[[:alpha:]]+\s*$' then period := extract(epoch from run - at); end if;
exception when others then
  error := 'paused, since there is no next run: ' || sqlerrm;
  raise warning 'enqueue_due_schedules: schedules with cron % in %: %', quote_literal(cron), time_zone, error;
end $$;

-- Enqueues the jobs of these schedules, which are due and locked, or with `failure` notes why their jobs cannot be
-- enqueued, and moves their next runs on. Gives how many jobs it made, and [{"schedule", "error"}] of what has failed.
create function private.enqueue_schedules(
  names text[], at timestamptz, failure text default null, out enqueued int, out failed jsonb
)
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  claims constant text := current_setting('request.jwt.claims', true);
begin
  perform set_config('request.jwt.claims', '', true); -- who calls is not who asked for these jobs
  with due as materialized (
    select s.*, case when failure is null and (s.overlap = 'allow' or (
        select j.status in ('pending', 'running') from public.jobs j where j.id = s.last_job_id
      ) is not true) then private.new_job_id() end as job_id
    from public.schedules s where s.name = any (names)
  ), coming as materialized (
    -- Once for all that have the same cron: it is most of the work. An interval counts from when it was due; in seconds,
    -- since days would go by the session's time zone.
    select d.*, coalesce(r.error, failure) as error, coalesce(
      d.next_run + make_interval(secs => r.period * (floor(extract(epoch from at - d.next_run) / r.period) + 1)), r.run
    ) as run
    from (select distinct d.cron, d.time_zone from due d) c
    cross join lateral private.run_after(c.cron, c.time_zone, at) r
    join due d on d.cron = c.cron and d.time_zone = c.time_zone
  ), moved as (
    update public.schedules s
    set next_run = coalesce(d.run, s.next_run), paused = d.run is null, last_error = d.error,
      last_job_id = coalesce(d.job_id, s.last_job_id),
      last_run = case when d.job_id is null then s.last_run else s.next_run end
    from coming d where s.name = d.name
    returning d.*
  ), made as (
    -- From what has moved, so that a trigger on jobs may change or delete the schedule.
    insert into public.jobs (id, kind, payload, priority, max_attempts, context, schedule, due_at)
    select d.job_id, d.kind, d.payload, d.priority, d.max_attempts, d.context, d.name, d.next_run
    from moved d where d.job_id is not null order by d.job_id
    returning id
  )
  select (select count(*) from made), coalesce((
    select jsonb_agg(jsonb_build_object('schedule', m.name, 'error', m.error)) from moved m where m.error is not null
  ), '[]') into enqueued, failed;
  perform set_config('request.jwt.claims', claims, true);
end $$;

-- Enqueues the jobs of the schedules that are due, the hundred longest due first, and returns how many jobs it made, and
-- which schedules have failed: {"enqueued": 3, "failed": [{"schedule", "error"}, …]}.
-- Leaves off after three seconds, since a call over REST may take eight: what is left is due at the next call. Measured
-- among 100,000 schedules, with 100 due of one cron: 8 ms, and 9 for the whole tick (27 and 53 in a new session, of
-- which a tick with nothing to do takes 23); 20 and 25 where next_cron_run() is asked for each. 10,000 due: 0.7 to 2 s.
create function public.enqueue_due_schedules_as_json() returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off set lock_timeout = '1s' as $$
declare
  at constant timestamptz := clock_timestamp();
  names text[];
  held text[] := '{}';
  -- So many at once: more while it is quick, since a trigger of the app's on jobs may be slow.
  batch int := 1;
  largest int := 100;
  began timestamptz;
  made record;
  failure text;
  total int := 0;
  failed jsonb := '[]';
begin
  -- So that a deferred trigger on jobs raises here, for its own schedule, and not at the end for all.
  set constraints all immediate;
  while clock_timestamp() < at + interval '3 seconds' loop
    -- Of the first hundred in any order, or those that wait for a lock would be the first at every call.
    names := array(select n from unnest(array(
      select s.name from public.schedules s where not s.paused and s.next_run <= at and s.name <> all (held)
      order by s.next_run limit 100 for no key update skip locked
    )) n order by random() limit batch);
    exit when cardinality(names) = 0;
    began := clock_timestamp();
    begin
      select * into made from private.enqueue_schedules(names, at);
      total := total + made.enqueued;
      failed := failed || made.failed;
      batch := case when clock_timestamp() > began + interval '100 ms' then greatest(batch / 10, 1)
        else least(batch * 10, largest) end;
    exception when others or assert_failure or query_canceled then
      failure := left(sqlerrm, 1000);
      -- A statement that took too long is at its end, and what it has made is kept; not so when somebody cancels it.
      if sqlstate = '57014' and clock_timestamp() < began + interval '1 second' then raise; end if;
      -- One of them fails, as when a trigger of the app's on jobs raises: in small steps then; a lock takes a second.
      batch := 1;
      largest := least(largest, case when sqlstate in ('55P03', '40P01') then 1 else 10 end);
      if cardinality(names) = 1 then
        held := held || names; -- it stays due after a lock, or where it cannot be moved on
        begin
          if sqlstate not in ('55P03', '40P01') then
            raise warning 'enqueue_due_schedules: schedule %: %', names[1], failure;
            failed := failed || jsonb_build_object('schedule', names[1], 'error', failure);
            perform private.enqueue_schedules(names, at, failure);
          end if;
        exception when others or assert_failure then
          raise warning 'enqueue_due_schedules: schedule % stays due: %', names[1], sqlerrm;
        end;
      end if;
      exit when sqlstate = '57014';
    end;
  end loop;
  return jsonb_build_object('enqueued', total, 'failed', failed);
end $$;

-- The same for SQL: how many jobs it made.
create function public.enqueue_due_schedules() returns int
language sql set search_path = pg_catalog, pg_temp as $$
  select (public.enqueue_due_schedules_as_json() ->> 'enqueued')::int
$$;

revoke all on function private.check_tenant, private.run_after, private.enqueue_schedules, public.schedule_job,
  public.unschedule_job, public.unschedule_jobs, public.pause_schedule, public.resume_schedule, public.list_schedules,
  public.ensure_schedules, public.ensure_app_schedules, public.enqueue_due_schedules_as_json, public.enqueue_due_schedules
  from public, anon, authenticated;
grant execute on function private.check_tenant, private.run_after, private.enqueue_schedules, public.schedule_job,
  public.unschedule_job, public.unschedule_jobs, public.pause_schedule, public.resume_schedule, public.list_schedules,
  public.ensure_schedules, public.ensure_app_schedules, public.enqueue_due_schedules_as_json, public.enqueue_due_schedules
  to service_role;
