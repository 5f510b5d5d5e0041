// Requests to this server. The key lives in sessionStorage: it ends with the tab.

import { tab } from "./storage.js";

const KEY = "steersman-key";
const LINKED = "steersman-linked";

export const key = {
  get: () => tab.get(KEY) ?? "",
  /** Whether it is the key of the link that the server printed. */
  isLinked: () => tab.get(LINKED) !== null,
  set: (value, isLinked = false) => {
    if (value) tab.set(KEY, value);
    else tab.remove(KEY);
    if (isLinked) tab.set(LINKED, "yes");
    else tab.remove(LINKED);
  },
};

/** An answer that is an error: `status` is 0 if the server could not be reached. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Codes of a server that is not there yet, or not any more, and words for that. */
const AWAY = { server_loading: "Loading", loading: "Loading", server_stopping: "Stopping", draining: "Stopping" };
/** Codes of an operator's routes, for everyone else. */
const REFUSED = ["invalid_admin_key", "admin_keys_not_set"];

const tell = (event, detail) => window.dispatchEvent(new CustomEvent(event, { detail }));

/**
 * The answer to a request. Throws an `ApiError` for one that is an error. The frame is told what concerns all views:
 * `contact`, with words if the server does not answer; `needs-key`, with what is wrong; `refused`, for an operator's rights.
 */
export async function send(path, { method = "GET", body, type, signal, headers = {} } = {}) {
  const all = { ...headers };
  const own = key.get();
  if (own) all.authorization = `Bearer ${own}`;
  if (type) all["content-type"] = type;
  let response;
  try {
    response = await fetch(path, { method, body, signal, headers: all, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    tell("contact", "No answer");
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
  if (response.ok) {
    tell("contact", null);
    return response;
  }
  const answer = await response.json().catch(() => ({}));
  const { code, message } = answer.error ?? {};
  const error = new ApiError(response.status, code ?? answer.status ?? "", message ?? `Status ${response.status}`);
  tell("contact", AWAY[error.code] ?? null);
  if (REFUSED.includes(code)) tell("refused");
  // A link that was used takes nobody's key away, and the answer to a key that was changed meanwhile says nothing of the
  // new one.
  else if (response.status === 401 && code !== "invalid_link" && own === key.get()) tell("needs-key", code === "key_expired" ? message : null);
  throw error;
}

export const get = async (path, signal) => (await send(path, { signal })).json();

/** The JSON of each line of a reply. */
export const getLines = async (path, signal) => {
  const text = await (await send(path, { signal })).text();
  return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
};

export const post = async (path, body, type = "application/json") => {
  const data = type === "application/json" && body !== undefined ? JSON.stringify(body) : body;
  return (await send(path, { method: "POST", body: data, type: body === undefined ? undefined : type })).json();
};

/** Server-sent events of a route, as `{event, data}` with parsed data. Ends with the stream. */
export async function* events(path, { body, signal, headers } = {}) {
  const options = body === undefined
    ? { signal }
    : { method: "POST", body: JSON.stringify(body), type: "application/json", signal, headers };
  const response = await send(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) event = line.slice(6).trim();
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        const text = data.join("\n");
        if (text && text !== "[DONE]") yield { event, data: JSON.parse(text) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
