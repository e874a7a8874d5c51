// The page: which view is shown, the models, the key, the theme, and whether the server can be reached.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, node } from "./dom.js";
import { Gauges } from "./gauges.js";
import { composedModels } from "./metrics.js";
import { Race } from "./race.js";
import { storageOf, write } from "./storage.js";
import { Store } from "./store.js";

const KEY = "hamburger.key";
const VIEWS = ["chat", "race", "gauges"];
const PULSE = 5000; // milliseconds between two looks at a server that is well
const PULSE_LOST = 1000; // and at one that was lost
const WANTED = "This server wants a key. Its operator has one.";
const LOST = "The server cannot be reached. This page looks every second, and goes on when it is back.";
const UNWELL = "The server says that it is not well. Its log says why; this page looks again every second.";

class Page {
  #models = [];
  #lacksModels = false; // they were asked for, and did not come; a key may bring them, else the next look
  #lost = null; // why the server is not well, null while it is
  #session = storageOf("sessionStorage");
  #key = this.#session.getItem(KEY) ?? "";

  constructor() {
    this.store = new Store(storageOf("localStorage"));
    this.api = new Api(() => this.#key);
    const chosen = () => byId("model").value;
    const refused = (error) => this.#refused(error);
    // 404: the model is gone, an adapter that was unloaded for instance, and the list is of before.
    const unanswered = (error) => (error.status === 404 ? this.#load() : refused(error));
    this.chat = new Chat(this.api, this.store, chosen, unanswered);
    this.race = new Race(this.api, () => this.#models, chosen, unanswered);
    this.gauges = new Gauges(this.api, () => this.#chosen()?.measured ?? chosen(), refused);
    this.#wire();
    this.#route();
    this.#load();
    setTimeout(() => this.#pulse(), PULSE);
  }

  #wire() {
    window.addEventListener("hashchange", () => this.#route());
    const theme = byId("theme");
    const paint = () => (document.documentElement.dataset.theme = theme.value);
    theme.value = this.store.settings.theme ?? "auto";
    theme.addEventListener("change", () => {
      this.store.set("theme", theme.value);
      paint();
    });
    paint();
    byId("model").addEventListener("change", (event) => {
      this.store.set("model", event.target.value);
      this.#tellChosen();
      this.gauges.forget();
    });
    byId("settings").open = window.matchMedia("(min-width: 60rem)").matches;
    byId("open-key").addEventListener("click", () => this.#askKey(""));
    byId("key-form").addEventListener("submit", (event) => {
      if (event.submitter?.value === "cancel") return;
      this.#key = byId("key").value.trim();
      write(this.#session, KEY, this.#key);
      const use = () => {
        this.#load();
        this.gauges.unlock();
      };
      byId("key-dialog").addEventListener("close", use, { once: true }); // then it can open again for a wrong one
    });
  }

  #route() {
    const asked = location.hash.slice(1);
    if (!VIEWS.includes(asked) && document.body.dataset.view) return; // the link that skips the header
    const view = VIEWS.includes(asked) ? asked : "chat";
    for (const name of VIEWS) {
      byId(`view-${name}`).hidden = name !== view;
      const link = document.querySelector(`nav a[href="#${name}"]`);
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.body.dataset.view = view;
    this.gauges.show(view === "gauges");
  }

  async #load() {
    this.#tellModels(true, "loading…");
    try {
      const { data } = await this.api.json("v1/models");
      const composed = await this.#composed();
      this.#models = data.map((card) => modelOf(card, data, composed));
      const select = byId("model");
      const before = select.value || this.store.settings.model;
      select.replaceChildren(...data.map(({ id }) => node("option", { value: id }, id)));
      if (data.some(({ id }) => id === before)) select.value = before;
      this.#lacksModels = false;
      this.#tellModels(false);
      this.#tellChosen();
      this.#say(null);
    } catch (error) {
      this.#lacksModels = error.status !== 401;
      this.#tellModels(false, error.status === 401 ? "needs a key" : "not known yet");
      if (error.status === 401) this.#say(null); // it is there, and would be asked for a key at each look
      this.#refused(error);
    }
  }

  #chosen() {
    return this.#models.find(({ id }) => id === byId("model").value);
  }

  /** Another model is chosen, or the list is another. */
  #tellChosen() {
    const of = { true: "a token must be to join its group", false: "a draft must be" }[this.#chosen()?.composed];
    byId("confidence-help").textContent = `How sure ${of ?? "a draft, or a token of a group, must be"}. 1: one token a pass.`;
    this.race.offer();
  }

  /** Whether the list is on its way, and what stands in its place while there is none. */
  #tellModels(busy, instead = "") {
    const select = byId("model");
    select.setAttribute("aria-busy", String(busy));
    if (!this.#models.length) select.replaceChildren(node("option", { value: "" }, instead));
  }

  async #composed() {
    try {
      return composedModels(await (await this.api.get("metrics")).text());
    } catch {
      return null; // metrics may be closed to this key: then the race has no third lane
    }
  }

  async #pulse() {
    if (!document.hidden) {
      try {
        await this.api.get("health");
        if (this.#lost !== null || this.#lacksModels) await this.#load();
      } catch (error) {
        if (error.isLost) this.#say(LOST);
        else if (error.status === 503) this.#say(UNWELL);
        else if (this.#lost !== null) await this.#load(); // 401: closed to the public, and so alive
      }
    }
    setTimeout(() => this.#pulse(), this.#lost === null ? PULSE : PULSE_LOST);
  }

  #refused(error) {
    if (error.status === 401) this.#askKey(error.isUnsendable ? error.message : WANTED);
    else if (error.isLost) this.#say(LOST);
  }

  #say(sentence) {
    if (sentence === this.#lost) return;
    this.#lost = sentence;
    byId("connection").textContent = sentence ?? "";
  }

  #askKey(reason) {
    const dialog = byId("key-dialog");
    if (dialog.open) return;
    byId("key-reason").textContent = reason;
    byId("key").value = this.#key;
    dialog.showModal();
    byId("key").focus();
  }
}

/** A card of the list: its id, the name of which it is one (its own, unless it is an alias), and the model's in the metrics. */
function modelOf({ id, parent, root }, data, composed) {
  const measured = parent ?? id;
  const isAlias = parent && data.some((other) => other.id === parent && other.root === root);
  return { id, of: isAlias ? parent : id, measured, composed: composed?.has(measured) };
}

new Page();
