// The race: one prompt to a model and to what it is compared with; what came when, and whether the texts are the same.

import { announce, byId, node, swap } from "./dom.js";
import { Lanes, play, tokensPerSecond } from "./player.js";
import { download, replayPage } from "./replay.js";

const PROMPT = "Write a Python function that says whether a number is prime, then explain it.";
const SEED = 1; // sampled texts are the same only with the same noise
const FIRST = "the first model"; // the server's, while the list of models is not there
const WITHOUT_DRAFTS = ""; // of the choice of an opponent: the same model at confidence 1

export class Race {
  #running = null;
  #race = null;
  #lanes = null;

  /** models(): [{id, of, composed}] as the server lists them, of: whose name it is; chosen(): the id of the first lane's. */
  constructor(api, models, chosen, refused) {
    Object.assign(this, { api, models, chosen, refused });
    byId("race-prompt").value = PROMPT;
    byId("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    byId("race-stop").addEventListener("click", () => this.#running?.abort());
    byId("race-replay").addEventListener("click", () => this.#replay());
    byId("race-save").addEventListener("click", () => this.#save());
  }

  /** After the list of models or the chosen one changed. */
  offer() {
    const mine = this.models().find(({ id }) => id === this.chosen())?.of;
    const others = this.models().filter(({ id, of }) => id === of && of !== mine);
    const against = byId("race-against");
    const before = against.value;
    against.replaceChildren(
      node("option", { value: WITHOUT_DRAFTS }, "itself, without drafts"),
      ...others.filter(({ composed }) => !composed).map(({ id }) => node("option", { value: id }, id)),
    );
    if ([...against.options].some(({ value }) => value === before)) against.value = before;
    const composed = others.filter((one) => one.composed);
    byId("race-third-label").hidden = !composed.length;
    byId("race-third").replaceChildren(
      ...composed.map(({ id }) => node("option", { value: id }, id)),
      node("option", { value: "" }, "none"),
    );
  }

  #planned() {
    const model = this.chosen() || undefined;
    const name = model ?? FIRST;
    const against = byId("race-against").value;
    const isComposed = this.models().find(({ id }) => id === model)?.composed;
    const lanes = [
      { name, note: isComposed ? "Groups are composed: one slot a group, a text of its own." : "Drafts, each checked by the model.", body: { model } },
      against === WITHOUT_DRAFTS
        ? { name: `${name} at confidence 1`, note: "One token a pass.", body: { model, confidence: 1 } }
        : { name: against, note: "One token a pass, at confidence 1.", body: { model: against, confidence: 1 } },
    ];
    const third = byId("race-third").value;
    if (third) lanes.push({ name: third, note: "Groups are composed: one slot a group, a text of its own.", body: { model: third }, isOther: true });
    if (isComposed) lanes[0].isOther = true;
    return lanes.map((lane) => ({ ...lane, events: [] }));
  }

  async #start() {
    if (this.#running) return;
    const prompt = byId("race-prompt").value.trim();
    if (!prompt) return byId("race-prompt").focus();
    const race = { prompt, together: byId("race-together").checked, lanes: this.#planned(), verdict: "" };
    this.#lanes = new Lanes(byId("lanes"), race.lanes);
    this.#race = race;
    byId("race-verdict").textContent = "";
    byId("race-after").hidden = true;
    this.#fail("");
    const running = this.#busy(new AbortController());
    let failure = null;
    try {
      const runs = race.lanes.map((lane, index) => () => this.#run(race, lane, index, running.signal));
      if (race.together) await Promise.all(runs.map((run) => run()));
      else for (const run of runs) await run();
      race.verdict = verdict(race);
      byId("race-verdict").textContent = race.verdict;
      byId("race-after").hidden = false;
      if (!race.together) await play(this.#lanes, race, Number(byId("race-speed").value), running.signal);
    } catch (error) {
      running.abort();
      if (error.name === "AbortError") announce("The race was stopped");
      else failure = error;
    }
    this.#busy(null);
    if (failure) this.#fail(failure.message, failure); // now that what has the focus stays: a dialog gives it back
  }

  async #run(race, lane, index, signal) {
    const temperature = Number(byId("race-temperature").value);
    const body = { ...lane.body, messages: [{ role: "user", content: race.prompt }], temperature, seed: SEED };
    body.max_tokens = Number(byId("race-tokens").value);
    body.cache_salt = `race ${Date.now()} ${index}`; // else the first lane would read the prompt for the others
    const begun = performance.now();
    for await (const { choices, usage } of this.api.chat(body, signal)) {
      const delta = choices[0]?.delta;
      const text = (delta?.reasoning_content ?? "") + (delta?.content ?? "");
      if (!choices[0]?.group && !text) continue;
      const event = {
        at: performance.now() - begun,
        text,
        tokens: usage?.completion_tokens ?? 0,
        passes: usage?.macro_steps,
        slots: usage?.kv_slots,
      };
      lane.events.push(event);
      this.#lanes.show(index, event);
    }
  }

  async #replay() {
    if (this.#running) return;
    const running = this.#busy(new AbortController());
    await play(this.#lanes, this.#race, Number(byId("race-speed").value), running.signal);
    this.#busy(null);
  }

  async #save() {
    try {
      const read = async (path) => (await this.api.get(path)).text();
      const { prompt, verdict: said, lanes } = this.#race;
      const plain = lanes.map(({ name, note, events }) => ({ name, note, events }));
      download("hamburger-race.html", await replayPage({ prompt, verdict: said, lanes: plain }, read));
    } catch (error) {
      this.#fail(error.message, error);
    }
  }

  #busy(running) {
    this.#running = running;
    if (running) swap(byId("race-start"), byId("race-stop"));
    else swap(byId("race-stop"), byId("race-start"));
    byId("race-replay").disabled = running !== null;
    return running;
  }

  #fail(sentence, error = null) {
    byId("race-error").hidden = !sentence;
    byId("race-error").textContent = sentence;
    if (error) this.refused(error);
  }
}

const textOf = (lane) => lane.events.map((event) => event.text).join("");

/** What came of it, in sentences. */
export function verdict({ lanes, together }) {
  const [first, second, third] = lanes;
  const [a, b] = [textOf(first), textOf(second)];
  const said = [];
  let same = 0;
  while (same < Math.min(a.length, b.length) && a[same] === b[same]) same += 1;
  if (a === b) said.push(`Both texts are identical, all ${a.length} characters.`);
  else if (first.isOther) said.push(`The texts part after ${same} characters: composed groups change the text.`);
  else said.push(`The texts part after ${same} characters.`);
  const speeds = lanes.map(({ events }) => (events.length > 1 ? tokensPerSecond(events[0], events.at(-1)) : 0));
  if (speeds[0] && speeds[1]) {
    const times = (speeds[0] / speeds[1]).toFixed(2);
    said.push(`${first.name} wrote ${times} times as many tokens a second as ${second.name}${together ? ", while all shared this machine" : ""}.`);
  }
  if (third?.events.length) {
    const { tokens, slots } = third.events.at(-1);
    said.push(`${third.name} wrote ${textOf(third) === b ? "the same text" : "a text of its own"}, ${tokens} tokens in ${slots} slots.`);
  }
  return said.join(" ");
}
