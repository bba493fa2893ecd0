-- Settle: how a claim ends.
--
-- Every function here but the rescue names the lease token that the claim gave. A token that no longer holds changes nothing,
-- and the answer says so: the id is missing, or it is false or null. So a settle call is safe to repeat. Rows are found by id
-- and token alone: a condition on the status would let the planner walk the dead part of a partial index (measured: 87 ms).
-- They are found by `id = any (array)` and only then joined, since a join with the argument alone becomes a walk over the
-- whole primary key while the statistics say that the table is small.
--
-- Rows are locked in the order of their ids, so that two calls over the same jobs cannot deadlock. A row that somebody else
-- keeps locked is waited for one second (55P03): the caller then settles the others without it.
--
-- A job that goes back to pending may find that another holds its dedupe key meanwhile. That never raises. Of the two the
-- newer waits and the older is cancelled, with its payload; its last_error says so. Whether an enqueue that is still open
-- holds the key is not known yet: it is waited for a moment, less than it takes Postgres to call that a deadlock, and the
-- job is then left to the rescue, as one whose lease has run out.

create type private.requeued_job as (id uuid, available_at timestamptz, attempts int, last_error text);

-- Puts jobs that the caller has locked back to pending, all at once or, where a dedupe key is in the way, one by one. Returns
-- for each what it now is: pending; cancelled, when it was running and a newer job holds its key; running, when it is left
-- to the rescue; what it was, when it had ended before and its key is held.
create function private.requeue_jobs(given private.requeued_job[]) returns table (id uuid, status text)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_nestloop = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '300ms' as $$
#variable_conflict use_column
declare
  patient_until constant timestamptz := clock_timestamp() + interval '500 milliseconds';
  superseded constant text := 'superseded: another job holds its dedupe key';
  note text;
  done uuid[];
  job private.requeued_job;
  taken record;
begin
  begin
    with back as (
      update public.jobs j
      set status = 'pending', attempts = g.attempts, available_at = g.available_at, last_error = g.last_error,
        lease_token = j.lease_token + 1, lease_expires_at = null, finished_at = null, updated_at = clock_timestamp()
      from unnest(given) g where j.id = any (array(select i.id from unnest(given) i)) and j.id = g.id returning j.id
    )
    select array_agg(b.id) into done from back b;
    return query select d, 'pending' from unnest(done) d;
    return;
  exception when unique_violation or lock_not_available or deadlock_detected then
    null;
  end;

  -- The newest first, so that it gets the key.
  for job in select distinct on (g.id) * from unnest(given) g order by g.id desc loop
    id := job.id;
    perform set_config('lock_timeout', case when clock_timestamp() < patient_until then '50ms' else '1ms' end, true);
    begin
      select j.kind, j.dedupe_key, j.status = 'running' as running into taken from public.jobs j where j.id = job.id;
      update public.jobs j
      set status = 'cancelled', finished_at = clock_timestamp(), updated_at = clock_timestamp(),
        last_error = concat_ws(E'\n', j.last_error, superseded)
      where taken.running and j.id = (
        select o.id from public.jobs o
        where o.kind = taken.kind and o.dedupe_key = taken.dedupe_key and o.status = 'pending' and o.id < job.id
        for no key update skip locked
      );
      update public.jobs j
      set status = 'pending', attempts = job.attempts, available_at = job.available_at, last_error = job.last_error,
        lease_token = j.lease_token + 1, lease_expires_at = null, finished_at = null, updated_at = clock_timestamp()
      where j.id = job.id;
      status := 'pending';
      return next;
      continue;
    exception
      when unique_violation then note := superseded;
      when lock_not_available or deadlock_detected then
        note := 'not put back yet: an enqueue with its dedupe key is not committed';
    end;
    update public.jobs j
    set status = case when taken.running and note = superseded then 'cancelled' else j.status end,
      attempts = case when taken.running then job.attempts else j.attempts end, -- what is given back stays uncounted
      lease_token = j.lease_token + (taken.running and note = superseded)::int,
      lease_expires_at = case when taken.running and note <> superseded then clock_timestamp() end,
      finished_at = case when not (taken.running and note <> superseded) then coalesce(j.finished_at, clock_timestamp()) end,
      last_error = concat_ws(E'\n', nullif(rtrim(replace(coalesce(job.last_error, ''), note, ''), E'\n'), ''), note),
      updated_at = clock_timestamp()
    where j.id = job.id returning j.status into status;
    return next;
  end loop;
end $$;

-- Completes the jobs in [{"id", "lease_token", "result"}] and returns the ids that were still held. A result of more than
-- 4 MB is cut: {"cut": its first 10,000 characters, "characters": how many it had}.
create function public.complete_jobs(completions jsonb) returns setof uuid
language sql set search_path = pg_catalog, pg_temp
set enable_nestloop = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '1s' as $$
  with c as materialized (
    select (e ->> 'id')::uuid as id, (e ->> 'lease_token')::int as lease_token, e -> 'result' as result
    from jsonb_array_elements(completions) e order by 1
  )
  update public.jobs j
  set status = 'succeeded', lease_token = j.lease_token + 1, lease_expires_at = null,
    result = case
      when pg_column_size(c.result) <= 4000000 then c.result
      else jsonb_build_object('cut', left(c.result::text, 10000), 'characters', length(c.result::text))
    end,
    finished_at = clock_timestamp(), updated_at = clock_timestamp()
  from c where j.id = any (array(select i.id from c i)) and j.id = c.id and j.lease_token = c.lease_token
    and j.lease_expires_at is not null
  returning j.id
$$;

-- Completes one job; false when it was not held.
create function public.complete_job(id uuid, lease_token int, result jsonb default null) returns boolean
language sql set search_path = pg_catalog, pg_temp as $$
  select count(*) > 0 from public.complete_jobs(jsonb_build_array(jsonb_build_object(
    'id', complete_job.id, 'lease_token', complete_job.lease_token, 'result', complete_job.result
  )))
$$;

create type private.failed_attempt as (
  id uuid, kind text, lease_token int, attempt int, worker text, error text, retry_at timestamptz
);

-- Ends an attempt as failed for each of [{"id", "lease_token", "error", "retry_in", "permanent"}]. The job waits for its
-- retry, or is dead when this was its last attempt or `permanent` is true, or cancelled when a newer job holds its dedupe
-- key. `retry_in` (an interval, or seconds) overrides the kind's backoff; at most 30 days. An error of more than 10,000
-- characters is cut, and says so. Returns what became of those that were still held, but for what is left to the rescue;
-- available_at is null unless it is pending.
create function public.fail_jobs(failures jsonb) returns table (id uuid, status text, available_at timestamptz)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_nestloop = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '1s' as $$
#variable_conflict use_column
declare
  failed private.failed_attempt[];
  died_at timestamptz;
begin
  failed := array(
    select distinct on (held.id) row(
      held.id, held.kind, held.lease_token, held.attempts, held.locked_by,
      case
        when (held.x).error is not null then (held.x).error
        -- The workers of this template cut it themselves, and add how long it was.
        when length(e ->> 'error') > 10100
        then format('%s… (cut, %s characters in all)', left(e ->> 'error', 10000), length(e ->> 'error'))
        else coalesce(e ->> 'error', 'failed without a message')
      end,
      case
        when coalesce((e ->> 'permanent')::boolean, false) or held.attempts >= coalesce(held.max_attempts, (held.k).max_attempts, 5)
        then null
        when (held.x).retry_at is not null then greatest((held.x).retry_at, clock_timestamp())
        when e ->> 'retry_in' is not null
        then clock_timestamp() + greatest(least((e ->> 'retry_in')::interval, interval '30 days'), interval '0')
        -- The exponent is clamped before the power is taken: with enough attempts it would overflow.
        else clock_timestamp() + make_interval(secs => least(
          extract(epoch from coalesce((held.k).backoff_base, interval '30 seconds'))::double precision
            * power(coalesce((held.k).backoff_factor, 2), least(held.attempts, 60)),
          extract(epoch from coalesce((held.k).backoff_cap, interval '1 hour'))::double precision
        ) * (1 - coalesce((held.k).backoff_jitter, 0.2) * random()))
      end
    )::private.failed_attempt
    from (
      select h.id, h.kind, h.lease_token, h.attempts, h.max_attempts, h.locked_by, e.value as e,
        (select k from public.job_kinds k where k.kind = h.kind) as k,
        -- It has failed before, and was left to the rescue.
        (select f from public.job_failures f where f.job_id = h.id and f.lease_token = h.lease_token) as x
      from jsonb_array_elements(failures) e
      join public.jobs h on h.id = (e.value ->> 'id')::uuid and h.lease_token = (e.value ->> 'lease_token')::int
        and h.lease_expires_at is not null
      where h.id = any (array(select (i ->> 'id')::uuid from jsonb_array_elements(failures) i))
      order by h.id for no key update of h
    ) held
    order by held.id
  );

  -- One time for both tables: list_dead_jobs goes on after a job that was put back by that of its failure.
  died_at := clock_timestamp();
  update public.jobs j
  set status = 'dead', lease_token = j.lease_token + 1, lease_expires_at = null, last_error = f.error,
    finished_at = died_at, updated_at = died_at
  from unnest(failed) f
  where j.id = any (array(select i.id from unnest(failed) i)) and j.id = f.id and f.retry_at is null;

  return query
  with requeued as materialized (
    select r.id, r.status from private.requeue_jobs(array(
      select row(f.id, f.retry_at, f.attempt, f.error)::private.requeued_job from unnest(failed) f where f.retry_at is not null
    )) r
  ), ended as materialized (
    select f.*, coalesce(r.status, 'dead') as status from unnest(failed) f left join requeued r on r.id = f.id
  ), recorded as (
    insert into public.job_failures (job_id, kind, attempt, lease_token, worker, error, failed_at, retry_at, unreported)
    select n.id, n.kind, n.attempt, n.lease_token, n.worker, n.error, died_at,
      case when n.status in ('pending', 'running') then n.retry_at end, n.error like 'lease expired: worker %'
    from ended n
    on conflict do nothing
  )
  select n.id, n.status, case when n.status = 'pending' then n.retry_at end from ended n where n.status <> 'running';
end $$;

-- Ends one attempt as failed: what then became of the job, null when it was not held.
create function public.fail_job(
  id uuid, lease_token int, error text, retry_in interval default null, permanent boolean default false
) returns text
language sql set search_path = pg_catalog, pg_temp as $$
  select f.status from public.fail_jobs(jsonb_build_array(jsonb_build_object(
    'id', fail_job.id, 'lease_token', fail_job.lease_token, 'error', fail_job.error,
    'retry_in', fail_job.retry_in, 'permanent', fail_job.permanent
  ))) f
$$;

-- Gives back the jobs in [{"id", "lease_token", "delay"}] without counting the attempt; `delay` (an interval, or seconds,
-- at most 10 years) is how long they then wait. Returns the ids that were still held, but for what is left to the rescue.
create function public.release_jobs(releases jsonb) returns setof uuid
language plpgsql set search_path = pg_catalog, pg_temp
set enable_nestloop = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '1s' as $$
begin
  return query
  select r.id from private.requeue_jobs(array(
    select row(
      j.id,
      case
        when (e.value ->> 'delay')::interval > interval '0'
        then clock_timestamp() + least((e.value ->> 'delay')::interval, interval '10 years')
        else j.available_at
      end,
      greatest(j.attempts - 1, 0),
      j.last_error
    )::private.requeued_job
    from jsonb_array_elements(releases) e
    join public.jobs j on j.id = (e.value ->> 'id')::uuid and j.lease_token = (e.value ->> 'lease_token')::int
      and j.lease_expires_at is not null
    where j.id = any (array(select (i ->> 'id')::uuid from jsonb_array_elements(releases) i))
    order by j.id for no key update of j
  )) r
  where r.status <> 'running';
end $$;

-- Extends the leases in [{"id", "lease_token"}] to `lease_seconds` from now and returns the ids that are still held. A
-- lease that is missing from the answer is lost: its handler must stop, and what it returns will be refused.
create function public.extend_jobs(leases jsonb, lease_seconds int default 60) returns table (id uuid)
language sql set search_path = pg_catalog, pg_temp
set enable_nestloop = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '1s' as $$
  with l as materialized (
    select (e ->> 'id')::uuid as id, (e ->> 'lease_token')::int as lease_token from jsonb_array_elements(leases) e order by 1
  )
  update public.jobs j
  set lease_expires_at = clock_timestamp() + make_interval(secs => greatest(1, least(extend_jobs.lease_seconds, 86400)))
  from l where j.id = any (array(select i.id from l i)) and j.id = l.id and j.lease_token = l.lease_token
    and j.lease_expires_at is not null
  returning j.id
$$;

-- Merges these fields into the job's progress, which the next attempt is given, and those of `steps` into its steps; false
-- when the job was not held. Raises 22023 for what is no object, and when progress would have more than 1 MB of JSON.
create function public.checkpoint_job(id uuid, lease_token int, fields jsonb) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off set lock_timeout = '1s' as $$
declare
  merged jsonb;
begin
  if jsonb_typeof(fields) is distinct from 'object' or jsonb_typeof(fields -> 'steps') <> 'object' then
    raise exception 'checkpoint_job: fields, or steps in it, is not an object' using errcode = '22023',
      hint = 'Give {"name": value, …}.';
  end if;
  select coalesce(j.progress, '{}') || fields || case
      when fields ? 'steps' then jsonb_build_object('steps', coalesce(j.progress -> 'steps', '{}') || (fields -> 'steps'))
      else '{}'
    end into merged
  from public.jobs j
  where j.id = checkpoint_job.id and j.lease_token = checkpoint_job.lease_token and j.lease_expires_at is not null
  for no key update;
  if not found then return false; end if;
  if fields = '{}' then return true; end if; -- only to see whether it is held
  if private.is_too_large(merged, 1000000) then
    raise exception 'checkpoint_job: progress would have more than 1000000 bytes of JSON' using errcode = '22023',
      hint = 'Keep it in Storage or in a table of yours, and where it is in progress.';
  end if;
  update public.jobs j set progress = merged, updated_at = clock_timestamp() where j.id = checkpoint_job.id;
  return true;
end $$;

-- Ends the attempts whose lease has run out, at most `max_jobs` of them, as failed: the worker is gone or stuck. They are
-- available again at once, since the lost lease was the wait, or dead when that was the last attempt. Returns how many.
-- The lock reads each row anew, so a job that has just been completed is left alone.
create function public.rescue_expired_jobs(max_jobs int default 1000) returns int
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
  expired jsonb;
  one jsonb;
  rescued int := 0;
begin
  set constraints all immediate; -- a deferred trigger of the app's is to raise here as well
  expired := (
    select coalesce(jsonb_agg(jsonb_build_object(
      'id', e.id, 'lease_token', e.lease_token, 'retry_in', 0, 'error', format(
        'lease expired: worker %s neither finished the job nor extended its lease by %s', e.locked_by, e.lease_expires_at
      )
    )), '[]') from (
      select j.* from public.jobs j where j.status = 'running' and j.lease_expires_at < (select clock_timestamp())
      order by j.lease_expires_at limit greatest(1, least(rescue_expired_jobs.max_jobs, 10000))
      for no key update skip locked
    ) e
  );
  begin
    return (select count(*) from public.fail_jobs(expired));
  exception when others or assert_failure then
    null; -- A trigger of the app may raise for one of them, and is to hold up no other.
  end;
  for one in select jsonb_array_elements(expired) loop
    begin
      rescued := rescued + (select count(*) from public.fail_jobs(jsonb_build_array(one)));
    exception when others or assert_failure then
      raise warning 'rescue_expired_jobs: job % stays: %', one ->> 'id', sqlerrm;
    end;
  end loop;
  return rescued;
end $$;

-- Hands over up to `max_attempts` attempts of the last day that ended with their lease, each to one caller: the worker is
-- gone, so the next one reports them.
create function public.take_lost_attempts(max_attempts int default 100)
returns table (job_id uuid, kind text, attempt int, error text)
language sql set search_path = pg_catalog, pg_temp as $$
  update public.job_failures f set unreported = false
  where f.ctid = any (array(
    select u.ctid from public.job_failures u
    where u.unreported and u.failed_at > (select clock_timestamp()) - interval '1 day'
    order by u.failed_at limit greatest(1, least(take_lost_attempts.max_attempts, 1000)) for no key update skip locked
  ))
  returning f.job_id, f.kind, f.attempt, f.error
$$;

revoke all on function private.requeue_jobs, public.complete_jobs, public.complete_job, public.fail_jobs, public.fail_job, public.release_jobs,
  public.extend_jobs, public.checkpoint_job, public.rescue_expired_jobs, public.take_lost_attempts from public, anon, authenticated;
grant execute on function private.requeue_jobs, public.complete_jobs, public.complete_job, public.fail_jobs, public.fail_job, public.release_jobs,
  public.extend_jobs, public.checkpoint_job, public.rescue_expired_jobs, public.take_lost_attempts to service_role;
