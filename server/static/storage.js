// What the browser keeps, or a stand-in until the tab closes where it keeps nothing for this site.

/** name: "localStorage" or "sessionStorage". Where site data are blocked, even naming them throws. */
export function storageOf(name) {
  try {
    return window[name] ?? new Transient();
  } catch {
    return new Transient();
  }
}

/** Whether it was kept: there may be no room. */
export function write(storage, key, text) {
  try {
    storage.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

class Transient {
  #texts = new Map();

  get length() {
    return this.#texts.size;
  }

  key(index) {
    return [...this.#texts.keys()][index] ?? null;
  }

  getItem(key) {
    return this.#texts.get(key) ?? null;
  }

  setItem(key, text) {
    this.#texts.set(key, text);
  }

  removeItem(key) {
    this.#texts.delete(key);
  }
}
