// What a macro-step (a pass) emitted: read from a stream's chunk, and shown as shaded tokens with what was drafted.

import { node } from "./dom.js";

/** Turns chunks into groups. A character may lie in several tokens, so one decoder goes through a whole answer. */
export class GroupReader {
  #decoder = new TextDecoder();

  /** {text, tokens: [[text, id, chance]], drafted, chances, accepted, drafter}; null for a chunk without a group. */
  read(choice) {
    const text = (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? "");
    const group = choice.group;
    if (!group) return text ? { text, tokens: [[text, null, null]] } : null;
    return { text, tokens: this.#tokens(text, group.token_ids, choice.logprobs?.content), ...drafts(group) };
  }

  #tokens(text, ids, entries) {
    const decoded = (entries ?? []).map((entry) => [
      this.#decoder.decode(Uint8Array.from(entry.bytes ?? []), { stream: true }),
      Math.exp(entry.logprob),
    ]);
    const matches = decoded.length === ids.length && decoded.map(([piece]) => piece).join("") === text;
    if (matches) return decoded.map(([piece, chance], i) => [piece, ids[i], round(chance)]);
    // Where a stop string or half a character holds text back, only the group's whole text is known.
    return ids.map((id, i) => [i === 0 ? text : "", id, decoded[i] ? round(decoded[i][1]) : null]);
  }
}

function drafts({ drafted, chances, accepted, drafter }) {
  return drafted ? { drafted, chances, accepted, drafter } : {};
}

const round = (number) => Math.round(number * 1000) / 1000;

/** The element of one group. */
export function groupNode(group, index) {
  const kept = group.accepted ?? 0;
  const tokens = group.tokens.map(([text], i) => node("span", { class: i < kept ? "token kept" : "token" }, text));
  const missed = (group.drafted?.length ?? 0) - kept;
  const marks = missed > 0 ? [node("span", { class: "misses", "aria-hidden": "true" }, ...strokes(missed))] : [];
  return node("span", { class: `pass ${index % 2 ? "odd" : "even"}`, "data-pass": index }, ...tokens, ...marks);
}

const strokes = (count) => Array.from({ length: Math.min(count, 8) }, () => node("i"));

/** A sentence or two on one group, for who points at it. */
export function described(group, index, dial) {
  const known = group.tokens.filter(([, id]) => id !== null);
  const tokens = known.map(([text, id, chance]) => `${JSON.stringify(text)} #${id}${percent(chance)}`).join(", ");
  const kept = group.accepted ?? 0;
  const drafted = (group.drafted ?? []).map((id, i) => `#${id}${percent(group.chances?.[i])} ${i < kept ? "✓" : "✗"}`);
  const from = { micro: "the micro decoder", lookup: "the text so far", prediction: "the prediction" }[group.drafter];
  const parts = [`Pass ${index + 1}: ${tokens || "text of unknown tokens"}.`];
  if (drafted.length) parts.push(`Drafted by ${from ?? "a drafter"}: ${drafted.join(", ")}.`);
  else if (known.length) parts.push("Nothing was drafted.");
  parts.push(`Confidence: ${dial ?? "automatic"}.`);
  return parts.join(" ");
}

const percent = (chance) => (chance === null || chance === undefined ? "" : ` ${Math.round(chance * 100)}%`);

/** A view of all passes of an answer: append as they come; arrows and the pointer choose one, `inspect` is told. */
export class Passes {
  #groups = [];
  #chosen = -1;

  constructor(inspect) {
    this.inspect = inspect;
    this.root = node("div", {
      class: "passes",
      role: "group",
      tabindex: "0",
      "aria-label": "The answer, pass by pass: left and right choose a pass",
      onpointerover: (event) => this.#choose(Number(event.target.closest("[data-pass]")?.dataset.pass ?? -1)),
      onkeydown: (event) => this.#key(event),
    });
  }

  append(group) {
    this.root.append(groupNode(group, this.#groups.length));
    this.#groups.push(group);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.#choose(Math.min(Math.max(this.#chosen + step, 0), this.#groups.length - 1));
  }

  #choose(index) {
    if (index < 0 || index === this.#chosen) return;
    this.root.children[this.#chosen]?.classList.remove("chosen");
    this.root.children[index].classList.add("chosen");
    this.#chosen = index;
    this.inspect(this.#groups[index], index);
  }
}
