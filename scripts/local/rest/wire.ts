// A connection to Postgres, spoken to in its own protocol. A request is one message out and one back: its statements
// share one transaction, which commits when all have succeeded; after an error Postgres skips the rest. A client
// library would need a round trip for each of begin, settings, statement and commit.

import { createHash, createHmac, pbkdf2Sync, randomBytes } from "node:crypto";

export interface Statement {
  text: string;
  params: string[];
}

/** Columns as text, in the statement's order. */
export type Row = (string | null)[];

export interface Connection {
  /** Which state of the schema its prepared statements were made for. */
  readonly generation: number;
  /** Runs the statements as one transaction and returns the last row that came. */
  run(statements: Statement[]): Promise<Row>;
  /** Resolves to true if the connection was lost while it was idle, to false when it is used again. */
  idle(): Promise<boolean>;
  close(): void;
}

/** What Postgres answered instead of a result, with its SQLSTATE. */
export class DatabaseError extends Error {
  constructor(
    readonly severity: string,
    readonly code: string,
    message: string,
    readonly detail: string | null,
    readonly hint: string | null,
  ) {
    super(message);
  }
}

/** The connection is gone. `began`: Postgres may have run the statements, so they must not be sent again. */
export class ConnectionLost extends Error {
  constructor(message: string, readonly began: boolean) {
    super(message);
  }
}

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/**
 * Connects to the database of the URL and logs in (password by SCRAM, or none).
 * Throws if nothing listens there, or a DatabaseError if Postgres refuses.
 */
export async function connect(url: URL, generation: number): Promise<Connection> {
  const socket = await Deno.connect({ hostname: url.hostname, port: Number(url.port || 5432) });
  socket.setNoDelay();
  const prepared = new Map<string, string>();
  let buffer = new Uint8Array(16 * 1024);
  let start = 0;
  let end = 0;
  let reading: Promise<number | null> | null = null;
  let uses = 0;

  async function send(bytes: Uint8Array): Promise<void> {
    for (let at = 0; at < bytes.length;) at += await socket.write(bytes.subarray(at));
  }

  function read(): Promise<number | null> {
    if (start > 0) {
      buffer.copyWithin(0, start, end);
      [start, end] = [0, end - start];
    }
    if (end === buffer.length) {
      const larger = new Uint8Array(2 * buffer.length);
      larger.set(buffer);
      buffer = larger;
    }
    return socket.read(buffer.subarray(end));
  }

  // The next message: the letter of its type, and its content, which holds until the next call.
  async function receive(): Promise<{ type: string; content: Uint8Array }> {
    while (end - start < 5 || end - start < 1 + int32(buffer, start + 1)) {
      reading ??= read();
      const count = await reading;
      reading = null;
      if (count === null) throw new ConnectionLost("server closed the connection unexpectedly", true);
      end += count;
    }
    const type = String.fromCharCode(buffer[start]);
    const content = buffer.subarray(start + 5, start + 1 + int32(buffer, start + 1));
    start += 5 + content.length;
    return { type, content };
  }

  async function logIn(): Promise<void> {
    const user = decodeURIComponent(url.username);
    const settings = { user, database: url.pathname.slice(1) || user, application_name: "postgrest" };
    const startup = message("").int32(196608);
    for (const [name, value] of Object.entries(settings)) startup.text(name).text(value);
    await send(startup.text("").end());
    const scram = createScram(decodeURIComponent(url.password));
    while (true) {
      const { type, content } = await receive();
      if (type === "Z") return;
      if (type === "E") throw readError(content);
      if (type !== "R") continue;
      const step = int32(content, 0);
      const data = decoder.decode(content.subarray(4));
      if (step === 10) {
        const first = encoder.encode(scram.first);
        await send(message("p").text("SCRAM-SHA-256").int32(first.length).bytes(first).end());
      } else if (step === 11) await send(message("p").bytes(encoder.encode(scram.answer(data))).end());
      else if (step !== 0 && step !== 12) {
        throw new Error(`Postgres asks for a login this cannot do (${step})`);
      }
    }
  }

  async function run(statements: Statement[]): Promise<Row> {
    uses += 1;
    const out = message();
    const fresh: { text: string; name: string }[] = [];
    for (const { text, params } of statements) {
      let name = prepared.get(text);
      if (name === undefined) {
        name = `s${prepared.size + fresh.length}`;
        fresh.push({ text, name });
        out.start("P").text(name).text(text).int16(0);
      }
      out.start("B").text("").text(name).int16(0).int16(params.length);
      for (const param of params) out.counted(param);
      out.int16(0).start("E").text("").int32(0);
    }
    let answered = false;
    let row: Row = [];
    let failure: DatabaseError | null = null;
    try {
      await send(out.start("S").end());
      while (true) {
        const { type, content } = await receive();
        if (type === "Z") break;
        if (type === "D") row = readRow(content);
        else if (type === "E") failure = readError(content);
        else if (type === "1") {
          const parsed = fresh.shift();
          if (parsed) prepared.set(parsed.text, parsed.name);
        }
        if (failure && failure.severity !== "ERROR") throw failure;
        answered ||= type === "1" || type === "2";
      }
    } catch (error) {
      socket.close();
      // Postgres says why it ends a connection: if that comes first, it had not begun with the statements.
      const began = answered || !(error instanceof DatabaseError);
      throw new ConnectionLost(error instanceof Error ? error.message : String(error), began);
    }
    if (failure) throw failure;
    return row;
  }

  try {
    await logIn();
  } catch (error) {
    socket.close();
    throw error;
  }
  return {
    generation,
    run,
    async idle() {
      const use = uses;
      reading ??= read();
      const count = await reading.catch(() => null);
      // Once in use again, what came is run's to read.
      return use === uses && (count === null || buffer[0] === "E".charCodeAt(0));
    },
    close: () => socket.close(),
  };
}

// ---- Messages ----

function int32(bytes: Uint8Array, at: number): number {
  return bytes[at] << 24 | bytes[at + 1] << 16 | bytes[at + 2] << 8 | bytes[at + 3];
}

function readRow(content: Uint8Array): Row {
  const row: Row = [];
  for (let at = 2; at < content.length;) {
    const size = int32(content, at);
    at += 4;
    row.push(size < 0 ? null : decoder.decode(content.subarray(at, at + size)));
    at += Math.max(size, 0);
  }
  return row;
}

function readError(content: Uint8Array): DatabaseError {
  const fields = new Map(decoder.decode(content).split("\0").map((field) => [field[0], field.slice(1)]));
  const field = (letter: string) => fields.get(letter) ?? null;
  return new DatabaseError(
    field("V") ?? "ERROR",
    field("C") ?? "XX000",
    field("M") ?? "",
    field("D"),
    field("H"),
  );
}

interface Message {
  start(type: string): Message;
  int16(value: number): Message;
  int32(value: number): Message;
  /** Ended by a zero byte. */
  text(value: string): Message;
  /** Preceded by its length in bytes. */
  counted(value: string): Message;
  bytes(value: Uint8Array): Message;
  end(): Uint8Array;
}

// One or more messages in a row: each starts with its type (the first of a connection has none) and its length.
function message(type?: string): Message {
  let out = new Uint8Array(2048);
  let at = 0;
  let lengthAt = -1;
  const room = (size: number) => {
    if (at + size <= out.length) return;
    const larger = new Uint8Array(2 * (at + size));
    larger.set(out.subarray(0, at));
    out = larger;
  };
  const put32 = (value: number, place: number) => {
    out[place] = value >>> 24;
    out[place + 1] = value >>> 16;
    out[place + 2] = value >>> 8;
    out[place + 3] = value;
  };
  const putText = (value: string) => {
    room(3 * value.length + 5);
    at += encoder.encodeInto(value, out.subarray(at)).written;
  };
  const finish = () => {
    if (lengthAt >= 0) put32(at - lengthAt, lengthAt);
  };
  const self: Message = {
    start(type) {
      finish();
      room(5);
      if (type) out[at++] = type.charCodeAt(0);
      lengthAt = at;
      at += 4;
      return self;
    },
    int16(value) {
      room(2);
      out[at++] = value >>> 8;
      out[at++] = value;
      return self;
    },
    int32(value) {
      room(4);
      put32(value, at);
      at += 4;
      return self;
    },
    text(value) {
      putText(value);
      out[at++] = 0;
      return self;
    },
    counted(value) {
      const place = at;
      room(4);
      at += 4;
      putText(value);
      put32(at - place - 4, place);
      return self;
    },
    bytes(value) {
      room(value.length);
      out.set(value, at);
      at += value.length;
      return self;
    },
    end() {
      finish();
      return out.subarray(0, at);
    },
  };
  return type === undefined ? self : self.start(type);
}

// ---- Login ----

// SCRAM-SHA-256 (RFC 5802, 7677) without checking the server's own proof: it is on this machine.
function createScram(password: string): { first: string; answer(challenge: string): string } {
  const hmac = (key: Uint8Array, text: string) => createHmac("sha256", key).update(text).digest();
  const start = `n=,r=${randomBytes(18).toString("base64")}`;
  return {
    first: `n,,${start}`,
    answer(challenge) {
      const parts = new Map(challenge.split(",").map((part) => [part[0], part.slice(2)]));
      const salt = Uint8Array.fromBase64(parts.get("s") ?? "");
      const salted = pbkdf2Sync(password, salt, Number(parts.get("i")), 32, "sha256");
      const key = hmac(salted, "Client Key");
      const withoutProof = `c=biws,r=${parts.get("r")}`;
      const signature = hmac(
        createHash("sha256").update(key).digest(),
        `${start},${challenge},${withoutProof}`,
      );
      const proof = key.map((byte, at) => byte ^ signature[at]);
      return `${withoutProof},p=${proof.toBase64()}`;
    },
  };
}
