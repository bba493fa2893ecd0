import postgres from "postgres";
import { seeded } from "../support.ts";

/** A stream of enqueues that remembers which ones the database has acknowledged, and a log of what becomes of them. */

const ENQUEUERS = 4;
/** From one enqueue of an enqueuer to its next, on average. */
const INTERVAL_MS = 200;

export interface Load {
  /** The jobs whose enqueue was acknowledged: the commit's answer has arrived. */
  acknowledged: string[];
  /** Those of them that have not been seen to have ended. */
  open: Set<string>;
  /** Stops enqueuing. */
  stop(): Promise<void>;
}

/** Writes down each time that a job's status is set, in the transaction that does so: the table `audit`. */
export async function startAudit(sql: postgres.Sql): Promise<void> {
  await sql`create table audit (job_id uuid, status text, attempts int, at timestamptz default clock_timestamp())`;
  await sql`alter table audit enable row level security`;
  await sql`
    create function audit() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
      insert into public.audit (job_id, status, attempts) values (new.id, new.status, new.attempts);
      return null;
    end $$`;
  await sql`create trigger audit after insert or update of status on jobs for each row execute function audit()`;
}

/** Starts to enqueue about 20 jobs a second: most are quick, some take up to two seconds, some fail at first. */
export function startLoad(url: string, seed: number): Load {
  const stopping = new AbortController();
  const load: Load = {
    acknowledged: [],
    open: new Set(),
    async stop() {
      stopping.abort();
      await Promise.all(enqueuers);
    },
  };
  const enqueuers = Array.from({ length: ENQUEUERS }, (_, n) => enqueueUntilStopped(seeded(seed + n)));
  return load;

  async function enqueueUntilStopped(random: () => number): Promise<void> {
    const sql = postgres(url, {
      max: 1,
      max_lifetime: null,
      connect_timeout: 5,
      fetch_types: false,
      backoff: () => 0.2,
      onnotice: () => {},
    });
    while (!stopping.signal.aborted) {
      const [kind, payload] = nextJob(random);
      try {
        // Attempts without end: a job that is dead is then a fault.
        const [row] = await sql`select enqueue_job(${kind}, ${
          sql.json(payload)
        }, max_attempts => 1000) as id`;
        load.acknowledged.push(row?.id);
        load.open.add(row?.id);
      } catch {
        // Nothing was promised, though it may have been committed.
      }
      await new Promise((resolve) => setTimeout(resolve, 2 * INTERVAL_MS * random()));
    }
    await sql.end({ timeout: 1 });
  }
}

function nextJob(random: () => number): [kind: string, payload: Record<string, number>] {
  const which = random();
  if (which < 0.1) return ["pause", { ms: Math.round(500 + 1_500 * random()) }];
  if (which < 0.2) return ["fail_first", { times: random() < 0.7 ? 1 : 2 }];
  return ["echo", { n: Math.round(1_000 * random()) }];
}
