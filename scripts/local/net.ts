// Plays pg_net's background worker: sends what net.http_get, http_post and http_delete queue.
//
// One transaction per batch, as the real one: queue rows are deleted, the requests are sent, and the responses become
// visible when the slowest of them has ended. If the worker dies in between, the batch is sent again.

import postgres from "postgres";
import { createLatch, listenAlways, messageOf, withoutRepeats } from "./latch.ts";

const BATCH_SIZE = 200;
const TIME_TO_LIVE = "6 hours";
const AGENT = "pg_net/0.20.0";

export interface PlayNetOptions {
  /** A superuser's connection string; the work is done as postgres, as on a hosted project. */
  url: string;
  signal: AbortSignal;
  log: (line: string) => void;
  /** How long to rest after each batch; the real worker's second unless given. */
  pauseMs?: number;
}

interface QueuedRequest {
  id: string;
  method: string;
  url: string;
  headers: Record<string, string> | null;
  body: Uint8Array<ArrayBuffer> | null;
  timeoutMs: number;
}

/** A row of net._http_response, without `created`, which is the batch's start. */
interface ResponseRow {
  id: string;
  status_code?: number;
  content_type?: string | null;
  headers?: Record<string, string>;
  content?: string | null;
  timed_out: boolean;
  error_msg?: string;
}

/**
 * Sends queued requests until `signal`: at once when a transaction that called net.wake() commits and the worker is
 * asleep, then a pause, and again until a look finds nothing. The first commit during a pause cuts it short, later ones
 * wait for the next. Never throws for a lost connection: it says so in the log and goes on when the server is back.
 */
export async function playNet({ url, signal, log, pauseMs = 1000 }: PlayNetOptions): Promise<void> {
  const connect = () =>
    postgres(url, {
      max: 1,
      backoff: () => 0.2,
      fetch_types: false,
      onnotice: () => {},
      connection: {
        application_name: `pg_net ${AGENT.split("/")[1]} worker`,
        statement_timeout: 0,
      },
    });
  const listener = connect();
  let sql = connect();
  const client = Deno.createHttpClient({ poolMaxIdlePerHost: 0 });
  const say = withoutRepeats(log);
  const latch = createLatch();
  signal.addEventListener("abort", latch.set);

  // The real worker's two flags: should_wake, which only the first commit raises, and the latch, which it then sets.
  let shouldWake = true;
  const wake = () => {
    if (shouldWake) return;
    shouldWake = true;
    latch.set();
  };
  const lookAgain = () => {
    shouldWake = true;
    latch.set();
  };

  await listenAlways(listener, "pg_net_wake", signal, wake, lookAgain);
  while (!signal.aborted) {
    if (!shouldWake) {
      await latch.wait();
      continue;
    }
    shouldWake = false;
    try {
      while (await sendBatch(sql, client, signal) && !signal.aborted) await latch.wait(pauseMs);
    } catch (error) {
      if (signal.aborted) break;
      say(`pg_net worker: ${messageOf(error)}`);
      shouldWake = true;
      // A client that was cut off in a transaction may never connect again.
      sql.end({ timeout: 0 });
      sql = connect();
      await latch.wait(200);
    }
  }
  client.close();
  await Promise.all([sql.end({ timeout: 1 }), listener.end({ timeout: 1 })]);
}

/**
 * Runs a transaction on a client that is thrown away when it fails. Were postgres.js to hear of the failure, it would write
 * a rollback to a socket that may be closed, which ends the process or leaves the client waiting for ever.
 */
function inTransaction(
  sql: postgres.Sql,
  run: (sql: postgres.TransactionSql) => Promise<boolean>,
): Promise<boolean> {
  return new Promise((resolve, reject) => {
    sql.begin((transaction) =>
      run(transaction).catch((error) => {
        reject(error);
        return new Promise<never>(() => {});
      })
    ).then(resolve, reject);
  });
}

/** Sends one batch and stores its responses. Returns whether there was anything to do. */
async function sendBatch(sql: postgres.Sql, client: Deno.HttpClient, signal: AbortSignal): Promise<boolean> {
  return await inTransaction(sql, async (transaction) => {
    const [{ installed }] =
      await transaction`select to_regclass('net.http_request_queue') is not null as installed`;
    if (!installed) return false;
    const expired = await transaction`
      delete from net._http_response
       where ctid = any(array(select ctid from net._http_response
                               where created < now() - ${TIME_TO_LIVE}::interval limit ${BATCH_SIZE}))`;
    const requests = await transaction<QueuedRequest[]>`
      delete from net.http_request_queue q
       using (select id from net.http_request_queue order by id limit ${BATCH_SIZE}) next
       where q.id = next.id
      returning q.id, q.method, q.url, q.body, q.timeout_milliseconds as "timeoutMs",
                (select jsonb_object_agg(key, value) from jsonb_each_text(q.headers) where value is not null) as headers`;
    if (requests.length) {
      const rows = await Promise.all(requests.map((request) => send(request, client, signal)));
      await transaction`
        insert into net._http_response (id, status_code, content_type, headers, content, timed_out, error_msg)
        select * from json_to_recordset(${JSON.stringify(rows)}::text::json)
          as r(id bigint, status_code int, content_type text, headers jsonb, content text, timed_out boolean, error_msg text)`;
    }
    return requests.length > 0 || expired.count > 0;
  });
}

async function send(
  request: QueuedRequest,
  client: Deno.HttpClient,
  signal: AbortSignal,
): Promise<ResponseRow> {
  const started = performance.now();
  const timeout = request.timeoutMs > 0 ? AbortSignal.timeout(request.timeoutMs) : undefined;
  try {
    const response = await fetch(request.url, {
      client,
      method: request.method.toUpperCase(),
      headers: { ...request.headers, "user-agent": AGENT },
      body: request.body,
      signal: timeout ? AbortSignal.any([timeout, signal]) : signal,
    });
    const text = await response.text();
    return {
      id: request.id,
      status_code: response.status,
      content_type: response.headers.get("content-type"),
      headers: Object.fromEntries(response.headers),
      content: text.split("\0", 1)[0] || null,
      timed_out: false,
    };
  } catch (error) {
    signal.throwIfAborted();
    if (!timeout?.aborted) {
      return { id: request.id, timed_out: false, error_msg: inCurlsWords(error) };
    }
    const ms = (performance.now() - started).toFixed(6);
    return {
      id: request.id,
      timed_out: true,
      error_msg: `Timeout of ${request.timeoutMs} ms reached. Total time: ${ms} ms (DNS time: 0.000000 ms, ` +
        `TCP/SSL handshake time: 0.000000 ms, HTTP Request/Response time: ${ms} ms)`,
    };
  }
}

/** pg_net stores curl's own sentences; the common ones are put in its words, anything else is kept as it is. */
function inCurlsWords(error: unknown): string {
  const message = messageOf(error instanceof Error && error.cause ? error.cause : error); // "fetch failed" says nothing
  if (/tcp connect error|connection refused/i.test(message)) return "Could not connect to server";
  if (/dns error|failed to lookup/i.test(message)) return "Could not resolve hostname";
  if (/invalid url/i.test(message)) return "URL using bad/illegal format or missing URL";
  if (/scheme .* not supported/i.test(message)) return "Unsupported protocol";
  if (/connection closed before message completed/i.test(message)) {
    return "Server returned nothing (no headers, no data)";
  }
  return message;
}
