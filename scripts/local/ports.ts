/** Where the local stack listens: the Supabase CLI's own ports. */
export interface Ports {
  api: number;
  database: number;
  mail: number;
}

const defaultPorts: Ports = { api: 54321, database: 54322, mail: 54324 };

/** The variable that sets each port, for the messages that name it. */
const portVariables = { api: "LOCAL_API_PORT", database: "LOCAL_DB_PORT", mail: "LOCAL_MAIL_PORT" };

/** The ports to use: LOCAL_API_PORT, LOCAL_DB_PORT and LOCAL_MAIL_PORT where they are set. Throws when one is no port. */
export function readPorts(): Ports {
  const read = (name: keyof Ports) => {
    const text = Deno.env.get(portVariables[name]);
    if (!text) return defaultPorts[name];
    const port = Number(text);
    if (!Number.isInteger(port) || port < 1 || port > 65535) {
      throw new Error(`${portVariables[name]} is ${JSON.stringify(text)}: give a port from 1 to 65535.`);
    }
    return port;
  };
  return { api: read("api"), database: read("database"), mail: read("mail") };
}

/** Throws naming the port and its variable when something listens there already. */
export function assertPortFree(ports: Ports, name: keyof Ports): void {
  try {
    Deno.listen({ hostname: "127.0.0.1", port: ports[name] }).close();
  } catch (error) {
    const why = error instanceof Deno.errors.AddrInUse ? "is taken" : `cannot be used (${error})`;
    throw new Error(`Port ${ports[name]} (${name}) ${why}. ${portHint(name)}`);
  }
}

/** What to do about a port that is taken. */
export function portHint(name: keyof Ports): string {
  return `Stop what uses it (a running npm start or supabase start?), or set ${
    portVariables[name]
  } to another port.`;
}

/**
 * A port that nothing listens on now, for tests. Below the range that outgoing connections are given, or one of them could
 * take it between now and its use; and above those that fetch refuses to call, of which 10080 is the last
 * (https://fetch.spec.whatwg.org/#port-blocking).
 */
export function freePort(): number {
  while (true) {
    const port = 10_100 + Math.floor(Math.random() * 19_900);
    try {
      Deno.listen({ hostname: "127.0.0.1", port }).close();
      return port;
    } catch (error) {
      if (!(error instanceof Deno.errors.AddrInUse)) throw error;
    }
  }
}
