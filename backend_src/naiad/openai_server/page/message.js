// One message on the page: its text, its tokens with their probabilities, its figures and its buttons.

import { copyText, el, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** Shows a message, and again whenever it changes. */
export class MessageView {
  /**
   * @param message see history.js; `tokens` are its log-probabilities, as the server sends them.
   * @param actions {edit(text), regenerate()}
   */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.showsTokens = Boolean(message.tokens);
    this.isUser = message.role === "user";
    const who = this.isUser ? "You" : message.model || "Assistant";
    this.body = el("div", { class: this.isUser ? "text" : "markdown", dir: "auto" });
    this.figures = el("span", { class: "figures" });
    this.buttons = el("span", { class: "buttons" });
    this.node = el("article", { class: `message ${message.role}`, "aria-label": who });
    if (!this.isUser) {
      this.reasoning = el("div", { class: "markdown", dir: "auto" });
      this.thinking = el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), this.reasoning);
      this.tokens = new TokenStrip();
      this.node.append(el("header", {}, who), this.thinking, this.tokens.node);
    }
    this.calls = el("div", { class: "calls" });
    this.node.append(this.body, this.calls, el("footer", {}, this.buttons, this.figures));
    this.#makeButtons();
    this.update();
  }

  /** Shows what the message says now. */
  update() {
    const { message } = this;
    if (this.isUser) {
      this.body.textContent = message.content;
      return;
    }
    const hasTokens = Boolean(message.tokens?.length);
    this.body.hidden = hasTokens && this.showsTokens;
    this.tokens.node.hidden = !this.body.hidden;
    if (this.body.hidden) this.tokens.show(message.tokens);
    else showMarkdown(this.body, message.content);
    this.thinking.hidden = !message.reasoning;
    showMarkdown(this.reasoning, message.reasoning ?? "");
    this.calls.replaceChildren(...(message.calls ?? []).map(callNode));
    this.figures.textContent = figuresOf(message);
    this.toggle.hidden = !hasTokens;
  }

  /** Marks the message as still being written. */
  setBusy(isBusy) {
    this.node.classList.toggle("busy", isBusy);
    this.node.setAttribute("aria-busy", String(isBusy));
    this.buttons.hidden = isBusy;
  }

  #makeButtons() {
    const copy = iconButton("copy", "Copy the message", () => copyText(this.message.content, copy));
    this.buttons.append(copy);
    if (this.isUser) {
      this.buttons.append(iconButton("edit", "Edit the message", () => this.#edit()));
      return;
    }
    this.toggle = iconButton("tokens", "Show probabilities", () => {
      this.showsTokens = !this.showsTokens;
      this.toggle.setAttribute("aria-pressed", String(this.showsTokens));
      this.update();
    });
    this.toggle.setAttribute("aria-pressed", String(this.showsTokens));
    this.buttons.append(iconButton("again", "Regenerate the answer", () => this.actions.regenerate()), this.toggle);
  }

  #edit() {
    const area = el("textarea", { class: "editor", "aria-label": "Edited message", rows: 3, dir: "auto", ".value": this.message.content });
    const close = () => {
      form.replaceWith(this.body);
      this.buttons.hidden = false;
      this.buttons.querySelector("[aria-label^=Edit]").focus();
    };
    const send = () => {
      if (area.value.trim()) this.actions.edit(area.value);
    };
    const form = el(
      "div",
      { class: "editing" },
      area,
      el("p", { class: "about" }, "What follows this message is thrown away."),
      el("button", { type: "button", class: "primary", onclick: send }, "Send"),
      el("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.body.replaceWith(form);
    this.buttons.hidden = true;
    area.focus();
  }
}

/** A call of a tool: what the model wrote, as text. */
function callNode({ name, arguments: sent }) {
  return el("section", { "aria-label": `Call of ${name}` }, el("code", {}, name), el("pre", { dir: "auto" }, sent));
}

function figuresOf({ stats, end }) {
  const parts = [];
  if (stats?.numTokens) parts.push(`${stats.numTokens} ${stats.numTokens === 1 ? "token" : "tokens"}`);
  if (stats?.tokensPerS) parts.push(`${stats.tokensPerS.toFixed(1)} tokens/s`);
  if (stats?.firstTokenS) parts.push(`first token ${stats.firstTokenS.toFixed(2)} s`);
  if (stats?.numPromptTokens) {
    const cached = stats.numCachedTokens ? ` (${stats.numCachedTokens} cached)` : "";
    parts.push(`prompt ${stats.numPromptTokens}${cached}`);
  }
  if (end) parts.push(end);
  return parts.join(" · ");
}

/** Tokens coloured by probability. One of them can have the focus; arrow keys move it. */
class TokenStrip {
  constructor() {
    this.tokens = [];
    this.card = el("div", { class: "token-card", role: "status", hidden: true });
    this.list = el("div", {
      class: "tokens",
      dir: "auto",
      role: "group",
      "aria-label": "Tokens with their probabilities; move with the arrow keys",
      onpointerover: (event) => this.#open(event.target),
      onpointerleave: () => this.#close(),
      onfocusin: (event) => this.#open(event.target),
      onfocusout: () => this.#close(),
      onkeydown: (event) => this.#move(event),
    });
    this.node = el("div", { class: "token-strip", hidden: true }, this.list, this.card);
  }

  /** Shows tokens; those that were there stay. */
  show(tokens) {
    if (tokens !== this.tokens) {
      this.list.replaceChildren();
      this.decoder = new TextDecoder();
      this.tokens = tokens;
    }
    for (let at = this.list.children.length; at < tokens.length; at++) {
      const { bytes, token, logprob } = tokens[at];
      // A character may take several tokens: it is shown with the last one.
      const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      const level = Math.min(9, Math.floor(Math.exp(logprob) * 10));
      const node = el("span", { class: `token p${level}`, tabindex: at ? "-1" : "0" }, text || "⋯");
      node.position = at;
      this.list.append(node);
    }
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = event.target.position;
    let next = step && this.list.children[at + step];
    if (event.key === "Home") next = this.list.firstChild;
    if (event.key === "End") next = this.list.lastChild;
    if (event.key === "Escape") this.#close();
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #open(node) {
    if (node.position === undefined) return;
    const { token, logprob, top_logprobs: best = [] } = this.tokens[node.position];
    const isBest = best.some((each) => each.token === token);
    const rows = isBest ? best : [...best, { token, logprob }];
    this.card.replaceChildren(
      ...rows.map((each) =>
        el(
          "div",
          { class: each.token === token ? "chosen" : null },
          el("code", {}, shown(each.token)),
          el("meter", { min: 0, max: 1, value: Math.exp(each.logprob), "aria-hidden": "true" }),
          el("span", {}, percent(each.logprob)),
        ),
      ),
    );
    this.card.hidden = false;
    this.#place(node.getBoundingClientRect());
  }

  /** Puts the card below a token, or above it where there is no room, inside the window. */
  #place(box) {
    const { offsetWidth, offsetHeight, style } = this.card;
    const hasRoom = box.bottom + offsetHeight + 10 < innerHeight;
    style.left = `${Math.max(8, Math.min(box.left, innerWidth - offsetWidth - 8))}px`;
    style.top = `${hasRoom ? box.bottom + 5 : box.top - offsetHeight - 5}px`;
    document.addEventListener("scroll", () => this.#close(), { once: true, capture: true });
  }

  #close() {
    this.card.hidden = true;
  }
}

function percent(logProb) {
  const share = Math.exp(logProb) * 100;
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

function shown(token) {
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
