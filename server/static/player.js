// Lanes of a race, shown live or played again. A saved replay is a page that holds this file and the one that it imports.
//
// A lane is {name, note, events: [{at, text, tokens, passes, slots}]}: milliseconds since it was asked, sums so far.

import { Follower } from "./follow.js";

const make = (tag, className, text = "") => {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
};

const FIGURES = [
  ["speed", "tokens/s"],
  ["tokens", "tokens"],
  ["passes", "passes"],
  ["rate", "tokens a pass"],
  ["slots", "slots"],
  ["time", "seconds"],
];

export class Lanes {
  constructor(root, lanes) {
    this.lanes = lanes.map((lane, index) => {
      const title = make("h3", "lane-name", lane.name);
      title.id = `lane-${index}`;
      const list = make("dl", "figures");
      const figures = {};
      for (const [key, label] of FIGURES) {
        const pair = make("div", "figure");
        figures[key] = make("dd", "", "–");
        pair.append(make("dt", "", label), figures[key]);
        list.append(pair);
      }
      const text = make("div", "lane-text");
      text.tabIndex = 0;
      text.setAttribute("role", "group");
      text.setAttribute("aria-labelledby", title.id);
      const box = make("article", "lane");
      box.setAttribute("aria-labelledby", title.id);
      box.append(title, make("p", "lane-note", lane.note), list, text);
      return { box, text, figures, follower: new Follower(text), count: 0, first: null };
    });
    root.replaceChildren(...this.lanes.map((lane) => lane.box));
  }

  clear() {
    for (const lane of this.lanes) {
      lane.follower.drop();
      lane.text.replaceChildren();
      Object.values(lane.figures).forEach((figure) => (figure.textContent = "–"));
      Object.assign(lane, { count: 0, first: null });
    }
  }

  show(index, event) {
    const lane = this.lanes[index];
    lane.follower.grow(() => this.#add(lane, event));
  }

  #add(lane, event) {
    lane.first ??= event;
    lane.text.append(make("span", `pass ${lane.count++ % 2 ? "odd" : "even"}`, event.text));
    const { figures } = lane;
    const speed = tokensPerSecond(lane.first, event);
    figures.speed.textContent = speed ? speed.toFixed(0) : "–";
    figures.tokens.textContent = event.tokens;
    figures.passes.textContent = event.passes ?? "–";
    figures.rate.textContent = event.passes ? (event.tokens / event.passes).toFixed(2) : "–";
    figures.slots.textContent = event.slots ?? "–";
    figures.time.textContent = (event.at / 1000).toFixed(2);
  }
}

/** Of decoding: from the first token on, which also ends the reading of the prompt. */
export function tokensPerSecond(first, last) {
  return last.at > first.at ? (1000 * (last.tokens - first.tokens)) / (last.at - first.at) : 0;
}

/** Play the lanes side by side; resolves at the end, or when the signal aborts. */
export function play(lanes, race, speed, signal) {
  lanes.clear();
  const next = race.lanes.map(() => 0);
  const begun = performance.now();
  return new Promise((resolve) => {
    const frame = () => {
      if (signal?.aborted) return resolve();
      const now = (performance.now() - begun) * speed;
      race.lanes.forEach((lane, index) => {
        while (next[index] < lane.events.length && lane.events[next[index]].at <= now) {
          lanes.show(index, lane.events[next[index]++]);
        }
      });
      if (race.lanes.every((lane, index) => next[index] >= lane.events.length)) return resolve();
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
}
