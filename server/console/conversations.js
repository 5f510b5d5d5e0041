// The conversations that this browser keeps, those of one access: another key's are not listed.

import { Conversation, title } from "./conversation.js";
import { number } from "./dom.js";
import { local } from "./storage.js";

/**
 * What is kept for an access. A browser keeps some five million characters for all pages of an
 * address.
 */
export const LIMITS = { conversations: 200, characters: 4_000_000 };

/**
 * Returns whose conversations these are. The owner of a server without keys is the same person with
 * its link and without.
 */
function owner({ key, profile }, isLinked) {
  if (key === "profile") return `profile:${encodeURIComponent(profile)}`;
  return isLinked ? "none" : key;
}

export class Conversations {
  #prefix;
  /** `{id, title, updated, characters}` by id. */
  #heads = new Map();

  constructor(access, isLinked) {
    this.#prefix = `steersman-chat/${owner(access, isLinked)}/`;
    for (const name of local.names(this.#prefix)) this.#note(name.slice(this.#prefix.length));
  }

  /** The newest first. */
  list() {
    return [...this.#heads.values()].sort((a, b) => b.updated - a.updated);
  }

  /** Those with `words` in their title or in a message, in whatever case; the newest first. */
  find(words) {
    const wanted = words.trim().toLowerCase();
    if (!wanted) return this.list();
    const has = (value) => value?.toLowerCase().includes(wanted);
    return this.list().filter(
      ({ id, title: name }) =>
        has(name) ||
        this.get(id)?.messages.some(({ content, reasoning }) => has(content) || has(reasoning)),
    );
  }

  characters() {
    return this.list().reduce((sum, head) => sum + head.characters, 0);
  }

  /** The conversation as it is kept, or null if there is none or it cannot be read. */
  get(id) {
    try {
      return Conversation.parse(local.get(this.#prefix + id) ?? "");
    } catch {
      return null;
    }
  }

  /**
   * Keeps a conversation, with what another tab has added to it. Returns `removed`, the titles of
   * the oldest conversations, which made room for it, and `problem`, why it ends with this page.
   */
  save(conversation) {
    const kept = this.get(conversation.id);
    if (kept) conversation.merge(kept);
    const value = JSON.stringify(conversation);
    const name = this.#prefix + conversation.id;
    if (value.length > LIMITS.characters) {
      return {
        removed: [],
        problem:
          `This conversation is longer than ${number(LIMITS.characters)} characters: ` +
          "what is added to it from here on is not kept.",
      };
    }
    const removed = [];
    const others = this.list().filter(({ id }) => id !== conversation.id);
    const isFull = () =>
      others.length >= LIMITS.conversations ||
      value.length + others.reduce((sum, head) => sum + head.characters, 0) > LIMITS.characters;
    const removeOldest = () => {
      const oldest = others.pop();
      this.remove(oldest.id);
      removed.push(oldest.title);
    };
    while (others.length && isFull()) removeOldest();
    let isKept = local.set(name, value);
    // Without any storage, nothing is gained by removing.
    while (!isKept && local.storage && others.length) {
      removeOldest();
      isKept = local.set(name, value);
    }
    this.#heads.set(conversation.id, head(conversation, value));
    return {
      removed,
      problem: isKept
        ? null
        : "This browser keeps nothing for this page, as in a private window or without room: " +
          "conversations end with this page.",
    };
  }

  rename(conversation, name) {
    if (!conversation || !title(name)) return;
    conversation.title = title(name);
    this.save(conversation);
  }

  remove(id) {
    this.#heads.delete(id);
    local.remove(this.#prefix + id);
  }

  /**
   * Calls `changed` with the id of each conversation that another tab saves or removes. Returns how
   * to stop.
   */
  watch(changed) {
    const listener = ({ key }) => {
      if (!key?.startsWith(this.#prefix)) return;
      const id = key.slice(this.#prefix.length);
      this.#heads.delete(id);
      this.#note(id);
      changed(id);
    };
    window.addEventListener("storage", listener);
    return () => window.removeEventListener("storage", listener);
  }

  #note(id) {
    const conversation = this.get(id);
    if (conversation) this.#heads.set(id, head(conversation, local.get(this.#prefix + id)));
  }
}

const head = ({ id, title: name, updated }, value) => ({
  id,
  title: name,
  updated,
  characters: value.length,
});
