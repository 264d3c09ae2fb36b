// Conversations, kept in this browser; private ones last as long as the page.

const PREFIX = "naiad.chat.";
const ROLES = ["user", "assistant"];

/**
 * A conversation: {id, title, system, isPrivate, changedMs, messages}.
 * A message: {role, content, reasoning, calls, model, stats, end}; what else it holds is not kept.
 */
export function newConversation(system = "", isPrivate = false) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, title: "", system, isPrivate, changedMs: Date.now(), messages: [] };
}

export class History {
  constructor() {
    this.conversations = new Map();
    for (const key of storedKeys()) {
      const conversation = read(key);
      if (conversation) this.conversations.set(conversation.id, conversation);
    }
  }

  /** All conversations, the last changed first. */
  list() {
    return [...this.conversations.values()].sort((a, b) => b.changedMs - a.changedMs);
  }

  /** Takes over a change; returns what went wrong, or "". */
  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    if (conversation.isPrivate) {
      this.#erase(conversation.id);
      return "";
    }
    const { id, title, system, changedMs } = conversation;
    const messages = conversation.messages.map(kept);
    try {
      localStorage.setItem(PREFIX + id, JSON.stringify({ id, title, system, changedMs, messages }));
      return "";
    } catch {
      return "This browser has no room for the conversation: it is lost when the page closes.";
    }
  }

  remove(id) {
    this.conversations.delete(id);
    this.#erase(id);
  }

  #erase(id) {
    try {
      localStorage.removeItem(PREFIX + id);
    } catch {
      // Storage is off: nothing was kept.
    }
  }
}

function kept({ role, content, reasoning, calls, model, stats, end }) {
  return { role, content, reasoning, calls, model, stats, end };
}

function isCall(each) {
  return typeof each?.name === "string" && typeof each.arguments === "string";
}

function storedKeys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

/** Reads a conversation; another version of the page may have written it. */
function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    if (PREFIX + found.id !== key || !Array.isArray(found.messages)) return null;
    const messages = found.messages.filter((each) => ROLES.includes(each?.role) && typeof each.content === "string");
    for (const each of messages) each.calls = Array.isArray(each.calls) ? each.calls.filter(isCall) : [];
    const [title, system] = [String(found.title ?? ""), String(found.system ?? "")];
    return { id: found.id, title, system, isPrivate: false, changedMs: Number(found.changedMs) || 0, messages };
  } catch {
    return null;
  }
}
