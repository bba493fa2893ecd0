-- Webhook inbox: messages from elsewhere, each stored once and processed by a job of its own.
--
-- The function webhook-inbox verifies a message and calls receive_webhook(), which stores it and enqueues a job of kind
-- webhook_<source>, in one transaction and under one id. What a job has, a message has: retries, limits, its end as dead.
--
-- Invariants
--   * Of one source, tenant and message id there is one row, however often and at once it is sent. The first body stays.
--   * A message's status is its job's. They are deleted together, by whoever deletes the job.
--   * What has ended stays for 4 days at least, whatever job_kinds says: longer than senders repeat what was not received
--     (Stripe: 3 days). See private.purgeable_kinds().
--   * body is what came, byte for byte. payload is the same as jsonb, for queries, and null where that cannot be.

create table public.webhook_inbox (
  id uuid primary key references public.jobs on delete cascade,
  source text not null check (source ~ '^[a-z][a-z0-9_]{0,54}$'),
  tenant text check (octet_length(tenant) between 1 and 512),
  message_id text not null check (octet_length(message_id) between 1 and 512),
  type text check (octet_length(type) <= 512),
  payload jsonb,
  body bytea not null,
  headers jsonb not null default '{}' check (jsonb_typeof(headers) = 'object'),
  other_bodies int not null default 0,
  received_at timestamptz not null default clock_timestamp(),
  unique nulls not distinct (source, message_id, tenant)
);
comment on table public.webhook_inbox is 'One row per webhook message, with the id of its job, kind webhook_<source>, whose status is the message''s.';
comment on column public.webhook_inbox.message_id is 'What the sender calls it, else sha256: and the hash of the body.';
comment on column public.webhook_inbox.payload is 'The body as jsonb; null when it is none, has more than 1 MiB, or has what jsonb cannot hold.';
comment on column public.webhook_inbox.other_bodies is 'How often the message came again with another body, which is not kept.';

-- The newest of a source, and of a tenant there; and of a status, which is the job's.
create index webhook_inbox_source on public.webhook_inbox (source, id);
create index webhook_inbox_tenant on public.webhook_inbox (source, tenant, id) where tenant is not null;
create index jobs_webhooks on public.jobs (kind, status, id) where starts_with(kind, 'webhook_');

alter table public.webhook_inbox enable row level security;
revoke all on public.webhook_inbox from public, anon, authenticated;
grant select, insert, update, delete on public.webhook_inbox to service_role;

-- A body as jsonb; null when that cannot hold it: it is no JSON or not UTF-8, has U+0000 or half a surrogate pair, is
-- nested too deeply, or has numbers that are short to send and endless to write. Null, too, when it has more than 1 MiB:
-- 6 MiB of small numbers take seconds, and the sender waits.
create function private.webhook_payload(body bytea) returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  content text;
  payload jsonb;
begin
  if octet_length(body) > 1048576 then return null; end if;
  -- Without its byte order mark.
  content := convert_from(substr(body, case when substr(body, 1, 3) = '\xefbbbf' then 4 else 1 end), 'UTF8');
  payload := content::jsonb;
  -- Where there are no exponents no number is longer than it came; to look at each would take most of the time.
  return case when content !~ '[0-9][eE][+-]?[0-9][0-9]' or not private.is_too_large(payload) then payload end;
exception when others then
  return null;
end $$;

-- Stores a message and enqueues its job, unless one of its source, tenant and message id is there; returns the id of
-- both, and whether they are new. The caller has verified it.
--
--   body        what came; in SQL convert_to('…', 'UTF8')
--   message_id  what the sender calls it, the same however often it is sent; null: a hash of the body
--   tenant      whose it is, where a source serves several; up to 512 bytes, as message_id and type
--   headers     what is to be kept, an object of texts
--   payload     the body as jsonb where that is not how it is written, as for a form, and not kept with more than 4 MB;
--               null: the body itself, if it is JSON
--   concurrency_key, context  as in enqueue_job
--
-- Raises 22023 naming the argument that is not usable.
create function public.receive_webhook(
  source text, body bytea, message_id text default null, type text default null, tenant text default null,
  headers jsonb default '{}', payload jsonb default null, concurrency_key text default null, context jsonb default null,
  out id uuid, out created boolean
)
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_variable
declare
  given_id constant text := coalesce(message_id, 'sha256:' || encode(sha256(body), 'hex'));
  kept constant jsonb := case
    when payload is null then private.webhook_payload(body) when not private.is_too_large(payload) then payload
  end;
  same boolean;
  wrong text;
begin
  if source is null or source !~ '^[a-z][a-z0-9_]{0,54}$' then
    wrong := format('source %s is not a source''s name', coalesce(quote_literal(left(source, 80)), 'null'));
  elsif body is null then wrong := 'body is null';
  elsif octet_length(given_id) not between 1 and 512 then wrong := 'message_id does not have 1 to 512 bytes';
  elsif octet_length(tenant) not between 1 and 512 then wrong := 'tenant does not have 1 to 512 bytes';
  elsif octet_length(type) > 512 then wrong := 'type has more than 512 bytes';
  elsif length(concurrency_key) not between 1 and 512 then wrong := 'concurrency_key does not have 1 to 512 characters';
  elsif jsonb_typeof(headers) is distinct from 'object'
    or jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")') then
    wrong := 'headers is not an object of texts';
  end if;
  if wrong is not null then raise exception 'receive_webhook: %', wrong using errcode = '22023'; end if;

  while id is null loop
    -- Where the message is being stored by somebody else, or deleted, it waits for the end of that.
    with stored as (
      insert into public.webhook_inbox as w (id, source, tenant, message_id, type, payload, body, headers)
      values (private.new_job_id(), source, tenant, given_id, type, kept, body, headers)
      on conflict do nothing returning w.id
    )
    insert into public.jobs as j (id, kind, concurrency_key, context)
    select s.id, 'webhook_' || source, concurrency_key, context from stored s returning j.id into id;
    created := id is not null;
    exit when created;
    -- It may have been purged since the insert met it.
    select w.id, w.body = body into id, same from public.webhook_inbox w
    where w.source = source and w.message_id = given_id and (w.tenant = tenant or tenant is null and w.tenant is null);
    if not same then
      update public.webhook_inbox w set other_bodies = w.other_bodies + 1 where w.id = id;
    end if;
  end loop;
end $$;

-- The message of a job, for its handler; the body in base64.
create function public.read_webhook(id uuid)
returns table (message_id text, type text, tenant text, headers jsonb, body text, received_at timestamptz)
language sql stable set search_path = pg_catalog, pg_temp as $$
  select w.message_id, w.type, w.tenant, w.headers, encode(w.body, 'base64'), w.received_at
  from public.webhook_inbox w where w.id = read_webhook.id
$$;

-- This source, or all that have messages.
create function private.webhook_sources(source text) returns text[]
language sql set search_path = pg_catalog, pg_temp as $$
  select case when source is not null then array[source] else array(
    select substr(k, 9) from private.known_kinds() k where starts_with(k, 'webhook_')
  ) end
$$;

create type private.listed_webhook as (
  id uuid, source text, tenant text, message_id text, type text, status text, attempts int, last_error text,
  other_bodies int, received_at timestamptz, finished_at timestamptz
);

-- Messages, the newest first: of a source, of a tenant, with a status of their job, at most `max_rows` (1 to 1000), and
-- after the message `before`, the last of the page before. What came is in webhook_inbox. Raises 22023 for what cannot
-- be. Those with a status are found by that of their jobs; a tenant's that have succeeded, as most have, among all of his.
create function public.list_webhooks(
  source text default null, tenant text default null, status text default null, max_rows int default 50,
  before uuid default null
) returns setof private.listed_webhook
language plpgsql stable set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_hashjoin = off
set enable_mergejoin = off set jit = off as $$
#variable_conflict use_variable
declare
  sources constant text[] := private.webhook_sources(source);
  among_all constant boolean := status is null or status = 'succeeded' and tenant is not null;
begin
  perform private.check_argument('list_webhooks: max_rows', max_rows, 1, 1000);
  if status not in ('pending', 'running', 'succeeded', 'dead', 'cancelled') then
    raise exception 'list_webhooks: status % is not pending, running, succeeded, dead or cancelled',
      quote_literal(left(status, 80)) using errcode = '22023';
  end if;
  return query
  with found as (
    select f.id from unnest(sources) s(name) cross join lateral (
      (select w.id from public.webhook_inbox w join public.jobs j on j.id = w.id
      where among_all and w.source = s.name and (tenant is null or w.tenant = tenant)
        and (status is null or j.status = status) and (before is null or w.id < before)
      order by w.id desc limit max_rows)
      union all
      (select j.id from public.jobs j join public.webhook_inbox w on w.id = j.id
      where not among_all and starts_with(j.kind, 'webhook_') and j.kind = 'webhook_' || s.name and j.status = status
        and (tenant is null or w.tenant = tenant) and (before is null or j.id < before)
      order by j.id desc limit max_rows)
    ) f order by f.id desc limit max_rows
  )
  select w.id, w.source, w.tenant, w.message_id, w.type, j.status, j.attempts, j.last_error, w.other_bodies, w.received_at,
    j.finished_at
  from found f join public.webhook_inbox w on w.id = f.id join public.jobs j on j.id = f.id order by f.id desc;
end $$;

-- Puts messages back as retry_jobs() does: dead ones of a source, or of a tenant there, the first to come first; or dead
-- and cancelled ones by their ids; at most `max_rows`. Returns the ids of those that now wait. Raises 22023 with neither.
create function public.retry_webhooks(
  source text default null, tenant text default null, ids uuid[] default null, max_rows int default 1000
) returns setof uuid
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
#variable_conflict use_variable
begin
  if ids is null and source is null then
    raise exception 'retry_webhooks: neither a source nor ids are given' using errcode = '22023',
      hint = 'Give ids, which may be {}, or the source whose dead messages are to be processed again.';
  end if;
  return query select public.retry_jobs(ids => array(
    select j.id from public.jobs j join public.webhook_inbox w on w.id = j.id
    where starts_with(j.kind, 'webhook_') and (source is null or j.kind = 'webhook_' || source)
      and (ids is null and j.status = 'dead' or j.id = any (ids)) and (tenant is null or w.tenant = tenant)
    order by j.id limit greatest(max_rows, 0)
  ), max_jobs => max_rows);
end $$;

-- Deletes messages that came more than `older_than` ago, and their jobs whatever they do, of a source, of a tenant that
-- leaves, or of that tenant there; at most `max_rows`, of a source the oldest first. Returns how many: call it until that
-- is 0. What its sender repeats later is stored as new. Raises 22023 with neither source nor tenant, and where one is null
-- and nothing is spared: a query that was to give it has found none, and that is not to mean all. Raises 55P03 where
-- somebody keeps one locked.
create function public.purge_webhooks(
  source text default '', tenant text default '', older_than interval default '0', max_rows int default 10000
) returns int
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
set enable_seqscan = off set enable_bitmapscan = off set jit = off set lock_timeout = '1s' as $$
#variable_conflict use_variable
declare
  deleted int;
begin
  if concat(source, tenant) = '' or (source || tenant) is null and older_than = interval '0' then
    raise exception 'purge_webhooks: source or tenant is null, or neither is given' using errcode = '22023',
      hint = 'Give one of them; what has ended is deleted by itself, see keep_succeeded in job_kinds.';
  elsif older_than is null or older_than < interval '0' then
    raise exception 'purge_webhooks: older_than % is no time', coalesce(older_than::text, 'null') using errcode = '22023';
  elsif (max_rows > 0) is not true then
    raise exception 'purge_webhooks: max_rows % is not above 0', coalesce(max_rows::text, 'null') using errcode = '22023';
  end if;
  delete from public.jobs d
  where d.id = any (array(
    select m.id from unnest(private.webhook_sources(nullif(source, ''))) s(name) cross join lateral (
      select w.id from public.webhook_inbox w
      where w.source = s.name and (coalesce(tenant, '') = '' or w.tenant = tenant)
        and w.received_at <= clock_timestamp() - least(older_than, interval '1000 years')
      order by w.id limit max_rows
    ) m limit max_rows
  ));
  get diagnostics deleted = row_count;
  return deleted;
end $$;

revoke all on function private.webhook_payload, private.webhook_sources, public.receive_webhook, public.read_webhook,
  public.list_webhooks, public.retry_webhooks, public.purge_webhooks from public, anon, authenticated;
grant execute on function private.webhook_payload, private.webhook_sources, public.receive_webhook, public.read_webhook,
  public.list_webhooks, public.retry_webhooks, public.purge_webhooks to service_role;
