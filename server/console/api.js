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

/** The answer to a request. Throws an `ApiError` for one that is an error. */
export async function send(path, { method = "GET", body, type, signal, headers = {} } = {}) {
  const all = { ...headers };
  if (key.get()) all.authorization = `Bearer ${key.get()}`;
  if (type) all["content-type"] = type;
  let response;
  try {
    response = await fetch(path, { method, body, signal, headers: all, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const { code, message } = answer.error ?? {};
  const error = new ApiError(response.status, code ?? answer.status ?? "", message ?? `Status ${response.status}`);
  if (response.status === 401 && code !== "invalid_admin_key") {
    window.dispatchEvent(new CustomEvent("needs-key", { detail: code === "key_expired" ? message : null }));
  }
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
