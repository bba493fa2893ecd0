-- Claim: how a worker takes work.
--
-- Each kind that waits gets a fair share of a claim, so a hundred thousand jobs of one kind do not delay another's first.
-- Within a kind the higher priority goes first and then the one enqueued first; one pick in ten starts from the lowest
-- priority, so that nothing starves. A claim's cost depends on what it takes, not on what waits: kinds and priorities are
-- stepped through by index, one probe each, and delayed jobs are never walked over.
--
-- The rows are locked `for no key update skip locked`, not with the usual `for update`: a row of job_failures or of an
-- app's own table that references a job holds `for key share` on it until its transaction ends, and `for update skip
-- locked` would pass over that job in silence. Nothing here changes a key.
--
-- Planner: the settings on claim_jobs pin one plan shape whatever the statistics say. With stale statistics the planner
-- otherwise sorts or scans the table (measured: 3 to 10 times slower); enable_seqscan off alone brings in the JIT (48 ms).
-- `(select clock_timestamp())` is read once, so an index scan ends at it; a bare volatile call would be asked for every row.

-- Where the next claim starts its round of the kinds when more than 32 wait. Unlogged: a crash empties it, and the round
-- begins anew.
create unlogged table private.turn (
  one boolean primary key default true check (one),
  kind text not null
);
alter table private.turn enable row level security;
revoke all on private.turn from public, anon, authenticated, service_role;
grant select, insert, update on private.turn to service_role;

-- Up to 32 kinds that have pending jobs, due or not, from the one after `start` on and round again.
create function private.waiting_kinds(start text) returns text[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  found_kinds text[] := '{}';
  at_kind text := start;
  next_kind text;
  wrapped boolean := false;
begin
  loop
    next_kind := null;
    select j.kind into next_kind from public.jobs j
    where j.status = 'pending' and j.kind > at_kind
    order by j.kind, j.priority desc, j.available_at, j.id
    limit 1;
    if next_kind is null or (wrapped and next_kind > start) then
      exit when wrapped or start = '';
      wrapped := true;
      at_kind := '';
    else
      at_kind := next_kind;
      found_kinds := found_kinds || next_kind;
      exit when cardinality(found_kinds) = 32;
    end if;
  end loop;
  return found_kinds;
end $$;

-- Up to `max_jobs` due jobs of one kind, locked, a priority at a time; `taken` are locked already by this claim. A suspect
-- has lost its worker at its last attempt, and has one attempt left or two; for each there may be one job more.
create function private.pick_jobs(kind text, max_jobs int, taken uuid[], out ids uuid[], out suspects uuid[])
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  lowest_first constant boolean := random() < 0.1;
  level int := case when lowest_first then -101 else 101 end;
  most constant int := coalesce((select k.max_attempts from public.job_kinds k where k.kind = pick_jobs.kind), 5);
  picked record;
begin
  ids := '{}';
  suspects := '{}';
  loop
    if lowest_first then
      select j.priority into level from public.jobs j
      where j.status = 'pending' and j.kind = pick_jobs.kind and j.priority > level
      order by j.priority, j.available_at desc, j.id desc
      limit 1;
    else
      select j.priority into level from public.jobs j
      where j.status = 'pending' and j.kind = pick_jobs.kind and j.priority < level
      order by j.priority desc, j.available_at, j.id
      limit 1;
    end if;
    exit when not found;
    select coalesce(array_agg(p.id), '{}') as ids, coalesce(array_agg(p.id) filter (where p.suspect), '{}') as suspects
    into picked
    from (
      select j.id, j.attempts + 2 >= coalesce(j.max_attempts, most) and j.last_error like 'lease expired:%' as suspect
      from public.jobs j
      where j.status = 'pending' and j.kind = pick_jobs.kind and j.priority = level
        and j.available_at <= (select clock_timestamp()) and j.id <> all (pick_jobs.taken)
      order by j.available_at, j.id
      limit pick_jobs.max_jobs - cardinality(ids)
      for no key update skip locked
    ) p;
    ids := ids || picked.ids;
    suspects := suspects || picked.suspects;
    -- Those behind them do not wait until the last of them has had its turn.
    if cardinality(picked.suspects) > 0 then
      ids := ids || array(
        select j.id from public.jobs j
        where j.status = 'pending' and j.kind = pick_jobs.kind and j.priority = level
          and j.available_at <= (select clock_timestamp()) and j.id <> all (pick_jobs.taken || ids)
          and (j.attempts + 2 >= coalesce(j.max_attempts, most) and j.last_error like 'lease expired:%') is not true
        order by j.available_at, j.id
        limit cardinality(picked.suspects)
        for no key update skip locked
      );
    end if;
    exit when cardinality(ids) >= pick_jobs.max_jobs;
  end loop;
end $$;

revoke all on function private.waiting_kinds, private.pick_jobs from public, anon, authenticated;
grant execute on function private.waiting_kinds, private.pick_jobs to service_role;

-- Whether jobs are started at all: see enable_dispatch().
create table private.dispatch (
  one boolean primary key default true check (one),
  enabled boolean not null default true
);
insert into private.dispatch default values;
alter table private.dispatch enable row level security;
revoke all on private.dispatch from public, anon, authenticated, service_role;
grant select on private.dispatch to service_role;

-- Workers that have promised to look for work by themselves until awake_until: while one has, an enqueue need not poke.
-- Unlogged: after a crash nobody has promised anything.
create unlogged table private.awake_workers (
  worker text primary key,
  awake_until timestamptz not null
);
alter table private.awake_workers enable row level security;
revoke all on private.awake_workers from public, anon, authenticated, service_role;
grant select, insert, update, delete on private.awake_workers to service_role;

-- Claims up to `max_jobs` due jobs (at most 1000, the most rows that REST gives back) and counts an attempt for each. They
-- come in the order in which they are to start. Raises 22023 naming the argument that is not usable.
--
--   worker         a name, for locked_by
--   lease_seconds  how long the jobs are the worker's
--   kinds          of these alone; null for all
--   except_kinds   not of these
--   awake_for      given by a worker that dispatch has started. It gets nothing while dispatch is off, and promises to claim
--                  again within that time, which spares the project a poke per enqueue. A claim that fills up, or one for no
--                  time, takes the promise back, since such a worker takes no more work for now.
--
-- Of a job that it gives, `timeout_ms` is how long the attempt may run, and `suspect` that its worker was lost at the
-- attempt before, and that this is its last attempt or the last but one. It may be what ends workers, or be about to die of
-- another's doing: a claim gives one such job by itself, and a process runs it with nothing beside it. Not before, since a
-- night of lost workers makes many of them, and they run one after the other.
create function public.claim_jobs(
  worker text,
  max_jobs int default 10,
  lease_seconds int default 60,
  kinds text[] default null,
  awake_for interval default null,
  except_kinds text[] default null
) returns table (
  id uuid, kind text, payload jsonb, attempts int, max_attempts int, lease_token int, context jsonb,
  created_at timestamptz, lease_expires_at timestamptz, timeout_ms int, suspect boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
declare
  start text; -- null when no more than 32 kinds wait
  first_kind text;
  once_round boolean;
  waiting text[];
  full_kinds text[] := '{}';
  ids uuid[] := '{}';
  suspects uuid[] := '{}';
  picked record;
  share int;
  claimed_at timestamptz;
begin
  if claim_jobs.worker is null or claim_jobs.worker = '' then
    raise exception 'claim_jobs: worker is empty' using errcode = '22023', hint = 'Give a name that tells this worker from others.';
  end if;
  if claim_jobs.max_jobs is null or claim_jobs.max_jobs not between 1 and 1000 then
    raise exception 'claim_jobs: max_jobs % is not between 1 and 1000', coalesce(claim_jobs.max_jobs::text, 'null')
      using errcode = '22023';
  end if;
  if claim_jobs.lease_seconds is null or claim_jobs.lease_seconds not between 1 and 86400 then
    raise exception 'claim_jobs: lease_seconds % is not between 1 and 86400', coalesce(claim_jobs.lease_seconds::text, 'null')
      using errcode = '22023';
  end if;

  if claim_jobs.awake_for is not null and not (select d.enabled from private.dispatch d) then
    delete from private.awake_workers w where w.worker = claim_jobs.worker;
    return;
  end if;

  if claim_jobs.kinds is null then
    select t.kind into start from private.turn t;
    start := coalesce(start, '');
  end if;
  for round in 1 .. 100 loop
    if claim_jobs.kinds is null then
      waiting := private.waiting_kinds(start);
      once_round := first_kind = any (waiting);
      first_kind := coalesce(first_kind, waiting[1]);
      start := waiting[32];
    else
      waiting := array(select distinct k from unnest(claim_jobs.kinds) k where k is not null);
    end if;

    -- Each kind in turn gets an equal part of what is left, in an order that changes; those that had more get the rest.
    waiting := array(
      select k from unnest(waiting) k where k <> all (coalesce(claim_jobs.except_kinds, '{}')) order by random()
    );
    for i in 1 .. cardinality(waiting) loop
      share := ceil((claim_jobs.max_jobs - cardinality(ids))::numeric / (cardinality(waiting) - i + 1));
      exit when share <= 0;
      select * into picked from private.pick_jobs(waiting[i], share, '{}');
      ids := ids || picked.ids;
      suspects := suspects || picked.suspects;
      if cardinality(picked.ids) >= share then
        full_kinds := full_kinds || waiting[i];
      end if;
    end loop;
    for i in 1 .. cardinality(full_kinds) loop
      exit when cardinality(ids) >= claim_jobs.max_jobs;
      select * into picked from private.pick_jobs(full_kinds[i], claim_jobs.max_jobs - cardinality(ids), ids);
      ids := ids || picked.ids;
      suspects := suspects || picked.suspects;
    end loop;

    -- Of more than 32 kinds these may all be waiting for later: then the next ones are looked at.
    exit when cardinality(ids) > 0 or claim_jobs.kinds is not null or start is null or once_round;
  end loop;
  if start is not null and cardinality(ids) > 0 then
    update private.turn t set kind = start
    where t.one = (select u.one from private.turn u for no key update skip locked);
    insert into private.turn (kind) select start where not exists (select from private.turn) on conflict do nothing;
  end if;

  -- Either one suspect, or the others: now the one and now the other, so that neither waits for ever.
  if cardinality(suspects) > 0 then
    if cardinality(suspects) = cardinality(ids) or random() < 0.25 then
      ids := suspects[1:1];
    else
      ids := array(select i from unnest(ids) i where i <> all (suspects));
    end if;
  end if;

  if claim_jobs.awake_for > interval '0' and cardinality(ids) < claim_jobs.max_jobs then
    -- Renewed in its second half only: a poll that finds nothing seldom writes.
    insert into private.awake_workers as w (worker, awake_until)
    values (claim_jobs.worker, clock_timestamp() + claim_jobs.awake_for)
    on conflict (worker) do update set awake_until = excluded.awake_until
    where w.awake_until < clock_timestamp() + claim_jobs.awake_for / 2;
  else
    delete from private.awake_workers w where w.worker = claim_jobs.worker;
  end if;

  if cardinality(ids) = 0 then
    return;
  end if;
  claimed_at := clock_timestamp();
  return query
  with claimed as (
    update public.jobs j
    set status = 'running',
      attempts = j.attempts + 1,
      lease_token = j.lease_token + 1,
      locked_at = claimed_at,
      locked_by = claim_jobs.worker,
      lease_expires_at = claimed_at + make_interval(secs => claim_jobs.lease_seconds),
      updated_at = claimed_at
    where j.id = any (ids)
    returning j.*
  )
  select c.id, c.kind, c.payload, c.attempts, coalesce(c.max_attempts, k.max_attempts, 5), c.lease_token, c.context,
    c.created_at, c.lease_expires_at, coalesce(k.timeout_ms, 45000),
    c.id = any (suspects)
  from claimed c
  left join public.job_kinds k on k.kind = c.kind
  order by c.priority desc, c.available_at, c.id;
end $$;
revoke all on function public.claim_jobs from public, anon, authenticated;
grant execute on function public.claim_jobs to service_role;
