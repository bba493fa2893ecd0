-- Purge: how jobs leave.
--
-- What has ended stays for as long as its kind says in job_kinds: keep_succeeded (7 days), keep_dead (30 days) and
-- keep_cancelled (7 days), counted from finished_at. Its failures go with it. The tick deletes 10,000 every ten seconds at
-- most; what somebody keeps locked is left for the next time.

-- Deletes up to `max_jobs` jobs whose time is over, and returns how many.
create function public.purge_jobs(max_jobs int default 10000) returns int
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
  at_kind text := '';
  ended record;
  deleted int;
  total int := 0;
begin
  loop
    select j.kind into at_kind from public.jobs j
    where j.finished_at is not null and j.kind > at_kind
    order by j.kind, j.status, j.finished_at
    limit 1;
    exit when not found;
    for ended in
      select s.status, clock_timestamp() - s.keep as before
      from (select 1) one
      left join public.job_kinds k on k.kind = at_kind
      cross join lateral (values
        ('succeeded', coalesce(k.keep_succeeded, interval '7 days')),
        ('dead', coalesce(k.keep_dead, interval '30 days')),
        ('cancelled', coalesce(k.keep_cancelled, interval '7 days'))
      ) s(status, keep)
    loop
      delete from public.jobs d
      where d.id = any (array(
        select j.id from public.jobs j
        where j.kind = at_kind and j.status = ended.status and j.finished_at < ended.before
        order by j.finished_at
        limit greatest(purge_jobs.max_jobs, 0) - total
        for update skip locked
      ));
      get diagnostics deleted = row_count;
      total := total + deleted;
    end loop;
  end loop;
  delete from private.starts s where s.at < clock_timestamp() - interval '31 days';
  return total;
end $$;

revoke all on function public.purge_jobs from public, anon, authenticated;
grant execute on function public.purge_jobs to service_role;
