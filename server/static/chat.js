// The chat: conversations, the composer and its settings. Asks the server, and shows what comes.

import { announce, button, byId, node } from "./dom.js";
import { GroupReader } from "./groups.js";
import { AnswerNode, userNode } from "./message.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "confidence"];
const EXAMPLES = [
  "Write a Python function that says whether a number is prime.",
  "Name ten animals, one a line.",
  "Explain to a child why the sky is blue.",
];

/** Else the browser says at the first wrong one what it may be. */
function settingsAreRight() {
  const wrong = NUMBERS.map(byId).find((field) => !field.checkValidity());
  if (!wrong) return true;
  byId("settings").open = true;
  return wrong.reportValidity();
}

export class Chat {
  #running = null; // the AbortController of the answer that grows

  /** chosen(): the model's id. refused(error): told of an error that the whole page should know. */
  constructor(api, store, chosen, refused) {
    Object.assign(this, { api, store, chosen, refused });
    this.current = store.conversations[0] ?? store.add();
    this.thread = byId("thread");
    this.prompt = byId("prompt");
    this.#wire();
    this.#open(this.current);
  }

  #wire() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-conversation").addEventListener("click", () => {
      const empty = this.store.conversations.find((one) => !one.messages.length);
      this.#open(empty ?? this.store.add());
      this.prompt.focus();
    });
    byId("system").addEventListener("change", (event) => {
      this.current.system = event.target.value;
      this.#keep();
    });
    for (const name of NUMBERS) {
      const field = byId(name);
      field.value = this.store.settings[name] ?? "";
      field.addEventListener("change", () => field.checkValidity() && this.store.set(name, field.value));
    }
    for (const radio of document.querySelectorAll("input[name=shown]")) {
      radio.checked = radio.value === (this.store.settings.shown ?? "passes");
      radio.addEventListener("change", () => this.#show(radio.value));
    }
    this.#show(this.store.settings.shown ?? "passes");
    window.addEventListener("pagehide", () => this.#keep());
  }

  #show(kind) {
    this.store.set("shown", kind);
    this.thread.dataset.shown = kind;
  }

  stop() {
    this.#running?.abort();
  }

  #open(conversation) {
    this.stop();
    this.current = conversation;
    byId("system").value = conversation.system ?? "";
    this.#list();
    this.#draw();
  }

  #list() {
    const items = this.store.conversations.map((one) => {
      const name = one.title || "New conversation";
      const open = button(name, () => this.#open(one), { "aria-current": one === this.current ? "true" : null });
      const remove = button("×", () => this.#remove(one), { class: "remove", "aria-label": `Delete “${name}”` });
      return node("li", {}, open, remove);
    });
    byId("conversations").replaceChildren(...items);
  }

  #remove(conversation) {
    if (conversation.messages.length && !confirm(`Delete “${conversation.title}”? It cannot be brought back.`)) return;
    this.store.remove(conversation);
    if (conversation === this.current) this.#open(this.store.conversations[0] ?? this.store.add());
    else this.#list();
    byId("new-conversation").focus();
  }

  #draw() {
    const { messages } = this.current;
    this.thread.replaceChildren(...messages.map((message, index) => this.#node(message, index)));
    if (!messages.length) this.thread.append(this.#welcome());
    this.thread.scrollTop = this.thread.scrollHeight;
  }

  #node(message, index) {
    if (message.role === "user") return userNode(message, (text) => this.#ask(index, text));
    return new AnswerNode(message, { regenerate: () => this.#again(index) }).root;
  }

  #welcome() {
    const fill = (text) => button(text, () => {
      this.prompt.value = text;
      this.#send();
    });
    return node(
      "div",
      { class: "welcome" },
      node("p", {}, "This server writes several tokens with one pass of the model. Ask something, and see each pass in a shade of its own:"),
      node("p", { class: "examples" }, ...EXAMPLES.map(fill)),
    );
  }

  #send() {
    const text = this.prompt.value.trim();
    if (!text || this.#running || !settingsAreRight()) return;
    this.prompt.value = "";
    this.#ask(this.current.messages.length, text);
  }

  /** The message at `index` becomes `text`, what follows it is dropped, and it is answered. */
  #ask(index, text) {
    if (!settingsAreRight()) return;
    this.stop();
    const conversation = this.current;
    conversation.messages.length = index;
    conversation.messages.push({ role: "user", content: text });
    conversation.title ||= text.replace(/\s+/g, " ").slice(0, 60);
    this.#answer(conversation);
  }

  #again(index) {
    if (!settingsAreRight()) return;
    this.stop();
    this.current.messages.length = index;
    this.#answer(this.current);
  }

  async #answer(conversation) {
    const asked = this.#body(conversation);
    const message = { role: "assistant", content: "", groups: [], model: asked.model, dial: asked.confidence };
    const index = conversation.messages.push(message) - 1;
    this.#draw();
    this.#list();
    const shown = new AnswerNode(message, { regenerate: () => this.#again(index) });
    this.thread.lastElementChild.replaceWith(shown.root);
    const running = new AbortController();
    this.#busy(running);
    shown.begin();
    announce("The model answers");
    this.thread.scrollTop = this.thread.scrollHeight;
    try {
      await this.#stream(asked, message, shown, running.signal);
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else {
        message.error = error.message;
        this.refused(error);
      }
    }
    if (this.#running === running) this.#busy(null);
    shown.end();
    if (!message.error) announce(`The answer has ended: ${message.usage?.completion_tokens ?? 0} tokens in ${message.groups.length} passes`);
    this.#keep();
  }

  async #stream(asked, message, shown, signal) {
    const reader = new GroupReader();
    let first = 0;
    for await (const chunk of this.api.chat(asked, signal)) {
      if (chunk.usage) message.usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      message.content += choice.delta?.content ?? "";
      if (choice.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
      if (choice.finish_reason) message.finish = choice.finish_reason;
      const group = reader.read(choice);
      if (group) {
        first ||= performance.now();
        const stays = this.thread.scrollHeight - this.thread.scrollTop - this.thread.clientHeight < 60;
        shown.append(group, chunk.usage);
        message.seconds = (performance.now() - first) / 1000;
        if (stays) this.thread.scrollTop = this.thread.scrollHeight;
      }
    }
  }

  #body(conversation) {
    // Before the list of models is there the server chooses, its first one.
    const body = { model: this.chosen() || undefined, messages: [], logprobs: true };
    if (conversation.system?.trim()) body.messages.push({ role: "system", content: conversation.system });
    for (const { role, content } of conversation.messages) if (content) body.messages.push({ role, content });
    for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
    return body;
  }

  #busy(running) {
    this.#running = running;
    byId("send").hidden = running !== null;
    byId("stop").hidden = running === null;
  }

  #keep() {
    if (!this.store.save()) announce("This browser has no room to keep the conversations: delete some.");
  }
}
