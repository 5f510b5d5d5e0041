// One conversation: a tree of messages, of which one path is shown. Messages are added and never
// moved.

const ROLES = ["user", "assistant"];
/** Fields of a message besides `id`, `parent`, `role` and `content`; all are texts but `notes`. */
const TEXTS = ["model", "reasoning", "foot", "error", "request"];
const FORMAT = "steersman-conversation";
/** Messages of a conversation that is imported, at most. */
const MESSAGES = 10_000;

const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(8))]
    .map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");

export class Conversation {
  constructor({ id = newId(), title = "", updated = 0, tip = null, messages = [] } = {}) {
    Object.assign(this, { id, title, updated, tip, messages });
  }

  /** The messages that are shown, the first one first: those from `to` up to the root. */
  path(to = this.tip) {
    const known = new Map(this.messages.map((message) => [message.id, message]));
    const path = [];
    for (let message = known.get(to); message; message = known.get(message.parent))
      path.push(message);
    return path.reverse();
  }

  /** Adds a message after `parent` and shows the path to it. */
  add(message, parent = this.tip) {
    const added = { id: newId(), parent, ...message };
    this.messages.push(added);
    this.tip = added.id;
    this.updated = Date.now();
    this.title ||= title(added.content);
    return added;
  }

  /** Shows the path to the parent of `message`: what is added next is its sibling. */
  leave(message) {
    this.tip = message.parent;
  }

  /** The messages with the same parent, `message` among them, the oldest first. */
  siblings(message) {
    return this.messages.filter(({ parent }) => parent === message.parent);
  }

  /** Shows the path through `message` to the newest message below it. */
  choose(message) {
    const newest = (id) => this.messages.findLast(({ parent }) => parent === id)?.id;
    for (let next = message.id; next; next = newest(next)) this.tip = next;
    this.updated = Date.now();
  }

  /**
   * Adds the messages of another copy, such as that of another tab, which this one does not have.
   */
  merge({ messages }) {
    const own = new Set(this.messages.map(({ id }) => id));
    const others = messages.filter(({ id }) => !own.has(id));
    if (others.length) this.messages = [...this.messages, ...others];
  }

  toJSON() {
    const { id, title: name, updated, tip, messages } = this;
    return { format: FORMAT, version: 1, id, title: name, updated, tip, messages };
  }

  /**
   * Returns the conversation in `source`, JSON as `JSON.stringify` writes one. Throws an `Error`
   * that names what is wrong.
   */
  static parse(source) {
    let value;
    try {
      value = JSON.parse(source);
    } catch (error) {
      throw new Error(`it is no JSON: ${error.message}`);
    }
    const fail = (field, what) => {
      throw new Error(`${field}: ${what}`);
    };
    if (value?.format !== FORMAT) fail("format", `must be "${FORMAT}"`);
    if (value.version !== 1) fail("version", "this console reads version 1");
    if (!/^[0-9a-f]{16}$/.test(value.id)) fail("id", "must be 16 hexadecimal digits");
    if (typeof value.title !== "string") fail("title", "must be a string");
    if (!Number.isFinite(value.updated)) fail("updated", "must be a number");
    if (!Array.isArray(value.messages)) fail("messages", "must be a list");
    if (value.messages.length > MESSAGES)
      fail("messages", `has ${value.messages.length} messages, at most ${MESSAGES} are read`);
    const ids = new Set();
    const messages = value.messages.map((message, i) => {
      const field = (name) => `messages[${i}].${name}`;
      if (typeof message?.id !== "string" || ids.has(message.id))
        fail(field("id"), "must be a string, and different from the others");
      if (message.parent !== null && !ids.has(message.parent))
        fail(field("parent"), "must be null, or the id of an earlier message");
      if (!ROLES.includes(message.role)) fail(field("role"), `must be one of ${ROLES.join(", ")}`);
      if (typeof message.content !== "string") fail(field("content"), "must be a string");
      for (const name of TEXTS)
        if (message[name] !== undefined && typeof message[name] !== "string")
          fail(field(name), "must be a string");
      const notes = message.notes ?? [];
      if (!Array.isArray(notes) || !notes.every((note) => typeof note === "string"))
        fail(field("notes"), "must be a list of strings");
      ids.add(message.id);
      const { id, parent, role, content } = message;
      return {
        id,
        parent,
        role,
        content,
        ...Object.fromEntries(
          TEXTS.filter((name) => name in message).map((name) => [name, message[name]]),
        ),
        notes,
      };
    });
    if (value.tip !== null && !ids.has(value.tip)) fail("tip", "must be the id of a message");
    return new Conversation({
      id: value.id,
      title: title(value.title),
      updated: value.updated,
      tip: value.tip,
      messages,
    });
  }
}

/** The first line of a text, at most 80 characters. */
export const title = (text) => text.trim().split("\n", 1)[0].slice(0, 80);
