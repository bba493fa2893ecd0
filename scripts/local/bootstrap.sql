-- What a new hosted project has before its first migration, as far as a project's own migrations and functions can
-- tell: roles, their settings and grants, default privileges, schemas, extensions. Run once, by startPostgres, as
-- supabase_admin and in one transaction. Left out: the schemas storage, realtime and graphql_public, the tables of Auth
-- apart from auth.users, and safeupdate and supautils, which are C libraries.

-- The API's roles. A request logs in as authenticator and becomes one of the others.
create role anon nologin;
create role authenticated nologin;
create role service_role nologin bypassrls;
create role authenticator login noinherit password 'postgres';
grant anon, authenticated, service_role to authenticator;

-- Whoever runs migrations: powerful, but no superuser.
create role postgres login createdb createrole replication bypassrls password 'postgres';
grant anon, authenticated, service_role, authenticator, pg_monitor, pg_read_all_data, pg_signal_backend
  to postgres with admin option;
do $$ begin
  if exists (select from pg_roles where rolname = 'pg_create_subscription') then -- since Postgres 16
    grant pg_create_subscription to postgres;
  end if;
end $$;
grant execute on function pg_reload_conf() to postgres;
alter database postgres owner to postgres;

-- Owners that migrations may name.
create role supabase_auth_admin login noinherit;
create role dashboard_user createdb createrole replication;
grant all on database postgres to dashboard_user;

alter role supabase_admin set search_path = "$user", public, auth, extensions;
alter role postgres set search_path = "$user", public, extensions;
alter role anon set statement_timeout = '3s';
alter role authenticated set statement_timeout = '8s';
alter role authenticator set statement_timeout = '8s';
alter role authenticator set lock_timeout = '8s';

grant usage on schema public to postgres, anon, authenticated, service_role;
alter default privileges for role postgres, supabase_admin in schema public
  grant all on tables to postgres, anon, authenticated, service_role;
alter default privileges for role postgres, supabase_admin in schema public
  grant all on functions to postgres, anon, authenticated, service_role;
alter default privileges for role postgres, supabase_admin in schema public
  grant all on sequences to postgres, anon, authenticated, service_role;
-- Since October 30, 2026, and in new projects since May 30, the API's roles get no use of what postgres creates
-- (supabase.com/changelog/45329; the statements are those of `auto_expose_new_tables = false`).
alter default privileges for role postgres in schema public
  revoke select, insert, update, delete on tables from anon, authenticated, service_role;
alter default privileges for role postgres in schema public
  revoke usage, select on sequences from anon, authenticated, service_role;
alter default privileges for role postgres in schema public
  revoke execute on functions from anon, authenticated, service_role;

create schema extensions authorization postgres;
grant usage on schema extensions to anon, authenticated, service_role;
grant all on schema extensions to dashboard_user;
create extension "uuid-ossp" with schema extensions;
create extension pgcrypto with schema extensions;
create extension pg_stat_statements with schema extensions;
grant all on all tables in schema extensions to postgres with grant option;
grant all on all routines in schema extensions to postgres with grant option;
create extension supabase_vault;

-- Auth: the table that others refer to, and who is asking.
create schema auth authorization supabase_admin;
grant usage on schema auth to postgres, anon, authenticated, service_role;
grant all on schema auth to supabase_auth_admin, dashboard_user;

create table auth.users (
  instance_id            uuid,
  id                     uuid primary key,
  aud                    varchar(255),
  role                   varchar(255),
  email                  varchar(255),
  encrypted_password     varchar(255),
  email_confirmed_at     timestamptz,
  invited_at             timestamptz,
  last_sign_in_at        timestamptz,
  raw_app_meta_data      jsonb,
  raw_user_meta_data     jsonb,
  is_super_admin         boolean,
  created_at             timestamptz,
  updated_at             timestamptz,
  phone                  text unique default null,
  phone_confirmed_at     timestamptz,
  banned_until           timestamptz,
  is_sso_user            boolean not null default false,
  deleted_at             timestamptz,
  is_anonymous           boolean not null default false
);
create unique index users_email_partial_key on auth.users (email) where not is_sso_user;
alter table auth.users enable row level security;
alter table auth.users owner to supabase_auth_admin;
grant all on auth.users to postgres, dashboard_user;

create function auth.jwt() returns jsonb language sql stable as $$
  select coalesce(nullif(current_setting('request.jwt.claim', true), ''),
                  nullif(current_setting('request.jwt.claims', true), ''))::jsonb;
$$;
create function auth.uid() returns uuid language sql stable as $$
  select coalesce(nullif(current_setting('request.jwt.claim.sub', true), ''),
                  nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub')::uuid;
$$;
create function auth.role() returns text language sql stable as $$
  select coalesce(nullif(current_setting('request.jwt.claim.role', true), ''),
                  nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role');
$$;
create function auth.email() returns text language sql stable as $$
  select coalesce(nullif(current_setting('request.jwt.claim.email', true), ''),
                  nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'email');
$$;
alter function auth.jwt() owner to supabase_auth_admin;
alter function auth.uid() owner to supabase_auth_admin;
alter function auth.role() owner to supabase_auth_admin;
alter function auth.email() owner to supabase_auth_admin;

-- Empty, for migrations that add tables to it.
create publication supabase_realtime;
alter publication supabase_realtime owner to postgres;

-- Tell the REST layer that the schema has changed.
create function extensions.pgrst_watch() returns event_trigger language plpgsql set search_path = '' as $$
begin
  notify pgrst, 'reload schema';
end;
$$;
create event trigger pgrst_ddl_watch on ddl_command_end
  when tag in ('CREATE SCHEMA', 'ALTER SCHEMA', 'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO', 'ALTER TABLE',
               'CREATE VIEW', 'ALTER VIEW', 'CREATE MATERIALIZED VIEW', 'ALTER MATERIALIZED VIEW', 'CREATE FUNCTION',
               'ALTER FUNCTION', 'CREATE TRIGGER', 'CREATE TYPE', 'ALTER TYPE', 'CREATE RULE', 'COMMENT')
  execute function extensions.pgrst_watch();
create event trigger pgrst_drop_watch on sql_drop execute function extensions.pgrst_watch();
