-- Leases: named locks with an end, for work that must not run twice at once.
--
-- A lease belongs to whoever acquired it until they release it or its time is over. Then it is anybody's: a holder that
-- dies blocks the others for `seconds` at most.
--
-- Invariants
--   * Of a scope and key there is one row, and until expires_at one holder. A late holder can neither extend nor release,
--     even if nobody has taken its place.
--   * holder is a fencing number: each acquisition, of whatever lease, has a higher one than those before. What the work
--     writes to can refuse a number that is lower than one it has seen, and so a holder that does not know it is late.
--   * Whether a lease is free is known at once, or within a second where another transaction is just taking it.

-- Whose turn it is: of leases, and of idempotency keys. It begins with the time, so that a project that is set up anew, and
-- restores the data of an older one, goes on with higher numbers. Below 2^53, as JSON needs it.
create sequence private.holders;
select setval('private.holders', (extract(epoch from clock_timestamp()) * 1000)::bigint);

create table public.leases (
  scope text collate "C" not null check (octet_length(scope) <= 512),
  key text collate "C" not null check (length(key) between 1 and 512),
  holder bigint not null default 0,
  acquired_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null default '-infinity',
  primary key (scope, key)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
comment on table public.leases is 'One row per lease that somebody holds, or has held until it ran out. See acquire_lease().';
comment on column public.leases.holder is 'A fencing number: rises with each acquisition.';

create index leases_expired on public.leases (expires_at);

alter table public.leases enable row level security;
revoke all on public.leases from public, anon, authenticated;
revoke all on sequence private.holders from public, anon, authenticated;
grant select, insert, update, delete on public.leases to service_role;
grant usage on sequence private.holders to service_role;

-- Raises 22023 when a scope or a key, of up to `longest` characters, is not usable.
create function private.check_key(who text, scope text, key text, longest int) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if length(key) between 1 and longest and octet_length(scope) <= 512 then return; end if;
  raise exception '%: % does not have %', who,
    case when scope is null or octet_length(scope) > 512 then 'scope' else 'key' end,
    case when scope is null or octet_length(scope) > 512 then 'up to 512 bytes' else format('1 to %s characters', longest) end
    using errcode = '22023';
end $$;

-- Acquires the lease of that key for so many seconds, 1 to 86400, and returns its holder: the fencing number that extends
-- and releases it. Null while somebody else has it. `scope` keeps apart what has the same key. In a transaction the lease is
-- seen by others, and counts, from its commit on; meanwhile they are told after a second that it is not theirs.
create function public.acquire_lease(key text, seconds int default 60, scope text default '') returns bigint
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
declare
  holder bigint;
begin
  perform private.check_key('acquire_lease', scope, key, 512);
  perform private.check_argument('acquire_lease: seconds', seconds, 1, 86400);
  loop
    if exists (
      select from public.leases l where l.scope = scope and l.key = key and l.expires_at > clock_timestamp()
    ) then
      return null;
    end if;
    begin
      -- The number is drawn when the row is this call's own: one that waited for the row with its number would have a
      -- lower one than who went before it.
      insert into public.leases (scope, key) values (scope, key) on conflict do nothing;
      update public.leases l set holder = nextval('private.holders'), acquired_at = clock_timestamp(),
        expires_at = clock_timestamp() + make_interval(secs => seconds)
      where l.scope = scope and l.key = key and l.expires_at <= clock_timestamp()
      returning l.holder into holder;
    exception when lock_not_available then
      return null;
    end;
    if holder is not null then return holder; end if;
  end loop;
end $$;

-- Makes it so many seconds, 1 to 86400, from now on. False when the lease has run out, or is another's: its work must stop.
create function public.extend_lease(key text, holder bigint, seconds int default 60, scope text default '') returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
begin
  perform private.check_argument('extend_lease: seconds', seconds, 1, 86400);
  update public.leases l set expires_at = clock_timestamp() + make_interval(secs => seconds)
  where l.scope = scope and l.key = key and l.holder = holder and l.expires_at > clock_timestamp();
  return found;
end $$;

-- Gives it back. False when it has run out, or is another's.
create function public.release_lease(key text, holder bigint, scope text default '') returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '1s'
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
begin
  delete from public.leases l
  where l.scope = scope and l.key = key and l.holder = holder and l.expires_at > clock_timestamp();
  return found;
end $$;

revoke all on function private.check_key, public.acquire_lease, public.extend_lease, public.release_lease
  from public, anon, authenticated;
grant execute on function private.check_key, public.acquire_lease, public.extend_lease, public.release_lease
  to service_role;
