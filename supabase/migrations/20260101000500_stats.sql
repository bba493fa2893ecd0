-- Statistics: what waits, runs and has ended, per kind.
--
-- Nothing is counted beyond 10,000: a count is a text, exact up to there and then '10000+'. Each is the scan of an index
-- range that holds what is counted and nothing else, so that its cost does not depend on how many jobs there are.

-- A count that has stopped at 10,001, as text.
create function private.count_text(jobs bigint) returns text
language sql immutable set search_path = pg_catalog, pg_temp as $$
  select case when jobs > 10000 then '10000+' else jobs::text end
$$;

-- One row for each of these kinds, or for all that have settings or jobs. Pending jobs are
--   ready     due, first attempts and retries alike; oldest_ready_age is how long the oldest has been so
--   delayed   waiting for their time
--   retrying  waiting for their next attempt
-- The run times are those of the newest thousand that succeeded; failed_last_hour counts attempts. limited: jobs are due,
-- and the kind's limits let none of them start now.
create function public.job_stats(kinds text[] default null) returns table (
  kind text, ready text, delayed text, retrying text, running text, dead text, oldest_ready_age interval,
  succeeded_last_hour text, failed_last_hour text, median_run_time interval, p95_run_time interval,
  paused boolean, limited boolean
)
-- Stable, so that all counts are of one moment.
language plpgsql stable set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
#variable_conflict use_variable
declare
  at timestamptz;
  due record;
begin
  for kind in
    select distinct k from unnest(coalesce(kinds, array(select private.known_kinds()))) k where k is not null order by 1
  loop
    at := clock_timestamp();
    select * into due from private.count_due_jobs(kind, 10001);
    ready := private.count_text(due.plain + due.keyed);
    oldest_ready_age := clock_timestamp() - due.oldest;
    delayed := private.count_text((select count(*) from (
      select from public.jobs j where j.kind = kind and j.status = 'pending' and (j.attempts > 0) is false
        and j.available_at > at and (j.attempts > 0 or j.available_at > j.created_at) limit 10001) c)); -- as jobs_later has it
    retrying := private.count_text((select count(*) from (
      select from public.jobs j
      where j.kind = kind and j.status = 'pending' and j.attempts > 0 and j.available_at > at limit 10001) c));
    running := private.count_text((select count(*) from (
      select from public.jobs j where j.kind = kind and j.status = 'running' limit 10001) c));
    dead := private.count_text((select count(*) from (
      select from public.jobs j where j.kind = kind and j.status = 'dead' and j.finished_at is not null limit 10001) c));
    succeeded_last_hour := private.count_text((select count(*) from (
      select from public.jobs j
      where j.kind = kind and j.status = 'succeeded' and j.finished_at > at - interval '1 hour' limit 10001) c));
    failed_last_hour := private.count_text((select count(*) from (
      select from public.job_failures f where f.kind = kind and f.failed_at > at - interval '1 hour' limit 10001) c));
    select percentile_cont(0.5) within group (order by r.took), percentile_cont(0.95) within group (order by r.took)
    into median_run_time, p95_run_time from (
      select j.finished_at - j.locked_at as took from public.jobs j
      where j.kind = kind and j.status = 'succeeded' and j.finished_at is not null order by j.finished_at desc limit 1000) r;
    paused := exists (select from public.job_kinds k where k.kind = kind and k.paused);
    limited := not paused and due.plain + due.keyed > 0 and (select r.ready = 0 from private.count_ready_jobs(kind, 1) r);
    return next;
  end loop;
end $$;

-- The same as a view, to look at in the SQL editor or over REST.
create view public.job_health with (security_invoker = true) as select * from public.job_stats();
revoke all on public.job_health from public, anon, authenticated;
grant select on public.job_health to service_role;
revoke all on function private.count_text, public.job_stats from public, anon, authenticated;
grant execute on function private.count_text, private.count_due_jobs, private.count_ready_jobs, public.job_stats to service_role;
