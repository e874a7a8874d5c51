// The memory strip: one cell a KV slot of an answer, as its usage tells while it streams.

import { node } from "./dom.js";

const MOST = 4096; // cells that are drawn; beyond that the numbers alone go on
const CHUNK = 64; // tokens that settle together (engine/types/settling.py)

export class MemoryStrip {
  #settled = 0; // so many of the first cells have been folded
  #tokens = 0;

  constructor() {
    this.root = node("div", { class: "memory", role: "img", "aria-label": "KV memory: no slot yet" });
  }

  /** After a pass: the answer's tokens and slots so far, and which shade the pass has. */
  show(tokens, slots, isOdd) {
    const fresh = tokens - this.#tokens;
    this.#tokens = tokens;
    if (slots > MOST) return this.#label(slots);
    const added = slots - this.root.children.length;
    if (fresh > 0 && added > 0 && added <= fresh) this.#add(fresh, added, isOdd);
    else if (fresh > 0) {
      this.#add(fresh, fresh, isOdd);
      this.#fold(this.root.children.length - slots);
    }
    this.#label(slots);
  }

  #add(tokens, cells, isOdd) {
    for (let i = 0; i < cells; i++) {
      const several = Math.ceil((tokens - i) / cells) > 1 ? " several" : "";
      this.root.append(node("i", { class: `${isOdd ? "odd" : "even"}${several}` }));
    }
  }

  /** `gone` slots were given back, by the oldest chunk that had not settled. Which of its tokens kept theirs is not told. */
  #fold(gone) {
    const cells = this.root.children;
    for (let i = 0; i < gone; i++) cells[Math.min(this.#settled, cells.length - 1)].remove();
    const kept = Math.max(0, CHUNK - gone); // at a limit none: they take the places of what settled first
    for (let i = 0; i < kept && this.#settled < cells.length; i++) cells[this.#settled++].className = "settled";
  }

  #label(slots) {
    const gone = this.#tokens > slots ? `: ${this.#tokens - slots} need none of their own` : "";
    this.root.setAttribute("aria-label", `KV memory: ${this.#tokens} tokens in ${slots} slots${gone}`);
    this.root.title = this.root.getAttribute("aria-label");
  }
}
