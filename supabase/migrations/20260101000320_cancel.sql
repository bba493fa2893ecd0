-- Cancel and retry: how somebody else than a worker changes a job's course.
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

-- Puts dead and cancelled jobs back, with all their attempts: those with these ids, or dead ones, of `kind` or, with no
-- arguments, of any, the first to die first; at most `max_jobs`. Their failures are kept. Returns the ids of those that now
-- wait. One whose dedupe key another job holds stays as it is, and its last_error says so. Raises 22023 when neither is given
-- but null: a query that was to give the ids has found none, and that is not to mean all.
create function public.retry_jobs(
  ids uuid[] default '{00000000-0000-0000-0000-000000000000}', kind text default null, max_jobs int default 1000
) returns setof uuid
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_custom_plan as $$
declare
  any_job constant boolean := retry_jobs.ids is null or retry_jobs.ids = '{00000000-0000-0000-0000-000000000000}';
  chosen uuid[];
begin
  if retry_jobs.ids is null and retry_jobs.kind is null then
    raise exception 'retry_jobs: ids and kind are null' using errcode = '22023',
      hint = 'Give ids, which may be {}, or a kind; call it without arguments for the dead jobs of all kinds.';
  end if;
  if retry_jobs.max_jobs is null or retry_jobs.max_jobs not between 1 and 100000 then
    raise exception 'retry_jobs: max_jobs % is not between 1 and 100000', coalesce(retry_jobs.max_jobs::text, 'null')
      using errcode = '22023';
  end if;
  chosen := array(
    select j.id from public.jobs j
    where j.id = any (case when not any_job then retry_jobs.ids else array(
        select d.id from public.jobs d
        where d.status = 'dead' and d.finished_at is not null and (retry_jobs.kind is null or d.kind = retry_jobs.kind)
        order by d.finished_at limit retry_jobs.max_jobs
      ) end)
      and j.status in ('dead', 'cancelled') and (retry_jobs.kind is null or j.kind = retry_jobs.kind)
    order by j.id limit retry_jobs.max_jobs for no key update skip locked
  );
  return query
  select r.id from private.requeue_jobs(array(
    select row(j.id, clock_timestamp(), 0, j.last_error)::private.requeued_job
    from (select d.id, d.last_error from public.jobs d where d.id = any (chosen) order by d.finished_at, d.id) j
  )) r
  where r.status = 'pending';
end $$;

revoke all on function public.cancel_jobs, public.retry_jobs from public, anon, authenticated;
grant execute on function public.cancel_jobs, public.retry_jobs to service_role;
