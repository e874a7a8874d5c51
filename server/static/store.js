// Conversations and settings, kept in this browser. Knows no page and no server.

const CONVERSATIONS = "hamburger.conversations";
const SETTINGS = "hamburger.settings";

export class Store {
  constructor(storage) {
    this.storage = storage;
    this.conversations = this.#read(CONVERSATIONS, []).filter((one) => one?.id && Array.isArray(one.messages));
    this.settings = this.#read(SETTINGS, {});
  }

  add() {
    const conversation = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", system: "", messages: [] };
    this.conversations.unshift(conversation);
    return conversation;
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((one) => one !== conversation);
    return this.save();
  }

  /** Whether it was kept. Where the browser has no room, the passes of answers go before any text does. */
  save() {
    if (this.#write(CONVERSATIONS, this.conversations)) return true;
    for (const conversation of this.conversations.toReversed()) {
      for (const message of conversation.messages) delete message.groups;
      if (this.#write(CONVERSATIONS, this.conversations)) return true;
    }
    return false;
  }

  set(name, value) {
    this.settings[name] = value;
    return this.#write(SETTINGS, this.settings);
  }

  #read(name, otherwise) {
    try {
      const value = JSON.parse(this.storage.getItem(name) ?? "null");
      return value !== null && typeof value === typeof otherwise ? value : otherwise;
    } catch {
      return otherwise; // somebody else's, or the browser keeps nothing
    }
  }

  #write(name, value) {
    try {
      this.storage.setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}
