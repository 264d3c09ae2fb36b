// Calls of the server: JSON and streams of events, with the key that the server asks for.

const BASE = new URL("..", import.meta.url);
const KEY = "naiad.key";

/** An answer that is not a success, in the server's words. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    this.name = "ServerError";
    Object.assign(this, { status, code, param, retryAfterS });
  }
}

/** The key of this session; it is never kept longer than the browser's tab. */
export const keyStore = {
  value: readKey(),
  set(key) {
    this.value = key;
    try {
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    } catch {
      // Storage is off: the key lasts as long as the page.
    }
  },
};

function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/**
 * Makes the calls.
 * @param askKey (message) → Promise of a key, or of null if the user gives none.
 */
export function makeApi(askKey) {
  let asking = null;

  async function call(path, { body, signal, accept } = {}) {
    for (;;) {
      const used = keyStore.value;
      const headers = { Accept: accept };
      if (used) headers.Authorization = `Bearer ${used}`;
      const options = { headers, signal, cache: "no-store" };
      if (body !== undefined) {
        options.method = "POST";
        headers["Content-Type"] = "application/json";
        options.body = JSON.stringify(body);
      }
      let response;
      try {
        response = await fetch(new URL(path.replace(/^\/+/, ""), BASE), options);
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The server does not answer. Is it running?");
      }
      if (response.ok) return response;
      const error = await readError(response);
      if (response.status !== 401) throw error;
      // Several calls may be refused at once: they ask once.
      if (keyStore.value === used) {
        asking ??= askKey(used ? error.message : "").finally(() => (asking = null));
        if ((await asking) === null) throw error;
      }
      signal?.throwIfAborted();
    }
  }

  return {
    /** Fetches JSON; with a body by POST. */
    async json(path, body, { signal } = {}) {
      const response = await call(path, { body, signal, accept: "application/json" });
      return response.json();
    },
    /** Reads a stream of server-sent events until it ends: onEvent(name, data), data as text. */
    async events(path, { onEvent, signal, body } = {}) {
      const response = await call(path, { body, signal, accept: "text/event-stream" });
      await readEvents(response.body, onEvent);
    },
  };
}

async function readError(response) {
  const text = await response.text().catch(() => "");
  let details = {};
  try {
    details = JSON.parse(text).error ?? {};
  } catch {
    // A proxy answered.
  }
  const message = details.message || `The server answered ${response.status} ${response.statusText}.`;
  const retryAfterS = Number(response.headers.get("retry-after")) || null;
  const { code = null, param = null } = details;
  return new ServerError(String(message), { status: response.status, code, param, retryAfterS });
}

/** Reads events from the bytes of a stream, however they are cut. */
export async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "message";
  let data = [];
  for (;;) {
    let value, done;
    try {
      ({ value, done } = await reader.read());
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection to the server broke.");
    }
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) onEvent(name, data.join("\n"));
        name = "message";
        data = [];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") data.push(text);
      else if (field === "event") name = text;
    }
  }
}
