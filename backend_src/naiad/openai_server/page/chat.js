// The chat: conversations, their messages, and the stream of the answer that is being written.

import { ServerError } from "./api.js";
import { el, icon, iconButton } from "./dom.js";
import { History, newConversation } from "./history.js";
import { MessageView } from "./message.js";
import { Settings, storedText, writeStored } from "./settings.js";

const SUGGESTIONS = ["What is the capital of France?", "Explain a KV cache in two sentences.", "Write a haiku about a river."];
const WIDE = matchMedia("(min-width: 1000px)");
const ENDS = { length: "cut at the limit", content_filter: "filtered", tool_calls: "calls a tool" };
const TITLE_LENGTH = 60;
// Tokens that came together say nothing of speed.
const LEAST_MEASURED_MS = 20;
// An answer's drawing takes a fourth of the time at most.
const RESTS = 3;
const LONGEST_REST_MS = 1000;

const byId = (id) => document.getElementById(id);

/** Makes the view. */
export function chatView(root, api) {
  const chat = new Chat(root, api);
  return {
    show() {
      chat.loadModels();
      if (WIDE.matches) byId("prompt").focus();
    },
    hide() {},
  };
}

class Chat {
  constructor(root, api) {
    this.api = api;
    this.root = root;
    this.history = new History();
    this.settings = new Settings(byId("sampling"));
    this.views = [];
    this.running = null;
    this.followsEnd = true;
    this.#makePanels();
    this.#makeComposer();
    this.#makeSuggestions();
    this.open(this.history.list()[0] ?? newConversation());
  }

  /** Shows a conversation; an answer that is being written to another one is stopped. */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    byId("system").value = conversation.system;
    byId("private").checked = conversation.isPrivate;
    this.#showError(null);
    this.#showMessages();
    this.#showList();
    this.#toEnd();
  }

  async loadModels() {
    const select = byId("model");
    try {
      const { data } = await this.api.json("/v1/models");
      const wanted = select.value || storedText("naiad.model");
      select.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
      if (data.some(({ id }) => id === wanted)) select.value = wanted;
      select.disabled = data.length === 0;
      const [chosen] = data.filter(({ id }) => id === select.value);
      byId("welcome-model").textContent = chosen
        ? `${chosen.id} answers${chosen.max_model_len ? `, with a window of ${chosen.max_model_len.toLocaleString("en")} tokens` : ""}.`
        : "No model serves now.";
      if (!data.length) select.append(el("option", {}, "no model"));
    } catch (error) {
      this.#showError(error, () => this.loadModels());
    }
  }

  /** Sends what is in the message field. */
  async send() {
    const prompt = byId("prompt");
    if (!prompt.value.trim() || this.running) return;
    this.conversation.messages.push({ role: "user", content: prompt.value });
    prompt.value = "";
    this.#fit();
    await this.answer();
  }

  /** Has the last message of the conversation answered. */
  async answer() {
    this.stop();
    const { conversation } = this;
    const model = byId("model").value;
    let body;
    try {
      body = { model, messages: this.#prompt(), ...this.settings.request() };
    } catch (error) {
      this.#save();
      this.#showMessages();
      this.#showError(error, () => this.answer());
      return;
    }
    body.stream = true;
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
    const message = { role: "assistant", content: "", reasoning: "", calls: [], model, stats: {}, end: "" };
    if (body.logprobs) message.tokens = [];
    conversation.messages.push(message);
    conversation.title ||= titleOf(conversation.messages[0].content);
    this.#save();
    this.#showError(null);
    this.#showMessages();
    this.followsEnd = true;
    this.#toEnd();
    const run = { abort: new AbortController(), message, conversation, view: this.views.at(-1) };
    this.running = run;
    this.#showRunning();
    await this.#stream(run, body);
  }

  /** Stops the answer that is being written; what there is of it stays. */
  stop() {
    this.running?.abort.abort();
  }

  async #stream(run, body) {
    const { message } = run;
    const answer = new Answer(message);
    let error = null;
    const draw = drawer(() => {
      run.view.update();
      if (this.followsEnd && this.running === run) this.#toEnd();
    });
    run.view.setBusy(true);
    try {
      await this.api.events("/v1/chat/completions", {
        body,
        signal: run.abort.signal,
        onEvent: (_, data) => {
          answer.take(data);
          draw.soon();
        },
      });
      if (!answer.isComplete) throw new ServerError("The answer ended early.");
    } catch (caught) {
      if (caught.name === "AbortError") message.end = "stopped";
      else {
        error = caught;
        message.end = "broken off";
      }
    }
    draw.cancel();
    this.#finish(run, error);
  }

  #finish(run, error) {
    const { message, conversation, view } = run;
    const isShown = this.conversation === conversation;
    if (this.running === run) this.running = null;
    if (!message.content && !message.reasoning && !message.calls.length && error) {
      conversation.messages = conversation.messages.filter((each) => each !== message);
      if (isShown) this.#showMessages();
    } else {
      view.update();
      view.setBusy(false);
    }
    if (this.history.conversations.has(conversation.id)) this.#save(conversation);
    this.#showRunning();
    if (isShown && error) this.#showError(error, () => this.#retry(message));
    if (isShown && this.followsEnd) this.#toEnd();
    byId("status").textContent = error ? "" : announcement(message);
  }

  #retry(message) {
    const { messages } = this.conversation;
    if (messages.at(-1) === message) messages.pop();
    this.answer();
  }

  #prompt() {
    const system = byId("system").value;
    const said = this.conversation.messages.map(({ role, content }) => ({ role, content }));
    return system.trim() ? [{ role: "system", content: system }, ...said] : said;
  }

  // What is on the page.

  #showMessages() {
    const { messages } = this.conversation;
    let kept = 0;
    while (kept < messages.length && this.views[kept]?.message === messages[kept]) kept++;
    for (const view of this.views.splice(kept)) view.node.remove();
    for (const message of messages.slice(kept)) {
      const view = new MessageView(message, {
        edit: (text) => this.#cut(message, { role: "user", content: text }),
        regenerate: () => this.#cut(message),
      });
      this.views.push(view);
      byId("messages").append(view.node);
    }
    byId("welcome").hidden = messages.length > 0;
  }

  /** Throws a message and what follows it away, puts another in its place, and has that answered. */
  #cut(message, other) {
    this.stop();
    const { messages } = this.conversation;
    messages.splice(messages.indexOf(message));
    if (other) messages.push(other);
    byId("prompt").focus();
    this.answer();
  }

  #showList() {
    const rows = this.history.list().map((conversation) => {
      const title = conversation.title || "New chat";
      const isCurrent = conversation === this.conversation;
      const open = () => {
        this.open(conversation);
        this.#fold("history");
      };
      return el(
        "li",
        { class: isCurrent ? "current" : null },
        el(
          "button",
          { type: "button", class: "title", "aria-current": isCurrent ? "true" : null, onclick: open, title },
          el("span", { dir: "auto" }, title),
          conversation.isPrivate ? el("span", { class: "tag" }, "private") : null,
        ),
        iconButton("trash", `Delete ${title}`, () => this.#remove(conversation)),
      );
    });
    byId("conversations").replaceChildren(...rows);
  }

  #remove(conversation) {
    this.history.remove(conversation.id);
    if (conversation === this.conversation) this.open(this.history.list()[0] ?? newConversation(conversation.system));
    else this.#showList();
    byId("new-chat").focus();
  }

  #save(conversation = this.conversation) {
    conversation.changedMs = Date.now();
    const problem = this.history.save(conversation);
    if (problem) this.#showError(new Error(problem));
    this.#showList();
  }

  #showError(error, retry) {
    const line = byId("error");
    line.hidden = !error;
    if (!error) return line.replaceChildren();
    const details = error instanceof ServerError ? [error.status || "", error.code ?? ""].filter(Boolean).join(" · ") : "";
    const again = () => {
      this.#showError(null);
      retry();
    };
    line.replaceChildren(
      el("span", {}, error.message),
      details ? el("span", { class: "tag" }, details) : "",
      retry ? el("button", { type: "button", class: "quiet", onclick: again }, "Try again") : "",
      iconButton("close", "Close the error", () => this.#showError(null)),
    );
  }

  #showRunning() {
    const hadFocus = [byId("stop"), byId("send")].includes(document.activeElement);
    byId("send").hidden = Boolean(this.running);
    byId("stop").hidden = !this.running;
    if (this.running) byId("status").textContent = "Answering";
    if (hadFocus) byId("prompt").focus();
  }

  #toEnd() {
    const scroller = byId("scroller");
    scroller.scrollTop = scroller.scrollHeight;
  }

  #fit() {
    const prompt = byId("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 240)}px`;
  }

  // What the user does.

  #makeComposer() {
    const prompt = byId("prompt");
    byId("send").append(icon("send"));
    byId("stop").append(icon("stop"));
    byId("to-end").append(icon("down"));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    // A browser may keep a page that was left, and its connections with it.
    window.addEventListener("pagehide", () => this.stop());
    prompt.addEventListener("input", () => this.#fit());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      const side = event.target.closest(".side");
      if (side && !WIDE.matches) this.#fold(side.id);
      else if (!event.target.closest(".editing, .tokens")) this.stop();
    });
    const scroller = byId("scroller");
    const look = () => {
      const distance = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
      this.followsEnd = distance < 60;
      byId("to-end").hidden = distance < 200;
    };
    scroller.addEventListener("scroll", look);
    new ResizeObserver(() => {
      if (this.followsEnd) this.#toEnd();
      look();
    }).observe(scroller);
    byId("to-end").addEventListener("click", () => {
      this.#toEnd();
      prompt.focus();
    });
  }

  #makePanels() {
    for (const name of ["history", "settings"]) {
      const button = byId(`${name}-button`);
      const close = this.root.querySelector(`[data-close=${name}]`);
      close.append(icon("close"));
      close.addEventListener("click", () => this.#fold(name));
      button.addEventListener("click", () => {
        this.#unfold(name, button.getAttribute("aria-expanded") !== "true");
        if (button.getAttribute("aria-expanded") === "true") byId(name).focus();
      });
    }
    const arrange = () => {
      this.#unfold("history", WIDE.matches);
      this.#unfold("settings", false);
    };
    WIDE.addEventListener("change", arrange);
    arrange();
    byId("new-chat").prepend(icon("plus"));
    byId("new-chat").addEventListener("click", () => {
      this.open(newConversation(this.conversation.system));
      this.#fold("history");
      byId("prompt").focus();
    });
    byId("private").addEventListener("change", (event) => {
      this.conversation.isPrivate = event.target.checked;
      if (this.conversation.messages.length) this.#save();
    });
    byId("system").addEventListener("change", (event) => {
      this.conversation.system = event.target.value;
      if (this.conversation.messages.length) this.#save();
    });
    byId("model").addEventListener("change", (event) => {
      writeStored("naiad.model", event.target.value);
      this.loadModels();
    });
  }

  /** Shows or hides a panel. */
  #unfold(name, isOpen) {
    byId(name).hidden = !isOpen;
    byId(`${name}-button`).setAttribute("aria-expanded", String(isOpen));
    if (isOpen && !WIDE.matches) this.#unfold(name === "history" ? "settings" : "history", false);
  }

  /** Hides a panel that covers the chat. */
  #fold(name) {
    if (WIDE.matches) return;
    this.#unfold(name, false);
    byId(`${name}-button`).focus();
  }

  #makeSuggestions() {
    const choose = (text) => {
      byId("prompt").value = text;
      this.send();
    };
    const buttons = SUGGESTIONS.map((text) => el("button", { type: "button", class: "suggestion", onclick: () => choose(text) }, text));
    byId("suggestions").append(...buttons);
  }
}

/** Puts the chunks of an answer together. */
class Answer {
  constructor(message) {
    this.message = message;
    this.isComplete = false;
    this.beginMs = performance.now();
    this.firstMs = 0;
    this.numFirst = 0;
  }

  /** Takes the data of an event. Throws a ServerError if it is an error. */
  take(data) {
    if (data === "[DONE]") {
      this.isComplete = true;
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(String(chunk.error.message), chunk.error);
    const { message } = this;
    for (const { delta = {}, logprobs, finish_reason } of chunk.choices ?? []) {
      message.content += delta.content ?? "";
      message.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
      for (const call of delta.tool_calls ?? []) this.#call(call);
      if (logprobs?.content && message.tokens) message.tokens.push(...logprobs.content);
      if (finish_reason && finish_reason !== "stop") message.end = ENDS[finish_reason] ?? finish_reason;
    }
    if (chunk.usage) this.#count(chunk.usage);
  }

  /** Adds a part of a call: its name comes first, then its arguments piece by piece. */
  #call({ index, function: part = {} }) {
    const { calls } = this.message;
    while (calls.length <= index) calls.push({ name: "", arguments: "" });
    calls[index].name += part.name ?? "";
    calls[index].arguments += part.arguments ?? "";
  }

  #count(usage) {
    const { stats } = this.message;
    stats.numTokens = usage.completion_tokens;
    stats.numPromptTokens = usage.prompt_tokens;
    stats.numCachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const nowMs = performance.now();
    if (!stats.numTokens || stats.numTokens === this.numLast) return;
    this.numLast = stats.numTokens;
    if (!this.firstMs) {
      this.firstMs = nowMs;
      this.numFirst = stats.numTokens;
      stats.firstTokenS = (nowMs - this.beginMs) / 1000;
    } else if (nowMs - this.firstMs > LEAST_MEASURED_MS) {
      stats.tokensPerS = ((stats.numTokens - this.numFirst) * 1000) / (nowMs - this.firstMs);
    }
  }
}

/**
 * Draws at most once a frame, and rests after it for a multiple of the time that it took: the longer an answer,
 * the longer it takes to show it again, and the page has to hear its user all the while.
 */
function drawer(draw) {
  let frame = 0;
  let timer = 0;
  let isAsked = false;
  const run = () => {
    const beginMs = performance.now();
    frame = 0;
    isAsked = false;
    draw();
    // This comes when the frame has been laid out.
    timer = setTimeout(() => (timer = setTimeout(rested, Math.min((performance.now() - beginMs) * RESTS, LONGEST_REST_MS))));
  };
  const rested = () => {
    timer = 0;
    if (isAsked) frame = requestAnimationFrame(run);
  };
  return {
    soon() {
      isAsked = true;
      if (!timer) frame ||= requestAnimationFrame(run);
    },
    cancel() {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    },
  };
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

function announcement({ content, calls, end }) {
  const said = [content, ...calls.map(({ name }) => `Call of ${name}`)].filter(Boolean).join(" · ");
  const words = said.length > 300 ? `${said.slice(0, 300)}…` : said;
  return `${end === "stopped" ? "Stopped" : "The answer"}: ${words}`;
}
