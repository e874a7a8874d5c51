// Keeps the end of what grows in sight, while it was in sight. A saved replay takes this file too: it imports nothing.

const NEAR = 60; // pixels: so near to the end one looks at it

export class Follower {
  #boxes;
  #tops = []; // where they were put last
  #changes = [];
  #frame = 0;
  #follows = true;
  #wasSeen = true;

  /** boxes: those that may scroll; the first holds what grows. */
  constructor(...boxes) {
    this.#boxes = boxes;
  }

  /** `change` adds to the end in the next frame: measured after each pass, all passes would be laid out each time. */
  grow(change) {
    this.#changes.push(change);
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Now, without waiting for the frame: a hidden tab has none. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#changes.length) return;
    const isSeen = this.#isSeen();
    if (isSeen && this.#wasSeen) this.#follows = this.#isAtEnd(); // else it grew meanwhile, and goes on as it was left
    this.#wasSeen = isSeen;
    for (const change of this.#changes.splice(0)) change();
    if (this.#follows) this.toEnd();
  }

  drop() {
    this.#changes = [];
  }

  toEnd() {
    if (!this.#isSeen()) return;
    for (const box of this.#boxes) box.scrollTop = box.scrollHeight;
    this.#tops = this.#boxes.map((box) => box.scrollTop);
  }

  /** Or where it was put: what else grew since, or made the window smaller, scrolled nobody away. */
  #isAtEnd() {
    const isNear = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
    return this.#boxes.every((box, index) => isNear(box) || box.scrollTop === this.#tops[index]);
  }

  /** Else another view is looked at, which must not move. */
  #isSeen() {
    return this.#boxes[0].clientHeight > 0;
  }
}
