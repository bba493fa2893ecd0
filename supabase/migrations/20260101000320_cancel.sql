-- Cancel, reschedule, list and retry: how somebody else than a worker changes a job's course.
--
-- They raise for nobody's lock: a job that somebody else keeps locked, as an enqueue that it has absorbed does until that is
-- committed, stays as it is and is missing from the answer.

-- Cancels the jobs among these that wait or run, and returns their ids. A running one's token is void at once; its worker
-- finds out at its next heartbeat and tells the handler by its signal.
create function public.cancel_jobs(ids uuid[]) returns setof uuid
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '300ms' as $$
begin
  begin
    -- For what is locked but for a moment, as by a claim or a heartbeat.
    perform from public.jobs j where j.id = any (cancel_jobs.ids) and j.status in ('pending', 'running')
    order by j.id for no key update;
  exception when lock_not_available or deadlock_detected then
    null;
  end;
  return query update public.jobs j
  set status = 'cancelled', lease_token = j.lease_token + 1, lease_expires_at = null, finished_at = clock_timestamp(),
    updated_at = clock_timestamp()
  where j.id = any (array(
    select c.id from public.jobs c where c.id = any (cancel_jobs.ids) and c.status in ('pending', 'running')
    order by c.id for no key update skip locked
  )) returning j.id;
end $$;

-- Sets when the waiting jobs among these are due, a retry included, and returns their ids; a time that has passed means now.
-- Raises 22023 for null or an endless time.
create function public.reschedule_jobs(ids uuid[], available_at timestamptz) returns setof uuid
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '300ms' as $$
begin
  if isfinite(reschedule_jobs.available_at) is not true then
    raise exception 'reschedule_jobs: available_at is %', coalesce(reschedule_jobs.available_at::text, 'null')
      using errcode = '22023', hint = 'Give a time; cancel_jobs() ends what is never to run.';
  end if;
  return query update public.jobs j
  set available_at = greatest(reschedule_jobs.available_at, clock_timestamp()), updated_at = clock_timestamp()
  where j.id = any (array(
    select p.id from public.jobs p where p.id = any (reschedule_jobs.ids) and p.status = 'pending'
    order by p.id for no key update skip locked
  )) returning j.id;
end $$;

-- Dead jobs, of `kind` or of all kinds, the last to die first, at most `max_jobs` (1 to 1000). `before` is the last of the
-- page before; it may have been put back meanwhile. Raises 22023 where it is not, and was not, a dead job.
-- Without enable_sort off, Postgres 15 with stale statistics sorts all dead jobs of a kind, and not those of one moment.
create function public.list_dead_jobs(kind text default null, max_jobs int default 50, before uuid default null)
returns setof public.jobs
language plpgsql stable set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
  died_before timestamptz := 'infinity';
begin
  perform private.check_argument('list_dead_jobs: max_jobs', list_dead_jobs.max_jobs, 1, 1000);
  if list_dead_jobs.before is not null then
    died_before := (
      select case when j.status = 'dead' then j.finished_at else (
        select max(f.failed_at) from public.job_failures f where f.job_id = j.id and f.retry_at is null
      ) end
      from public.jobs j where j.id = list_dead_jobs.before
    );
    if died_before is null then
      raise exception 'list_dead_jobs: before, %, has not died', list_dead_jobs.before using errcode = '22023',
        hint = 'Give the id of the last job of the page before, or leave it out for the first page.';
    end if;
  end if;
  return query
  select d.* from unnest(case
    when list_dead_jobs.kind is null then array(select private.known_kinds()) else array[list_dead_jobs.kind]
  end) k(kind)
  cross join lateral (
    select j.* from public.jobs j
    where j.kind = k.kind and j.status = 'dead' and j.finished_at <= died_before -- it has a time, as the index wants
      and (j.finished_at, j.id) < (died_before, coalesce(list_dead_jobs.before, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
    order by j.finished_at desc, j.id desc limit list_dead_jobs.max_jobs
  ) d
  order by d.finished_at desc, d.id desc limit list_dead_jobs.max_jobs;
end $$;

-- Puts dead and cancelled jobs back, with all their attempts: those with these ids, or dead ones, of `kind` or, with no
-- arguments, of any, the first to die first; at most `max_jobs`. Their failures and progress are kept. Returns the ids of
-- those that now wait. One whose dedupe key another job holds stays as it is, and its last_error says so. Raises 22023 when
-- null is all that is given: a query that was to give the ids or the kind has found none, and that is not to mean all. So the
-- defaults are not null.
create function public.retry_jobs(
  ids uuid[] default '{00000000-0000-0000-0000-000000000000}', kind text default '', max_jobs int default 1000
) returns setof uuid
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_custom_plan as $$
declare
  any_job constant boolean := retry_jobs.ids is null or retry_jobs.ids = '{00000000-0000-0000-0000-000000000000}';
  of_kind constant text := nullif(retry_jobs.kind, '');
  chosen uuid[];
begin
  if any_job and (retry_jobs.kind is null or retry_jobs.ids is null and of_kind is null) then
    raise exception 'retry_jobs: what is given is null' using errcode = '22023',
      hint = 'Give ids, which may be {}, or a kind; call it without arguments for the dead jobs of all kinds.';
  end if;
  perform private.check_argument('retry_jobs: max_jobs', retry_jobs.max_jobs, 1, 100000);
  chosen := array(
    select j.id from public.jobs j
    where j.id = any (case when not any_job then retry_jobs.ids else array(
        select d.id from public.jobs d
        where d.status = 'dead' and d.finished_at is not null and (of_kind is null or d.kind = of_kind)
        order by d.finished_at limit retry_jobs.max_jobs
      ) end)
      and j.status in ('dead', 'cancelled') and (of_kind is null or j.kind = of_kind)
    order by j.id limit retry_jobs.max_jobs for no key update skip locked
  );
  return query
  select r.id from private.requeue_jobs(array(
    select row(j.id, clock_timestamp(), 0, j.last_error)::private.requeued_job
    from (select d.id, d.last_error from public.jobs d where d.id = any (chosen) order by d.finished_at, d.id) j
  )) r
  where r.status = 'pending';
end $$;

revoke all on function public.cancel_jobs, public.reschedule_jobs, public.list_dead_jobs, public.retry_jobs
  from public, anon, authenticated;
grant execute on function public.cancel_jobs, public.reschedule_jobs, public.list_dead_jobs, public.retry_jobs to service_role;
