// One message of a conversation as an element: its text, its passes, its memory, and what can be done with it.

import { button, copy, node, say } from "./dom.js";
import { described, Passes } from "./groups.js";
import { show } from "./markdown.js";
import { MemoryStrip } from "./memory.js";

const REDRAW = 80; // milliseconds between two drawings of growing Markdown
const REST = 5; // and so many times as long as one takes, as the whole text is parsed

/** A user's message. onedit(text) is called with what it becomes. */
export function userNode(message, onedit) {
  const text = node("div", { class: "words" }, message.content);
  const edit = button("Edit", () => root.replaceChildren(editor(message.content, onedit, back)));
  const back = () => {
    root.replaceChildren(...parts);
    edit.focus();
  };
  const parts = [head("You", "user"), text, node("p", { class: "actions" }, edit, button("Copy", () => copy(message.content)))];
  const root = node("article", { class: "message user", "aria-label": "You" }, ...parts);
  return root;
}

const head = (name, kind) => node("p", { class: `who ${kind}`, "aria-hidden": "true" }, name);

function editor(content, onedit, oncancel) {
  const area = node("textarea", { rows: "3", "aria-label": "Edit your message" });
  area.value = content;
  queueMicrotask(() => area.focus());
  return node(
    "form",
    {
      class: "editor",
      onsubmit: (event) => {
        event.preventDefault();
        if (area.value.trim()) onedit(area.value);
      },
    },
    area,
    node("p", { class: "actions" }, node("button", { type: "submit", class: "main" }, "Send again"), button("Cancel", oncancel)),
  );
}

/** A model's answer, which may grow. */
export class AnswerNode {
  #drawn = 0;
  #cost = 0; // milliseconds that the last drawing took
  #timer = null;
  #written = ""; // as much of the content as is shown as Markdown

  /**
   * actions: {regenerate(), isText() (else passes are shown), grow(change) (in the next frame)}.
   * message: {content, reasoning, groups, usage, finish, error, seconds, dial}.
   */
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.memory = new MemoryStrip();
    this.inspector = node("p", { class: "inspector", role: "status" });
    this.passes = new Passes((group, index) => {
      this.inspector.textContent = described(group, index, message.dial);
    });
    this.text = node("div", { class: "words markdown" });
    this.thought = node("div", { class: "words" });
    this.thinking = node("details", { class: "thinking", hidden: true }, node("summary", {}, "Reasoning"), this.thought);
    this.stats = node("p", { class: "stats" });
    this.error = node("p", { class: "error", role: "alert", hidden: true });
    const buttons = [button("Copy", () => copy(message.content)), button("Regenerate", actions.regenerate)];
    this.root = node(
      "article",
      { class: "message answer", "aria-label": "Answer" },
      head("Answer", "model"),
      this.thinking,
      this.passes.root,
      this.text,
      this.memory.root,
      this.inspector,
      this.error,
      this.stats,
      node("p", { class: "actions" }, ...buttons),
    );
    this.#replay();
  }

  /** One more pass; `usage` as of it. */
  append(group, usage) {
    const index = this.message.groups.length;
    this.message.groups.push(group);
    group.slots = usage?.kv_slots;
    group.sum = usage?.completion_tokens;
    this.actions.grow(() => this.#show(group, index));
    this.#redraw();
  }

  end() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.draw();
    this.root.classList.remove("growing");
    this.root.removeAttribute("aria-busy");
  }

  begin() {
    this.root.classList.add("growing");
    this.root.setAttribute("aria-busy", "true");
  }

  #replay() {
    const groups = this.message.groups ?? [];
    groups.forEach((group, index) => this.#show(group, index));
    this.root.classList.toggle("without-passes", !groups.length && Boolean(this.message.content));
    this.draw();
  }

  #show(group, index) {
    this.passes.append(group);
    if (group.slots !== undefined) this.memory.show(group.sum, group.slots, index % 2 === 1);
  }

  #redraw() {
    if (this.#timer) return;
    const wait = Math.max(0, Math.max(REDRAW, REST * this.#cost) - (performance.now() - this.#drawn));
    this.#timer = setTimeout(() => {
      this.#timer = null;
      this.actions.grow(() => this.draw());
    }, wait);
  }

  /** All but the passes. Also called when another kind is shown. */
  draw() {
    const begun = performance.now();
    if (this.actions.isText() || this.root.classList.contains("without-passes")) this.#write();
    this.thinking.hidden = !this.message.reasoning;
    say(this.thought, this.message.reasoning ?? "");
    this.error.hidden = !this.message.error;
    say(this.error, this.message.error ?? "");
    say(this.stats, summary(this.message));
    this.#drawn = performance.now();
    this.#cost = this.#drawn - begun;
  }

  #write() {
    if (this.message.content === this.#written) return;
    this.#written = this.message.content;
    show(this.#written, this.text);
  }
}

const ENDS = { length: "cut at the limit", stopped: "stopped by you", left: "cut, as the page was left", content_filter: "cut" };

/** "24 tokens in 18 passes (1.33 a pass) · 24 slots · 61 tokens/s". */
function summary({ usage, seconds, finish, model, groups }) {
  if (!usage) return "";
  const { completion_tokens: tokens, macro_steps: passes, kv_slots: slots } = usage;
  const parts = [passes ? `${tokens} tokens in ${passes} passes (${(tokens / passes).toFixed(2)} a pass)` : `${tokens} tokens`];
  if (slots) parts.push(`${slots} slots`);
  if (usage.confidence !== undefined) parts.push(`confidence ${usage.confidence}`);
  const since = tokens - (groups?.[0]?.sum ?? 0); // those that came after the first pass, which the clock begins with
  if (seconds > 0 && since > 0) parts.push(`${(since / seconds).toFixed(0)} tokens/s`);
  if (ENDS[finish]) parts.push(ENDS[finish]);
  if (model) parts.push(model);
  return parts.join(" · ");
}
