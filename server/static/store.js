// Conversations and settings, kept in this browser. Knows no page and no server.
//
// Each conversation has an entry of its own, and a tab writes only what it changed: other tabs may hold older ones.

import { write } from "./storage.js";

const CONVERSATION = "hamburger.conversation."; // and its id
const TOGETHER = "hamburger.conversations"; // where earlier versions kept all of them
const SETTINGS = "hamburger.settings";

const unique = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export class Store {
  constructor(storage) {
    this.storage = storage;
    this.settings = this.#read(SETTINGS, {});
    this.conversations = [];
    for (const id of this.#ids()) this.#insert(this.#stored(id));
    this.#takeOver();
  }

  add() {
    const conversation = { id: unique(), begun: Date.now(), title: "", system: "", messages: [] };
    this.conversations.unshift(conversation);
    return conversation;
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((one) => one !== conversation);
    this.storage.removeItem(CONVERSATION + conversation.id);
  }

  /** Whether it was kept. Where the browser has no room, passes of answers go before any text does, the oldest first. */
  save(conversation) {
    if (!this.conversations.includes(conversation)) return true; // it was deleted while it was answered
    const theirs = this.#stored(conversation.id);
    if (theirs && theirs.version !== conversation.version) this.#part(conversation, theirs);
    const written = { version: unique(), from: conversation.version };
    const kept = this.#put({ ...conversation, ...written }) || this.#squeeze({ ...conversation, ...written });
    if (kept) Object.assign(conversation, written);
    return kept;
  }

  /**
   * Take what another tab wrote or deleted under `key` (null: under any), and return the conversations that this changed.
   * `growing` is left alone, as it will be saved when its answer ends.
   */
  follow(key, growing) {
    if (key !== null && !key.startsWith(CONVERSATION)) return [];
    const ids = key === null ? new Set([...this.#ids(), ...this.conversations.map(({ id }) => id)]) : [key.slice(CONVERSATION.length)];
    const changed = [];
    for (const id of ids) {
      const mine = this.conversations.find((one) => one.id === id);
      const theirs = this.#stored(id);
      if (!theirs && mine?.version) this.conversations = this.conversations.filter((one) => one !== mine);
      else if (theirs && !mine) this.#insert(theirs);
      else if (theirs && mine !== growing && theirs.version !== mine.version) this.#adopt(mine, theirs);
      else continue;
      changed.push(mine ?? theirs);
    }
    return changed;
  }

  set(name, value) {
    this.settings = { ...this.settings, ...this.#read(SETTINGS, {}), [name]: value };
    return write(this.storage, SETTINGS, JSON.stringify(this.settings));
  }

  #adopt(mine, theirs) {
    if (!mine.from || mine.from !== theirs.from) return Object.assign(mine, theirs);
    this.#part(mine, theirs); // both were written in the same instant, before either could be read by the other
    return this.save(mine);
  }

  /** Two tabs went on with one conversation at the same time: both stay. */
  #part(mine, theirs) {
    mine.id = unique();
    this.#insert(theirs);
  }

  #ids() {
    const keys = Array.from({ length: this.storage.length }, (_, index) => this.storage.key(index));
    return keys.filter((key) => key.startsWith(CONVERSATION)).map((key) => key.slice(CONVERSATION.length));
  }

  /** As it lies in the storage; null where there is none, or somebody else's. */
  #stored(id) {
    return valid(this.#read(CONVERSATION + id, {}), id);
  }

  /** Newest first. */
  #insert(conversation) {
    if (!conversation) return;
    this.conversations.push(conversation);
    this.conversations.sort((a, b) => b.begun - a.begun);
  }

  #put(conversation) {
    return write(this.storage, CONVERSATION + conversation.id, JSON.stringify(conversation));
  }

  /** Without passes of others, in the storage only: those that are shown keep theirs. At its turn, without its own. */
  #squeeze(conversation) {
    for (const { id } of this.conversations.toReversed()) {
      const stored = id === conversation.id ? conversation : this.#stored(id);
      if (!stored?.messages.some(({ groups }) => groups?.length)) continue;
      const lean = { ...stored, messages: stored.messages.map(({ groups, ...rest }) => rest) };
      if (id === conversation.id) conversation = lean;
      else this.#put(lean);
      if (this.#put(conversation)) return true;
    }
    return false;
  }

  #takeOver() {
    const before = this.#read(TOGETHER, null);
    if (!Array.isArray(before)) return;
    this.storage.removeItem(TOGETHER); // first, as there may be no room for both
    const known = new Set(this.conversations.map(({ id }) => id));
    const found = before.map((one) => valid(one, one?.id)).filter((one) => one && !known.has(one.id));
    found.forEach((one, index) => this.#insert({ ...one, begun: Date.now() - 1 - index }));
    for (const one of this.conversations) if (!known.has(one.id)) this.save(one);
  }

  #read(name, otherwise) {
    try {
      const value = JSON.parse(this.storage.getItem(name) ?? "null");
      return typeof value === "object" ? (value ?? otherwise) : otherwise;
    } catch {
      return otherwise; // somebody else's
    }
  }
}

function valid(value, id) {
  if (typeof id !== "string" || value?.id !== id || !Array.isArray(value.messages)) return null;
  const messages = value.messages.filter((one) => typeof one?.content === "string");
  return { ...value, messages, begun: Number(value.begun) || 0 };
}
