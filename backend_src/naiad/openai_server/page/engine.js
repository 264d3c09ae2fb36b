// The engine view: what one model's engine is doing, twice a second.
//
// engineView(root, api) fills the element `root` and returns {show(), hide()}. `api.json(path)` fetches JSON;
// `api.events(path, {onEvent(name, data), signal})` reads server-sent events until the stream ends or the signal
// aborts. Nothing is fetched while the view is hidden or the page is in the background.

const STATES = {
  decode: "generating",
  prefill: "reading prompt",
  paused: "paused",
  waiting: "waiting",
  compiling: "compiling grammar",
};
const BLOCKS = [
  ["free", "Free"],
  ["cached", "Cached"],
  ["used", "In use"],
  ["shared", "Shared"],
];
const SERIES = [
  ["decode", "Decode"],
  ["accepted", "Drafts accepted"],
  ["prefill", "Prefill"],
];
const HISTORY = 120;
const GUTTER = 34; // room for the axis of the timeline, in pixels
const SHARE_S = 10;
const RETRY_MS = [500, 1000, 2000, 5000];

// Registered as colours, canvases read them as the theme has them.
for (const name of "prefill decode accepted paused step free cached used shared on-shared text soft line".split(" ")) {
  CSS.registerProperty?.({ name: `--ev-${name}`, syntax: "<color>", inherits: true, initialValue: "#888" });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Set a text only where it changes, so that screen readers and layout stay quiet. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function number(value) {
  return value < 100 && value % 1 ? tenth.format(value) : whole.format(value);
}

function milliseconds(ms) {
  if (ms === null) return "–";
  if (ms >= 10000) return `${tenth.format(ms / 1000)} s`;
  return `${ms < 100 ? tenth.format(ms) : whole.format(ms)} ms`;
}

function seconds(s) {
  if (s < 100) return `${tenth.format(s)} s`;
  return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
}

function percent(part, all) {
  return all > 0 ? `${whole.format((100 * part) / all)} %` : "–";
}

/** A canvas that is as wide as its box, sharp on every screen, and drawn again when the box changes. */
class Drawing {
  constructor(className, draw) {
    this.canvas = make("canvas", { class: className });
    this.draw = draw;
    this.context = this.canvas.getContext("2d");
    this.observer = new ResizeObserver(() => this.paint());
    this.observer.observe(this.canvas);
  }

  paint() {
    const { canvas, context } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== columns || canvas.height !== rows) {
      canvas.width = columns;
      canvas.height = rows;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    this.draw(context, width, height, (name) => style.getPropertyValue(`--ev-${name}`).trim());
  }
}

/** A number with a name, a remark below it and, if wanted, its course over the last minute. */
class Tile {
  constructor(name, hasCourse = false) {
    this.value = make("dd", { class: "ev-value" }, "–");
    this.remark = make("dd", { class: "ev-remark" }, "\u00a0");
    this.node = make("div", { class: "ev-tile" }, make("dt", {}, name), this.value, this.remark);
    this.course = [];
    if (hasCourse) {
      this.drawing = new Drawing("ev-spark", (...all) => this.plot(...all));
      this.drawing.canvas.setAttribute("aria-hidden", "true");
      this.node.append(this.drawing.canvas);
    }
  }

  set(value, remark, plotted) {
    write(this.value, value);
    write(this.remark, remark);
    if (!this.drawing) return;
    this.course.push(plotted);
    if (this.course.length > HISTORY) this.course.shift();
    this.drawing.paint();
  }

  clear() {
    this.course = [];
    write(this.value, "–");
    write(this.remark, "\u00a0");
    this.drawing?.paint();
  }

  plot(context, width, height, colour) {
    if (this.course.length < 2) return;
    const most = Math.max(1, ...this.course);
    const first = HISTORY - this.course.length;
    const x = (index) => ((first + index) / (HISTORY - 1)) * width;
    const y = (value) => height - 2 - (value / most) * (height - 4);
    context.beginPath();
    this.course.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.strokeStyle = colour("decode");
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(x(0), height);
    context.globalAlpha = 0.15;
    context.fillStyle = colour("decode");
    context.fill();
    context.globalAlpha = 1;
  }
}

function legend(entries) {
  const values = {};
  const list = make("dl", { class: "ev-legend" });
  for (const [key, name] of entries) {
    values[key] = make("dd", {}, "");
    const swatch = make("span", { class: `ev-swatch ev-is-${key}`, "aria-hidden": "true" });
    list.append(make("div", {}, make("dt", {}, swatch, name), values[key]));
  }
  return [list, values];
}

function panel(title, className, ...children) {
  const heading = make("h3", {}, title);
  return make("section", { class: `ev-panel ${className}` }, heading, ...children);
}

/** The last steps as stacked bars, and below them how long each took. A cursor tells one step in words. */
class Timeline {
  constructor() {
    this.steps = null;
    this.cursor = null; // the number of a step; null: the newest
    this.drawing = new Drawing("ev-timeline", (...all) => this.plot(...all));
    const [list, values] = legend(SERIES);
    this.values = values;
    this.words = make("p", { class: "ev-words" }, "No steps yet.");
    this.box = this.drawing.canvas;
    for (const [name, value] of Object.entries({
      tabindex: "0",
      role: "slider",
      "aria-label": "The last steps, the newest on the right",
      "aria-valuemin": "0",
      "aria-valuemax": "0",
      "aria-valuenow": "0",
      "aria-valuetext": "No steps yet",
    })) {
      this.box.setAttribute(name, value);
    }
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.choose(null));
    this.box.addEventListener("blur", () => this.choose(null));
    this.node = panel("Batch of the last steps", "ev-steps", list, this.box, this.words);
  }

  set(steps) {
    this.steps = steps;
    const sums = this.sums();
    for (const [key] of SERIES) write(this.values[key], `${number(sums[key])} tokens`);
    this.describe();
    this.drawing.paint();
  }

  clear() {
    this.steps = null;
    this.cursor = null;
    for (const [key] of SERIES) write(this.values[key], "–");
    this.describe();
    this.drawing.paint();
  }

  sums() {
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    const { prefill_tokens, decode_rows, accepted_tokens } = this.steps;
    return { prefill: sum(prefill_tokens), decode: sum(decode_rows), accepted: sum(accepted_tokens) };
  }

  get count() {
    return this.steps ? this.steps.ms.length : 0;
  }

  /** The index of the chosen step; without a choice that of the newest. */
  get index() {
    if (this.cursor === null) return this.count - 1;
    return Math.min(this.count - 1, Math.max(0, this.cursor - this.steps.first));
  }

  choose(index) {
    this.cursor = index === null || !this.count ? null : this.steps.first + index;
    this.describe();
    this.drawing.paint();
  }

  press(event) {
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 };
    let index = this.index;
    if (event.key in moves) index += moves[event.key];
    else if (event.key === "Home") index = 0;
    else if (event.key === "End" || event.key === "Escape") index = this.count;
    else return;
    event.preventDefault();
    this.choose(index >= this.count ? null : Math.max(0, index));
  }

  point(event) {
    const { left, width } = this.box.getBoundingClientRect();
    const share = (event.clientX - left - GUTTER) / (width - GUTTER);
    const place = Math.floor(share * HISTORY) - (HISTORY - this.count);
    this.choose(place < 0 || place >= this.count ? null : place);
  }

  describe() {
    if (!this.count) {
      write(this.words, "No steps yet.");
      this.box.setAttribute("aria-valuetext", "No steps yet");
      return;
    }
    const { first, ms, prefill_tokens, decode_rows, draft_tokens, accepted_tokens, preemptions } = this.steps;
    const at = this.index;
    const parts = [
      `${milliseconds(ms[at])}`,
      `${number(prefill_tokens[at])} prompt tokens`,
      `${number(decode_rows[at])} sequences decode`,
    ];
    if (draft_tokens[at]) parts.push(`${accepted_tokens[at]} of ${draft_tokens[at]} drafts accepted`);
    if (preemptions[at]) parts.push(`${preemptions[at]} preempted`);
    const words = `Step ${whole.format(first + at + 1)}: ${parts.join(", ")}.`;
    write(this.words, words);
    this.box.setAttribute("aria-valuemin", String(first + 1));
    this.box.setAttribute("aria-valuemax", String(first + this.count));
    this.box.setAttribute("aria-valuenow", String(first + at + 1));
    this.box.setAttribute("aria-valuetext", words);
  }

  plot(context, width, height, colour) {
    const lane = 34;
    const bottom = height - lane - 20;
    this.axis(context, width, bottom, colour);
    if (!this.count) return;
    const { ms, prefill_tokens, decode_rows, accepted_tokens, preemptions } = this.steps;
    const most = this.most();
    const longest = Math.max(...ms, 0.001);
    const slot = (width - GUTTER) / HISTORY;
    const left = (at) => GUTTER + (HISTORY - this.count + at) * slot;
    const bar = Math.max(1, slot - (slot > 4 ? 1 : 0.5));
    const scaled = (tokens) => Math.sqrt(tokens / most) * (bottom - 12);
    for (let at = 0; at < this.count; at += 1) {
      const x = left(at);
      let below = 0;
      for (const [key, tokens] of [
        ["decode", decode_rows[at]],
        ["accepted", accepted_tokens[at]],
        ["prefill", prefill_tokens[at]],
      ]) {
        if (!tokens) continue;
        const [from, to] = [scaled(below), scaled(below + tokens)];
        context.fillStyle = colour(key);
        context.fillRect(x, bottom - to, bar, Math.max(1, to - from));
        below += tokens;
      }
      if (preemptions[at]) this.flag(context, x + bar / 2, colour("paused"));
      context.fillStyle = colour("step");
      const taken = Math.max(1, (ms[at] / longest) * lane);
      context.fillRect(x, height - taken, bar, taken);
    }
    context.fillStyle = colour("soft");
    context.textAlign = "left";
    context.fillText(`step time, ${milliseconds(longest)} at most`, GUTTER, height - lane - 2);
    if (this.cursor !== null) {
      const x = left(this.index);
      context.strokeStyle = colour("text");
      context.lineWidth = 1;
      context.strokeRect(x - 1, 0.5, bar + 2, height - 1);
    }
  }

  most() {
    const { prefill_tokens, decode_rows, accepted_tokens } = this.steps;
    const totals = prefill_tokens.map((tokens, at) => tokens + decode_rows[at] + accepted_tokens[at]);
    return Math.max(4, ...totals);
  }

  /** A triangle above a step that began with preemptions: a shape, not only a colour. */
  flag(context, x, fill) {
    context.fillStyle = fill;
    context.beginPath();
    context.moveTo(x - 4, 2);
    context.lineTo(x + 4, 2);
    context.lineTo(x, 9);
    context.fill();
  }

  /** Lines at round numbers of tokens; the scale grows with their square root, so that single tokens show. */
  axis(context, width, bottom, colour) {
    context.font = `11px ${getComputedStyle(this.box).fontFamily}`;
    context.textBaseline = "bottom";
    context.textAlign = "right";
    context.fillStyle = colour("soft");
    context.fillText("tokens", GUTTER + 6, 11);
    context.lineWidth = 1;
    const most = this.count ? this.most() : 4;
    let last = Infinity;
    for (const tokens of [0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]) {
      if (tokens > most) break;
      const y = Math.round(bottom - Math.sqrt(tokens / most) * (bottom - 12)) + 0.5;
      if (last - y < 15) continue;
      last = y;
      context.strokeStyle = colour("line");
      context.beginPath();
      context.moveTo(GUTTER, y);
      context.lineTo(width, y);
      context.stroke();
      if (y > 22) context.fillText(whole.format(tokens), GUTTER - 6, y + 6);
    }
  }
}

/** The blocks of one group of layers as a map. */
class BlockMap {
  constructor() {
    this.cells = new Uint8Array(0);
    this.drawing = new Drawing("ev-map", (...all) => this.plot(...all));
    this.drawing.canvas.setAttribute("role", "img");
    this.drawing.canvas.setAttribute("aria-label", "The KV cache is not known.");
    const [list, values] = legend(BLOCKS);
    this.values = values;
    this.title = make("p", { class: "ev-words" }, "\u00a0");
    this.node = make("div", { class: "ev-group" }, list, this.drawing.canvas, this.title);
  }

  set(blocks, blockSize) {
    this.cells = Uint8Array.from(atob(blocks.cells), (char) => char.charCodeAt(0));
    const all = BLOCKS.reduce((sum, [key]) => sum + blocks[key], 0);
    for (const [key] of BLOCKS) write(this.values[key], `${number(blocks[key])} · ${percent(blocks[key], all)}`);
    const width = blocks.blocks_per_cell;
    const each = width === 1 ? "one square a block" : `one square for ${width} blocks`;
    const seen = blocks.window === null ? "" : `, window of ${number(blocks.window)} tokens`;
    write(this.title, `${number(all)} blocks of ${blockSize} tokens${seen}; ${each}.`);
    const summary = BLOCKS.map(([key, name]) => `${name.toLowerCase()} ${blocks[key]}`).join(", ");
    this.drawing.canvas.setAttribute("aria-label", `${all} blocks of the KV cache: ${summary}.`);
    this.drawing.paint();
  }

  clear() {
    this.cells = new Uint8Array(0);
    for (const [key] of BLOCKS) write(this.values[key], "–");
    write(this.title, "\u00a0");
    this.drawing.canvas.setAttribute("aria-label", "The KV cache is not known.");
    this.drawing.paint();
  }

  plot(context, width, height, colour) {
    const count = this.cells.length;
    if (!count) return;
    // The largest squares with which all cells fit.
    let columns = Math.max(1, Math.floor(Math.sqrt((count * width) / height)));
    while (Math.ceil(count / columns) * (width / columns) > height) columns += 1;
    const size = Math.min(width / columns, 20);
    const gap = size > 5 ? 1 : size > 3 ? 0.5 : 0;
    const fills = BLOCKS.map(([key]) => colour(key));
    const mark = colour("on-shared");
    for (let at = 0; at < count; at += 1) {
      const state = this.cells[at];
      const [x, y] = [(at % columns) * size, Math.floor(at / columns) * size];
      context.fillStyle = fills[state];
      context.fillRect(x, y, size - gap, size - gap);
      if (state === 3 && size > 4) {
        // A dot: a shape, not only a colour.
        context.fillStyle = mark;
        const dot = Math.max(1.5, size / 4);
        context.fillRect(x + (size - gap - dot) / 2, y + (size - gap - dot) / 2, dot, dot);
      }
    }
  }
}

/** A table whose rows keep their nodes from one update to the next. */
class Table {
  constructor(caption, columns, empty) {
    this.rows = new Map();
    this.columns = columns;
    this.body = make("tbody");
    const heads = columns.map(([name, className]) => make("th", { scope: "col", class: className }, name));
    this.table = make(
      "table",
      { class: "ev-table" },
      make("caption", { class: "ev-hidden" }, caption),
      make("thead", {}, make("tr", {}, ...heads)),
      this.body,
    );
    this.empty = make("p", { class: "ev-empty" }, empty);
    this.node = make(
      "div",
      { class: "ev-scroll", tabindex: "0", role: "region", "aria-label": caption },
      this.table,
      this.empty,
    );
  }

  /** Show these entries in their order; `fill(cells, entry)` writes the cells of one row. */
  set(entries, keyOf, fill) {
    const keys = new Set(entries.map(keyOf));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    let before = this.body.firstChild;
    for (const entry of entries) {
      const key = keyOf(entry);
      let row = this.rows.get(key);
      if (!row) {
        row = this.row();
        this.rows.set(key, row);
      }
      fill(row.cells, entry, row.node);
      if (row.node === before) before = before.nextSibling;
      else this.body.insertBefore(row.node, before);
    }
    this.empty.hidden = entries.length > 0;
  }

  row() {
    const cells = this.columns.map(([name, className], index) => {
      const attributes = { class: className, "data-name": name };
      return index ? make("td", attributes) : make("th", { scope: "row", ...attributes });
    });
    return { node: make("tr", {}, ...cells), cells };
  }
}

/** A bar in a cell, with its words; made once, then only its lengths change. */
function bar(cell, className, words, lengths) {
  if (!cell.firstChild) {
    const parts = Object.keys(lengths).map((name) => make("span", { class: `ev-part ev-is-${name}` }));
    cell.append(
      make("span", { class: `ev-bar ${className}`, "aria-hidden": "true" }, ...parts),
      make("span", { class: "ev-bar-words" }),
    );
  }
  const [box, text] = cell.children;
  Object.values(lengths).forEach((length, index) => {
    const clipped = Math.min(1, Math.max(0, length || 0)).toFixed(4);
    box.children[index].style.setProperty("--ev-length", clipped);
  });
  write(text, words);
}

class Requests {
  constructor() {
    this.table = new Table(
      "Requests that run or wait",
      [
        ["Request", "ev-id"],
        ["State", "ev-state"],
        ["Prompt and answer", "ev-progress"],
        ["Cached", "ev-number ev-wide"],
        ["Waited", "ev-number ev-wide"],
        ["Runs for", "ev-number ev-wide"],
        ["Priority", "ev-number ev-wide"],
        ["Tenant", "ev-tenant ev-wide"],
      ],
      "No request runs or waits.",
    );
    this.more = make("p", { class: "ev-words" }, "\u00a0");
    this.node = panel("Requests", "ev-requests", this.table.node, this.more);
  }

  set(view) {
    this.table.set(
      view.requests,
      (request) => request.id,
      (cells, request, row) => this.fill(cells, request, row),
    );
    const left = view.requests_left_out;
    const notes = [`${number(view.running)} run, ${number(view.waiting)} wait`];
    if (left) notes.push(`${number(left)} are not listed`);
    write(this.more, `${notes.join("; ")}.`);
  }

  clear() {
    this.table.set([], () => "", () => {});
    write(this.more, "\u00a0");
  }

  fill([id, state, progress, cached, waited, runs, priority, tenant], request, row) {
    if (!id.firstChild) {
      // Where there is little room, only what tells requests apart is shown.
      const [prefix] = request.id.match(/^[a-z]+[-_]|/);
      id.append(make("span", { class: "ev-wide" }, prefix), request.id.slice(prefix.length));
      id.title = request.id;
    }
    row.className = `ev-row ev-${request.state}`;
    if (!state.firstChild) state.append(make("span", { class: "ev-badge" }));
    write(state.firstChild, STATES[request.state] ?? request.state);
    const read = Math.min(request.computed_tokens, request.prompt_tokens);
    bar(
      progress,
      "ev-two",
      `${number(read)} / ${number(request.prompt_tokens)} + ${number(request.output_tokens)} / ${number(
        request.max_tokens,
      )}`,
      {
        prefill: read / request.prompt_tokens,
        decode: request.output_tokens / request.max_tokens,
      },
    );
    write(cached, number(request.cached_tokens));
    write(waited, seconds(request.wait_s));
    write(runs, request.run_s ? seconds(request.run_s) : "–");
    write(priority, String(request.priority));
    write(tenant, tenantName(request.tenant));
  }
}

function tenantName(label) {
  return label ? label.slice(0, 6) : "none";
}

class Tenants {
  constructor() {
    this.seen = new Map();
    this.table = new Table(
      "Tenants' shares of the computed tokens",
      [
        ["Tenant", "ev-tenant"],
        ["Share", "ev-progress"],
        ["Running", "ev-number"],
        ["Waiting", "ev-number"],
      ],
      "No tenant has requests.",
    );
    this.node = panel("Tenants' shares", "ev-tenants", this.table.node);
  }

  set(view) {
    const rates = new Map(view.tenants.map((each) => [each.tenant, this.rate(each, view.time)]));
    for (const tenant of this.seen.keys()) if (!rates.has(tenant)) this.seen.delete(tenant);
    const all = [...rates.values()].reduce((sum, rate) => sum + rate, 0);
    this.table.set(
      view.tenants,
      (each) => each.tenant,
      ([name, share, running, waiting], each) => {
        write(name, tenantName(each.tenant));
        name.title = each.tenant;
        const rate = rates.get(each.tenant);
        const parts = [`${number(Math.round(rate))} tokens/s`];
        // Who does not see all tenants does not know the share.
        if (view.totals) parts.unshift(percent(rate, all));
        bar(share, "ev-one", parts.join(" · "), { prefill: all ? rate / all : 0 });
        write(running, number(each.running));
        write(waiting, number(each.waiting));
      },
    );
  }

  clear() {
    this.seen.clear();
    this.table.set([], () => "", () => {});
  }

  /** Tokens a second over the last seconds; the counter begins anew when the tenant comes back. */
  rate({ tenant, tokens }, now) {
    let points = this.seen.get(tenant) ?? [{ time: now - 0.5, tokens: 0 }];
    if (tokens < points[points.length - 1].tokens) points = [{ time: now - 0.5, tokens: 0 }];
    points.push({ time: now, tokens });
    while (points.length > 2 && points[0].time < now - SHARE_S) points.shift();
    this.seen.set(tenant, points);
    return (tokens - points[0].tokens) / Math.max(0.5, now - points[0].time);
  }
}

class Drafts {
  constructor() {
    this.table = new Table(
      "How often each place of a draft was accepted since the start",
      [
        ["Place", "ev-number"],
        ["Accepted", "ev-progress"],
      ],
      "This engine has not tried any drafts.",
    );
    this.node = panel("Drafts accepted by place", "ev-drafts", this.table.node);
  }

  set({ total_rows: rows, accepted_at: accepted }) {
    let last = accepted.length;
    while (last && !accepted[last - 1]) last -= 1;
    const entries = rows ? accepted.slice(0, Math.max(1, last)).map((count, at) => [at + 1, count]) : [];
    this.table.set(
      entries,
      ([place]) => place,
      ([place, share], [number_, count]) => {
        write(place, String(number_));
        bar(share, "ev-one", `${percent(count, rows)} · ${number(count)}`, { accepted: count / rows });
      },
    );
  }

  clear() {
    this.table.set([], () => "", () => {});
  }
}

class View {
  constructor(root) {
    this.status = make("span", { class: "ev-status", role: "status" }, "Not connected");
    this.models = make("select", { "aria-label": "Model" });
    const heading = make("h2", {}, "Engine");
    const head = make("header", { class: "ev-head" }, heading, this.models, this.status);
    this.tiles = {
      output: new Tile("Output tokens/s", true),
      prefill: new Tile("Prompt tokens/s", true),
      first: new Tile("Time to first token"),
      inter: new Tile("Between tokens"),
      running: new Tile("Running"),
      cache: new Tile("KV cache"),
      hits: new Tile("Prefix cache hits"),
      drafts: new Tile("Drafts accepted"),
    };
    const { running, ...ofAll } = this.tiles;
    const tiles = Object.values(this.tiles).map((tile) => tile.node);
    this.timeline = new Timeline();
    this.requests = new Requests();
    this.tenants = new Tenants();
    this.drafts = new Drafts();
    this.maps = [];
    this.mapPanel = panel("KV cache", "ev-cache");
    this.started = null;
    this.own = make("p", { class: "ev-words ev-own" }, "Only operators see what the engine does for all tenants.");
    this.own.hidden = true;
    this.ofAll = [this.timeline, this.drafts, ...Object.values(ofAll)].map((part) => part.node);
    this.ofAll.push(this.mapPanel);
    this.body = make(
      "div",
      { class: "ev-body" },
      this.own,
      make("dl", { class: "ev-tiles" }, ...tiles),
      this.timeline.node,
      this.mapPanel,
      this.requests.node,
      this.tenants.node,
      this.drafts.node,
    );
    root.classList.add("ev");
    root.append(head, this.body);
  }

  tell(state, words) {
    this.status.className = `ev-status ev-is-${state}`;
    write(this.status, words);
  }

  clear() {
    Object.values(this.tiles).forEach((tile) => tile.clear());
    for (const part of [this.timeline, ...this.maps, this.requests, this.tenants, this.drafts]) part.clear();
  }

  set(view) {
    if (this.started !== null && this.started !== view.started) this.clear();
    this.started = view.started;
    this.tell("live", "Live");
    this.own.hidden = view.totals !== null;
    for (const node of this.ofAll) node.hidden = view.totals === null;
    if (view.totals) this.setTotals(view.totals, view.block_size);
    this.tiles.running.set(`${number(view.running)} / ${number(view.max_running)}`, `${number(view.waiting)} wait`);
    this.requests.set(view);
    this.tenants.set(view);
  }

  setTotals(totals, blockSize) {
    const { tiles } = this;
    const { first_token: first, inter_token: inter, drafts, kv } = totals;
    const [output, prompts] = [totals.output_tokens_per_s, totals.prefill_tokens_per_s];
    tiles.output.set(number(output), `${number(totals.total_output_tokens)} since start`, output);
    tiles.prefill.set(number(prompts), "computed", prompts);
    tiles.first.set(milliseconds(first.p50_ms), `p95 ${milliseconds(first.p95_ms)}`);
    tiles.inter.set(milliseconds(inter.p50_ms), `p95 ${milliseconds(inter.p95_ms)}`);
    const sum = (...keys) => kv.reduce((all, group) => all + keys.reduce((part, key) => part + group[key], 0), 0);
    const held = sum("used", "shared");
    tiles.cache.set(percent(held, sum("free", "cached") + held), `${number(totals.total_preemptions)} preemptions`);
    tiles.hits.set(percent(totals.total_hit_tokens, totals.total_queried_tokens), "since start");
    tiles.drafts.set(percent(drafts.accepted, drafts.proposed), `${number(drafts.proposed)} in 30 s`);
    this.timeline.set(totals.steps);
    this.drafts.set(drafts);
    while (this.maps.length < kv.length) {
      const map = new BlockMap();
      this.maps.push(map);
      this.mapPanel.append(map.node);
    }
    while (this.maps.length > kv.length) this.maps.pop().node.remove();
    kv.forEach((blocks, index) => this.maps[index].set(blocks, blockSize));
  }
}

export function engineView(root, api) {
  const view = new View(root);
  let model = null;
  let stop = null; // ends the stream that is open

  let isShown = false;
  const wanted = () => isShown && !document.hidden;

  async function findModels() {
    const { data } = await api.json("/v1/models");
    const names = data.map((each) => each.id);
    if (!names.includes(model)) model = names[0] ?? null;
    const options = names.map((name) => make("option", { value: name }, name));
    view.models.replaceChildren(...options);
    if (model !== null) view.models.value = model;
    view.models.disabled = names.length < 2;
  }

  function take(name, data) {
    const told = typeof data === "string" ? JSON.parse(data) : data;
    if (name === "snapshot") view.set(told);
    else if (name === "restarted") view.clear();
    else if (name === "away") {
      view.clear();
      view.tell("away", `The engine is away: ${told.message}`);
    } else if (name === "gone") {
      view.clear();
      view.tell("away", told.message);
    }
  }

  async function watch(signal) {
    let failures = 0;
    while (!signal.aborted) {
      try {
        await findModels();
        if (model === null) throw new Error("No model serves now.");
        const onEvent = (name, data) => {
          failures = 0;
          if (!signal.aborted) take(name, data);
        };
        await api.events(`/engine/events?model=${encodeURIComponent(model)}`, { onEvent, signal });
      } catch (error) {
        if (signal.aborted) return;
        view.tell("away", `Not connected: ${error.message}`);
      }
      const pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  function update() {
    if (wanted() && stop === null) {
      stop = new AbortController();
      watch(stop.signal);
    } else if (!wanted() && stop !== null) {
      stop.abort();
      stop = null;
    }
  }

  view.models.addEventListener("change", () => {
    model = view.models.value;
    view.clear();
    stop?.abort();
    stop = null;
    update();
  });
  document.addEventListener("visibilitychange", update);

  return {
    show() {
      isShown = true;
      update();
    },
    hide() {
      isShown = false;
      update();
    },
  };
}
