-- Dispatch: how work starts.
--
--   wake  A trigger on jobs pokes the job-worker function through pg_net when something due was inserted.
--   tick  pg_cron runs private.tick() every 10 seconds: it rescues expired leases, and pokes workers if jobs are ready.
--
-- A poke is an HTTP request that says "look now". It may be lost or doubled: all state is in the tables, and the tick
-- finds what a lost poke leaves. An idle project makes no function calls.
--
-- The wake may never fail, block or slow an enqueue. It takes no lock that another enqueue could hold, and writes nothing
-- but the poke: it reads whether a worker has promised to look by itself, or a poke is queued already, and otherwise
-- pokes. (A row to be updated by whoever pokes would lose every wake while one enqueuing transaction stays open.)
--
-- Address and secret come from Vault: project_url and cron_secret. What is missing makes the tick fail, every ten seconds,
-- in cron.job_run_details; never an enqueue. job_dispatch_health() says what is wrong and what to do.
--
-- pg_cron, pg_net and Vault are created where the server offers them, and named only inside plpgsql, where a name is
-- looked up when it is used. Where they are missing the queue works, and something else must call the drain function.

do $$
begin
  if exists (select from pg_available_extensions where name = 'pg_net') then
    create extension if not exists pg_net with schema extensions;
  end if;
  if exists (select from pg_available_extensions where name = 'pg_cron') then
    create extension if not exists pg_cron;
  end if;
end $$;

-- Which pg_net requests were ours, so that their answers can be found. Unlogged, as pg_net's own tables are.
create unlogged table private.pokes (
  request_id bigint not null,
  reason text not null,
  poked_at timestamptz not null default clock_timestamp()
);
create index pokes_poked_at on private.pokes (poked_at);
alter table private.pokes enable row level security;
revoke all on private.pokes from public, anon, authenticated, service_role;

-- Where job-worker is and the secret that opens it. Raises 55000 naming what is not set up. Reads the secret: nobody may
-- call it directly.
create function private.worker_endpoint(out url text, out cron_secret text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  wrong text;
begin
  if to_regclass('vault.decrypted_secrets') is null or to_regclass('net.http_request_queue') is null then
    raise exception 'no worker can be started: the extensions pg_net and supabase_vault are needed'
      using errcode = '55000', hint = 'Create them, or call the drain function from outside and run select disable_dispatch().';
  end if;
  select max(s.decrypted_secret) filter (where s.name = 'project_url'),
    max(s.decrypted_secret) filter (where s.name = 'cron_secret')
  into url, cron_secret
  from vault.decrypted_secrets s
  where s.name in ('project_url', 'cron_secret');
  url := btrim(url, E' \t\r\n');
  -- While the secret is being rotated there are two; either opens the door.
  cron_secret := btrim(split_part(cron_secret, ',', 1), E' \t\r\n');
  wrong := case
    when url is null then 'project_url is not in Vault'
    when url !~ '^https?://[^/]' then 'project_url in Vault does not start with http:// or https://'
    when cron_secret is null then 'cron_secret is not in Vault'
    when length(cron_secret) < 32 then 'cron_secret in Vault is shorter than 32 characters'
  end;
  if wrong is not null then
    raise exception 'no worker can be started: %', wrong
      using errcode = '55000', hint = 'select * from job_dispatch_health() says what to do.';
  end if;
  url := rtrim(url, '/') || '/functions/v1/job-worker';
end $$;

-- Queues one poke.
create function private.poke(reason text) returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  endpoint record;
begin
  select * into endpoint from private.worker_endpoint();
  insert into private.pokes (request_id, reason)
  select net.http_post(
    url => endpoint.url,
    body => '{}'::jsonb,
    headers => jsonb_build_object('Content-Type', 'application/json', 'Authorization', 'Bearer ' || endpoint.cron_secret),
    timeout_milliseconds => 5000
  ), poke.reason;
end $$;

-- How many pokes wait to be sent. One that pg_net is sending is deleted by its open transaction (xmax): it has left, and a
-- slow answer beside it may keep that transaction open for seconds. pg_net's queue has no index.
create function private.count_queued_pokes() returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return (select count(*) from net.http_request_queue q where q.url like '%/functions/v1/job-worker' and q.xmax = 0);
end $$;

-- The wake. A missing extension or secret, a lock or anything else that goes wrong ends here: the tick reports it.
-- Measured with the real pg_net beside a single-row insert of 65 µs: 30 µs while a worker is awake or a poke is queued (as
-- long as pg_net's queue is short), 140 µs for the few inserts a second that poke.
create function private.wake() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
begin
  if exists (select from inserted i where i.status = 'pending' and i.available_at <= clock_timestamp())
    and not exists (select from private.awake_workers w where w.awake_until > clock_timestamp())
    and (select d.enabled from private.dispatch d)
  then
    -- Apart, so that an insert beside an awake worker does not touch pg_net's queue at all.
    if private.count_queued_pokes() = 0 then
      perform private.poke('wake');
    end if;
  end if;
  return null;
exception when others then
  return null;
end $$;

create trigger wake after insert on public.jobs
  referencing new table as inserted
  for each statement execute function private.wake();

-- How many jobs are due, counted to `max_jobs`, and since when the oldest of them is: one step through the index for each
-- kind and priority that waits.
create function private.ready_jobs(max_jobs int, out total int, out oldest timestamptz)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
  at_kind text := '';
  at_priority int := -101;
  head record;
  ready int;
begin
  total := 0;
  loop
    select j.kind, j.priority, j.available_at into head from public.jobs j
    where j.status = 'pending' and j.kind = at_kind and j.priority < at_priority
    order by j.kind, j.priority desc, j.available_at, j.id
    limit 1;
    if not found then
      select j.kind, j.priority, j.available_at into head from public.jobs j
      where j.status = 'pending' and j.kind > at_kind
      order by j.kind, j.priority desc, j.available_at, j.id
      limit 1;
      exit when not found;
    end if;
    at_kind := head.kind;
    at_priority := head.priority;
    select count(*) into ready from (
      select from public.jobs j
      where j.status = 'pending' and j.kind = at_kind and j.priority = at_priority
        and j.available_at <= (select clock_timestamp())
      limit ready_jobs.max_jobs - total
    ) r;
    if ready > 0 then
      total := total + ready;
      oldest := least(oldest, head.available_at);
    end if;
    exit when total >= ready_jobs.max_jobs;
  end loop;
end $$;

-- The tick: rescues what expired, and pokes as many workers as the ready jobs call for: one per 100, at most 5 at work,
-- and one more while a job has been ready for ten seconds.
-- Raises 55000 while something is not set up, so that cron's history shows it. An error undoes a whole run: one that has
-- rescued jobs keeps them and is silent, and the next, with nothing to rescue, says what is wrong.
create function private.tick() returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
  rescued int;
  ready record;
  wanted int;
  at_work int;
begin
  rescued := public.rescue_expired_jobs(1000);
  begin
    perform private.worker_endpoint();
    delete from private.awake_workers w where w.awake_until < clock_timestamp() - interval '1 minute';
    delete from private.pokes p where p.poked_at < clock_timestamp() - interval '6 hours';
    select * into ready from private.ready_jobs(500);
    wanted := ceil(ready.total / 100.0);
    if wanted > 0 then
      select count(*) into at_work from (
        select j.locked_by from public.jobs j where j.status = 'running'
        union
        select w.worker from private.awake_workers w where w.awake_until > clock_timestamp()
      ) w;
      -- Who is at work may take none of these: it has died, is about to end or takes other kinds.
      if ready.oldest < clock_timestamp() - interval '10 seconds' then
        wanted := greatest(wanted, at_work + 1);
      end if;
      -- A poke that is still queued is a worker to come: while pg_net sends nothing they must not pile up.
      at_work := at_work + private.count_queued_pokes();
      -- pg_net goes to sleep over a queue that it finds locked, and only this or another request wakes it. Not in the
      -- trigger: each call adds a callback to the session that is never removed.
      if to_regprocedure('net.wake()') is not null then
        perform net.wake();
      end if;
      for i in 1 .. wanted - at_work loop
        perform private.poke('tick');
      end loop;
    end if;
  exception when others then
    if rescued = 0 then
      raise;
    end if;
  end;
end $$;

-- Deletes this template's old rows from cron's history, which pg_cron itself never does.
create function private.prune_cron_history() returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from cron.job_run_details d
  -- By command: a job that is scheduled anew has a new id.
  where d.command in ('select private.tick()', 'select private.prune_cron_history()')
    and d.start_time < clock_timestamp() - interval '1 day';
end $$;

revoke all on function private.worker_endpoint, private.poke, private.count_queued_pokes, private.wake, private.ready_jobs,
  private.tick, private.prune_cron_history from public, anon, authenticated, service_role;

-- Turns the tick and the wake on. Raises 55000 where pg_cron is missing.
create function public.enable_dispatch() returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if to_regclass('cron.job') is null then
    raise exception 'enable_dispatch: the extension pg_cron is not installed' using errcode = '55000',
      hint = 'Run create extension pg_cron, or have something else call the drain function.';
  end if;
  update private.dispatch d set enabled = true where d.one;
  -- Anew, since scheduling a job that is there leaves it paused if it was.
  perform cron.unschedule(j.jobid) from cron.job j where j.jobname in ('nightshift_tick', 'nightshift_prune');
  perform cron.schedule('nightshift_tick', '10 seconds', 'select private.tick()');
  perform cron.schedule('nightshift_prune', '17 * * * *', 'select private.prune_cron_history()');
end $$;

-- Turns the tick and the wake off, and gives nothing more to workers that they have started: jobs then wait until something
-- calls the drain function or claims them.
create function public.disable_dispatch() returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  update private.dispatch d set enabled = false where d.one;
  if to_regclass('cron.job') is not null then
    perform cron.unschedule(j.jobid) from cron.job j where j.jobname in ('nightshift_tick', 'nightshift_prune');
  end if;
end $$;

-- Whether jobs get started, one row for each thing that must hold: what it is, whether it holds, what was seen, and what
-- to do when it does not. Secrets are not shown.
create function public.job_dispatch_health() returns table (item text, ok boolean, detail text, todo text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
declare
  missing text;
  secrets jsonb := '{}';
  tick record;
  run record;
  poke record;
  ready record;
begin
  select string_agg(n, ', ') into missing
  from unnest(array['pg_cron', 'pg_net', 'supabase_vault']) n
  where not exists (select from pg_catalog.pg_extension x where x.extname = n);
  item := 'extensions'; ok := missing is null;
  detail := coalesce('missing: ' || missing, 'pg_cron, pg_net and supabase_vault are installed');
  todo := case when not ok then 'Run create extension for each; without them call the drain function from outside.' end;
  return next;

  if to_regclass('vault.decrypted_secrets') is not null then
    select coalesce(jsonb_object_agg(s.name, btrim(s.decrypted_secret, E' \t\r\n')), '{}') into secrets
    from vault.decrypted_secrets s where s.name in ('project_url', 'cron_secret');
  end if;
  item := 'project_url'; ok := coalesce(secrets ->> 'project_url' ~ '^https?://[^/]', false);
  detail := coalesce(secrets ->> 'project_url', 'not in Vault');
  todo := case when not ok then
    'Run select vault.create_secret(''https://<ref>.supabase.co'', ''project_url''), or vault.update_secret where it exists.' end;
  return next;
  item := 'cron_secret'; ok := coalesce(length(btrim(split_part(secrets ->> 'cron_secret', ',', 1))) >= 32, false);
  detail := case when secrets ->> 'cron_secret' is null then 'not in Vault'
    when ok then 'in Vault' else 'in Vault, but shorter than 32 characters' end;
  todo := case when not ok then
    'Run select vault.create_secret(''<CRON_SECRET of the functions>'', ''cron_secret''), or vault.update_secret where it exists.' end;
  return next;

  item := 'tick'; ok := false; detail := 'not scheduled'; todo := 'Run select enable_dispatch().';
  if to_regclass('cron.job') is not null and (select d.enabled from private.dispatch d) then
    select * into tick from cron.job j where j.jobname = 'nightshift_tick' and j.active;
    if found then
      select * into run from cron.job_run_details d
      where d.jobid = tick.jobid and d.start_time is not null
      order by d.runid desc
      limit 1;
      if not found then
        detail := 'scheduled, but has never run';
        todo := 'Wait ten seconds. If it stays so, pg_cron is not running: restart the database.';
      else
        ok := run.status <> 'failed' and run.start_time > clock_timestamp() - interval '1 minute';
        detail := format('last run %s at %s%s', run.status, date_trunc('second', run.start_time),
          case when run.status = 'failed' then ': ' || btrim(split_part(run.return_message, 'CONTEXT:', 1), E' \n') end);
        todo := case when run.status = 'failed' then 'Mend what the message names.'
          when not ok then 'pg_cron has stopped running jobs: restart the database.' end;
      end if;
    end if;
  end if;
  return next;

  item := 'worker'; ok := true; detail := 'not poked in the last 6 hours'; todo := null;
  if to_regclass('net._http_response') is not null then
    select p.reason, p.poked_at, r.id as answered, r.status_code, r.timed_out, r.error_msg, r.content,
      exists (select from net.http_request_queue q where q.id = p.request_id) as queued
    into poke
    from private.pokes p
    left join net._http_response r on r.id = p.request_id
    -- A poke that was just sent has no answer yet: the one before it tells more.
    where r.id is not null or p.poked_at < clock_timestamp() - interval '15 seconds'
    order by p.poked_at desc
    limit 1;
    if found then
      ok := coalesce(poke.status_code between 200 and 299, false);
      detail := format('last poke (%s), at %s: %s', poke.reason, date_trunc('second', poke.poked_at), case
        when poke.queued then 'not sent yet'
        when poke.answered is null then 'no answer is kept'
        when poke.status_code is null then coalesce(poke.error_msg, 'timed out')
        else poke.status_code || case when ok then '' else coalesce(' ' || left(poke.content, 300), '') end end);
      todo := case
        when ok then null
        when poke.queued then 'pg_net is not sending: run select net.worker_restart(), or restart the database.'
        when poke.answered is null then 'The next poke tells more: enqueue a job, or wait for one.'
        when poke.timed_out then 'The function did not answer within 5 s: read the log of job-worker, and check project_url.'
        when poke.status_code is null then 'Check that project_url is this project''s API, as seen from the database.'
        when poke.status_code = 401 and poke.content not like '%CRON_SECRET%' then
          'This is not job-worker''s answer: check project_url, and that job-worker is deployed with verify_jwt = false.'
        when poke.status_code = 401 then 'CRON_SECRET of the functions and cron_secret in Vault differ: set both to the same.'
        when poke.status_code = 404 then 'Deploy the function: supabase functions deploy job-worker. If it is, check project_url.'
        else 'Read the log of the function job-worker.' end;
    end if;
  end if;
  return next;

  select * into ready from private.ready_jobs(10000);
  item := 'ready jobs'; ok := coalesce(ready.oldest > clock_timestamp() - interval '1 minute', true);
  detail := case when ready.total = 0 then 'none' else
    format('%s, the oldest due since %s', case when ready.total = 10000 then '10000+' else ready.total::text end,
      date_trunc('second', ready.oldest)) end;
  todo := case when not ok then 'Mend the items above. If all hold, read the log of job-worker: it fails, or has more work than it can do.' end;
  return next;
end $$;

revoke all on function public.enable_dispatch, public.disable_dispatch, public.job_dispatch_health
  from public, anon, authenticated;
grant execute on function public.enable_dispatch, public.disable_dispatch, public.job_dispatch_health to service_role;

do $$
begin
  if to_regclass('cron.job') is not null then
    perform public.enable_dispatch();
  end if;
end $$;
