-- Claim: how a worker takes work.
--
-- Each kind that waits gets a fair share of a claim, so a hundred thousand jobs of one kind do not delay another's first.
-- Within a kind the higher priority goes first and then the one enqueued first; one pick in ten starts from the lowest
-- priority, so that nothing starves. A claim's cost depends on what it takes, not on what waits: kinds and priorities are
-- stepped through by index, one probe each, and delayed jobs are not walked over.
--
-- Invariants of flow control
--   * Nothing counts but rows: those that run, and private.starts for the rate. Nobody can leak a place.
--   * Whoever claims of a kind that has a limit, or jobs with a concurrency key, holds that kind's row of private.turns until
--     its transaction ends, and counts after it has got it. Another claim passes such a kind over instead of waiting.
--   * The time by which a claim counts is the one that it writes to locked_at.
--
-- The rows are locked `for no key update skip locked`, not with the usual `for update`: a row of job_failures or of an
-- app's own table that references a job holds `for key share` on it until its transaction ends, and `for update skip
-- locked` would pass over that job in silence. Nothing here changes a key.
--
-- Planner: the settings on claim_jobs pin one plan shape whatever the statistics say. With stale statistics the planner
-- otherwise sorts or scans the table (measured: 3 to 10 times slower); enable_seqscan off alone brings in the JIT (48 ms).

-- Whose turn it is: in the row of a kind, the concurrency key after which the next claim goes on; in the row '', the kind
-- after which the next claim starts its round when more than 32 wait. Who has locked a row has the turn.
create table private.turns (
  kind text primary key,
  at text not null default ''
);
insert into private.turns values ('');

-- When how many jobs of a kind with a rate limit were claimed, within its last two rate_periods: a claim that others have
-- overtaken looks back from its own time.
create table private.starts (
  kind text not null,
  at timestamptz not null,
  jobs int not null,
  primary key (kind, at)
);

-- A transaction that stays open keeps the index entries of all jobs that have ended since it began, and a claim walks over
-- them: with 4000 jobs a second, after a minute for 176 ms. So a claim that has read much for what it took leaves a mark
-- where it found something, and the next ones begin there. At look_at one of them looks at what is before the mark, as does
-- every claim that would be empty, since jobs may come in there late. There is no mark where there is no such trouble.
create unlogged table private.low_water (
  kind text not null,
  priority int not null,
  available_at timestamptz not null,
  look_at timestamptz not null,
  primary key (kind, priority)
);

-- Whether jobs are started at all: see enable_dispatch().
create table private.dispatch (
  one boolean primary key default true check (one),
  enabled boolean not null default true
);
insert into private.dispatch default values;

-- Workers that have promised to look for work by themselves until awake_until: while one has, an enqueue need not poke.
-- Unlogged: after a crash nobody has promised anything.
create unlogged table private.awake_workers (
  worker text primary key,
  awake_until timestamptz not null
);

alter table private.turns enable row level security;
alter table private.starts enable row level security;
alter table private.low_water enable row level security;
alter table private.dispatch enable row level security;
alter table private.awake_workers enable row level security;
revoke all on private.turns, private.starts, private.low_water, private.dispatch, private.awake_workers
  from public, anon, authenticated, service_role;
grant select, insert, update, delete on private.turns, private.starts, private.low_water, private.awake_workers
  to service_role;
grant select on private.dispatch to service_role;

-- Up to `max_kinds` kinds that have pending jobs, due or not, or a mark: those after `start`, and then from the first one on.
create function private.waiting_kinds(start text, max_kinds int, marked boolean) returns text[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  beyond constant text := repeat('z', 64); -- longer than a kind may be
begin
  return array(
    with recursive seen as (
      select start as kind, 0 as nth, false as wrapped
      union all
      select coalesce(k.next, ''), s.nth + (k.next is not null)::int, s.wrapped or k.next is null
      from seen s
      cross join lateral (
        -- What is before a mark is not probed: there may be many entries of none.
        select coalesce(case when marked then (select min(m.kind) from private.low_water m where m.kind > s.kind) end, beyond)
          as mark offset 0
      ) m
      cross join lateral (
        select nullif(least(m.mark, (
          select j.kind from public.jobs j
          where j.status = 'pending' and j.concurrency_key is null and j.kind > s.kind and j.kind < m.mark
          order by j.kind, j.priority desc, j.available_at, j.id limit 1
        ), (
          select j.kind from public.jobs j
          where j.status = 'pending' and j.concurrency_key is not null and j.kind > s.kind and j.kind < m.mark
          order by j.kind, j.priority desc, j.available_at, j.id limit 1
        )), beyond) as next offset 0
      ) k
      where s.nth < max_kinds and case when s.wrapped then k.next <= start else k.next is not null or start <> '' end
    )
    select s.kind from seen s where s.nth > 0 and s.kind <> ''
  );
end $$;

-- Takes the turn of a kind until the transaction ends; false when another claim has it.
create function private.take_turn(kind text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' as $$
begin
  perform from private.turns t where t.kind = take_turn.kind for no key update skip locked;
  if not found and not exists (select from private.turns t where t.kind = take_turn.kind) then
    insert into private.turns (kind) values (take_turn.kind) on conflict do nothing;
    perform from private.turns t where t.kind = take_turn.kind for no key update skip locked;
  end if;
  return found;
exception when lock_not_available then
  return false; -- the first claim of its kind has just come in between
end $$;

-- How many jobs of a kind its limits let start at that time, at most `max_jobs`.
create function private.free_places(kind text, max_jobs int, at timestamptz) returns int
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  limits record;
  places int := max_jobs;
begin
  select k.paused, k.concurrency, k.rate_limit, coalesce(k.rate_period, interval '1 minute') as rate_period into limits
  from public.job_kinds k where k.kind = free_places.kind;
  if limits.paused then return 0; end if;
  if limits.concurrency is not null then
    places := least(places, limits.concurrency - (
      select count(*)::int from (
        select from public.jobs j where j.status = 'running' and j.kind = free_places.kind
        order by j.concurrency_key limit limits.concurrency -- ordered, or the statistics choose between two indexes
      ) r
    ));
  end if;
  if limits.rate_limit is not null and places > 0 then
    places := least(places, (
      -- Overtaken by more than a period: what it would have to count may be forgotten.
      select case when max(s.at) > free_places.at + limits.rate_period then 0
        else limits.rate_limit - coalesce(sum(s.jobs), 0)::int end
      from private.starts s where s.kind = free_places.kind and s.at > free_places.at - limits.rate_period
    ));
  end if;
  return greatest(places, 0);
end $$;

-- Of each of these kinds up to as many jobs without a concurrency key as are wanted that are due at that time, locked, a
-- priority at a time; `counts` says how many of each. `taken` are locked already by this claim; `marked`: there are marks, and
-- `fully`: not only from them on. `most` is how many attempts a job of the kind has. A suspect has lost its worker at its last
-- attempt, and has one attempt left or two; for each there may be one job more.
create function private.pick_plain_jobs(
  kinds text[], wanted int[], most int[], due timestamptz, lowest_first boolean, taken uuid[], marked boolean,
  fully boolean, out ids uuid[], out counts int[], out suspects uuid[]
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  levels int[] := array_fill(case when lowest_first then -101 else 101 end, array[cardinality(kinds)]);
  next_marks int[];
  begins timestamptz[]; -- where to begin at these marks; null: from the first job on
  pages bigint := pg_stat_get_xact_blocks_fetched('public.jobs_ready'::regclass);
  step record;
  extra uuid[];
  others int; -- than suspects
begin
  ids := '{}';
  suspects := '{}';
  counts := array_fill(0, array[cardinality(kinds)]);
  while 0 < any (wanted) loop
    if marked then
      select array_agg(m.priority order by k.nth),
        array_agg(case when not (fully or m.look_at < due and private.take_turn('')) then m.available_at end order by k.nth)
      into next_marks, begins
      from unnest(kinds, levels) with ordinality k(kind, level, nth)
      left join lateral (
        select w.* from private.low_water w
        where w.kind = k.kind and case when lowest_first then w.priority > k.level else w.priority < k.level end
        order by case when lowest_first then w.priority else -w.priority end limit 1
      ) m on true;
    end if;
    for step in
      select k.nth, k.kind, k.most, l.level, l.level = k.mark as marked, s.since, p.ids, p.suspects, p.first_at,
        pg_stat_get_xact_blocks_fetched('public.jobs_ready'::regclass) as pages
      from unnest(kinds, wanted, most, levels, next_marks, begins) with ordinality k(kind, wanted, most, level, mark, since, nth)
      -- The next priority: up to that of the next mark, whose jobs may lie behind many entries of none.
      cross join lateral (
        select case when lowest_first then least(k.mark, (
          select j.priority from public.jobs j
          where j.status = 'pending' and j.concurrency_key is null and j.kind = k.kind
            and j.priority > k.level and j.priority < coalesce(k.mark, 101)
          order by j.priority, j.available_at desc, j.id desc limit 1
        )) else greatest(k.mark, (
          select j.priority from public.jobs j
          where j.status = 'pending' and j.concurrency_key is null and j.kind = k.kind
            and j.priority < k.level and j.priority > coalesce(k.mark, -101)
          order by j.priority desc, j.available_at, j.id limit 1
        )) end as level offset 0
      ) l
      cross join lateral (select case when l.level = k.mark then k.since end as since offset 0) s
      cross join lateral (
        select coalesce(array_agg(p.id), '{}') as ids, coalesce(array_agg(p.id) filter (where p.suspect), '{}') as suspects,
          min(p.available_at) as first_at
        from (
          select j.id, j.available_at,
            j.attempts + 2 >= coalesce(j.max_attempts, k.most) and j.last_error like 'lease expired:%' as suspect
          from public.jobs j
          where j.status = 'pending' and j.concurrency_key is null and j.kind = k.kind and j.priority = l.level
            and j.available_at >= coalesce(s.since, '-infinity') and j.available_at <= due and j.id <> all (taken)
          order by j.available_at, j.id limit k.wanted for no key update skip locked
        ) p
      ) p
      where k.wanted > 0
    loop
      -- Those behind suspects do not wait until the last of them has had its turn.
      extra := '{}';
      if cardinality(step.suspects) > 0 then
        extra := array(
          select j.id from public.jobs j
          where j.status = 'pending' and j.concurrency_key is null and j.kind = step.kind and j.priority = step.level
            and j.available_at >= coalesce(step.since, '-infinity') and j.available_at <= due
            and j.id <> all (taken || ids || step.ids)
            and (j.attempts + 2 >= coalesce(j.max_attempts, step.most) and j.last_error like 'lease expired:%') is not true
          order by j.available_at, j.id limit cardinality(step.suspects) for no key update skip locked
        );
      end if;
      others := cardinality(step.ids) - cardinality(step.suspects) + cardinality(extra);
      levels[step.nth] := step.level;
      wanted[step.nth] := case when step.level is null then 0 else wanted[step.nth] - others end;
      counts[step.nth] := counts[step.nth] + others;
      ids := ids || step.ids || extra;
      suspects := suspects || step.suspects;
      if step.level is not null and step.pages - pages > 20 + cardinality(step.ids) / 20 then
        if private.take_turn('') then
          insert into private.low_water as m
          values (
            step.kind, step.level, coalesce(step.first_at, due),
            due + least(make_interval(secs => 1 + (step.pages - pages) / 1000.0), interval '10 seconds')
          )
          on conflict on constraint low_water_pkey do update
          set available_at = excluded.available_at,
            look_at = case when step.since is null then excluded.look_at else m.look_at end;
        end if;
      elsif step.marked and step.since is null and private.take_turn('') then
        delete from private.low_water m where m.kind = step.kind and m.priority = step.level;
      end if;
      pages := step.pages;
    end loop;
  end loop;
end $$;

-- Up to `max_jobs` jobs of one kind with a concurrency key that are due at that time, in their order, of each key no more
-- than its free places; `taken` are given to this claim already, `passed` are not to be had. Of suspects there may be any
-- number beside them. Locks nothing, so only who has the kind's turn may rely on it.
--
-- Many jobs may wait for few keys, and many keys for a later time. So it looks at the first jobs in their order and,
-- where they do not do, at the first jobs of as many keys, from the one after `at_key` on and round again; then at four times
-- as many, until it has come to the end of either. What only some of the keys have must not go ahead of the first 500
-- jobs; once 2000 have been looked at, fewer than `max_jobs` will do. After 5000 of either it leaves off, unless `fully`: `cut`
-- says so, and the next claim goes on after `at_key`, so that a kind with very many of both holds up no other.
-- Stable, so that all of it sees one moment: a place that gets free meanwhile is not for the second job of its key.
create function private.choose_keyed_jobs(
  kind text, max_jobs int, due timestamptz, lowest_first boolean, most int, taken uuid[], passed uuid[], fully boolean,
  inout at_key text, out ids uuid[], out keys text[], out suspects uuid[], out cut boolean
)
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  key_places constant int := coalesce(
    (select k.key_concurrency from public.job_kinds k where k.kind = choose_keyed_jobs.kind), 1
  );
  used constant text[] := array(
    select j.concurrency_key from public.jobs j
    where j.id = any (taken) and j.kind = choose_keyed_jobs.kind and j.concurrency_key is not null
  );
  look_at int := greatest(2 * max_jobs, 20);
  enough int;
  walked int;
  more record;
begin
  cut := false;
  loop
    -- Not in (select …) looks up in a hash, where <> all (…) compares with one after the other.
    -- Between, and the order by key, leave one index to choose, whatever the statistics say.
    with recursive levels as (
      select case when lowest_first then -101 else 101 end as priority
      union all
      select case when lowest_first then (
        select j.priority from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = choose_keyed_jobs.kind
          and j.priority > l.priority order by j.priority, j.available_at desc, j.id desc limit 1
      ) else (
        select j.priority from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = choose_keyed_jobs.kind
          and j.priority < l.priority order by j.priority desc, j.available_at, j.id limit 1
      ) end from levels l where l.priority is not null
    ), walk as materialized (
      select w.* from levels l cross join lateral (
        select j.id, j.concurrency_key as key, case when lowest_first then j.priority else -j.priority end as rank,
          j.available_at, j.attempts + 2 >= coalesce(j.max_attempts, most) and j.last_error like 'lease expired:%' as suspect
        from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = choose_keyed_jobs.kind
          and j.priority = l.priority and j.available_at <= due and j.id not in (select unnest(taken || passed))
        order by j.available_at, j.id limit look_at
      ) w limit look_at
    ), numbered as (
      select f.*, row_number() over (partition by f.key order by f.rank nulls first, f.available_at, f.id) as nth
      from (select * from walk union all select null, u, null, null, null from unnest(used) u) f
    ), counted as (
      select n.*, max(case when n.nth = 1 then key_places - (
        select count(*) from (
          select from public.jobs r
          where r.status = 'running' and r.kind = choose_keyed_jobs.kind and r.concurrency_key between n.key and n.key
          order by r.concurrency_key limit key_places
        ) r
      ) end) over (partition by n.key) as places from numbered n
    ), admitted as (
      select c.*, count(*) filter (where c.suspect is not true) over (order by c.rank, c.available_at, c.id) as others
      from counted c where c.nth <= c.places and c.id is not null
    )
    select coalesce(array_agg(a.id), '{}'), coalesce(array_agg(a.key), '{}'),
      coalesce(array_agg(a.id) filter (where a.suspect), '{}'), (select count(*) from walk)
    into ids, keys, suspects, walked
    from admitted a where a.others <= max_jobs;
    if walked < look_at or cardinality(ids) - cardinality(suspects) >= max_jobs then return; end if;

    enough := case when look_at < 500 then look_at else 2 * max_jobs end;
    with recursive steps as (
      select at_key as key, false as wrapped
      union all
      select n.* from steps s cross join lateral (
        (select j.concurrency_key, s.wrapped from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = choose_keyed_jobs.kind
          and j.concurrency_key > s.key order by j.concurrency_key, j.priority desc, j.available_at, j.id limit 1)
        union all
        select '', true where not s.wrapped
        limit 1
      ) n where not (s.wrapped and s.key > at_key)
    ), some_keys as materialized (
      select s.key from steps s where s.wrapped = (s.key <= at_key) limit look_at
    ), firsts as materialized (
      select b.* from some_keys s cross join lateral (
        select count(*) + case when s.key not in (select unnest(used || keys)) then 0 else (
          select count(*) from unnest(used || keys) u where u = s.key
        ) end as used from (
          select from public.jobs r
          where r.status = 'running' and r.kind = choose_keyed_jobs.kind and r.concurrency_key between s.key and s.key
          order by r.concurrency_key limit key_places
        ) r
      ) r cross join lateral (
        select j.id, s.key, case when lowest_first then j.priority else -j.priority end as rank,
          j.available_at, j.attempts + 2 >= coalesce(j.max_attempts, most) and j.last_error like 'lease expired:%' as suspect
        from public.jobs j
        where j.status = 'pending' and j.concurrency_key is not null and j.kind = choose_keyed_jobs.kind
          and j.concurrency_key between s.key and s.key and j.available_at <= due
          and j.id not in (select unnest(taken || passed || ids))
          and j.priority <= case when not lowest_first then 100 else (
            select l.priority from public.jobs l
            where l.status = 'pending' and l.concurrency_key is not null and l.kind = choose_keyed_jobs.kind
              and l.concurrency_key between s.key and s.key and l.available_at <= due
            order by l.concurrency_key desc, l.priority, l.available_at desc, l.id desc limit 1
          ) end
        order by j.concurrency_key, j.priority desc, j.available_at, j.id limit greatest(key_places - r.used, 0)
      ) b limit enough
    ), admitted as (
      select f.*, count(*) filter (where f.suspect is not true) over (order by f.rank, f.available_at, f.id) as others
      from firsts f
    )
    select coalesce(array_agg(a.id), '{}') as ids, coalesce(array_agg(a.key), '{}') as keys,
      coalesce(array_agg(a.id) filter (where a.suspect), '{}') as suspects,
      (select count(*) from firsts) < enough and (select count(*) from some_keys) < look_at as all_keys,
      coalesce((select array_agg(key) from firsts)[enough], (select array_agg(key) from some_keys)[look_at]) as last_key
    into more
    from admitted a where a.others <= max_jobs - (cardinality(ids) - cardinality(suspects));
    if look_at >= 500 or more.all_keys then
      ids := ids || more.ids;
      keys := keys || more.keys;
      suspects := suspects || more.suspects;
      exit when more.all_keys or cardinality(ids) - cardinality(suspects) >= max_jobs or look_at >= 2000 and ids <> '{}';
    end if;
    cut := look_at >= 5000 and not fully;
    exit when cut;
    look_at := 4 * look_at;
  end loop;
  at_key := coalesce(more.last_key, at_key);
end $$;

-- Up to `max_jobs` jobs of these kinds, locked, within their limits: an equal part of each; for each suspect there may be one
-- job more. `more` are the kinds of which there was no part left, and those that may have more than their part; `cut`: of one
-- not all keys were looked at.
create function private.pick_jobs(
  kinds text[], max_jobs int, due timestamptz, taken uuid[], marked boolean, fully boolean,
  out ids uuid[], out suspects uuid[], out more text[], out rated boolean, out cut boolean
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  lowest_first constant boolean := random() < 0.1;
  settings record;
  turn boolean;
  part int;
  wanted_kinds text[] := '{}';
  wanted int[] := '{}';
  most int[] := '{}';
  counts int[];
  with_keys int[] := '{}'; -- their numbers in wanted_kinds
  nth int;
  key text;
  chosen record;
  got uuid[];
  keyed uuid[];
  keyed_suspects uuid[];
  passed uuid[];
  all_keyed uuid[] := '{}';
begin
  rated := false;
  cut := false;
  more := kinds[max_jobs + 1 :];
  for settings in
    select u.kind, max_jobs / cardinality(kinds) + (u.nth <= max_jobs % cardinality(kinds))::int as part,
      k.max_attempts, k.paused, coalesce(k.concurrency, k.rate_limit) is not null as limited,
      k.rate_limit is not null as rated, coalesce((
        select true from public.jobs j where j.status = 'pending' and j.concurrency_key is not null and j.kind = u.kind
        order by j.priority desc, j.available_at, j.id limit 1
      ), false) as has_keys -- ordered, or the statistics choose between two indexes
    from unnest(kinds[: max_jobs]) with ordinality u(kind, nth)
    left join lateral (select * from public.job_kinds k where k.kind = u.kind offset 0) k on true
  loop
    continue when settings.paused;
    part := settings.part;
    if settings.has_keys or settings.limited then
      if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'claim_jobs: % has limits, and what runs can only be counted in a read committed transaction',
          settings.kind using errcode = '25000';
      end if;
      turn := private.take_turn(settings.kind);
      if settings.limited then
        continue when not turn;
        part := least(part, private.free_places(settings.kind, part + cardinality(taken), due) - (
          select count(*) from public.jobs j where j.id = any (taken) and j.kind = settings.kind
        ));
        rated := rated or settings.rated;
      end if;
      if settings.has_keys and turn and part > 0 then with_keys := with_keys || cardinality(wanted) + 1; end if;
    end if;
    continue when part <= 0;
    wanted_kinds := wanted_kinds || settings.kind;
    wanted := wanted || part;
    most := most || coalesce(settings.max_attempts, 5);
  end loop;

  select p.* into ids, counts, suspects
  from private.pick_plain_jobs(wanted_kinds, wanted, most, due, lowest_first, taken, marked, fully) p;

  foreach nth in array with_keys loop
    keyed := '{}'; keyed_suspects := '{}'; passed := '{}';
    -- Somebody else may have a row locked, or have changed it: then another is chosen in its place.
    loop
      select t.at into key from private.turns t where t.kind = wanted_kinds[nth];
      select * into chosen from private.choose_keyed_jobs(
        wanted_kinds[nth], wanted[nth] - (cardinality(keyed) - cardinality(keyed_suspects)), due, lowest_first,
        most[nth], taken || keyed, passed, fully, key
      );
      cut := cut or chosen.cut;
      if chosen.at_key <> key and (chosen.cut or cardinality(chosen.ids) > 0) then
        update private.turns t set at = chosen.at_key where t.kind = wanted_kinds[nth];
      end if;
      exit when cardinality(chosen.ids) = 0;
      got := array(
        select j.id from unnest(chosen.ids, chosen.keys) c(id, key)
        join public.jobs j on j.id = c.id and j.concurrency_key = c.key
        -- Not =, or with stale statistics the planner looks for each of them in the index of all that are pending.
        where j.status is not distinct from 'pending' and j.kind = wanted_kinds[nth] and j.available_at <= due
        for no key update of j skip locked
      );
      keyed := keyed || got;
      keyed_suspects := keyed_suspects || array(select g from unnest(got) g where g = any (chosen.suspects));
      passed := passed || array(select c from unnest(chosen.ids) c where c <> all (got));
      exit when cardinality(got) = cardinality(chosen.ids);
    end loop;
    counts[nth] := counts[nth] + cardinality(keyed);
    all_keyed := all_keyed || keyed;
    suspects := suspects || keyed_suspects;
  end loop;

  if cardinality(all_keyed) > 0 then
    ids := array(
      select r.id from (
        select j.id, w.wanted, row_number() over (
          partition by j.kind order by case when lowest_first then j.priority else -j.priority end, j.available_at, j.id
        ) as nth
        from public.jobs j join unnest(wanted_kinds, wanted) w(kind, wanted) on w.kind = j.kind
        where j.id = any (ids || all_keyed) and j.id <> all (suspects)
      ) r where r.nth <= r.wanted
    ) || suspects;
  end if;
  if cardinality(ids) < max_jobs then
    more := more || array(
      select w.kind from unnest(wanted_kinds, wanted, counts) w(kind, wanted, count) where w.count >= w.wanted
    );
  end if;
end $$;

-- Notes for the rate limits that these jobs start at that time: up to the next thousandth of the period, so that no more than
-- two thousand rows are ever counted.
create function private.record_starts(ids uuid[], at timestamptz) returns void
language sql set search_path = pg_catalog, pg_temp as $$
  with started as (
    select k.kind, coalesce(k.rate_period, interval '1 minute') as period, count(*)::int as jobs
    from public.jobs j join public.job_kinds k on k.kind = j.kind and k.rate_limit is not null
    where j.id = any (record_starts.ids)
    group by k.kind
  ), forgotten as (
    delete from private.starts s using started n where s.kind = n.kind and s.at <= record_starts.at - 2 * n.period
  )
  insert into private.starts as s (kind, at, jobs)
  select n.kind, to_timestamp(ceil(extract(epoch from record_starts.at) / step.s) * step.s), n.jobs
  from started n cross join lateral (select extract(epoch from n.period) / 1000 as s) step
  on conflict on constraint starts_pkey do update set jobs = s.jobs + excluded.jobs
$$;

-- Claims up to `max_jobs` due jobs (at most 1000, the most rows that REST gives back) and counts an attempt for each. They
-- come in the order in which they are to start. Empty only when nothing may start, or all that may is being claimed by
-- others. Raises 22023 naming the argument that is not usable, and 25000 for jobs with limits in a transaction that is not
-- read committed.
--
--   worker, lease_seconds  a name, for locked_by; how long the jobs are its own
--   kinds, except_kinds    of these alone (null for all), and not of those
--   awake_for      given by a worker that dispatch has started. It gets nothing while dispatch is off, and promises to claim
--                  again within that time, which spares the project a poke per enqueue. A claim that fills up, or one for no
--                  time, takes the promise back, since such a worker takes no more work for now.
--
-- Of a job that it gives, `timeout_ms` is how long the attempt may run, and `suspect` that its worker was lost at the
-- attempt before, and that this is its last attempt or the last but one. It may be what ends workers, or be about to die of
-- another's doing: a claim gives one such job by itself, and a process runs it with nothing beside it. Not before, since a
-- night of lost workers makes many of them, and they run one after the other.
create function public.claim_jobs(
  worker text, max_jobs int default 10, lease_seconds int default 60, kinds text[] default null,
  awake_for interval default null, except_kinds text[] default null
) returns table (
  id uuid, kind text, payload jsonb, attempts int, max_attempts int, lease_token int, context jsonb, progress jsonb,
  concurrency_key text, schedule text, due_at timestamptz, created_at timestamptz, lease_expires_at timestamptz,
  timeout_ms int, suspect boolean
)
language plpgsql set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
#variable_conflict use_column
declare
  start text; -- null when no more than 32 kinds wait
  first_kind text;
  once_round boolean;
  waiting text[];
  left_kinds text[];
  ids uuid[] := '{}';
  suspects uuid[] := '{}';
  picked record;
  with_settings text[];
  most int[];
  timeouts int[];
  marked boolean;
  fully boolean := false;
  rated boolean := false;
  cut boolean := false;
  claimed_at constant timestamptz := clock_timestamp();
begin
  if claim_jobs.worker is null or claim_jobs.worker = '' then
    raise exception 'claim_jobs: worker is empty' using errcode = '22023', hint = 'Give a name that tells this worker from others.';
  end if;
  perform private.check_argument('claim_jobs: max_jobs', claim_jobs.max_jobs, 1, 1000);
  perform private.check_argument('claim_jobs: lease_seconds', claim_jobs.lease_seconds, 1, 86400);

  if claim_jobs.awake_for is not null and not (select d.enabled from private.dispatch d) then
    delete from private.awake_workers w where w.worker = claim_jobs.worker;
    return;
  end if;

  select coalesce((select t.at from private.turns t where t.kind = ''), ''), exists (select from private.low_water)
  into start, marked;
  loop
    for round in 1 .. 100 loop
      if claim_jobs.kinds is null then
        waiting := private.waiting_kinds(start, 32, marked);
        once_round := first_kind = any (waiting);
        first_kind := coalesce(first_kind, waiting[1]);
        start := waiting[32];
      else
        waiting := array(select distinct k from unnest(claim_jobs.kinds) k where k is not null);
      end if;

      -- Each gets an equal part, in an order that changes; those that may have more get what is left.
      left_kinds := waiting;
      if cardinality(waiting) > 1 or claim_jobs.except_kinds is not null then
        left_kinds := array(
          select k from unnest(waiting) k where k <> all (array_remove(coalesce(claim_jobs.except_kinds, '{}'), null))
          order by random()
        );
      end if;
      while cardinality(left_kinds) > 0 and cardinality(ids) < claim_jobs.max_jobs loop
        picked := private.pick_jobs(left_kinds, claim_jobs.max_jobs - cardinality(ids), claimed_at, ids, marked, fully);
        ids := ids || picked.ids;
        suspects := suspects || picked.suspects;
        rated := rated or picked.rated;
        cut := cut or picked.cut;
        left_kinds := picked.more;
      end loop;

      -- Of more than 32 kinds these may all be waiting for later: then the next ones are looked at.
      exit when cardinality(ids) > 0 or claim_jobs.kinds is not null or start is null or once_round;
    end loop;
    exit when cardinality(ids) > 0 or fully or not (marked or cut);
    fully := true;
    start := coalesce(start, '');
    first_kind := null;
  end loop;
  -- After 3200 kinds of which none has anything it leaves off, and the next claim goes on there.
  if claim_jobs.kinds is null and start is not null and (cardinality(ids) > 0 or once_round is not true)
    and private.take_turn('')
  then
    update private.turns t set at = start where t.kind = '';
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

  if cardinality(ids) = 0 then return; end if;
  if rated then perform private.record_starts(ids, claimed_at); end if;
  -- Looked up once; a join would look for each job (measured: 8 % of a claim of 100).
  select array_agg(k.kind), array_agg(k.max_attempts), array_agg(k.timeout_ms) into with_settings, most, timeouts
  from public.job_kinds k where k.kind = any (waiting);
  return query
  with claimed as (
    update public.jobs j
    set status = 'running', attempts = j.attempts + 1, lease_token = j.lease_token + 1, locked_at = claimed_at,
      locked_by = claim_jobs.worker, lease_expires_at = claimed_at + make_interval(secs => claim_jobs.lease_seconds),
      updated_at = claimed_at
    where j.id = any (ids)
    returning j.id, j.kind, j.payload, j.attempts, j.max_attempts, j.lease_token, j.context, j.progress, j.concurrency_key,
      j.schedule, j.due_at, j.created_at, j.lease_expires_at, j.priority, j.available_at
  )
  select c.id, c.kind, c.payload, c.attempts, coalesce(c.max_attempts, most[array_position(with_settings, c.kind)], 5),
    c.lease_token, c.context, c.progress, c.concurrency_key, c.schedule, c.due_at, c.created_at, c.lease_expires_at,
    coalesce(timeouts[array_position(with_settings, c.kind)], 45000), c.id = any (suspects)
  from claimed c order by c.priority desc, c.available_at, c.id;
end $$;

revoke all on function private.record_starts, private.waiting_kinds, private.take_turn, private.free_places,
  private.pick_plain_jobs, private.choose_keyed_jobs, private.pick_jobs, public.claim_jobs
  from public, anon, authenticated;
grant execute on function private.record_starts, private.waiting_kinds, private.take_turn, private.free_places,
  private.pick_plain_jobs, private.choose_keyed_jobs, private.pick_jobs, public.claim_jobs to service_role;
