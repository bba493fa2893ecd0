-- Dispatch: how work starts.
--
--   wake  A trigger on jobs pokes the job-worker function through pg_net when something due was inserted.
--   tick  pg_cron runs private.tick() every 10 seconds: it rescues expired leases, enqueues due schedules, purges what has
--         ended long ago, and pokes workers if jobs are ready.
--
-- A poke is an HTTP request that says "look now". It may be lost or doubled: all state is in the tables, and the tick
-- finds what a lost poke leaves. An idle project makes a function call every ten minutes, which finds the schedules that a
-- deploy has brought, and those that job_dispatch_health() asks for.
--
-- The wake may never fail, block or slow an enqueue. It takes no lock that another enqueue could hold, and writes nothing
-- but the poke: it reads whether a worker has promised to look by itself, or a poke is queued already, and otherwise
-- pokes. (A row to be updated by whoever pokes would lose every wake while one enqueuing transaction stays open.)
--
-- Address and secret come from Vault: project_url and cron_secret. What is missing makes the tick fail, every ten seconds,
-- in cron.job_run_details; never an enqueue. job_dispatch_health() says what is wrong and what to do.
--
-- A worker that a poke starts takes no kind whose timeout_ms is over 70,000, its whole lifetime: jobs of such kinds start no
-- poke, and wait for npm run worker.
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
  request_id bigint primary key,
  reason text not null,
  poked_at timestamptz not null default clock_timestamp()
);
create index pokes_poked_at on private.pokes (poked_at);
alter table private.pokes enable row level security;
revoke all on private.pokes from public, anon, authenticated, service_role;

-- A secret in Vault; null when it is not there.
create function private.vault_secret(name text) returns text
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('vault.decrypted_secrets') is null then return null; end if;
  return (select btrim(s.decrypted_secret, E' \t\r\n') from vault.decrypted_secrets s where s.name = vault_secret.name);
end $$;

-- The secret that pokes carry. While it is being rotated there are two; either opens the door.
create function private.first_cron_secret() returns text
language sql set search_path = pg_catalog, pg_temp as $$
  select btrim(split_part(private.vault_secret('cron_secret'), ',', 1), E' \t\r\n')
$$;

-- Where job-worker is and the secret that opens it. Raises 55000 naming what is not set up. Reads the secret: nobody may
-- call it directly.
create function private.worker_endpoint(out url text, out cron_secret text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  wrong text;
begin
  if to_regclass('vault.decrypted_secrets') is null or to_regclass('net.http_request_queue') is null then
    raise exception 'no worker can be started: the extensions pg_net and supabase_vault are needed'
      using errcode = '55000', hint = 'Create them, or call the drain function from outside and run select disable_dispatch().';
  end if;
  url := private.vault_secret('project_url');
  cron_secret := private.first_cron_secret();
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
create function private.poke(reason text, body jsonb default '{}') returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  insert into private.pokes (request_id, reason)
  select net.http_post(
    url => w.url,
    body => poke.body,
    headers => jsonb_build_object('Content-Type', 'application/json', 'Authorization', 'Bearer ' || w.cron_secret),
    timeout_milliseconds => 5000
  ), poke.reason
  from private.worker_endpoint() w
  -- pg_net was created anew, and its numbers begin anew.
  on conflict (request_id) do update set reason = excluded.reason, poked_at = excluded.poked_at;
end $$;

-- How many of our pokes that start work wait to be sent. One that pg_net is sending is deleted by its open transaction
-- (xmax): it has left, and a slow answer beside it may keep that transaction open for seconds. pg_net's queue has no index,
-- and may hold whatever others send: nothing but the numbers of its requests is looked at.
create function private.count_queued_pokes() returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return (
    select count(*) from net.http_request_queue q
    where q.xmax = 0 and q.id in (
      select p.request_id from private.pokes p
      where p.poked_at > clock_timestamp() - interval '10 minutes' and p.reason <> 'health'
    )
  );
end $$;

-- The wake. A missing extension or secret, a lock or anything else that goes wrong ends here: the tick reports it.
-- Measured with the real pg_net beside a single-row insert of 65 µs: 30 µs while a worker is awake or a poke is queued (as
-- long as pg_net's queue is short), 140 µs for the few inserts a second that poke.
create function private.wake() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' as $$
declare
  due boolean;
begin
  if tg_level = 'ROW' then
    due := new.available_at <= clock_timestamp()
      and not exists (select from public.job_kinds k where k.kind = new.kind and (k.paused or k.timeout_ms > 70000));
  else
    select exists (
      select from inserted i
      where i.status = 'pending' and i.available_at <= clock_timestamp()
        and not exists (select from public.job_kinds k where k.kind = i.kind and (k.paused or k.timeout_ms > 70000))
    ) into due;
  end if;
  if due
    and not exists (select from private.awake_workers w where w.awake_until > clock_timestamp())
    and (select d.enabled from private.dispatch d)
  then
    -- Apart, so that an insert beside an awake worker does not touch pg_net's queue at all.
    if private.count_queued_pokes() = 0 then perform private.poke('wake'); end if;
  end if;
  return null;
exception when others then
  return null;
end $$;

create trigger wake after insert on public.jobs
  referencing new table as inserted for each statement execute function private.wake();
-- A job that is put back or brought forward. Not one that goes back when its attempt ends.
create trigger wake_again after update on public.jobs
  for each row when (
    new.status = 'pending' and (old.status not in ('pending', 'running') or new.available_at < old.available_at)
  ) execute function private.wake();

-- How many jobs of one kind are due, without and with a concurrency key, each counted to `max_jobs` at least, and since when
-- the oldest: one step through the indexes for each priority that waits.
create function private.count_due_jobs(kind text, max_jobs int, out plain int, out keyed int, out oldest timestamptz)
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  level int := 101;
begin
  plain := 0;
  keyed := 0;
  loop
    level := greatest(
      (
        select j.priority from public.jobs j
        where j.status = 'pending' and j.concurrency_key is null and j.kind = count_due_jobs.kind and j.priority < level
        order by j.priority desc, j.available_at, j.id limit 1
      ), (
        select j.priority from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = count_due_jobs.kind and j.priority < level
        order by j.priority desc, j.available_at, j.id limit 1
      )
    );
    exit when level is null;
    select plain + count(*) filter (where not d.has_key), keyed + count(*) filter (where d.has_key),
      least(oldest, min(d.available_at))
    into plain, keyed, oldest
    from (
      (
        select false as has_key, j.available_at from public.jobs j
        where j.status = 'pending' and j.concurrency_key is null and j.kind = count_due_jobs.kind and j.priority = level
          and j.available_at <= (select clock_timestamp())
        order by j.available_at, j.id limit greatest(max_jobs - plain, 1)
      ) union all (
        select true, j.available_at from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = count_due_jobs.kind and j.priority = level
          and j.available_at <= (select clock_timestamp())
        order by j.available_at, j.id limit greatest(max_jobs - keyed, 1)
      )
    ) d;
  end loop;
end $$;

-- How many jobs of one kind a claim could give, counted to `max_jobs`, and since when it could have given the first of
-- them: what is due, within the kind's limits. A kind with limits waits from its last start or success on.
create function private.count_ready_jobs(kind text, max_jobs int, out ready int, out since timestamptz)
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  due record;
begin
  ready := private.free_places(kind, max_jobs, clock_timestamp());
  if ready > 0 then
    select * into due from private.count_due_jobs(kind, max_jobs);
    if due.keyed > 0 then
      due.keyed := (
        select greatest(cardinality(c.ids), c.cut::int) -- there may be one, if not all were looked at
        from private.choose_keyed_jobs(kind, least(ready, 500), clock_timestamp(), false, 5, '{}', '{}', false, '') c
      );
    end if;
    ready := least(ready, due.plain + due.keyed);
  end if;
  if ready > 0 then
    since := due.oldest;
    if due.keyed > 0 or exists (
      select from public.job_kinds k
      where k.kind = count_ready_jobs.kind and (k.concurrency is not null or k.rate_limit is not null)
    ) then
      since := greatest(since, (
        select max(r.locked_at) from (
          select j.locked_at from public.jobs j where j.status = 'running' and j.kind = count_ready_jobs.kind
          order by j.concurrency_key limit 1000 -- ordered, or the statistics choose between two indexes
        ) r
      ), (
        select j.finished_at from public.jobs j
        where j.kind = count_ready_jobs.kind and j.status = 'succeeded' and j.finished_at is not null
        order by j.finished_at desc limit 1
      ));
    end if;
  end if;
end $$;

-- The same for all kinds that a poked worker takes.
create function private.ready_jobs(max_jobs int, out total int, out oldest timestamptz)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
  long_kinds constant text[] := array(select k.kind from public.job_kinds k where k.timeout_ms > 70000);
  kind text;
  counted record;
begin
  total := 0;
  foreach kind in array private.waiting_kinds('', 1000000, true) loop
    exit when total >= max_jobs;
    continue when kind = any (long_kinds);
    select * into counted from private.count_ready_jobs(kind, max_jobs - total);
    total := total + counted.ready;
    oldest := least(oldest, counted.since);
  end loop;
end $$;

-- The tick: rescues what expired, enqueues due schedules, purges, and pokes as many workers as the ready jobs call for:
-- one per 100, at most 5 at work, and one more when jobs were rescued, or one has been ready for a second. One, too, when
-- none was poked for ten minutes: a deploy may have brought other schedules of the app's (see ensure_app_schedules()),
-- which nobody else would find in an idle project. Until the first have come it is after one minute.
-- What fails undoes nothing of the rest. Where no worker can be poked it raises, such as 55000 while something is not set
-- up, so that cron's history shows it; all the rest is a warning. A run that has done something keeps that and is silent,
-- and the next, with nothing to do, says what is wrong.
create function private.tick() returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
set lock_timeout = '5s' as $$
declare
  step text;
  rescued int := 0;
  done int := 0;
  ready record;
  wanted int;
  at_work int;
begin
  foreach step in array array['rescue', 'schedules', 'purge', 'expired keys'] loop
    begin
      case step
        when 'rescue' then rescued := public.rescue_expired_jobs(1000);
        -- One that is due is moved on, with or without a job.
        when 'schedules' then done := public.enqueue_due_schedules()
          + coalesce((select min(s.next_run) from public.schedules s where not s.paused) <= clock_timestamp(), false)::int;
        when 'purge' then done := done + public.purge_jobs();
        when 'expired keys' then done := done + public.purge_expired_keys();
      end case;
    exception when others or assert_failure then
      raise warning 'tick: %: %', step, sqlerrm;
    end;
  end loop;
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
      -- Who is at work may take none of these: it has died, as when a lease has just run out, is full, about to end, or
      -- takes other kinds.
      if rescued > 0 or ready.oldest < clock_timestamp() - interval '1 second' then
        wanted := greatest(wanted, at_work + 1);
      end if;
      -- A poke that is still queued is a worker to come: while pg_net sends nothing they must not pile up.
      at_work := at_work + private.count_queued_pokes();
      -- pg_net goes to sleep over a queue that it finds locked, and only this or another request wakes it. Not in the
      -- trigger: each call adds a callback to the session that is never removed.
      if to_regprocedure('net.wake()') is not null then perform net.wake(); end if;
      for i in 1 .. wanted - at_work loop
        perform private.poke('tick');
      end loop;
    end if;
    if not exists (
      select from private.pokes p where p.poked_at > clock_timestamp() - make_interval(mins => case
        when exists (select from private.app_schedules) then 10 else 1 end)
    ) and private.count_queued_pokes() = 0 then
      perform private.poke('schedules');
    end if;
  exception when others then
    if rescued + done = 0 then raise; end if;
  end;
end $$;

-- Deletes this template's old rows from cron's history, which pg_cron itself never does.
create function private.prune_cron_history() returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  delete from cron.job_run_details d
  -- By command: a job that is scheduled anew has a new id.
  where d.command in ('select private.tick()', 'select private.prune_cron_history()')
    -- By number: what failed before it began has no time.
    and d.runid <= (
      select max(o.runid) from cron.job_run_details o where o.start_time < clock_timestamp() - interval '1 day'
    );
end $$;

revoke all on function private.vault_secret, private.first_cron_secret, private.worker_endpoint, private.poke,
  private.count_queued_pokes, private.wake, private.count_due_jobs, private.count_ready_jobs, private.ready_jobs,
  private.tick, private.prune_cron_history from public, anon, authenticated, service_role;

-- Turns the tick and the wake on. Raises 55000 where pg_cron is missing.
create function public.enable_dispatch() returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
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
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  update private.dispatch d set enabled = false where d.one;
  if to_regclass('cron.job') is not null then
    perform cron.unschedule(j.jobid) from cron.job j where j.jobname in ('nightshift_tick', 'nightshift_prune');
  end if;
end $$;

-- Health. What fails shows within a minute: the limits leave a few rounds of the ten-second tick, so that one late run is
-- no alarm.

-- What job-worker answered last. Also pokes it to find out: at most every 40 seconds whoever asks, which with the 15 that a
-- poke may take makes a minute; every ten while it does not work, so that what has been mended shows. This poke asks for jobs
-- of the kind nightshift_health, of which there are none, and to be answered after the look at the database, where another
-- poke is answered before it.
create function private.check_worker(out ok boolean, out detail text, out todo text)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  queued_since timestamptz;
  answer record;
  tried boolean := false;
  not_tried text;
begin
  if to_regclass('net.http_request_queue') is null then
    ok := false;
    detail := 'cannot be tried: pg_net is not installed';
    todo := 'Create it, or have something else call the drain function.';
    return;
  end if;
  -- The last poke of each sort that tells something: that has its answer, or must have lost it. That a worker accepts
  -- pokes says less than what the last try found.
  select a.* into answer from (
    select distinct on (p.reason = 'health') p.reason, p.poked_at, r.id, r.status_code, r.timed_out, r.error_msg, r.content,
      coalesce(case when p.reason = 'health' then r.status_code = 200 and r.content like '%"processed"%'
        else r.status_code = 202 and r.content like '%"accepted"%' end, false) as works
    from private.pokes p
    -- By time too: where pg_net was created anew, its ids begin anew.
    left join net._http_response r on r.id = p.request_id and r.created > p.poked_at - interval '1 minute'
    where p.poked_at > clock_timestamp() - interval '5 hours' -- answers are kept for six
      and (r.id is not null or p.poked_at < clock_timestamp() - interval '15 seconds')
      and not exists (select from net.http_request_queue q where q.id = p.request_id)
    order by p.reason = 'health', p.poked_at desc
  ) a
  order by a.reason <> 'health' and a.works, a.poked_at desc limit 1;

  begin
    if not (select d.enabled from private.dispatch d) then raise exception 'dispatch is off'; end if;
    -- One asker at a time. A row, since anybody may take an advisory lock.
    perform from private.dispatch d where d.one for update skip locked;
    if not found then raise exception 'another transaction is about to'; end if;
    if private.count_queued_pokes() = 0 and not exists (
      select from private.pokes p
      where p.reason = 'health'
        and p.poked_at > clock_timestamp() - make_interval(secs => case when answer.works then 40 else 10 end)
    ) then
      perform private.poke('health', '{"wait": true, "kinds": ["nightshift_health"]}');
      tried := true;
    end if;
  exception when others then
    -- No settings, a read-only transaction, a lock: what is known is still said.
    not_tried := sqlerrm;
  end;

  -- One that is being sent (xmax) may wait for a slow answer beside it.
  select min(p.poked_at) into queued_since from private.pokes p
  join net.http_request_queue q on q.id = p.request_id and q.url like '%/functions/v1/job-worker'
  where q.xmax = 0 or p.poked_at < clock_timestamp() - interval '30 seconds';

  if queued_since < clock_timestamp() - interval '15 seconds' then
    ok := false;
    detail := format('a poke of %s is not sent yet', date_trunc('second', queued_since));
    todo := 'pg_net is not sending: run select net.worker_restart(), or restart the database.';
  elsif answer is null then
    detail := case when not_tried is null then 'poked just now: ask again in a few seconds'
      else 'not known, and cannot be tried: ' || not_tried end;
    todo := case when not_tried is not null then 'Mend the items above, or ask in a transaction that may write.' end;
  else
    ok := answer.works;
    detail := format('last poke (%s), at %s: %s', answer.reason, date_trunc('second', answer.poked_at), case
      when answer.id is null then 'no answer is kept'
      when answer.status_code is null then coalesce(answer.error_msg, 'timed out')
      else answer.status_code || case when ok then '' else coalesce(
        -- A server that is not ours may send back what it was sent.
        ' ' || left(replace(answer.content, coalesce(private.first_cron_secret(), ''), '…'), 300), '') end end);
    todo := case
      when answer.id is null then
        'Ask again in a few seconds. If it stays so, pg_net keeps no answers: see its setting pg_net.ttl.'
      when answer.timed_out then 'job-worker did not answer within 5 s: read its log, and check project_url.'
      when answer.status_code is null then 'Check that project_url is this project''s API, as seen from the database.'
      when answer.status_code = 401 and answer.content like '%CRON_SECRET%' then
        'CRON_SECRET of the functions and cron_secret in Vault differ: set both to the same.'
      when answer.status_code = 404 then
        'Deploy the function: supabase functions deploy job-worker. If it is, check project_url.'
      -- 405: a POST that is redirected arrives as a GET.
      when answer.status_code < 400 or answer.status_code in (401, 405) then
        'This is not job-worker''s answer: set project_url to the API''s own address, not to one that redirects, '
        'and deploy the functions as they are in this version, with verify_jwt = false.'
      else 'Read the log of the function job-worker: it says what it lacks, or why it cannot reach the database''s API.' end;
    if tried then
      detail := detail || '; poked again just now: ask again in a few seconds';
    elsif ok and not_tried is not null and answer.poked_at < clock_timestamp() - interval '2 minutes' then
      ok := null;
      detail := detail || '; cannot be tried again: ' || not_tried;
      todo := 'Mend the items above, or ask in a transaction that may write.';
    end if;
  end if;
end $$;

-- Whether jobs get started, one row for each thing that must hold: what it is, whether it holds (null: not known yet), what
-- was seen, and what to do. Secrets are not shown. Asks the worker: see private.check_worker. Never fails, and waits for no
-- lock longer than half a second: an item that cannot be looked at says why.
create function public.job_dispatch_health() returns table (item text, ok boolean, detail text, todo text)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms' set timezone = 'UTC' set datestyle = 'ISO'
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
  found_text text;
  found_at timestamptz;
  tick record;
  run record;
  ready record;
begin
  foreach item in array array[
    'extensions', 'project_url', 'cron_secret', 'tick', 'worker', 'ready jobs', 'long jobs', 'leases', 'schedules',
    'kinds', 'purge'
  ] loop
    begin
      case item
        when 'extensions' then
          select string_agg(n, ', ') into found_text from unnest(array['pg_cron', 'pg_net', 'supabase_vault']) n
          where not exists (select from pg_catalog.pg_extension x where x.extname = n);
          ok := found_text is null;
          detail := coalesce('missing: ' || found_text, 'pg_cron, pg_net and supabase_vault are installed');
          todo := 'Run create extension for each; without them call the drain function from outside.';
        when 'project_url' then
          found_text := private.vault_secret('project_url');
          ok := coalesce(found_text ~ '^https?://[^/]', false);
          detail := coalesce(found_text, 'not in Vault');
          todo := 'Run select vault.create_secret(''https://<ref>.supabase.co'', ''project_url''), '
            'or vault.update_secret where it exists.';
        when 'cron_secret' then
          found_text := private.first_cron_secret();
          ok := coalesce(length(found_text) >= 32, false);
          detail := case when ok then 'in Vault' when found_text is null then 'not in Vault'
            else 'in Vault, but shorter than 32 characters' end;
          todo := 'Run select vault.create_secret(''<CRON_SECRET of the functions>'', ''cron_secret''), '
            'or vault.update_secret where it exists.';
        when 'tick' then
          ok := false;
          todo := 'Run select enable_dispatch(), or have something else call the drain function.';
          if to_regclass('cron.job') is null or not (select d.enabled from private.dispatch d) then
            detail := 'dispatch is off';
            if to_regclass('cron.job') is null then
              detail := 'pg_cron is not installed';
              todo := 'Create it and run select enable_dispatch(), or have something else call the drain function.';
            end if;
            return next;
            continue;
          end if;
          -- A database that was made from another as template has its jobs, which run in that one.
          select j.jobid, j.active into tick from cron.job j
          where j.jobname = 'nightshift_tick' and j.database = current_database() order by j.active desc limit 1;
          -- Without a start time: about to start, or failed before that, such as for want of a connection.
          select d.status, d.return_message, coalesce(d.start_time, d.end_time) as at into run from cron.job_run_details d
          where d.jobid = tick.jobid and (d.start_time is not null or d.status = 'failed') order by d.runid desc limit 1;
          detail := case
            when tick.jobid is null then 'not scheduled'
            when not tick.active then 'scheduled, but paused'
            when run.status is null then 'scheduled, but has never run'
            else format('last run %s at %s%s', run.status, date_trunc('second', run.at), case when run.status = 'failed'
              then ': ' || btrim(split_part(run.return_message, 'CONTEXT:', 1), E' \n') end) end;
          -- Four rounds: a tick may wait 5 s for a lock, and the next one waits for it.
          ok := detail like 'last run%' and run.status <> 'failed' and run.at > clock_timestamp() - interval '40 seconds';
          todo := case
            when detail like '%has never run' then
              'Wait ten seconds. If it stays so, pg_cron is not running: restart the database.'
            when detail not like 'last run%' then 'Run select enable_dispatch().'
            when run.return_message like '%lock timeout%' then
              'Look in pg_stat_activity for an old transaction: it keeps a table or rows locked.'
            when run.status = 'failed' then 'Mend what the message names.'
            when run.status = 'succeeded' then 'pg_cron has stopped running jobs: restart the database.'
            else 'The tick does not end: look in pg_stat_activity for what holds it up, or restart the database.' end;
        when 'worker' then
          select c.* into ok, detail, todo from private.check_worker() c;
        when 'ready jobs' then
          select * into ready from private.ready_jobs(10000);
          -- The tick has poked for it twice by then.
          ok := coalesce(ready.oldest > clock_timestamp() - interval '30 seconds', true);
          detail := case when ready.total = 0 then 'none' else format('%s%s, the oldest due since %s',
            ready.total, case when ready.total = 10000 then '+' end, date_trunc('second', ready.oldest)) end;
          todo := 'Mend the items above, or call the drain function. If all hold, look in pg_stat_activity for an old transaction, which may keep rows '
            'locked, and read the log of job-worker: it fails, takes not all kinds, or has more work than it can do.';
        when 'long jobs' then
          -- Where some run, somebody takes them, and is busy.
          select string_agg(k.kind, ', ' order by k.kind) into found_text
          from public.job_kinds k cross join lateral private.count_ready_jobs(k.kind, 1) r
          where k.timeout_ms > 70000 and r.since < clock_timestamp() - interval '1 minute'
            and not exists (select from public.jobs j where j.status = 'running' and j.kind = k.kind);
          ok := found_text is null;
          detail := coalesce('nobody takes: ' || left(found_text, 300), 'none waits for long');
          todo := 'Run npm run worker, or give the kinds a shorter timeout: an Edge Function takes none over 70 s.';
        when 'leases' then
          -- Of jobs whose worker is gone, and which the tick should have taken back.
          select min(j.lease_expires_at) into found_at from public.jobs j where j.status = 'running';
          ok := coalesce(found_at > clock_timestamp() - interval '30 seconds', true);
          detail := case when ok then 'none has run out'
            else format('one has run out at %s', date_trunc('second', found_at)) end;
          todo := 'The tick takes such jobs back: mend it. If it holds, somebody keeps the job''s row locked: look in '
            'pg_stat_activity; or a trigger of yours raises: the log of Postgres has it as a warning.';
        when 'schedules' then
          select min(s.next_run) into found_at from public.schedules s where not s.paused;
          select string_agg(format('%s (%s)', f.name, f.last_error), ', ') into found_text from (
            select '_app/schedules.ts' as name, a.error as last_error from private.app_schedules a where a.error is not null
            union all
            (select s.name, s.last_error from public.schedules s where s.last_error is not null order by s.name limit 10)
          ) f;
          found_at := nullif(found_at, greatest(found_at, clock_timestamp() - interval '30 seconds'));
          ok := found_at is null and found_text is null;
          detail := coalesce('failed: ' || left(found_text, 300),
            'one is overdue since ' || date_trunc('second', found_at), 'none is overdue');
          todo := 'Mend what is named, and run select resume_schedule(name) where that is paused. The tick enqueues what '
            'is due, or the drain function: mend that. If it holds, look in pg_stat_activity for what keeps a schedule''s row locked.';
        when 'kinds' then
          -- Of jobs that died within the last day because no worker knew their kind: see declare_job_kinds.
          select string_agg(distinct d.kind, ', ') into found_text from (
            select j.kind from public.jobs j
            where j.status = 'dead' and j.last_error like 'unknown_kind:%'
              and j.finished_at > (select clock_timestamp()) - interval '1 day'
            limit 10000
          ) d;
          ok := found_text is null;
          detail := coalesce('unknown to the worker that had them: ' || left(found_text, 300), 'none is unknown');
          todo := 'Deploy the functions that know them: the first worker that does puts those jobs back. '
            'If the kind is a slip, delete them, and unschedule what enqueues it.';
        when 'purge' then
          -- What it should have deleted an hour ago.
          select string_agg(p.what, ', ') into found_text from (
            select format('%s (%s)', k.kind, k.status) as what from private.purgeable_kinds(interval '1 hour') k
            union all
            select 'idempotency keys'
            where (select min(k.expires_at) from public.idempotency_keys k) < clock_timestamp() - interval '1 hour'
          ) p;
          ok := found_text is null;
          detail := coalesce('should be deleted since an hour or more: ' || left(found_text, 300), 'none is late');
          todo := 'The tick deletes 10,000 every ten seconds; what stops it is a warning in the log of Postgres.'
            || coalesce(' Jobs that these refer to stay, for want of on delete cascade or set null: ' || (
              select string_agg(c.conrelid::regclass::text, ', ') from pg_catalog.pg_constraint c
              where c.confrelid = 'public.jobs'::regclass and c.confdeltype in ('a', 'r')
            ) || '.', '');
      end case;
    exception when others then
      ok := null;
      detail := 'cannot be looked at: ' || sqlerrm;
      todo := 'Ask again. If it stays so, mend what the message names.';
    end;
    todo := case when ok then null else todo end;
    return next;
  end loop;
end $$;

revoke all on function private.check_worker, public.enable_dispatch, public.disable_dispatch, public.job_dispatch_health
  from public, anon, authenticated, service_role;
grant execute on function public.enable_dispatch, public.disable_dispatch, public.job_dispatch_health to service_role;

do $$
begin
  if to_regclass('cron.job') is not null then perform public.enable_dispatch(); end if;
end $$;
