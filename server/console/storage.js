// The browser's storage. Where the browser refuses it (a private window, a setting, no room),
// values are kept until the page ends.

class Values {
  #memory = new Map();

  constructor(open) {
    try {
      this.storage = open();
      this.storage.getItem("");
    } catch {
      this.storage = null;
    }
  }

  get(name) {
    return this.#memory.get(name) ?? this.storage?.getItem(name) ?? null;
  }

  /** Returns whether the browser keeps the value. */
  set(name, value) {
    try {
      this.storage.setItem(name, value);
      this.#memory.delete(name);
      return true;
    } catch {
      this.#memory.set(name, value);
      return false;
    }
  }

  remove(name) {
    this.#memory.delete(name);
    this.storage?.removeItem(name);
  }

  /** Names of all values that begin with `prefix`. */
  names(prefix) {
    const names = new Set(this.#memory.keys());
    for (let i = 0; i < (this.storage?.length ?? 0); i += 1) names.add(this.storage.key(i));
    return [...names].filter((name) => name.startsWith(prefix));
  }
}

/** Stays when the browser is closed. */
export const local = new Values(() => window.localStorage);

/** Ends with the tab. */
export const tab = new Values(() => window.sessionStorage);
