-- pg_cron for the local stack: the tables and functions of pg_cron 1.6, without its C library.
-- scripts/local/cron.ts plays the background worker that runs what is scheduled here.

create schema cron;

create sequence cron.jobid_seq;
create sequence cron.runid_seq;

create table cron.job (
  jobid    bigint primary key default nextval('cron.jobid_seq'),
  schedule text not null,
  command  text not null,
  nodename text not null default 'localhost',
  nodeport integer not null default inet_server_port(),
  database text not null default current_database(),
  username text not null default current_user,
  active   boolean not null default true,
  jobname  text,
  constraint jobname_username_uniq unique (jobname, username)
);

create table cron.job_run_details (
  jobid          bigint,
  runid          bigint primary key default nextval('cron.runid_seq'),
  job_pid        integer,
  database       text,
  username       text,
  command        text,
  status         text,
  return_message text,
  start_time     timestamptz,
  end_time       timestamptz
);

alter table cron.job enable row level security;
alter table cron.job_run_details enable row level security;
create policy cron_job_policy on cron.job using (username = current_user);
create policy cron_job_run_details_policy on cron.job_run_details using (username = current_user);

create function cron.job_cache_invalidate() returns trigger language plpgsql set search_path = '' as $$
begin
  perform pg_notify('pg_cron_job', '');
  return null;
end;
$$;
create trigger cron_job_cache_invalidate after insert or update or delete or truncate on cron.job
  for each statement execute function cron.job_cache_invalidate();

-- The one parser of schedules; null for one that is not valid. The player reads its answer:
-- {"seconds": n}, {"reboot": true}, or the values that each of the five fields allows.
create function cron._parse_schedule(schedule text) returns jsonb language plpgsql immutable strict set search_path = '' as $$
declare
  aliases  constant jsonb := '{"@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *",
                               "@weekly": "0 0 * * 0", "@daily": "0 0 * * *", "@midnight": "0 0 * * *",
                               "@hourly": "0 * * * *"}';
  names    constant text[] := array['minute', 'hour', 'day', 'month', 'weekday'];
  lows     constant int[]  := array[0, 0, 1, 1, 0];
  highs    constant int[]  := array[59, 23, 31, 12, 7];
  words    constant jsonb  := '{"month": "jan feb mar apr may jun jul aug sep oct nov dec",
                                "weekday": "sun mon tue wed thu fri sat"}';
  trimmed  text := btrim(schedule, E' \t\n');
  fields   text[];
  part     text;
  found    text[];
  first    int;
  last     int;
  step     int;
  allowed  int[];
  result   jsonb := '{}';
begin
  found := regexp_match(lower(trimmed), '^0*([1-9]|[1-5][0-9])\s+seconds?$');
  if found is not null then
    return jsonb_build_object('seconds', found[1]::int);
  end if;
  if trimmed in ('@reboot', '@restart') then
    return '{"reboot": true}';
  end if;

  fields := regexp_split_to_array(coalesce(aliases ->> trimmed, trimmed), '[ \t]+');
  if cardinality(fields) <> 5 then
    return null;
  end if;
  for f in 1..5 loop
    allowed := '{}';
    if f = 3 and fields[f] = '$' then
      result := result || '{"lastDay": true}';
    else
      for part in select unnest(string_to_array(lower(fields[f]), ',')) loop
        found := regexp_match(part, '^(?:\*|([a-z]+|\d{1,4})(?:-([a-z]+|\d{1,4}))?)(?:/(\d{1,4}))?$');
        if found is null or (found[1] is not null and found[2] is null and found[3] is not null) then
          return null; -- a step needs a range: 1/20 is refused by the real one too
        end if;
        first := coalesce(cron._schedule_value(found[1], words ->> names[f], lows[f]), lows[f]);
        last  := coalesce(cron._schedule_value(coalesce(found[2], found[1]), words ->> names[f], lows[f]), highs[f]);
        step  := coalesce(found[3]::int, 1);
        if first < lows[f] or last > highs[f] or first > last or step < 1 or step > highs[f] then
          return null;
        end if;
        allowed := allowed || array(select generate_series(first, last, step));
      end loop;
    end if;
    result := result || jsonb_build_object(names[f], allowed);
  end loop;
  return result || jsonb_build_object('dayStar', fields[3] like '*%', 'weekdayStar', fields[5] like '*%');
end;
$$;

-- A number, or the place of a month's or weekday's name; -1 for a word that is neither, null for null.
create function cron._schedule_value(value text, words text, low int) returns int
language sql immutable set search_path = '' as $$
  select case when value ~ '^\d+$' then value::int
              when value is null then null
              else coalesce(array_position(string_to_array(words, ' '), value) - 1 + low, -1) end;
$$;

-- The real functions are C: they know who calls them and write as the extension's owner. Here, the function that
-- anybody calls runs as its caller and hands its name to one that runs as the owner, and which trusts it.
create function cron._put_job(caller text, job_name text, schedule text, command text, database text, active boolean)
returns bigint language plpgsql security definer set search_path = '' as $$
#variable_conflict use_column
declare
  id bigint;
begin
  if cron._parse_schedule($3) is null or length($3) >= 1000 then
    raise exception 'invalid schedule: %', $3 using errcode = 'invalid_parameter_value',
      hint = 'Use cron format (e.g. 5 4 * * *), or interval format ''[1-59] seconds''';
  end if;
  if not has_database_privilege(caller, $5, 'connect') then
    raise exception 'User % does not have CONNECT privilege on %', caller, $5;
  end if;
  insert into cron.job (schedule, command, database, username, active, jobname)
  values ($3, $4, $5, caller, $6, job_name)
  on conflict on constraint jobname_username_uniq
  do update set schedule = excluded.schedule, command = excluded.command, database = excluded.database
  returning jobid into id;
  return id;
end;
$$;

create function cron._delete_job(caller text, id bigint, may_delete_all boolean) returns boolean
language plpgsql security definer set search_path = '' as $$
begin
  if not may_delete_all and exists (select from cron.job j where j.jobid = id and j.username <> caller) then
    raise exception 'permission denied for table job' using errcode = 'insufficient_privilege';
  end if;
  delete from cron.job j where j.jobid = id;
  return found;
end;
$$;

create function cron._job_id(caller text, name text) returns bigint
language sql security definer set search_path = '' as $$
  select jobid from cron.job where jobname = name and username = caller;
$$;

create function cron.schedule(schedule text, command text) returns bigint language sql strict set search_path = '' as $$
  select cron._put_job(current_user, null, schedule, command, current_database(), true);
$$;

create function cron.schedule(job_name text, schedule text, command text) returns bigint
language plpgsql set search_path = '' as $$
begin
  if job_name is null or schedule is null or command is null then
    raise exception '% can not be NULL', case when job_name is null then 'job_name'
                                              when schedule is null then 'schedule' else 'command' end;
  end if;
  return cron._put_job(current_user, job_name, schedule, command, current_database(), true);
end;
$$;

create function cron.schedule_in_database(job_name text, schedule text, command text, database text,
                                          username text default null, active boolean default true)
returns bigint language plpgsql set search_path = '' as $$
begin
  if username is not null and not (select rolsuper from pg_roles where rolname = current_user) then
    raise exception 'must be superuser to create a job for another role';
  end if;
  return cron._put_job(coalesce(username, current_user), job_name, schedule, command, database, active);
end;
$$;

create function cron.unschedule(job_id bigint) returns boolean language plpgsql strict set search_path = '' as $$
begin
  if not cron._delete_job(current_user, job_id, has_table_privilege('cron.job', 'delete')) then
    raise exception 'could not find valid entry for job %', job_id;
  end if;
  return true;
end;
$$;

create function cron.unschedule(job_name text) returns boolean language plpgsql strict set search_path = '' as $$
begin
  if not coalesce(cron._delete_job(current_user, cron._job_id(current_user, job_name), false), false) then
    raise exception 'could not find valid entry for job ''%''', job_name;
  end if;
  return true;
end;
$$;

create function cron._alter_job(caller text, caller_is_superuser boolean, id bigint, new_schedule text, new_command text,
                                new_database text, new_username text, new_active boolean)
returns void language plpgsql security definer set search_path = '' as $$
begin
  if new_username is not null and not caller_is_superuser then
    raise exception 'must be superuser to alter username';
  end if;
  if num_nonnulls(new_schedule, new_command, new_database, new_username, new_active) = 0 then
    raise exception 'no updates specified'
      using hint = 'You must specify at least one job attribute to change when calling alter_job';
  end if;
  if new_schedule is not null and cron._parse_schedule(new_schedule) is null then
    raise exception 'invalid schedule: %', new_schedule using errcode = 'invalid_parameter_value',
      hint = 'Use cron format (e.g. 5 4 * * *), or interval format ''[1-59] seconds''';
  end if;
  update cron.job j
     set schedule = coalesce(new_schedule, j.schedule),
         command  = coalesce(new_command, j.command),
         database = coalesce(new_database, j.database),
         username = coalesce(new_username, j.username),
         active   = coalesce(new_active, j.active)
   where j.jobid = id and (caller_is_superuser or j.username = caller);
  if not found then
    raise exception 'Job % does not exist or you don''t own it', id;
  end if;
end;
$$;

create function cron.alter_job(job_id bigint, schedule text default null, command text default null,
                               database text default null, username text default null, active boolean default null)
returns void language sql set search_path = '' as $$
  select cron._alter_job(current_user, (select rolsuper from pg_catalog.pg_roles where rolname = current_user),
                         job_id, schedule, command, database, username, active);
$$;

grant select on cron.job to public;
grant select, delete on cron.job_run_details to public;
grant select on sequence cron.jobid_seq, cron.runid_seq to public;
revoke all on function cron.alter_job, cron.schedule_in_database from public;

-- What a hosted project grants when the extension is created.
grant usage on schema cron to postgres with grant option;
grant all on all functions in schema cron to postgres with grant option;
grant all on cron.job_run_details to postgres with grant option;
revoke trigger on cron.job_run_details from postgres;
grant select on cron.job to postgres with grant option;
