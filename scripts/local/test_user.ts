import postgres from "postgres";
import { signJwt } from "./jwt.ts";

const id = "00000000-0000-4000-8000-000000000001";
const email = "test@example.com";
const DAY_SECONDS = 24 * 3600;

/** Signs a user in to try things with: makes the row in auth.users if it is not there, and gives back a token for a day. */
export async function signInTestUser(databaseUrl: string, jwtSecret: string): Promise<string> {
  const sql = postgres(databaseUrl, { max: 1, fetch_types: false, onnotice: () => {} });
  try {
    await sql`
      insert into auth.users (id, aud, role, email) values (${id}, 'authenticated', 'authenticated', ${email})
      on conflict do nothing`;
  } finally {
    await sql.end();
  }
  const iat = Math.floor(Date.now() / 1000);
  const who = { sub: id, email, role: "authenticated", aud: "authenticated", iss: "nightshift-local" };
  return await signJwt({
    ...who,
    app_metadata: { tenant_id: "test-tenant" },
    iat,
    exp: iat + DAY_SECONDS,
  }, jwtSecret);
}
