// The chat: conversations, the composer and its settings. Asks the server, and shows what comes.

import { announce, button, byId, node, swap } from "./dom.js";
import { Follower } from "./follow.js";
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
  #growing = null; // its conversation
  #answers = []; // those of the current conversation

  /** chosen(): the model's id. refused(error): told of an error that the whole page should know. */
  constructor(api, store, chosen, refused) {
    Object.assign(this, { api, store, chosen, refused });
    this.current = store.conversations[0] ?? store.add();
    this.thread = byId("thread");
    this.follower = new Follower(this.thread, document.scrollingElement); // in a narrow window the page scrolls
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
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-conversation").addEventListener("click", () => {
      const empty = this.store.conversations.find((one) => !one.messages.length);
      this.#open(empty ?? this.store.add());
      this.prompt.focus();
    });
    byId("system").addEventListener("change", (event) => {
      this.current.system = event.target.value;
      this.#keep(this.current);
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
    window.addEventListener("pagehide", () => this.#leave());
    window.addEventListener("pageshow", (event) => event.persisted && this.#follow(null)); // it heard nothing meanwhile
    window.addEventListener("storage", (event) => this.#follow(event.key));
  }

  /** Another tab changed what is kept under `key`. */
  #follow(key) {
    const changed = this.store.follow(key, this.#growing);
    if (!changed.length) return;
    if (!this.store.conversations.includes(this.current)) return this.#open(this.store.conversations[0] ?? this.store.add());
    this.#list();
    if (!changed.includes(this.current)) return;
    byId("system").value = this.current.system ?? "";
    this.#draw();
  }

  #show(kind) {
    this.store.set("shown", kind);
    this.thread.dataset.shown = kind;
    for (const answer of this.#answers) answer.draw();
  }

  stop() {
    this.#running?.abort();
  }

  /** What the answer that grows has so far is kept; should the page live on, its end says otherwise. */
  #leave() {
    if (!this.#growing) return;
    this.#growing.messages.at(-1).finish = "left";
    this.#keep(this.#growing);
  }

  #open(conversation) {
    this.stop();
    this.current = conversation;
    byId("system").value = conversation.system ?? "";
    this.#list();
    this.#draw();
  }

  #list() {
    const list = byId("conversations");
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const items = this.store.conversations.map((one) => {
      const name = one.title || "New conversation";
      const open = button(name, () => one === this.current || this.#open(one), {
        "aria-current": one === this.current ? "true" : null,
        "data-key": one.id,
      });
      const remove = button("×", () => this.#remove(one), {
        class: "remove",
        "aria-label": `Delete “${name}”`,
        "data-key": `remove ${one.id}`,
      });
      return node("li", {}, open, remove);
    });
    list.replaceChildren(...items);
    if (focused) [...list.querySelectorAll("button")].find(({ dataset }) => dataset.key === focused)?.focus();
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
    const wasInside = this.thread.contains(document.activeElement);
    this.#answers = [];
    this.thread.replaceChildren(...messages.map((message, index) => this.#node(message, index)));
    if (messages.length) this.follower.toEnd();
    else this.thread.append(this.#welcome());
    if (wasInside) this.thread.focus({ preventScroll: true });
  }

  #node(message, index) {
    if (message.role === "user") return userNode(message, (text) => this.#ask(index, text));
    const answer = new AnswerNode(message, {
      regenerate: () => this.#again(index),
      isText: () => this.thread.dataset.shown === "text",
      grow: (change) => this.follower.grow(change),
    });
    this.#answers.push(answer);
    return answer.root;
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
    conversation.messages.push(message);
    const wasInside = this.thread.contains(document.activeElement); // on a button that the drawing removes
    this.#draw();
    this.#list();
    const shown = this.#answers.at(-1);
    const running = new AbortController();
    this.#busy(running, conversation);
    if (wasInside) byId("stop").focus();
    shown.begin();
    announce("The model answers");
    let failure = null;
    try {
      await this.#stream(asked, message, shown, running.signal);
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else failure = error;
    }
    message.error = failure?.message;
    if (this.#running === running) this.#busy(null, null);
    this.follower.grow(() => shown.end());
    this.follower.flush();
    if (failure) this.refused(failure); // now that what has the focus stays: a dialog gives it back
    else announce(`The answer has ended: ${message.usage?.completion_tokens ?? 0} tokens in ${message.groups.length} passes`);
    this.#keep(conversation);
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
        shown.append(group, chunk.usage);
        message.seconds = (performance.now() - first) / 1000;
      }
    }
  }

  #body(conversation) {
    // Before the list of models is there the server chooses, its first one.
    const body = { model: this.chosen() || undefined, messages: [], logprobs: true };
    if (conversation.system?.trim()) body.messages.push({ role: "system", content: conversation.system });
    for (const { role, content } of answered(conversation.messages)) if (content) body.messages.push({ role, content });
    for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
    return body;
  }

  #busy(running, conversation) {
    this.#running = running;
    this.#growing = conversation;
    if (running) swap(byId("send"), byId("stop"));
    else swap(byId("stop"), byId("send"));
  }

  #keep(conversation) {
    const { length } = this.store.conversations;
    if (!this.store.save(conversation)) announce("This browser has no room to keep the conversations: delete some.");
    if (this.store.conversations.length !== length) this.#list(); // another tab's answer became one of its own
  }
}

/** Without questions that got nothing, as their answers failed, were stopped or are empty: else two would follow each other. */
function answered(messages) {
  const gotNothing = (answer) => answer?.role === "assistant" && !answer.content;
  return messages.filter((message, index) => message.role !== "user" || !gotNothing(messages[index + 1]));
}
