-- Enqueue: how work gets in.
--
-- enqueue_job writes one row, in the caller's transaction: if that rolls back there is no job, and no worker sees the job
-- before it commits. A plain insert into jobs does the same; this function adds readable errors and delays as intervals,
-- so that a caller's clock never matters.

-- A payload has 4 MB of JSON at most, however it comes in: a claim of ten must fit into a function's memory, and into the
-- API's time. The condition is looked at by the insert itself; an update of the job never does.
create function private.refuse_payload() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception 'jobs: the payload has % bytes of JSON, more than 4000000', octet_length(new.payload::text)
    using errcode = '22023', hint = 'Keep it in Storage or in a table of yours, and enqueue where it is.';
end $$;
revoke all on function private.refuse_payload from public, anon, authenticated, service_role;

create trigger refuse_payload before insert on public.jobs
  for each row when (octet_length(new.payload::text) > 4000000) execute function private.refuse_payload();

-- Enqueues a job and returns its id. `delay` counts from now on the database's clock; `available_at` is a time; at most
-- one of the two. `max_attempts` null: as job_kinds says, else 5. `context` is handed to the handler as it is.
-- Raises 22023 naming the argument that is not usable.
create function public.enqueue_job(
  kind text,
  payload jsonb default '{}',
  delay interval default null,
  available_at timestamptz default null,
  priority int default 0,
  max_attempts int default null,
  context jsonb default null
) returns uuid
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  new_id uuid;
begin
  if enqueue_job.kind is null or enqueue_job.kind !~ '^[a-z][a-z0-9_]{0,62}$' then
    raise exception 'enqueue_job: kind % is not a kind''s name', coalesce(quote_literal(left(enqueue_job.kind, 80)), 'null')
      using errcode = '22023', hint = 'Use lower case letters, digits and _, starting with a letter, at most 63 characters.';
  end if;
  if enqueue_job.payload is null then
    raise exception 'enqueue_job: payload is null' using errcode = '22023', hint = 'Leave it out for {}.';
  end if;
  if enqueue_job.delay is not null and enqueue_job.available_at is not null then
    raise exception 'enqueue_job: both delay and available_at are given' using errcode = '22023', hint = 'Give one of them.';
  end if;
  if enqueue_job.delay not between interval '0' and interval '10 years' then
    raise exception 'enqueue_job: delay % is not between 0 and 10 years', enqueue_job.delay using errcode = '22023';
  end if;
  if enqueue_job.available_at in ('infinity', '-infinity') then
    raise exception 'enqueue_job: available_at is %', enqueue_job.available_at using errcode = '22023', hint = 'Give a time.';
  end if;
  if enqueue_job.priority is null or enqueue_job.priority not between -100 and 100 then
    raise exception 'enqueue_job: priority % is not between -100 and 100', coalesce(enqueue_job.priority::text, 'null')
      using errcode = '22023';
  end if;
  if enqueue_job.max_attempts not between 1 and 1000 then
    raise exception 'enqueue_job: max_attempts % is not between 1 and 1000', enqueue_job.max_attempts using errcode = '22023';
  end if;

  insert into public.jobs (kind, payload, available_at, priority, max_attempts, context)
  values (
    enqueue_job.kind,
    enqueue_job.payload,
    -- A time in the past would overtake the jobs that already wait.
    greatest(enqueue_job.available_at, clock_timestamp() + coalesce(enqueue_job.delay, interval '0')),
    enqueue_job.priority,
    enqueue_job.max_attempts,
    enqueue_job.context
  )
  returning id into new_id;
  return new_id;
end $$;
revoke all on function public.enqueue_job from public, anon, authenticated;
grant execute on function public.enqueue_job to service_role;
