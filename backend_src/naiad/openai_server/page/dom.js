// Elements are made here and nowhere from markup: text stays text.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element: attributes, on… listeners, properties behind a dot, then children. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name.startsWith(".")) node[name.slice(1)] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const ICONS = {
  copy: "M8 8V5a1 1 0 0 1 1-1h10a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1h-3M5 8h10a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H5a1 1 0 0 1-1-1V9a1 1 0 0 1 1-1z",
  done: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9a2.8 2.8 0 0 0-4-4L4 16zM13.5 6.5l4 4",
  again: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3M19.5 3.5v4h-4",
  tokens: "M4 7h7M14 7h6M4 12h4M11 12h9M4 17h9M16 17h4",
  send: "M12 19V5M5.5 11.5L12 5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14M5 12h14",
  trash: "M4 7h16M10 4h4M6 7l1 13h10l1-13M10 11v5M14 11v5",
  down: "M12 5v14M5.5 12.5L12 19l6.5-6.5",
  close: "M6 6l12 12M18 6L6 18",
};

/** An icon without meaning of its own: its button has a label. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "icon");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button with an icon and a label, which is shown on hover. */
export function iconButton(name, label, onclick, attributes = {}) {
  const given = { type: "button", class: "icon-button", "aria-label": label, title: label, onclick };
  return el("button", { ...given, ...attributes }, icon(name));
}

/** Copies text, and says so on the button for a moment. */
export async function copyText(text, button) {
  const isDone = await write(text);
  const label = button.getAttribute("aria-label");
  button.replaceChildren(icon(isDone ? "done" : "close"));
  button.setAttribute("aria-label", isDone ? "Copied" : "The browser did not allow copying");
  setTimeout(() => {
    button.replaceChildren(icon("copy"));
    button.setAttribute("aria-label", label);
  }, 1500);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard object.
    const area = el("textarea", { class: "visually-hidden", ".value": text });
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isDone;
  }
}
