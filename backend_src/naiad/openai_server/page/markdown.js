// Markdown as a model writes it, made into elements without any markup of its own: tags in the text stay text.
// Time grows with the length of the text alone, whatever the text is.

import { copyText, el, iconButton } from "./dom.js";

const MAX_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|\t|$)(.*)$/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** Shows text in an element; what was there and has not changed stays as it is. */
export function showMarkdown(root, text) {
  const blocks = parseBlocks(text.split(/\r\n|\n|\r/), 0);
  let kept = 0;
  while (kept < blocks.length && root.children[kept]?.source === blocks[kept].source) kept++;
  while (root.childNodes.length > kept) root.lastChild.remove();
  for (const block of blocks.slice(kept)) {
    const node = block.make();
    node.source = block.source;
    root.append(node);
  }
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, make] = readBlock(lines, at, depth);
    blocks.push({ make, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

/** Reads the block at a line; returns the line after it, and what makes its element. */
function readBlock(lines, at, depth) {
  const line = lines[at];
  let match;
  if ((match = FENCE.exec(line))) return readFence(lines, at, match);
  if ((match = HEADING.exec(line))) {
    const [, marks, title = ""] = match;
    return [at + 1, () => el(`h${Math.min(marks.length + 2, 6)}`, {}, inline(title.trim()))];
  }
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
    const header = cells(line);
    if (header.length === cells(lines[at + 1]).length) return readTable(lines, at, header);
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end], depth)) end++;
  // The spaces before a line stay: models write code without a fence, too.
  const text = lines.slice(at, end).join("\n").replace(/^ {1,3}(?! )/, "");
  return [end, () => el("p", {}, inline(text))];
}

function interrupts(line, depth) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return depth < MAX_DEPTH && (QUOTE.test(line) || /^ {0,3}(?:[-*+]|1[.)])[ \t]+\S/.test(line));
}

function readFence(lines, at, [opening, marks, info]) {
  const indent = opening.length - opening.trimStart().length;
  let end = at + 1;
  const isEnd = (line) => {
    const text = line.trim();
    return text.length >= marks.length && text === marks[0].repeat(text.length);
  };
  while (end < lines.length && !isEnd(lines[end])) end++;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.length - line.trimStart().length)));
  return [Math.min(end + 1, lines.length), () => codeBlock(code.join("\n"), info.trim().split(/\s/)[0])];
}

function codeBlock(code, language) {
  const copy = iconButton("copy", "Copy the code", () => copyText(code, copy));
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, language.slice(0, 40) || "text"), copy),
    el("pre", { tabindex: "0", role: "region", "aria-label": "Code" }, el("code", {}, code)),
  );
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !interrupts(lines[end], depth))) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => el("blockquote", {}, ...parseBlocks(inner, depth + 1).map((block) => block.make()))];
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const sameKind = (match) => match && match[2].at(-1) === first[2].at(-1);
  const items = [];
  let isLoose = false;
  let end = at;
  for (let indent = 0, isBlank = false; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      isBlank = true;
      items.at(-1).push("");
      continue;
    }
    const spaces = line.length - line.trimStart().length;
    const match = ITEM.exec(line);
    if (items.length && spaces >= indent) {
      items.at(-1).push(line.slice(indent));
    } else if (sameKind(match) && !RULE.test(line)) {
      isLoose ||= isBlank;
      const gap = match[3] === "\t" || match[3].length > 4 ? 1 : Math.max(match[3].length, 1);
      indent = match[1].length + match[2].length + gap;
      items.push([match[4]]);
    } else if (isBlank || interrupts(line, depth)) {
      break;
    } else {
      items.at(-1).push(line.trimStart());
    }
    isBlank = false;
  }
  const make = () => {
    const start = isOrdered && Number.parseInt(first[2], 10) !== 1 ? Number.parseInt(first[2], 10) : null;
    return el(isOrdered ? "ol" : "ul", { start }, ...items.map((item) => listItem(item, isLoose, depth)));
  };
  return [end, make];
}

function listItem(lines, isLoose, depth) {
  const node = el("li");
  const task = /^\[([ xX])\] +/.exec(lines[0]);
  if (task) {
    lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
    const isDone = task[1] !== " ";
    node.append(el("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "Done" : "To do" }), " ");
  }
  for (const block of parseBlocks(lines, depth + 1)) {
    const made = block.make();
    if (made.tagName === "P" && !isLoose) node.append(...made.childNodes);
    else node.append(made);
  }
  return node;
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readTable(lines, at, header) {
  const sides = cells(lines[at + 1]).map((cell) => {
    if (cell.startsWith(":") && cell.endsWith(":")) return "center";
    return cell.endsWith(":") ? "right" : null;
  });
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
  const row = (tag, texts) =>
    el("tr", {}, ...header.map((_, column) => el(tag, { class: sides[column] }, inline(texts[column] ?? ""))));
  const make = () => {
    const body = lines.slice(at + 2, end).map((line) => row("td", cells(line)));
    const table = el("table", {}, el("thead", {}, row("th", header)), el("tbody", {}, ...body));
    return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  };
  return [end, make];
}

// What may begin something inside a line; all else is taken in one piece.
const PLAIN = /[^\\`*_~[\]!<\nh]+|h(?!ttps?:\/\/)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/iy;
const TARGET = /\([ \t]*<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500}){0,5})>?(?:[ \t]+"[^"]{0,500}")?[ \t]*\)/y;
const ELEMENTS = { "*": "em", _: "em", "**": "strong", __: "strong", "***": "strong", ___: "strong", "~~": "del" };
const WORD = /[\p{L}\p{N}]/u;

/** Makes the inside of a paragraph. */
function inline(text) {
  const frames = [{ mark: "", nodes: [] }];
  const numOpen = new Map();
  const missing = new Set();
  const add = (node) => frames.at(-1).nodes.push(node);

  // Takes the frames above one; what they opened was not closed, and is text.
  const collapse = (height) => {
    const target = frames[height - 1].nodes;
    for (const frame of frames.slice(height)) {
      target.push(frame.mark);
      for (const node of frame.nodes) target.push(node);
      numOpen.set(frame.mark, numOpen.get(frame.mark) - 1);
    }
    frames.length = height;
  };
  const open = (mark) => {
    if (frames.length > MAX_DEPTH) return add(mark);
    numOpen.set(mark, (numOpen.get(mark) ?? 0) + 1);
    frames.push({ mark, nodes: [] });
  };
  const close = (mark) => {
    if (!numOpen.get(mark)) return null;
    let height = frames.length - 1;
    while (frames[height].mark !== mark) height--;
    collapse(height + 1);
    numOpen.set(mark, numOpen.get(mark) - 1);
    return frames.pop().nodes;
  };

  for (let at = 0; at < text.length; ) {
    const letter = text[at];
    const plain = matchAt(PLAIN, text, at);
    if (plain) {
      add(plain[0]);
      at += plain[0].length;
    } else if (letter === "\\" && /[!-/:-@[-`{-~\n]/.test(text[at + 1] ?? "")) {
      add(text[at + 1] === "\n" ? el("br") : text[at + 1]);
      at += 2;
    } else if (letter === "`") {
      const run = runLength(text, at);
      const end = missing.has(run) ? -1 : closingRun(text, at + run, run);
      if (end < 0) missing.add(run);
      else add(el("code", {}, codeText(text.slice(at + run, end))));
      if (end < 0) add("`".repeat(run));
      at = end < 0 ? at + run : end + run;
    } else if (letter === "h") {
      at += addAddress(text, at, add, numOpen.get("["));
    } else if (letter === "<") {
      const address = matchAt(ADDRESS, text, at + 1);
      const isLink = address && text[at + 1 + address[0].length] === ">";
      add(isLink ? link(address[0], [address[0]]) : "<");
      at += isLink ? address[0].length + 2 : 1;
    } else if (letter === "[") {
      open("[");
      at++;
    } else if (letter === "]") {
      const target = numOpen.get("[") ? matchAt(TARGET, text, at + 1) : null;
      const nodes = target && close("[");
      add(nodes ? link(target[1], nodes) : "]");
      at += 1 + (nodes ? target[0].length : 0);
    } else if (letter === "*" || letter === "_" || letter === "~") {
      at += emphasis(text, at, { add, open, close });
    } else {
      add(letter === "\n" && text[at - 1] === " " && text[at - 2] === " " ? el("br") : letter);
      at++;
    }
  }
  collapse(1);
  const made = document.createDocumentFragment();
  let words = "";
  for (const node of frames[0].nodes) {
    if (typeof node === "string") {
      words += node;
      continue;
    }
    made.append(words, node);
    words = "";
  }
  made.append(words);
  return made;
}

function emphasis(text, at, { add, open, close }) {
  const run = runLength(text, at);
  const mark = text[at].repeat(run);
  const before = text[at - 1] ?? " ";
  const after = text[at + run] ?? " ";
  // Underscores inside a word are part of its name.
  const isInWord = mark[0] === "_" && WORD.test(before) && WORD.test(after);
  const tag = ELEMENTS[mark];
  const nodes = tag && !isInWord && /\S/.test(before) ? close(mark) : null;
  if (nodes) add(run === 3 ? el("strong", {}, el("em", {}, ...nodes)) : el(tag, {}, ...nodes));
  else if (tag && !isInWord && /\S/.test(after)) open(mark);
  else add(mark);
  return run;
}

function addAddress(text, at, add, isInLink) {
  const match = matchAt(ADDRESS, text, at);
  if (!match) {
    add(text[at]);
    return 1;
  }
  // What often follows an address is not part of it.
  let address = withoutTail(match[0], "*_~.,:;!?]");
  if (!address.includes("(")) address = withoutTail(address, ").,:;!?]");
  add(isInLink ? address : link(address, [address]));
  return address.length;
}

/** Makes a link that shows where it leads; an address that is not of the web stays text. */
function link(address, nodes) {
  let url;
  try {
    url = new URL(address);
  } catch {
    url = null;
  }
  if (!url || !/^https?:$/.test(url.protocol)) return el("span", {}, ...nodes, ` (${address})`);
  const attributes = { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href };
  const node = el("a", attributes, ...nodes);
  const isShown = node.textContent.replace(/\/$/, "") === url.href.replace(/\/$/, "");
  return isShown ? node : el("span", {}, node, el("span", { class: "target" }, ` (${url.host})`));
}

function withoutTail(text, letters) {
  let end = text.length;
  while (letters.includes(text[end - 1])) end--;
  return text.slice(0, end);
}

function codeText(code) {
  const text = code.replaceAll("\n", " ");
  return text.startsWith(" ") && text.endsWith(" ") && text.trim() ? text.slice(1, -1) : text;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

function closingRun(text, at, run) {
  for (let next = text.indexOf("`", at); next >= 0; next = text.indexOf("`", next)) {
    const length = runLength(text, next);
    if (length === run) return next;
    next += length;
  }
  return -1;
}
