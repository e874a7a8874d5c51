// The memory strip: one cell a KV slot of an answer, as its usage tells while it streams.

import { node } from "./dom.js";

const MOST = 4096; // cells that are drawn; beyond that the numbers alone go on
const FOLD = 8; // the most tokens that a drawn cell stands for after settling

export class MemoryStrip {
  #cells = []; // tokens in each, oldest first
  #settled = 0; // so many of the first have been folded
  #tokens = 0;

  constructor() {
    this.root = node("div", { class: "memory", role: "img", "aria-label": "KV memory: no slot yet" });
  }

  /** After a pass: the answer's tokens and slots so far, and which shade the pass has. */
  show(tokens, slots, isOdd) {
    const fresh = tokens - this.#tokens;
    this.#tokens = tokens;
    if (slots > MOST) return this.#label(slots);
    const added = slots - this.#cells.length;
    if (fresh > 0 && added > 0 && added <= fresh) this.#add(fresh, added, isOdd);
    else if (fresh > 0) {
      this.#add(fresh, fresh, isOdd);
      this.#fold(this.#cells.length - slots);
    }
    this.#label(slots);
  }

  #add(tokens, cells, isOdd) {
    for (let i = 0; i < cells; i++) {
      const held = Math.ceil((tokens - i) / cells);
      this.#cells.push(held);
      this.root.append(node("i", { class: `${isOdd ? "odd" : "even"}${held > 1 ? " several" : ""}` }));
    }
  }

  /** `gone` slots were given back. Which tokens kept theirs is not told: the oldest cells share them evenly. */
  #fold(gone) {
    let left = gone;
    while (left > 0 && this.#settled < this.#cells.length - 1) {
      const at = this.#settled;
      if (this.#cells[at] >= FOLD) {
        this.#settled += 1;
        continue;
      }
      this.#cells[at + 1] += this.#cells[at];
      this.#cells.splice(at, 1);
      const cell = this.root.children[at];
      cell.nextElementSibling.className = "settled";
      cell.remove();
      left -= 1;
    }
  }

  #label(slots) {
    const gone = this.#tokens > slots ? `: ${this.#tokens - slots} need none of their own` : "";
    this.root.setAttribute("aria-label", `KV memory: ${this.#tokens} tokens in ${slots} slots${gone}`);
    this.root.title = this.root.getAttribute("aria-label");
  }
}
