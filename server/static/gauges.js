// Small charts of /metrics for the chosen model. Asks only while they are looked at.

import { byId, say } from "./dom.js";
import { samples } from "./metrics.js";

const EVERY = 2000; // milliseconds
const KEPT = 60; // points
const [WIDTH, HEIGHT] = [240, 56];
const SVG = "http://www.w3.org/2000/svg";

const CHARTS = [
  ["hamburger_tokens_per_macro_step", "Tokens a pass", 2, "over the last minute", mean],
  ["hamburger_tokens_per_kv_ratio", "Tokens per KV slot", 2, "over the last minute", mean],
  ["hamburger_generation_tokens_per_second", "Tokens a second", 0, "over the last seconds", sum],
  ["hamburger_num_requests_running", "Running requests", 0, "now", sum],
  ["hamburger_num_requests_waiting", "Waiting requests", 0, "now", sum],
  ["hamburger_kv_cache_usage_perc", "KV pool in use, %", 1, "now", most, 100],
];

export class Gauges {
  #charts = [];
  #timer = null;
  #shown = false;
  #turn = 0; // each look at the gauges and each key is one; what was asked in an earlier one is void
  #lacksKey = false; // asking again would open the dialog again

  /** measured(): what the metrics call the chosen model. */
  constructor(api, measured, refused) {
    Object.assign(this, { api, measured, refused });
    this.#charts = CHARTS.map(([name, label, digits, when, join, factor = 1]) => ({ name, label, digits, join, factor, ...chart(label, when), points: [] }));
    byId("gauges").replaceChildren(...this.#charts.map(({ box }) => box));
    document.addEventListener("visibilitychange", () => this.#go());
  }

  show(isShown) {
    this.#shown = isShown;
    this.#go();
  }

  /** There is another key. */
  unlock() {
    this.#lacksKey = false;
    this.#go();
  }

  forget() {
    for (const chart of this.#charts) chart.points = [];
  }

  #go() {
    clearTimeout(this.#timer);
    this.#turn += 1;
    if (this.#shown && !document.hidden && !this.#lacksKey) this.#ask();
  }

  async #ask() {
    const turn = this.#turn;
    try {
      const found = samples(await (await this.api.get("metrics")).text());
      if (turn !== this.#turn) return;
      this.#draw(found);
      this.#fail("");
    } catch (error) {
      if (turn !== this.#turn) return;
      this.#fail(error.message);
      this.#lacksKey = error.status === 401;
      this.refused(error);
      if (this.#lacksKey) return;
    }
    this.#timer = setTimeout(() => this.#ask(), EVERY);
  }

  #draw(found) {
    const model = this.measured();
    for (const chart of this.#charts) {
      const mine = found.filter(({ name, labels }) => name === chart.name && labels.model_name === model);
      const value = chart.join(mine.map((sample) => sample.value)) * chart.factor;
      chart.points = [...chart.points, mine.length ? value : 0].slice(-KEPT);
      const text = value.toFixed(chart.digits);
      chart.value.textContent = text;
      const top = Math.max(...chart.points, chart.factor === 100 ? 1 : 1e-9);
      const at = (point, i) => `${(WIDTH * (KEPT - chart.points.length + i)) / (KEPT - 1)},${HEIGHT - 3 - ((HEIGHT - 6) * point) / top}`;
      chart.line.setAttribute("points", chart.points.map(at).join(" "));
      chart.svg.setAttribute("aria-label", `${chart.label}: ${text} now, at most ${top.toFixed(chart.digits)} of late`);
    }
  }

  #fail(sentence) {
    byId("gauges-error").hidden = !sentence;
    say(byId("gauges-error"), sentence);
  }
}

// Of the engines of one model: a replica has a series of its own.
function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function mean(values) {
  const working = values.filter((value) => value > 0);
  return working.length ? sum(working) / working.length : 0;
}

function most(values) {
  return Math.max(0, ...values);
}

function chart(label, when) {
  const box = document.createElement("article");
  const title = Object.assign(document.createElement("h3"), { textContent: label });
  const value = Object.assign(document.createElement("p"), { className: "value", textContent: "–" });
  const note = Object.assign(document.createElement("p"), { className: "help", textContent: when });
  const svg = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "polyline");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  svg.append(line);
  box.append(title, value, svg, note);
  return { box, value, svg, line };
}
