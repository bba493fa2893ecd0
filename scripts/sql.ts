import postgres from "postgres";
import { join } from "node:path";
import { readPorts } from "./local/ports.ts";

/** `npm run sql -- "…"`: runs SQL on the local database as postgres, and prints what comes back as tables. */

type Result = postgres.ValuesRowList<postgres.Row[]>;

const query = Deno.args.join(" ").trim();
if (query === "") {
  console.error('Give a query: npm run sql -- "select * from jobs"');
  Deno.exit(1);
}

const url = Deno.env.get("DATABASE_URL") || await localDatabase();
const sql = postgres(url, {
  max: 1,
  onnotice: (notice) => console.error(notice.message),
  fetch_types: false,
});
try {
  // One result for one statement, a list of results for several. Values, since two columns may have one name.
  const answer: Result | Result[] = await sql.unsafe(query).simple().values();
  for (const rows of "command" in answer ? [answer] : answer) {
    if (rows.columns?.length > 0) console.log(table(rows.columns.map((column) => column.name), rows));
    else console.log(`${rows.command} ${rows.count ?? ""}`.trim());
  }
} catch (error) {
  const refused = error instanceof Error && "code" in error && error.code === "ECONNREFUSED";
  const { message, detail, hint } = error instanceof postgres.PostgresError
    ? error
    : { message: String(error), detail: undefined, hint: undefined };
  console.error(refused ? `No database at ${new URL(url).host}: run npm start first.` : `Error: ${message}`);
  if (detail) console.error(`Detail: ${detail}`);
  if (hint) console.error(`Hint: ${hint}`);
  Deno.exitCode = 1;
} finally {
  await sql.end();
}

async function localDatabase(): Promise<string> {
  const state = await Deno.readTextFile(join(import.meta.dirname ?? ".", "../.local/stack.json")).catch(() =>
    "{}"
  );
  const { databaseUrl }: { databaseUrl?: string } = JSON.parse(state);
  return databaseUrl ?? `postgresql://postgres:postgres@127.0.0.1:${readPorts().database}/postgres`;
}

function table(columns: string[], rows: unknown[][]): string {
  const show = (value: unknown) =>
    value === null
      ? ""
      : value instanceof Date
      ? value.toISOString()
      : typeof value === "object"
      ? JSON.stringify(value)
      : String(value).replaceAll("\n", "\\n");
  const cells = [
    columns,
    ...rows.map((row) => row.map(show)),
  ];
  const widths = columns.map((_, i) => Math.max(...cells.map((line) => (line[i] ?? "").length)));
  const lines = cells.map((line) => line.map((cell, i) => cell.padEnd(widths[i] ?? 0)).join(" | ").trimEnd());
  lines.splice(1, 0, widths.map((width) => "-".repeat(width)).join("-+-"));
  return [...lines, `(${rows.length} row${rows.length === 1 ? "" : "s"})`].join("\n");
}
