-- Purge: how jobs leave.
--
-- What has ended stays for as long as its kind says in job_kinds: keep_succeeded (7 days), keep_dead (30 days) and
-- keep_cancelled (7 days), counted from finished_at. Its failures go with it. The tick deletes 10,000 every ten seconds at
-- most; what somebody keeps locked is left for the next time.

-- All kinds that have settings or jobs: one probe into each index for each.
create function private.known_kinds() returns setof text
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with recursive unsettled(kind) as (
    select ''
    union all
    select least(
      (select j.kind from public.jobs j where j.status = 'running' and j.kind > u.kind order by j.kind limit 1),
      (select j.kind from public.jobs j where j.finished_at is not null and j.kind > u.kind order by j.kind limit 1)
    ) from unsettled u where u.kind is not null
  )
  select unnest(private.waiting_kinds('', 1000000, true))
  union select k.kind from public.job_kinds k
  union select u.kind from unsettled u where u.kind <> '';
end $$;

-- The kinds that have jobs which ended so long ago that they should be gone, and since `late` then; and since when the others
-- of their status must have ended to stay. The jobs of webhook messages stay for 4 days at least: their senders may repeat
-- for three what they think was not received, and without its row a message is new.
create function private.purgeable_kinds(late interval) returns table (kind text, status text, since timestamptz)
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- Postgres before 17 has no time that lies an endless interval back.
  return query
  select a.kind, s.status, s.since from private.known_kinds() a(kind) left join public.job_kinds k on k.kind = a.kind
  cross join lateral (
    select v.status, clock_timestamp() - least(
      case when starts_with(a.kind, 'webhook_') then greatest(v.keep, interval '4 days') else v.keep end, interval '1000 years'
    ) as since from (values
      ('succeeded', coalesce(k.keep_succeeded, interval '7 days')),
      ('dead', coalesce(k.keep_dead, interval '30 days')),
      ('cancelled', coalesce(k.keep_cancelled, interval '7 days'))
    ) v(status, keep) offset 0
  ) s
  cross join lateral (
    select from public.jobs j where j.kind = a.kind and j.status = s.status and j.finished_at < s.since - late limit 1
  ) j;
end $$;

-- Deletes up to `max_jobs` jobs whose time is over, and returns how many; and starts that no rate counts any more. Kinds come
-- in an order that changes, so that one with many leaves the others their turn. What cannot be deleted, such as jobs that a
-- table of the app refers to, stops only those of its kind and status, with a warning: see private.check_purge.
create function public.purge_jobs(max_jobs int default 10000) returns int
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off set lock_timeout = '1s' as $$
declare
  ended record;
  deleted int;
  total int := 0;
begin
  set constraints all immediate; -- a deferred trigger of the app's is to raise below, and not for all at the end
  begin
    -- Of a kind that is claimed its claims delete them.
    delete from private.starts s where s.at < clock_timestamp() - interval '31 days';
  exception when lock_not_available then
    null;
  end;
  for ended in
    select k.kind, k.status, k.since from private.purgeable_kinds(interval '0') k order by random()
  loop
    exit when total >= purge_jobs.max_jobs;
    begin
      delete from public.jobs d
      where d.id = any (array(
        select j.id from public.jobs j
        where j.kind = ended.kind and j.status = ended.status and j.finished_at < ended.since order by j.finished_at
        limit purge_jobs.max_jobs - total
        for update skip locked
      ));
      get diagnostics deleted = row_count;
      total := total + deleted;
    exception
      when lock_not_available then exit; -- one second is enough: the tick must get on
      when others or assert_failure then
        raise warning 'purge_jobs: % jobs of kind % stay: %', ended.status, ended.kind, sqlerrm;
    end;
  end loop;
  return total;
end $$;

revoke all on function private.known_kinds, private.purgeable_kinds, public.purge_jobs from public, anon, authenticated;
grant execute on function private.known_kinds, private.purgeable_kinds, public.purge_jobs to service_role;
