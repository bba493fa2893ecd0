-- Settle: how a claim ends.
--
-- Every function here but the rescue names the lease token that the claim gave. A token that no longer holds changes nothing, and the
-- answer says so: the id is missing from it, or it is false or null. That makes a settle call safe to repeat when its
-- answer was lost. Rows are found by id and token alone: a condition on the status would let the planner walk the dead
-- part of a partial index (measured: 87 ms).
--
-- Rows are locked in the order of their ids, so that two calls over the same jobs cannot deadlock. A row that somebody else
-- keeps locked is waited for one second (55P03): the caller then settles the others without it.

-- Completes the jobs in [{"id", "lease_token", "result"}] and returns the ids that were still held. A result of more than
-- 4 MB is cut: {"cut": its first 10,000 characters, "characters": how many it had}.
create function public.complete_jobs(completions jsonb) returns setof uuid
language sql
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set jit = off
set lock_timeout = '1s'
as $$
  update public.jobs j
  set status = 'succeeded',
    lease_token = j.lease_token + 1,
    lease_expires_at = null,
    result = case
      when pg_column_size(c.result) <= 4000000 then c.result
      else jsonb_build_object('cut', left(c.result::text, 10000), 'characters', length(c.result::text))
    end,
    finished_at = clock_timestamp(),
    updated_at = clock_timestamp()
  from (
    select (e ->> 'id')::uuid as id, (e ->> 'lease_token')::int as lease_token, e -> 'result' as result
    from jsonb_array_elements(completions) e
    order by 1
  ) c
  where j.id = c.id and j.lease_token = c.lease_token and j.lease_expires_at is not null
  returning j.id
$$;

-- Completes one job; false when it was not held.
create function public.complete_job(id uuid, lease_token int, result jsonb default null) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
  select exists (
    select from public.complete_jobs(jsonb_build_array(jsonb_build_object(
      'id', complete_job.id, 'lease_token', complete_job.lease_token, 'result', complete_job.result
    )))
  )
$$;

-- Ends an attempt as failed for each of [{"id", "lease_token", "error", "retry_in", "permanent"}]. The job waits for its
-- retry, or is dead when this was its last attempt or `permanent` is true. `retry_in` (an interval, or seconds) overrides
-- the kind's backoff; at most 30 days. An error of more than 10,000 characters is cut, and says so. Returns what became of
-- those that were still held; available_at is null for dead.
create function public.fail_jobs(failures jsonb) returns table (id uuid, status text, available_at timestamptz)
language sql
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set jit = off
set lock_timeout = '1s'
as $$
  with failed as (
    update public.jobs j
    set status = case when f.dead then 'dead' else 'pending' end,
      lease_token = j.lease_token + 1,
      lease_expires_at = null,
      last_error = f.error,
      available_at = case when f.dead then j.available_at else clock_timestamp() + f.wait end,
      finished_at = case when f.dead then clock_timestamp() end,
      updated_at = clock_timestamp()
    from (
      select held.id, held.lease_token,
        case
          -- The workers of this template cut it themselves, and add how long it was.
          when length(e ->> 'error') > 10100
          then format('%s… (cut, %s characters in all)', left(e ->> 'error', 10000), length(e ->> 'error'))
          else coalesce(e ->> 'error', 'failed without a message')
        end as error,
        coalesce((e ->> 'permanent')::boolean, false) or held.attempts >= coalesce(held.max_attempts, k.max_attempts, 5) as dead,
        case
          when e ->> 'retry_in' is not null
          then greatest(least((e ->> 'retry_in')::interval, interval '30 days'), interval '0')
          -- The exponent is clamped before the power is taken: with enough attempts it would overflow.
          else make_interval(secs => least(
            extract(epoch from coalesce(k.backoff_base, interval '30 seconds'))::double precision
              * power(coalesce(k.backoff_factor, 2), least(held.attempts, 60)),
            extract(epoch from coalesce(k.backoff_cap, interval '1 hour'))::double precision
          ) * (1 - coalesce(k.backoff_jitter, 0.2) * random()))
        end as wait
      from jsonb_array_elements(failures) e
      cross join lateral (
        select h.id, h.kind, h.lease_token, h.attempts, h.max_attempts from public.jobs h
        where h.id = (e ->> 'id')::uuid and h.lease_token = (e ->> 'lease_token')::int and h.lease_expires_at is not null
      ) held
      left join public.job_kinds k on k.kind = held.kind
      order by held.id
    ) f
    where j.id = f.id and j.lease_token = f.lease_token and j.lease_expires_at is not null
    returning j.id, j.kind, j.status, case when j.status = 'pending' then j.available_at end as retry_at,
      j.attempts, f.lease_token as failed_token, j.locked_by, j.last_error
  ), recorded as (
    insert into public.job_failures (job_id, kind, attempt, lease_token, worker, error, retry_at)
    select f.id, f.kind, f.attempts, f.failed_token, f.locked_by, f.last_error, f.retry_at from failed f
  )
  select f.id, f.status, f.retry_at from failed f
$$;

-- Ends one attempt as failed: 'pending' when it will be retried, 'dead' when not, null when it was not held.
create function public.fail_job(
  id uuid,
  lease_token int,
  error text,
  retry_in interval default null,
  permanent boolean default false
) returns text
language sql
set search_path = pg_catalog, pg_temp
as $$
  select f.status
  from public.fail_jobs(jsonb_build_array(jsonb_build_object(
    'id', fail_job.id, 'lease_token', fail_job.lease_token, 'error', fail_job.error,
    'retry_in', fail_job.retry_in, 'permanent', fail_job.permanent
  ))) f
$$;

-- Gives back the jobs in [{"id", "lease_token", "delay"}] without counting the attempt; `delay` (an interval, or seconds,
-- at most 10 years) is how long they then wait. Returns the ids that were still held.
create function public.release_jobs(releases jsonb) returns setof uuid
language sql
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set jit = off
set lock_timeout = '1s'
as $$
  update public.jobs j
  set status = 'pending',
    attempts = greatest(j.attempts - 1, 0),
    lease_token = j.lease_token + 1,
    lease_expires_at = null,
    available_at = case
      when r.delay > interval '0' then clock_timestamp() + least(r.delay, interval '10 years')
      else j.available_at
    end,
    updated_at = clock_timestamp()
  from (
    select (e ->> 'id')::uuid as id, (e ->> 'lease_token')::int as lease_token, (e ->> 'delay')::interval as delay
    from jsonb_array_elements(releases) e
    order by 1
  ) r
  where j.id = r.id and j.lease_token = r.lease_token and j.lease_expires_at is not null
  returning j.id
$$;

-- Extends the leases in [{"id", "lease_token"}] to `lease_seconds` from now and returns the ids that are still held. A
-- lease that is missing from the answer is lost: its handler must stop, and what it returns will be refused.
create function public.extend_jobs(leases jsonb, lease_seconds int default 60) returns table (id uuid)
language sql
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set jit = off
set lock_timeout = '1s'
as $$
  update public.jobs j
  set lease_expires_at = clock_timestamp() + make_interval(secs => greatest(1, least(extend_jobs.lease_seconds, 86400)))
  from (
    select (e ->> 'id')::uuid as id, (e ->> 'lease_token')::int as lease_token
    from jsonb_array_elements(leases) e
    order by 1
  ) l
  where j.id = l.id and j.lease_token = l.lease_token and j.lease_expires_at is not null
  returning j.id
$$;

-- Attempts that ended with their lease. The worker is gone, so the next one reports them. Unlogged: after a crash of the
-- server they are in job_failures alone.
create unlogged table private.lost_attempts (
  job_id uuid not null,
  kind text not null,
  attempt int not null,
  error text not null,
  lost_at timestamptz not null default clock_timestamp()
);
alter table private.lost_attempts enable row level security;
revoke all on private.lost_attempts from public, anon, authenticated, service_role;
grant select, insert, update, delete on private.lost_attempts to service_role;

-- Ends the attempts whose lease has run out, at most `max_jobs` of them, as failed: the worker is gone or stuck. They are
-- available again at once, since the lost lease was the wait, or dead when that was the last attempt. Returns how many.
-- The lock reads each row anew, so a job that has just been completed is left alone.
create function public.rescue_expired_jobs(max_jobs int default 1000) returns int
language sql
set search_path = pg_catalog, pg_temp
as $$
  with expired as (
    select j.id, j.kind, j.attempts, j.lease_token, format(
      'lease expired: worker %s neither finished the job nor extended its lease by %s', j.locked_by, j.lease_expires_at
    ) as error
    from public.jobs j
    where j.status = 'running' and j.lease_expires_at < (select clock_timestamp())
    order by j.lease_expires_at
    limit greatest(1, least(rescue_expired_jobs.max_jobs, 10000))
    for no key update skip locked
  ), failed as (
    select f.id from public.fail_jobs((
      select coalesce(jsonb_agg(jsonb_build_object(
        'id', e.id, 'lease_token', e.lease_token, 'error', e.error, 'retry_in', 0
      )), '[]') from expired e
    )) f
  ), noted as (
    insert into private.lost_attempts (job_id, kind, attempt, error)
    select e.id, e.kind, e.attempts, e.error from expired e join failed f on f.id = e.id
  )
  select count(*)::int from failed
$$;

-- Hands over up to `max_attempts` of the attempts that ended with their lease, each to one caller.
create function public.take_lost_attempts(max_attempts int default 100)
returns table (job_id uuid, kind text, attempt int, error text)
language sql
set search_path = pg_catalog, pg_temp
as $$
  delete from private.lost_attempts l
  where l.ctid = any (array(
    select t.ctid from private.lost_attempts t
    order by t.lost_at
    limit greatest(1, least(take_lost_attempts.max_attempts, 1000))
    for update skip locked
  ))
  returning l.job_id, l.kind, l.attempt, l.error
$$;

revoke all on function public.complete_jobs, public.complete_job, public.fail_jobs, public.fail_job, public.release_jobs,
  public.extend_jobs, public.rescue_expired_jobs, public.take_lost_attempts from public, anon, authenticated;
grant execute on function public.complete_jobs, public.complete_job, public.fail_jobs, public.fail_job, public.release_jobs,
  public.extend_jobs, public.rescue_expired_jobs, public.take_lost_attempts to service_role;
