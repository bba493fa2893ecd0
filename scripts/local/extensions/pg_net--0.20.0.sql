-- pg_net for the local stack: the tables and functions of pg_net 0.20, without its C library.
-- scripts/local/net.ts plays the background worker that sends what is queued here.

create schema net;

create domain net.http_method as text check (lower(value) in ('get', 'post', 'delete'));
create type net.request_status as enum ('PENDING', 'SUCCESS', 'ERROR');
create type net.http_response as (status_code integer, headers jsonb, body text);
create type net.http_response_result as (status net.request_status, message text, response net.http_response);

-- Unlogged, as the real ones: a crash of the server empties both.
create unlogged table net.http_request_queue (
  id                   bigserial,
  method               net.http_method not null,
  url                  text not null,
  headers              jsonb,
  body                 bytea,
  timeout_milliseconds integer not null
);

create unlogged table net._http_response (
  id           bigint,
  status_code  integer,
  content_type text,
  headers      jsonb,
  content      text,
  timed_out    boolean,
  error_msg    text,
  created      timestamptz not null default now()
);
create index on net._http_response (created);

-- No function sets search_path, as none of the real ones does: it would double what a request costs.

-- Delivered at commit, and once per transaction however often it is called.
create function net.wake() returns void language plpgsql as $$
begin
  perform pg_notify('pg_net_wake', '');
end;
$$;

create function net.check_worker_is_up() returns void language plpgsql as $$
begin
  if not exists (select from pg_stat_activity where application_name like 'pg_net %') then
    raise exception 'the pg_net background worker is not up'
      using hint = 'The local stack''s players process (scripts/local/players.ts) has stopped: start the stack again.';
  end if;
end;
$$;

create function net._urlencode_string(string varchar) returns text
language sql immutable strict as $$
  select coalesce(string_agg(
           case when b between 48 and 57 or b between 65 and 90 or b between 97 and 122 or b in (45, 46, 95, 126)
                then chr(b) else '%' || upper(lpad(to_hex(b), 2, '0')) end, '' order by i), '')
    from (select i, get_byte(convert_to(string, 'utf8'), i) as b
            from generate_series(0, octet_length(convert_to(string, 'utf8')) - 1) as i) bytes;
$$;

create function net._encode_url_with_params_array(url text, params_array text[]) returns text
language plpgsql immutable strict as $$
declare
  query text := array_to_string(params_array, '&');
begin
  if url !~* '^https?://[^/]' then
    raise exception 'invalid URL "%": it must start with http:// or https:// and name a host', url;
  end if;
  url := regexp_replace(url, '#.*$', '');
  if url ~ '^[^/]*//[^/?]+$' then
    url := url || '/';
  end if;
  return url || case when query = '' then '' when url like '%?%' then '&' else '?' end || query;
end;
$$;

create function net._queue_request(method text, url text, params jsonb, headers jsonb, body jsonb, timeout_milliseconds int)
returns bigint language plpgsql as $$
declare
  request_id bigint;
  full_url   text := net._encode_url_with_params_array(url, array[]::text[]);
begin
  if params <> '{}' then
    full_url := net._encode_url_with_params_array(url, array(
      select net._urlencode_string(p.key) || '=' || net._urlencode_string(p.value) from jsonb_each_text(params) p));
  end if;
  insert into net.http_request_queue (method, url, headers, body, timeout_milliseconds)
  values (method, full_url, headers, convert_to(body::text, 'utf8'), timeout_milliseconds)
  returning id into request_id;
  perform net.wake();
  return request_id;
end;
$$;

create function net.http_get(url text, params jsonb default '{}', headers jsonb default '{}',
                             timeout_milliseconds int default 5000)
returns bigint language sql as $$
  select net._queue_request('GET', url, params, headers, null, timeout_milliseconds);
$$;

create function net.http_post(url text, body jsonb default '{}', params jsonb default '{}',
                              headers jsonb default '{"Content-Type": "application/json"}',
                              timeout_milliseconds int default 5000)
returns bigint language plpgsql as $$
declare
  content_type text := (select h.value from jsonb_each_text(coalesce(headers, '{}')) h
                         where lower(h.key) = 'content-type' limit 1);
begin
  if content_type is null then
    headers := headers || '{"Content-Type": "application/json"}';
  elsif content_type <> 'application/json' then
    raise exception 'Content-Type header must be "application/json"';
  end if;
  return net._queue_request('POST', url, params, headers, body, timeout_milliseconds);
end;
$$;

create function net.http_delete(url text, params jsonb default '{}', headers jsonb default '{}',
                                timeout_milliseconds int default 5000, body jsonb default null)
returns bigint language sql as $$
  select net._queue_request('DELETE', url, params, headers, body, timeout_milliseconds);
$$;

create function net._await_response(request_id bigint) returns boolean language plpgsql as $$
begin
  while not exists (select from net._http_response r where r.id = request_id) loop
    perform pg_sleep(0.05);
  end loop;
  return true;
end;
$$;

create function net._http_collect_response(request_id bigint, async boolean default true)
returns net.http_response_result language plpgsql as $$
declare
  found_row net._http_response;
begin
  if not async then
    perform net._await_response(request_id);
  end if;
  select * into found_row from net._http_response r where r.id = request_id;
  if found_row.id is null or found_row.error_msg is not null then
    return ('ERROR', coalesce(found_row.error_msg, 'request matching request_id not found'), null)
           ::net.http_response_result;
  end if;
  return ('SUCCESS', 'ok', (found_row.status_code, found_row.headers, found_row.content)::net.http_response)
         ::net.http_response_result;
end;
$$;

-- As the real one, every login role may read the queue, bearers included.
grant usage on schema net to public;
grant all on all sequences in schema net to public;
-- Until 0.20.5 the real one grants everything, with it the right to put triggers on the queue; here nobody gets that.
grant select, insert on all tables in schema net to public;
grant all on all tables in schema net to postgres;
grant usage on schema net to postgres, anon, authenticated, service_role;
