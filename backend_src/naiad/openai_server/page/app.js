// The page around its views: tabs, theme and key.

import { keyStore, makeApi } from "./api.js";
import { chatView } from "./chat.js";
import { el } from "./dom.js";
import { storedText, writeStored } from "./settings.js";

const byId = (id) => document.getElementById(id);

const theme = byId("theme");
theme.value = storedText("naiad.theme");
theme.addEventListener("change", () => {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
  writeStored("naiad.theme", theme.value);
});

const api = makeApi(askKey);
byId("key-button").hidden = !keyStore.value;
byId("key-button").addEventListener("click", async () => {
  if ((await askKey("")) !== null) location.reload();
});

/** Asks the user for a key; returns null if there is none. */
function askKey(message) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-error").textContent = message;
  byId("key-error").hidden = !message;
  byId("key-forget").hidden = !keyStore.value;
  byId("key-button").hidden = false;
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    let answer = null;
    const done = new AbortController();
    const listen = (id, event, act) => byId(id).addEventListener(event, act, { signal: done.signal });
    const give = (key) => {
      answer = key;
      keyStore.set(key);
      dialog.close();
    };
    listen("key-form", "submit", (event) => {
      event.preventDefault();
      if (input.value.trim()) give(input.value.trim());
    });
    listen("key-forget", "click", () => give(""));
    listen("key-cancel", "click", () => dialog.close());
    listen("key-dialog", "close", () => {
      input.value = "";
      done.abort();
      resolve(answer);
    });
  });
}

const views = { chat: chatView(byId("chat"), api), engine: null };
let shown = null;

async function show(name) {
  if (name === shown) return;
  const before = shown;
  shown = name;
  for (const each of Object.keys(views)) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  document.title = name === "chat" ? "Naiad" : "Engine · Naiad";
  if (location.hash.slice(1) !== name) history.replaceState(null, "", name === "chat" ? "." : `#${name}`);
  if (before) views[before]?.hide();
  if (name === "engine") views.engine ??= await loadEngine();
  if (shown === name) views[name].show();
}

async function loadEngine() {
  try {
    const { engineView } = await import("./engine.js");
    document.head.append(el("link", { rel: "stylesheet", href: new URL("engine.css", import.meta.url) }));
    return engineView(byId("engine"), api);
  } catch (error) {
    console.warn(error);
    byId("engine").replaceChildren(el("p", { class: "notice" }, "This server has no engine view."));
    return { show() {}, hide() {} };
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -tabs.indexOf(tab), End: tabs.length - 1 - tabs.indexOf(tab) }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}
const ofHash = () => (location.hash === "#engine" ? "engine" : "chat");
window.addEventListener("hashchange", () => show(ofHash()));
// A page that was left may come back as it was.
window.addEventListener("pagehide", () => views[shown]?.hide());
window.addEventListener("pageshow", (event) => event.persisted && views[shown]?.show());
show(ofHash());
