// How tokens are sampled: what is empty is not sent, and the server's default holds.

import { el } from "./dom.js";

const STORED = "naiad.settings";
const NUMBERS = [
  { name: "temperature", label: "Temperature", hint: "1", min: 0, max: 2, step: 0.1, about: "0 always takes the most likely token." },
  { name: "top_p", label: "Top p", hint: "1", min: 0, max: 1, step: 0.05, about: "The most likely tokens whose probabilities add up to this." },
  { name: "top_k", label: "Top k", hint: "all", min: 0, step: 1, about: "This many of the most likely tokens." },
  { name: "min_p", label: "Min p", hint: "0", min: 0, max: 1, step: 0.01, about: "Tokens with at least this share of the best one's probability." },
  { name: "max_tokens", label: "Max tokens", hint: "window", min: 1, step: 1, about: "Length of an answer." },
  { name: "seed", label: "Seed", hint: "random", min: 0, step: 1, about: "The same seed gives the same answer." },
  { name: "presence_penalty", label: "Presence penalty", hint: "0", min: -2, max: 2, step: 0.1, about: "Against tokens that the answer has." },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0", min: -2, max: 2, step: 0.1, about: "Against tokens, by how often it has them." },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1", min: 0, step: 0.05, about: "Against tokens of prompt and answer." },
];

export class Settings {
  /** Makes the fields; `root` gets them. */
  constructor(root) {
    this.fields = new Map();
    const stored = readStored();
    const grid = el("div", { class: "fields" });
    for (const each of NUMBERS) grid.append(this.#field(each, stored[each.name]));
    root.append(grid);
    this.stop = el("textarea", { id: "set-stop", rows: 2, placeholder: "none", "aria-describedby": "about-stop", onchange: () => this.#store() });
    this.stop.value = typeof stored.stop === "string" ? stored.stop : "";
    root.append(
      el("label", { for: "set-stop" }, "Stop strings"),
      this.stop,
      el("p", { class: "about", id: "about-stop" }, "One a line. An answer ends before the first of them."),
    );
    this.logProbs = el("input", { type: "checkbox", id: "set-logprobs", onchange: () => this.#store() });
    this.logProbs.checked = stored.logprobs === true;
    root.append(
      el("label", { class: "switch" }, this.logProbs, el("span", {}, "Show probabilities")),
      el("p", { class: "about" }, "Colours each token by its probability, with the alternatives."),
      el("button", { type: "button", class: "quiet", onclick: () => this.#reset() }, "Back to defaults"),
    );
  }

  /** The fields of a request. Throws an Error that names a field whose value is no number. */
  request() {
    const body = {};
    for (const [name, input] of this.fields) {
      if (input.validity.badInput) throw new Error(`${name}: expected a number.`);
      if (input.value.trim() === "") continue;
      body[name] = input.valueAsNumber;
      if (name === "seed" && !Number.isSafeInteger(body.seed)) throw new Error("seed: expected an integer up to 2⁵³ − 1.");
    }
    const stop = this.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if (this.logProbs.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return body;
  }

  #field({ name, label, hint, min, max, step, about }, value) {
    const id = `set-${name}`;
    const limits = { min, max, step: Number.isInteger(step) ? 1 : "any" };
    const input = el("input", { id, type: "number", placeholder: hint, title: about, autocomplete: "off", ...limits, onchange: () => this.#store() });
    if (typeof value === "number") input.value = value;
    this.fields.set(name, input);
    return el("div", { class: "field" }, el("label", { for: id, title: about }, label), input);
  }

  #reset() {
    for (const input of this.fields.values()) input.value = "";
    this.stop.value = "";
    this.logProbs.checked = false;
    this.#store();
  }

  #store() {
    const kept = { stop: this.stop.value, logprobs: this.logProbs.checked };
    for (const [name, input] of this.fields) if (input.value !== "") kept[name] = input.valueAsNumber;
    writeStored(STORED, JSON.stringify(kept));
  }
}

function readStored() {
  try {
    return JSON.parse(localStorage.getItem(STORED)) ?? {};
  } catch {
    return {};
  }
}

/** Keeps a value in this browser, if it keeps any. */
export function writeStored(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // Storage is off or full: the value lasts as long as the page.
  }
}

/** A kept value, or "". */
export function storedText(key) {
  try {
    return localStorage.getItem(key) ?? "";
  } catch {
    return "";
  }
}
