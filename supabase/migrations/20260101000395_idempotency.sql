-- Idempotency keys: a request that is sent again runs once.
--
-- begin_idempotent_request() says what to do with a request: run it (started), give the stored answer (replay), say that
-- it is at work (in_progress), or that its key was used for another one (mismatch). Who has started it stores its answer
-- with complete_idempotent_request(), or makes way for another try with release_idempotent_request().
--
--            begin                          complete
--   no row ─────────▶ in flight, locked ──────────────▶ finished ──ttl──▶ no row
--      ▲                  │       ▲ begin, once the lock is over
--      └─────release──────┘       └── the same request only
--
-- Invariants
--   * Of a scope and key there is one row, and of those who begin at once one starts. A request with another fingerprint
--     changes nothing, whatever state the key is in, until its time is over.
--   * Each start has a holder of its own: who began earlier can neither store, extend nor release.
--   * A holder whose lock is over may still store as long as nobody has started anew: the work is done, and not to be
--     done again.
--   * What is begun in a transaction that rolls back was never begun. Who begins the same request meanwhile waits a
--     second, and is then told that it is in progress.

create table public.idempotency_keys (
  scope text collate "C" not null check (octet_length(scope) <= 512),
  key text collate "C" not null check (length(key) between 1 and 255),
  fingerprint text not null check (octet_length(fingerprint) between 1 and 512),
  holder bigint not null,
  locked_until timestamptz not null,
  ttl interval not null check (ttl between interval '1 second' and interval '366 days'),
  status int check (status between 200 and 599),
  headers jsonb check (jsonb_typeof(headers) = 'object'),
  body bytea,
  created_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz,
  expires_at timestamptz not null,
  primary key (scope, key),
  constraint idempotency_keys_finished_has_answer check (num_nulls(status, headers, body, finished_at) in (0, 4))
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
comment on table public.idempotency_keys is 'One row per request with an idempotency key. In flight: status is null.';
comment on column public.idempotency_keys.scope is 'Who asks for what: keys of two scopes do not meet.';
comment on column public.idempotency_keys.fingerprint is 'By which the same request is known, such as a hash of it.';
comment on column public.idempotency_keys.locked_until is 'In flight: after this time the same request may be started anew.';
comment on column public.idempotency_keys.expires_at is 'From then on the key is free: ttl after the end of the request, or of its lock.';

create index idempotency_keys_expired on public.idempotency_keys (expires_at);

alter table public.idempotency_keys enable row level security;
revoke all on public.idempotency_keys from public, anon, authenticated;
grant select, insert, update, delete on public.idempotency_keys to service_role;

-- The scope as given, else the user whose request this is; '' where there is none and so nobody to tell apart, as in a
-- job. Raises 22023 in the request of somebody who is not signed in: all of these would share their answers.
create function private.caller_scope(who text, scope text) returns text
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  user_id constant text := private.request_context() ->> 'user_id';
begin
  if scope is null and user_id is null
    and nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role' = 'anon' then
    raise exception '%: scope is not given, and nobody is signed in', who using errcode = '22023',
      hint = 'Give a scope that tells callers apart.';
  end if;
  return coalesce(scope, 'user ' || user_id, '');
end $$;

-- Begins a request, or says why not.
--
--   key           the client's, up to 255 characters
--   fingerprint   what makes it the same request, such as a hash of all that it asks for; up to 512 bytes
--   lock_seconds  how long it is this caller's alone, 1 to 86400, unless it is extended
--   ttl           how long the answer is kept, a second to 366 days, from the end of the request
--   scope         who asks for what: up to 512 bytes; the user whose request this is unless given
--
-- outcome is started, and holder is what completes it; or in_progress; or mismatch; or replay, and status, headers and
-- body are the answer. Raises 22023 naming the argument that is not usable.
create function public.begin_idempotent_request(
  key text, fingerprint text, lock_seconds int default 60, ttl interval default '24 hours', scope text default null,
  out outcome text, out holder bigint, out status int, out headers jsonb, out body bytea
)
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
declare
  kept public.idempotency_keys;
  begun_at timestamptz;
  ends_at timestamptz;
begin
  scope := private.caller_scope('begin_idempotent_request', scope);
  perform private.check_key('begin_idempotent_request', scope, key, 255);
  perform private.check_argument('begin_idempotent_request: lock_seconds', lock_seconds, 1, 86400);
  if fingerprint is null or octet_length(fingerprint) not between 1 and 512 then
    raise exception 'begin_idempotent_request: fingerprint does not have 1 to 512 bytes' using errcode = '22023';
  elsif ttl is null or ttl not between interval '1 second' and interval '366 days' then
    raise exception 'begin_idempotent_request: ttl % is not between 1 second and 366 days', coalesce(ttl::text, 'null')
      using errcode = '22023';
  end if;
  loop
    select * into kept from public.idempotency_keys k where k.scope = scope and k.key = key;
    begun_at := clock_timestamp();
    ends_at := begun_at + make_interval(secs => lock_seconds);
    if kept.expires_at > begun_at and kept.fingerprint <> fingerprint then
      outcome := 'mismatch'; return;
    elsif kept.expires_at > begun_at and kept.status is not null then
      outcome := 'replay'; status := kept.status; headers := kept.headers; body := kept.body; return;
    elsif kept.status is null and kept.locked_until > begun_at then
      outcome := 'in_progress'; return;
    end if;
    begin
      if kept.key is null then
        insert into public.idempotency_keys as k (scope, key, fingerprint, holder, locked_until, ttl, expires_at)
        values (scope, key, fingerprint, nextval('private.holders'), ends_at, ttl, ends_at + ttl)
        on conflict do nothing returning k.holder into holder;
      else
        -- Whatever has happened to it since has changed expires_at.
        update public.idempotency_keys k set fingerprint = fingerprint, holder = nextval('private.holders'),
          locked_until = ends_at, ttl = ttl, status = null, headers = null, body = null, created_at = begun_at,
          finished_at = null, expires_at = ends_at + ttl
        where k.scope = scope and k.key = key and k.holder = kept.holder and k.expires_at = kept.expires_at
        returning k.holder into holder;
      end if;
    exception when lock_not_available then
      outcome := 'in_progress'; return;
    end;
    if holder is not null then outcome := 'started'; return; end if;
  end loop;
end $$;

-- Locks it for so many seconds, 1 to 86400, from now on. False when another has started it since, or it is finished.
create function public.extend_idempotent_request(
  key text, holder bigint, lock_seconds int default 60, scope text default null
) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
declare
  ends_at constant timestamptz := clock_timestamp() + make_interval(secs => lock_seconds);
begin
  scope := private.caller_scope('extend_idempotent_request', scope);
  perform private.check_argument('extend_idempotent_request: lock_seconds', lock_seconds, 1, 86400);
  update public.idempotency_keys k set locked_until = ends_at, expires_at = ends_at + k.ttl
  where k.scope = scope and k.key = key and k.holder = holder and k.status is null;
  return found;
end $$;

-- Stores the answer: an HTTP status, 200 to 599, an object of headers as texts, and the bytes of the body, up to 6 MiB (in
-- SQL convert_to('…', 'UTF8')). True when it is stored, now or by an earlier call; false when another has started the
-- request since. Raises 22023 naming the argument that is not usable.
create function public.complete_idempotent_request(
  key text, holder bigint, status int, headers jsonb default '{}', body bytea default '', scope text default null
) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
begin
  scope := private.caller_scope('complete_idempotent_request', scope);
  perform private.check_argument('complete_idempotent_request: status', status, 200, 599);
  if jsonb_typeof(headers) is distinct from 'object'
    or jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")') or octet_length(headers::text) > 65536 then
    raise exception 'complete_idempotent_request: headers is not an object of texts with up to 65536 bytes'
      using errcode = '22023';
  elsif body is null or octet_length(body) > 6291456 then
    raise exception 'complete_idempotent_request: body %', case when body is null then 'is null' else 'has more than 6291456 bytes' end
      using errcode = '22023';
  end if;
  update public.idempotency_keys k set status = status, headers = headers, body = body,
    finished_at = clock_timestamp(), expires_at = clock_timestamp() + k.ttl
  where k.scope = scope and k.key = key and k.holder = holder and k.status is null;
  return found or exists (
    select from public.idempotency_keys k
    where k.scope = scope and k.key = key and k.holder = holder
      and k.status = status and k.headers = headers and k.body = body
  );
end $$;

-- Forgets a request that came to nothing, so that the next try starts. False when another has started it since, or it is
-- finished.
create function public.release_idempotent_request(key text, holder bigint, scope text default null) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
begin
  scope := private.caller_scope('release_idempotent_request', scope);
  delete from public.idempotency_keys k
  where k.scope = scope and k.key = key and k.holder = holder and k.status is null;
  return found;
end $$;

-- Deletes up to `max_keys` idempotency keys, and as many leases, whose time is over, and returns how many. It leaves off
-- after a second: answers may be large.
create function public.purge_expired_keys(max_keys int default 10000) returns int
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
  begun_at constant timestamptz := clock_timestamp();
  leases int;
  deleted int;
  total int := 0;
begin
  delete from public.leases d where d.ctid = any (array(
    select l.ctid from public.leases l where l.expires_at <= begun_at order by l.expires_at limit max_keys
    for update skip locked
  ));
  get diagnostics leases = row_count;
  while total < max_keys and clock_timestamp() < begun_at + interval '1 second' loop
    delete from public.idempotency_keys d where d.ctid = any (array(
      select k.ctid from public.idempotency_keys k where k.expires_at <= begun_at order by k.expires_at
      limit least(max_keys - total, 500) for update skip locked
    ));
    exit when not found;
    get diagnostics deleted = row_count;
    total := total + deleted;
  end loop;
  return leases + total;
end $$;

revoke all on function private.caller_scope, public.begin_idempotent_request, public.extend_idempotent_request,
  public.complete_idempotent_request, public.release_idempotent_request, public.purge_expired_keys
  from public, anon, authenticated;
grant execute on function private.caller_scope, public.begin_idempotent_request, public.extend_idempotent_request,
  public.complete_idempotent_request, public.release_idempotent_request, public.purge_expired_keys to service_role;
