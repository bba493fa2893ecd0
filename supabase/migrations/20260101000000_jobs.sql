-- Jobs: the tables that everything else stands on.
--
-- A job is one row from the moment it is enqueued until it is purged. Its state is its status and nothing else:
--
--   pending ──claim──▶ running ──complete──▶ succeeded
--    ▲  ▲                 │
--    │  └──fail, release──┴──fail on the last attempt, or permanently──▶ dead
--    └──retry── dead, cancelled ◀──cancel── pending, running
--
-- Invariants
--   * Each change of state is one SQL function. Workers hold no state that the tables lack.
--   * A claim gives a lease: until lease_expires_at the job belongs to whoever knows its lease_token. The token rises at
--     every claim and every settling and never falls, so a stale worker's token matches nothing.
--   * An attempt is counted when it is claimed, not when it ends. A worker that dies takes its attempt with it.
--   * running ⇔ there is a lease; succeeded, dead or cancelled ⇔ there is a finished_at. Checks hold both.
--   * Of the jobs of a kind that hold a dedupe key there is one; the unique index jobs_dedupe says which hold it.
--   * Time is the database's: clock_timestamp(), never now(), which stands still in a long transaction.
--
-- Errors raised by the functions of this template, in every file:
--   22023  an argument is not usable; the message names it
--   25000  claim_jobs was called in a transaction that is not read committed
--   40001  an enqueue with a dedupe key, a lease or an idempotency key met, in such a transaction, what its snapshot does
--          not see: repeat the transaction
--   55000  dispatch is not set up; the hint says what to do
--   55P03  a row has been kept locked for a second by somebody else; the call has changed nothing
--
-- Every function pins search_path to pg_catalog, pg_temp. An empty one would not do: the caller's temporary schema is then
-- searched first for types, and a domain named uuid in it would run its check with the function's rights.
--
-- Only service_role may read or call any of it. Functions are executable by PUBLIC from birth and default privileges
-- differ from project to project, so every file revokes first and then grants by name.

-- An app may have this schema already, as Supabase's guides advise: its grants stay, and what is put here is closed by itself.
do $$
begin
  if to_regnamespace('private') is null then
    create schema private;
    revoke all on schema private from public, anon, authenticated;
    comment on schema private is 'Parts of the job queue that are not for callers. REST does not expose it.';
  end if;
end $$;
grant usage on schema private to service_role;

create table public.jobs (
  -- A version 7 UUID (RFC 9562, section 5.7) whose 12 bits after the milliseconds are their fraction, so that ids rise
  -- within a batch. An expression and not a function: whoever inserts would need the right to execute it.
  id uuid primary key default (
    left(
      overlay('0' || to_hex((date_part('epoch', clock_timestamp()) * 65536000)::bigint) placing '7' from 13 for 0),
      16
    ) || substr(gen_random_uuid()::text, 20)
  )::uuid,
  kind text not null check (kind ~ '^[a-z][a-z0-9_]{0,62}$'),
  payload jsonb not null default '{}',
  status text not null default 'pending' check (status in ('pending', 'running', 'succeeded', 'dead', 'cancelled')),
  priority int not null default 0 check (priority between -100 and 100),
  attempts int not null default 0 check (attempts between 0 and 1000000),
  max_attempts int check (max_attempts between 1 and 1000),
  available_at timestamptz not null default clock_timestamp(),
  locked_at timestamptz,
  locked_by text,
  lease_expires_at timestamptz check (isfinite(lease_expires_at)),
  lease_token int not null default 0 check (lease_token between 0 and 1000000000),
  dedupe_key text check (length(dedupe_key) between 1 and 512),
  dedupe text not null default 'active' check (dedupe in ('active', 'waiting', 'replace', 'once')),
  concurrency_key text check (length(concurrency_key) between 1 and 512),
  context jsonb,
  progress jsonb check (jsonb_typeof(progress) = 'object' and coalesce(jsonb_typeof(progress -> 'steps'), 'object') = 'object'),
  result jsonb,
  last_error text,
  schedule text,
  due_at timestamptz,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz,
  constraint jobs_running_has_lease check ((status = 'running') = (lease_expires_at is not null)),
  constraint jobs_finished_has_time check ((status in ('succeeded', 'dead', 'cancelled')) = (finished_at is not null))
) with (
  -- Every job is updated twice and its old versions are garbage at once: half a page is left for the new ones, and vacuum
  -- starts after a fixed count, not after a fifth of a table that may hold a million finished jobs.
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000, autovacuum_vacuum_cost_delay = 0
);

comment on table public.jobs is 'One row per job. Waiting for its retry: pending and attempts > 0, with last_error.';
comment on column public.jobs.attempts is 'Counted at claim, so it includes the attempt that runs now.';
comment on column public.jobs.max_attempts is 'Null: as its kind says in job_kinds, else 5.';
comment on column public.jobs.locked_at is 'When the last attempt was claimed; kept when it ends.';
comment on column public.jobs.lease_expires_at is 'Null unless running. After this time the job is rescued.';
comment on column public.jobs.lease_token is 'Names one claim. Rises at every claim and settling.';
comment on column public.jobs.dedupe_key is 'Of jobs with the same kind and key only one is enqueued; dedupe says for how long.';
comment on column public.jobs.dedupe is
  'Until when the job holds its key: active, while it waits or runs; waiting and replace, while it waits; once, while there is a row.';
comment on column public.jobs.context is 'Who asked for the job: the user of the request unless given. See private.request_context().';
comment on column public.jobs.progress is
  'What the handler has kept for the next attempt. The field steps: what each step that has completed gave.';
comment on column public.jobs.due_at is 'When the run of its schedule was due that it is; the first, where several were missed.';
comment on column public.jobs.concurrency_key is 'Of jobs with the same kind and key, key_concurrency (1) run at once.';

-- The order of the claim. It ends in id, or equal timestamps would be sorted at every claim. Jobs with a concurrency key
-- have an index of their own, so that those which must wait for their key are in nobody's way; and one by key, to step over
-- a key with many jobs.
create index jobs_ready on public.jobs (kind, priority desc, available_at, id)
  where status = 'pending' and concurrency_key is null;
create index jobs_ready_keyed on public.jobs (kind, priority desc, available_at, id)
  where status = 'pending' and concurrency_key is not null;
create index jobs_keys on public.jobs (kind, concurrency_key, priority desc, available_at, id)
  where status = 'pending' and concurrency_key is not null;

-- How many run, by kind and by key; which leases have run out.
create index jobs_running on public.jobs (kind, concurrency_key) where status = 'running';
create index jobs_leases on public.jobs (lease_expires_at) where status = 'running';

-- Who holds a dedupe key. An enqueue that meets a holder is absorbed by it.
create unique index jobs_dedupe on public.jobs (kind, dedupe_key)
  where dedupe_key is not null and (status = 'pending' or dedupe = 'once' or (dedupe = 'active' and status = 'running'));

-- For statistics: what waits for a retry (true) or for its time. For statistics and the purge: what has ended. What is
-- included spares reading the table.
create index jobs_later on public.jobs (kind, (attempts > 0), available_at) include (attempts)
  where status = 'pending' and (attempts > 0 or available_at > created_at);
create index jobs_finished on public.jobs (kind, status, finished_at) include (locked_at) where finished_at is not null;

-- What died because its worker did not know the kind: see declare_job_kinds.
create index jobs_unknown_kinds on public.jobs (kind, finished_at) where status = 'dead' and last_error like 'unknown_kind:%';

create table public.job_failures (
  job_id uuid not null references public.jobs on delete cascade,
  kind text not null,
  attempt int not null,
  lease_token int not null,
  worker text,
  error text not null,
  failed_at timestamptz not null default clock_timestamp(),
  retry_at timestamptz,
  unreported boolean not null default false,
  primary key (job_id, lease_token)
);
create index job_failures_failed_at on public.job_failures (kind, failed_at);
create index job_failures_unreported on public.job_failures (failed_at) where unreported;
comment on table public.job_failures is 'One row per failed attempt. retry_at is null when the job died of it.';
comment on column public.job_failures.unreported is 'Its worker was lost, and no other has said so yet.';

create table public.job_kinds (
  kind text primary key check (kind ~ '^[a-z][a-z0-9_]{0,62}$'),
  max_attempts int check (max_attempts between 1 and 1000),
  timeout_ms int check (timeout_ms between 1 and 86400000),
  backoff_base interval check (backoff_base between interval '0' and interval '1 day'),
  backoff_factor double precision check (backoff_factor between 1 and 10),
  backoff_cap interval check (backoff_cap between interval '0' and interval '30 days'),
  backoff_jitter double precision check (backoff_jitter between 0 and 1),
  concurrency int check (concurrency between 1 and 1000000),
  key_concurrency int check (key_concurrency between 1 and 1000000),
  rate_limit int check (rate_limit between 1 and 1000000),
  rate_period interval check (rate_period between interval '1 millisecond' and interval '31 days'),
  keep_succeeded interval check (keep_succeeded >= interval '0'),
  keep_dead interval check (keep_dead >= interval '0'),
  keep_cancelled interval check (keep_cancelled >= interval '0'),
  paused boolean not null default false,
  declared jsonb not null default '{}'
);
comment on table public.job_kinds is
  'Settings per kind, one optional row each. Null: 5 attempts, 45000 ms, 30 s, 2, 1 h, 0.2; no limit, but 1 per key; per minute; 7, 30 and 7 days. A change holds from the next claim on.';
comment on column public.job_kinds.backoff_base is
  'After attempt n the wait is base × factor^n, at most cap, drawn evenly from the last jitter (0.2: the last 20 %) below that.';
comment on column public.job_kinds.key_concurrency is 'How many of one concurrency key run at once.';
comment on column public.job_kinds.rate_limit is 'How many are claimed within any rate_period.';
comment on column public.job_kinds.keep_dead is 'How long after its end a dead job is deleted; its failures with it.';
comment on column public.job_kinds.paused is 'None is claimed; those that run go on.';
comment on column public.job_kinds.declared is
  'What the deployed code last declared. A value that differs from it was set by an operator and stays.';

alter table public.jobs enable row level security;
alter table public.job_failures enable row level security;
alter table public.job_kinds enable row level security;
revoke all on public.jobs, public.job_failures, public.job_kinds from public, anon, authenticated;
grant select, insert, update, delete on public.jobs, public.job_failures, public.job_kinds to service_role;

-- Raises 22023 saying that an argument is null or not within its bounds; `what`: the function and the argument.
create function private.check_argument(what text, given int, lowest int, highest int) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if given between lowest and highest then return; end if;
  raise exception '% % is not between % and %', what, coalesce(given::text, 'null'), lowest, highest
    using errcode = '22023';
end $$;

-- Writes what the code declares about its kinds and gives back what holds for each: the operator's value where there is
-- one, else the declared one, else the default. Called by a worker when it starts, with
-- [{"kind": "send_email", "max_attempts": 8, "timeout_ms": 10000, "backoff_base": "30 s", …}].
--
-- While a deploy rolls out, a worker of the old code buries jobs of a kind that only the new code knows. Those of the last
-- day go back, uncounted and in their old order, when a worker that knows the kind declares it: 1000 of each at a time.
create function public.declare_job_kinds(declarations jsonb)
returns table (kind text, max_attempts int, timeout_ms int)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set jit = off set lock_timeout = '1s' as $$
#variable_conflict use_column
begin
  -- Somebody who changes a kind's row keeps it locked until his transaction ends. What holds now is then given back, and the
  -- next worker declares.
  begin
    insert into public.job_kinds as k (
      kind, max_attempts, timeout_ms, backoff_base, backoff_factor, backoff_cap, backoff_jitter, concurrency,
      key_concurrency, rate_limit, rate_period, keep_succeeded, keep_dead, keep_cancelled, declared
    )
    select
      d.kind, d.max_attempts, d.timeout_ms, d.backoff_base, d.backoff_factor, d.backoff_cap, d.backoff_jitter,
      d.concurrency, d.key_concurrency, d.rate_limit, d.rate_period, d.keep_succeeded, d.keep_dead, d.keep_cancelled,
      c.declared
    from jsonb_array_elements(declarations) e
    cross join lateral jsonb_populate_record(null::public.job_kinds, e) d
    cross join lateral (select to_jsonb(d) - array['kind', 'paused', 'declared'] as declared) c
    -- A conflict locks the row even when there is nothing to change, and an operator's open transaction would then hold up
    -- every worker that starts.
    where not exists (select from public.job_kinds o where o.kind = d.kind and o.declared = c.declared) order by d.kind
    on conflict (kind) do update set (
        max_attempts, timeout_ms, backoff_base, backoff_factor, backoff_cap, backoff_jitter, concurrency, key_concurrency,
        rate_limit, rate_period, keep_succeeded, keep_dead, keep_cancelled, declared
      ) = (
        select
          m.max_attempts, m.timeout_ms, m.backoff_base, m.backoff_factor, m.backoff_cap, m.backoff_jitter, m.concurrency,
          m.key_concurrency, m.rate_limit, m.rate_period, m.keep_succeeded, m.keep_dead, m.keep_cancelled,
          excluded.declared
        from jsonb_populate_record(
          null::public.job_kinds,
          -- What an operator changed since the last declaration wins over the new one.
          excluded.declared || coalesce((
            select jsonb_object_agg(c.key, c.value) from jsonb_each(to_jsonb(k) - array['kind', 'paused', 'declared']) c
            where c.value is distinct from coalesce(k.declared -> c.key, 'null')
          ), '{}')
        ) m
      );
  exception when lock_not_available then
    null;
  end;

  begin
    perform private.requeue_jobs(array(
      select row(d.id, d.available_at, greatest(d.attempts - 1, 0), d.last_error)::private.requeued_job
      from jsonb_array_elements(declarations) e
      cross join lateral (
        select o.* from public.jobs o
        where o.kind = e ->> 'kind' and o.status = 'dead' and o.last_error like 'unknown_kind:%'
          and o.last_error = 'unknown_kind: ' || o.kind and o.finished_at > (select clock_timestamp()) - interval '1 day'
        limit 1000 for no key update skip locked
      ) d
    ));
  exception when others or assert_failure then
    raise warning 'declare_job_kinds: jobs that died because their kind was not known stay dead: %', sqlerrm;
  end;

  return query
  select k.kind, coalesce(k.max_attempts, 5), coalesce(k.timeout_ms, 45000) from public.job_kinds k
  where k.kind in (select e ->> 'kind' from jsonb_array_elements(declarations) e);
end $$;
revoke all on function private.check_argument, public.declare_job_kinds from public, anon, authenticated;
grant execute on function private.check_argument, public.declare_job_kinds to service_role;
