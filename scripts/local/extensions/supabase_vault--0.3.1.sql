-- Vault for the local stack: the names, types and grants of supabase_vault 0.3, without its C library.
--
-- Nothing is encrypted here. The values come from supabase/.env on the same disk, so a key beside them would protect
-- nothing. They are only stored in another form, so that reading vault.secrets.secret where
-- vault.decrypted_secrets.decrypted_secret was meant fails here as it does on a hosted project.

create function vault._crypto_aead_det_noncegen() returns bytea
language sql volatile set search_path = '' as $$
  select uuid_send(gen_random_uuid());
$$;

create function vault._crypto_aead_det_encrypt(message bytea, additional bytea, key_id bigint,
                                               context bytea default 'pgsodium', nonce bytea default null)
returns bytea language sql immutable as $$
  select coalesce(nonce, '') || message;
$$;

create function vault._crypto_aead_det_decrypt(message bytea, additional bytea, key_id bigint,
                                               context bytea default 'pgsodium', nonce bytea default null)
returns bytea language sql immutable as $$
  select substr(message, coalesce(length(nonce), 0) + 1);
$$;

create table vault.secrets (
  id          uuid primary key default gen_random_uuid(),
  name        text,
  description text not null default '',
  secret      text not null,
  key_id      uuid,
  nonce       bytea default vault._crypto_aead_det_noncegen(),
  created_at  timestamptz not null default current_timestamp,
  updated_at  timestamptz not null default current_timestamp
);
create unique index secrets_name_idx on vault.secrets (name) where name is not null;
comment on table vault.secrets is 'Secrets of the local stack: not encrypted.';

create view vault.decrypted_secrets as
select id, name, description, secret,
       convert_from(vault._crypto_aead_det_decrypt(decode(secret, 'base64'), convert_to(id::text, 'utf8'), 0,
                                                   'pgsodium', nonce), 'utf8') as decrypted_secret,
       key_id, nonce, created_at, updated_at
  from vault.secrets;

create function vault._stored_form(plain text, secret_id uuid, nonce bytea) returns text
language sql immutable set search_path = '' as $$
  select encode(vault._crypto_aead_det_encrypt(convert_to(plain, 'utf8'), convert_to(secret_id::text, 'utf8'), 0,
                                               'pgsodium', nonce), 'base64');
$$;

create function vault.create_secret(new_secret text, new_name text default null, new_description text default '',
                                    new_key_id uuid default null)
returns uuid language sql security definer set search_path = '' as $$
  insert into vault.secrets (id, name, description, secret, nonce)
  select n.id, new_name, new_description, vault._stored_form(new_secret, n.id, n.nonce), n.nonce
    from (select gen_random_uuid() as id, vault._crypto_aead_det_noncegen() as nonce) n
  returning id;
$$;

create function vault.update_secret(secret_id uuid, new_secret text default null, new_name text default null,
                                    new_description text default null, new_key_id uuid default null)
returns void language sql security definer set search_path = '' as $$
  update vault.secrets s
     set secret      = coalesce(vault._stored_form(new_secret, s.id, s.nonce), s.secret),
         name        = coalesce(new_name, s.name),
         description = coalesce(new_description, s.description),
         updated_at  = now()
   where s.id = secret_id;
$$;

revoke all on all functions in schema vault from public;
grant usage on schema vault to postgres with grant option;
grant select, delete, references, truncate on vault.secrets, vault.decrypted_secrets to postgres with grant option;
grant execute on function vault.create_secret, vault.update_secret, vault._crypto_aead_det_decrypt
  to postgres with grant option;
grant usage on schema vault to service_role;
grant select, delete on vault.secrets, vault.decrypted_secrets to service_role;
grant execute on function vault.create_secret, vault.update_secret, vault._crypto_aead_det_decrypt to service_role;
