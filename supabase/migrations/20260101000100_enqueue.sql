-- Enqueue: how work gets in.
--
-- enqueue_job writes one row, in the caller's transaction: if that rolls back there is no job, and no worker sees the job
-- before it commits. A plain insert into jobs does the same; this function adds readable errors, delays as intervals, so
-- that a caller's clock never matters, and an answer where a dedupe key is held already: an insert raises 23505 there.
--
-- Invariants of dedupe
--   * The unique index jobs_dedupe decides, and nothing that was looked up before. Whoever meets a row of a transaction that
--     is still open waits for its end: if that rolls back, the job is enqueued and not lost.
--   * A waiting job that absorbs an enqueue stays locked until the enqueuing transaction ends. The claim skips it so long, so
--     that its handler sees the data of that transaction.
--   * Batches take their keys in one order, so that two of them cannot deadlock.

-- Payload and context have 4 MB of JSON at most, and progress has 1 MB, however they come in: a claim of ten must fit into a
-- function's memory, and into the API's time. Updates are not looked at: they come from the functions here, or know what they
-- do.
--
-- In jsonb 1e131071 has few bytes, and as text 131,072: so the numbers of what is larger than a page are written out one by
-- one first, or to find out that it is too large would take the memory of the server.
create function private.is_too_large(document jsonb, most int default 4000000) returns boolean
language plpgsql immutable strict set search_path = pg_catalog, pg_temp as $$
declare
  bytes constant int := pg_column_size(document #> '{}'); -- as it is in memory: from a table it may come compressed
  written int := 0;
  number jsonb;
begin
  if bytes > 4 * most then return true; end if;
  if bytes > 8000 then
    -- Not from the path itself: its results, one by one, cost the square of how many they are.
    for number in
      select n from jsonb_array_elements(jsonb_path_query_array(document, 'strict $.** ? (@.type() == "number")')) n
    loop
      written := written + length(number::text);
      if written > most then return true; end if;
    end loop;
  end if;
  return octet_length(document::text) > most;
end $$;

-- Who is asking, of the request's JWT as the API has verified it: the user, the tenant, and the claims but for those of time,
-- which are over when the job runs. Null where there is no user.
create function private.request_context() returns jsonb
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  claims constant jsonb := nullif(current_setting('request.jwt.claims', true), '');
begin
  if coalesce(claims ->> 'sub', '') = '' then return null; end if;
  return jsonb_build_object(
    'user_id', claims ->> 'sub',
    'tenant_id', coalesce(claims ->> 'tenant_id', claims #>> '{app_metadata,tenant_id}'),
    'claims', claims - array['exp', 'iat', 'nbf', 'jti']
  );
end $$;

-- Security definer: whoever may insert jobs need not be granted the above.
create function private.complete_new_job() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  -- The look at the text spares those without a user the call (measured: 4 µs of 30 for a row of a batch).
  if new.context is null and current_setting('request.jwt.claims', true) like '%"sub"%' then
    new.context := private.request_context();
  end if;
  if private.is_too_large(new.payload) or private.is_too_large(new.context) then
    raise exception 'jobs: payload or context has more than 4000000 bytes of JSON'
      using errcode = '22023', hint = 'Keep it in Storage or in a table of yours, and enqueue where it is.';
  end if;
  if private.is_too_large(new.progress, 1000000) then
    raise exception 'jobs: progress has more than 1000000 bytes of JSON'
      using errcode = '22023', hint = 'Keep it in Storage or in a table of yours.';
  end if;
  return new;
end $$;
revoke all on function private.is_too_large, private.request_context, private.complete_new_job
  from public, anon, authenticated, service_role;
grant execute on function private.is_too_large, private.request_context to service_role;

create trigger complete_new_job before insert on public.jobs for each row execute function private.complete_new_job();

-- A job to be enqueued, as it is given; once it has been checked, without a delay.
create type private.new_job as (
  kind text, payload jsonb, delay interval, available_at timestamptz, priority int, max_attempts int, dedupe_key text,
  dedupe text, concurrency_key text, context jsonb
);

-- Raises 22023 saying what of a job is not usable; else gives it back with its time.
create function private.check_job(inout job private.new_job)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  wrong text;
  hint text := '';
begin
  if job.kind is null or job.kind !~ '^[a-z][a-z0-9_]{0,62}$' then
    wrong := format('kind %s is not a kind''s name', coalesce(quote_literal(left(job.kind, 80)), 'null'));
    hint := 'Use lower case letters, digits and _, starting with a letter, at most 63 characters.';
  elsif job.payload is null then
    wrong := 'payload is null'; hint := 'Leave it out for {}.';
  elsif job.delay is not null and job.available_at is not null then
    wrong := 'both delay and available_at are given'; hint := 'Give one of them.';
  elsif job.delay not between interval '0' and interval '10 years' then
    wrong := format('delay %s is not between 0 and 10 years', job.delay);
  elsif not isfinite(job.available_at) then
    wrong := format('available_at is %s', job.available_at); hint := 'Give a time.';
  elsif job.priority is null or job.priority not between -100 and 100 then
    wrong := format('priority %s is not between -100 and 100', coalesce(job.priority::text, 'null'));
  elsif job.max_attempts not between 1 and 1000 then
    wrong := format('max_attempts %s is not between 1 and 1000', job.max_attempts);
  elsif length(job.dedupe_key) not between 1 and 512 then
    wrong := format('dedupe_key has %s characters, not 1 to 512', length(job.dedupe_key));
  elsif job.dedupe is null or job.dedupe not in ('active', 'waiting', 'replace', 'once') then
    wrong := format('dedupe %s is not active, waiting, replace or once',
      coalesce(quote_literal(left(job.dedupe, 80)), 'null'));
  elsif job.dedupe <> 'active' and job.dedupe_key is null then
    wrong := format('dedupe is %s, but there is no dedupe_key', job.dedupe); hint := 'Give the key that is to be held.';
  elsif length(job.concurrency_key) not between 1 and 512 then
    wrong := format('concurrency_key has %s characters, not 1 to 512', length(job.concurrency_key));
  end if;
  if wrong is not null then raise exception 'enqueue_job: %', wrong using errcode = '22023', hint = hint; end if;
  -- A time in the past would overtake the jobs that already wait.
  job.available_at := greatest(job.available_at, clock_timestamp() + coalesce(job.delay, interval '0'));
  job.delay := null;
end $$;

-- An id as jobs.id has by default, for who must know it before the insert.
create function private.new_job_id() returns uuid
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return (left(
    overlay('0' || to_hex((date_part('epoch', clock_timestamp()) * 65536000)::bigint) placing '7' from 13 for 0), 16
  ) || substr(gen_random_uuid()::text, 20))::uuid;
end $$;

-- Enqueues a job whose dedupe key may be held: `id` is then the holder's, and `created` false.
create function private.enqueue_deduped(new private.new_job, new_id uuid, out id uuid, out created boolean)
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  for attempt in 1 .. 100 loop
    insert into public.jobs
      (id, kind, payload, available_at, priority, max_attempts, dedupe_key, dedupe, concurrency_key, context)
    values (new_id, new.kind, new.payload, new.available_at, new.priority, new.max_attempts, new.dedupe_key, new.dedupe,
      new.concurrency_key, new.context)
    on conflict do nothing
    returning jobs.id into id;
    created := id is not null;
    exit when created;
    begin
      if new.dedupe = 'replace' then
        update public.jobs j
        set payload = new.payload, available_at = new.available_at, priority = new.priority, max_attempts = new.max_attempts,
          concurrency_key = new.concurrency_key, context = coalesce(new.context, private.request_context()), attempts = 0,
          progress = null, last_error = null, updated_at = clock_timestamp()
        where j.kind = new.kind and j.dedupe_key = new.dedupe_key and j.status = 'pending' returning j.id into id;
      else
        select j.id into id from public.jobs j
        where j.kind = new.kind and j.dedupe_key = new.dedupe_key and j.status = 'pending' for share;
      end if;
      -- Undone, since a row that turns out to be claimed is locked by now, and its worker would wait for this transaction.
      if id is null then raise no_data_found; end if;
    exception when no_data_found then null;
    end;
    if id is null then
      select j.id into id from public.jobs j
      where j.kind = new.kind and j.dedupe_key = new.dedupe_key
        and (j.dedupe = 'once' or (j.dedupe = 'active' and j.status = 'running')) and j.status <> 'pending';
    end if;
    -- Else the holder has been claimed, or has ended, since the insert met it.
    exit when id is not null;
  end loop;
  if id is null then
    raise exception 'enqueue_job: who holds dedupe key % of % changes all the time', quote_literal(new.dedupe_key), new.kind
      using errcode = '40001', hint = 'Repeat the transaction.';
  end if;
end $$;

-- Enqueues a job and returns its id.
--
--   delay, available_at  not before: from now on the database's clock, or a time; at most one of the two
--   priority             -100 to 100, higher first within the kind
--   max_attempts         null: as job_kinds says, else 5
--   dedupe_key, dedupe   while another job of the kind holds the key, nothing is enqueued and its id is returned. It holds it
--                        while it waits or runs (active); while it waits, a retry included (waiting; replace: and it takes
--                        this call's payload, time and other settings, its attempts anew); while there is a row (once)
--   concurrency_key      of the kind's jobs with this key, job_kinds.key_concurrency (1) run at once
--   context              who asked for it, handed to the handler as it is; null: the user of the request, if there is one
--
-- Raises 22023 naming the argument that is not usable.
create function public.enqueue_job(
  kind text, payload jsonb default '{}', delay interval default null, available_at timestamptz default null,
  priority int default 0, max_attempts int default null, dedupe_key text default null, dedupe text default 'active',
  concurrency_key text default null, context jsonb default null
) returns uuid
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  job constant private.new_job := private.check_job(row(
    kind, payload, delay, available_at, priority, max_attempts, dedupe_key, dedupe, concurrency_key, context
  ));
  new_id uuid;
begin
  if dedupe_key is not null then return (private.enqueue_deduped(job, private.new_job_id())).id; end if;
  insert into public.jobs (kind, payload, available_at, priority, max_attempts, concurrency_key, context)
  values (kind, payload, job.available_at, priority, max_attempts, concurrency_key, context)
  returning id into new_id;
  return new_id;
end $$;

-- Enqueues the jobs in [{"kind", "payload", …}], each with the arguments of enqueue_job, all or none of them, and returns
-- for each, in the order given, its id and whether it was created: false with the id of the job that holds its dedupe key.
-- Raises 22023 naming the entry, from 0 on, and what of it is not usable.
create function public.enqueue_jobs(jobs jsonb) returns table (id uuid, created boolean)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  fields constant text[] := array['kind', 'payload', 'delay', 'available_at', 'priority', 'max_attempts', 'dedupe_key',
    'dedupe', 'concurrency_key', 'context'];
  given private.new_job[] := '{}';
  ids uuid[];
  were_created boolean[];
  entry record;
  job private.new_job;
  made record;
  hint text;
begin
  if jsonb_typeof(enqueue_jobs.jobs) is distinct from 'array' then
    raise exception 'enqueue_jobs: jobs is %, not an array', coalesce(jsonb_typeof(enqueue_jobs.jobs), 'null')
      using errcode = '22023', hint = 'Give [{"kind": "…", "payload": {}}, …].';
  end if;

  begin
    for entry in
      select e.value, e.n - 1 as n from jsonb_array_elements(enqueue_jobs.jobs) with ordinality e(value, n)
    loop
      if jsonb_typeof(entry.value) <> 'object' then
        raise exception 'it is %, not an object', jsonb_typeof(entry.value) using errcode = '22023';
      end if;
      if entry.value - fields <> '{}' then
        raise exception 'it has no field %', (
          select quote_literal(left(k, 80)) from jsonb_object_keys(entry.value - fields) k limit 1
        ) using errcode = '22023', hint = 'There are ' || array_to_string(fields, ', ') || '.';
      end if;
      job := jsonb_populate_record(null::private.new_job, entry.value);
      job.payload := coalesce(job.payload, '{}');
      job.priority := coalesce(job.priority, 0);
      job.dedupe := coalesce(job.dedupe, 'active');
      if private.is_too_large(job.payload) or private.is_too_large(job.context) then
        raise exception 'payload or context has more than 4000000 bytes of JSON'
          using errcode = '22023', hint = 'Keep it in Storage or in a table of yours, and enqueue where it is.';
      end if;
      given := given || private.check_job(job);
    end loop;
  exception when data_exception then
    get stacked diagnostics hint = pg_exception_hint;
    raise exception 'enqueue_jobs: entry %: %', entry.n, replace(sqlerrm, 'enqueue_job: ', '')
      using errcode = '22023', hint = hint;
  end;

  ids := array(select private.new_job_id() from generate_series(1, cardinality(given)));
  were_created := array_fill(true, array[cardinality(ids)]);
  insert into public.jobs (id, kind, payload, available_at, priority, max_attempts, concurrency_key, context)
  select ids[g.ordinality], g.kind, g.payload, g.available_at, g.priority, g.max_attempts, g.concurrency_key, g.context
  from unnest(given) with ordinality g where g.dedupe_key is null order by g.ordinality;
  -- Keys are taken one by one in their order, or two batches could wait for each other; and on one key the stronger lock
  -- first. Of what comes again on one key only the last replacement is made: each writes the row anew.
  for entry in
    select g.ordinality as n,
      row_number() over same > 1 and (g.dedupe <> 'replace' or lead(g.dedupe) over same = 'replace') as again
    from unnest(given) with ordinality g
    where g.dedupe_key is not null
    window same as (partition by g.kind, g.dedupe_key order by g.dedupe <> 'replace', g.ordinality)
    order by g.kind, g.dedupe_key, g.dedupe <> 'replace', g.ordinality
  loop
    if entry.again then made.created := false; else
      select d.id, d.created into made from private.enqueue_deduped(given[entry.n], ids[entry.n]) d;
    end if;
    ids[entry.n] := made.id;
    were_created[entry.n] := made.created;
  end loop;
  return query select u.id, u.created from unnest(ids, were_created) with ordinality as u(id, created, n) order by u.n;
end $$;

-- The same for REST, which gives back at most 1000 rows: [{"id", "created"}, …].
create function public.enqueue_jobs_as_json(jobs jsonb) returns jsonb
language sql set search_path = pg_catalog, pg_temp as $$
  select coalesce(jsonb_agg(jsonb_build_object('id', e.id, 'created', e.created) order by e.n), '[]')
  from public.enqueue_jobs(enqueue_jobs_as_json.jobs) with ordinality e(id, created, n)
$$;

revoke all on function private.check_job, private.new_job_id, private.enqueue_deduped, public.enqueue_job, public.enqueue_jobs,
  public.enqueue_jobs_as_json from public, anon, authenticated;
grant execute on function private.check_job, private.new_job_id, private.enqueue_deduped, public.enqueue_job, public.enqueue_jobs,
  public.enqueue_jobs_as_json to service_role;
