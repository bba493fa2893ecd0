import { join } from "node:path";

/** What the CLI uploads of one function. */
export interface Upload {
  slug: string;
  metadata: { name: string; entrypoint_path: string; import_map_path: string; verify_jwt: boolean };
  /** Their texts, by path below the project's folder. */
  files: Map<string, string>;
}

export interface ManagementApi extends AsyncDisposable {
  /** The project that it knows. */
  ref: string;
  /** The variables with which the CLI asks here instead of Supabase. */
  env: Record<string, string>;
  /** The functions that were deployed, the last upload of each. */
  uploads: Map<string, Upload>;
  /** The functions' secrets as they were set. */
  secrets: Record<string, string>;
}

/**
 * Supabase's management API as far as link, secrets set and functions deploy ask it
 * (https://supabase.com/docs/reference/api): accepts everything and records it.
 */
export async function recordManagementApi(): Promise<ManagementApi> {
  const ref = "abcdefghijklmnopqrst";
  const uploads = new Map<string, Upload>();
  const secrets: Record<string, string> = {};

  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, async (request) => {
    const { pathname, searchParams } = new URL(request.url);
    if (pathname === `/v1/projects/${ref}`) {
      return Response.json({
        id: ref,
        ref,
        name: "example",
        organization_id: "o",
        organization_slug: "o",
        region: "us-east-1",
        created_at: "2026-01-01T00:00:00Z",
        status: "ACTIVE_HEALTHY",
        database: {
          host: `db.${ref}.localhost`,
          version: "17.4.1",
          postgres_engine: "17",
          release_channel: "ga",
        },
      });
    }
    if (pathname.endsWith("/api-keys")) return Response.json([{ name: "anon", api_key: "a" }]);
    if (pathname.endsWith("/functions/deploy")) {
      const slug = searchParams.get("slug") ?? "";
      uploads.set(slug, await readUpload(slug, await request.formData()));
      return Response.json({ id: slug, slug, name: slug, status: "ACTIVE", version: 1 }, { status: 201 });
    }
    if (pathname.endsWith("/secrets")) {
      const given: { name: string; value: string }[] = await request.json();
      for (const { name, value } of given) secrets[name] = value;
      return Response.json({}, { status: 201 });
    }
    await request.body?.cancel();
    return Response.json(pathname.endsWith("/functions") ? [] : {});
  });

  const dir = await Deno.makeTempDir({ prefix: "nightshift-api-" });
  const profile = join(dir, "profile.yaml");
  const url = `http://127.0.0.1:${server.addr.port}`;
  await Deno.writeTextFile(
    profile,
    `name: test\napi_url: ${url}\ndashboard_url: ${url}\nproject_host: localhost\n`,
  );
  return {
    ref,
    env: {
      SUPABASE_PROFILE: profile,
      SUPABASE_ACCESS_TOKEN: `sbp_${"0".repeat(40)}`,
      DO_NOT_TRACK: "1",
    },
    uploads,
    secrets,
    async [Symbol.asyncDispose]() {
      await server.shutdown();
      await Deno.remove(dir, { recursive: true });
    },
  };
}

async function readUpload(slug: string, form: FormData): Promise<Upload> {
  const files = new Map<string, string>();
  for (const file of form.getAll("file")) {
    if (file instanceof File) files.set(file.name, await file.text());
  }
  return { slug, metadata: JSON.parse(await new Response(form.get("metadata")).text()), files };
}
