// The live page. Frames come in over one stream (cbatch/server/live.py), prompts go out. What is
// not known is a dash; texts are only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const make = (tag, name, parent) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  parent?.append(node);
  return node;
};
const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const percent = (share) => `${Math.round(100 * share)} %`;
const count = (number) => number.toLocaleString("en");
const figures = (value) => value.toFixed(value < 9.95 ? 2 : value < 99.5 ? 1 : 0);
const time = (seconds) => (seconds < 1 ? [figures(1e3 * seconds), "ms"] : [figures(seconds), "s"]);
const DASH = "–";

const colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "own", "accepted", "rejected", "read", "cached", "free"])
    colours[name] = style.getPropertyValue(`--${name}`);
}

// A canvas as large as its box, in device pixels: what is drawn stays sharp.
function fit(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
  canvas.height = Math.max(1, Math.round(height * devicePixelRatio));
}

// ---- charts: the last minute ------------------------------------------------------------------

class Chart {
  static SECONDS = [15, 60]; // shown at first, and at most

  constructor(name, colour, { ceiling = 0 } = {}) {
    [this.canvas, this.output] = [$(`c-${name}`), $(`v-${name}`)];
    this.colour = colour;
    this.ceiling = ceiling; // the least that the scale reaches
    this.points = []; // [second, value or null, low, high]
  }

  add(at, value, low = 0, high = value) {
    this.points.push([at, value, low, high]);
    while (this.points[0][0] < at - Chart.SECONDS[1]) this.points.shift();
  }

  say(text, unit = "") {
    if (this.output.dataset.said === text + unit) return;
    this.output.dataset.said = text + unit;
    this.output.replaceChildren(text);
    if (unit) make("small", "", this.output).textContent = ` ${unit}`;
  }

  draw() {
    const { width, height } = this.canvas, pen = this.canvas.getContext("2d");
    const ratio = devicePixelRatio, line = 1.5 * ratio;
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = colours.line;
    pen.fillRect(0, height - ratio, width, ratio);
    if (!this.points.length) return;
    const most = Math.max(this.ceiling, ...this.points.map((p) => p[3] ?? 0)) || 1;
    const end = this.points.at(-1)[0], long = Math.max(Chart.SECONDS[0], end - this.points[0][0]);
    const x = (at) => width - ((end - at) / long) * width - line;
    const y = (value) => height - line - (value / most) * (height - 2 * line);
    for (const run of this.runs()) {
      const area = new Path2D(), edge = new Path2D();
      for (const [at, value, , high] of run) {
        area.lineTo(x(at), y(high));
        edge.lineTo(x(at), y(value));
      }
      for (const [at, , low] of [...run].reverse()) area.lineTo(x(at), y(low));
      pen.fillStyle = pen.strokeStyle = colours[this.colour];
      pen.globalAlpha = 0.14;
      pen.fill(area);
      pen.globalAlpha = 1;
      pen.lineWidth = line;
      pen.lineJoin = "round";
      pen.stroke(edge);
    }
  }

  // Stretches without a gap: where nothing is known no line is drawn.
  runs() {
    const runs = [[]];
    for (const point of this.points)
      if (point[1] !== null) runs.at(-1).push(point);
      else if (runs.at(-1).length) runs.push([]);
    return runs.filter((run) => run.length);
  }
}

// ---- slots: a row each, a column a step, swept like an oscilloscope ---------------------------

const PAST = 2048; // columns remembered, for another width
const AHEAD = 6; // columns cleared before the sweep
const NONE = 0, DECODE = 1, PROMPT = 2;

class Slot {
  static deepest = 3; // drafts that a column has room for

  constructor(number, list) {
    this.node = make("li", "", list);
    this.name = make("span", "slot", this.node);
    make("span", "unseen", this.name).textContent = "slot ";
    this.name.append(String(number));
    this.canvas = make("canvas", "", this.node);
    this.canvas.setAttribute("aria-hidden", "true");
    [this.tokens, this.k, this.share] = ["tokens", "k", "share"].map((n) => make("span", n, this.node));
    this.kinds = new Uint8Array(PAST);
    this.drafted = new Uint8Array(PAST);
    this.accepted = new Uint8Array(PAST);
    this.take(null);
  }

  // A row of the frame; null: the slot is free.
  take(row) {
    const call = row?.[1] ?? null;
    if (!row || call !== this.call) [this.recentDrafted, this.recentAccepted, this.lastK] = [0, 0, null];
    [this.row, this.call] = [row, call];
  }

  note(tick, kind, drafted, accepted) {
    const at = tick % PAST;
    [this.kinds[at], this.drafted[at], this.accepted[at]] = [kind, drafted, accepted];
    if (kind !== DECODE || !this.row) return;
    this.lastK = drafted;
    this.recentDrafted = 0.98 * this.recentDrafted + drafted;
    this.recentAccepted = 0.98 * this.recentAccepted + accepted;
  }

  describe(mine) {
    this.node.className = this.row ? (mine ? "mine" : "") : "idle";
    if (!this.row) return [this.tokens, this.k, this.share].forEach((node, at) => put(node, ["", "", "free"][at]));
    const [, , prompt, known, todo, belief] = this.row;
    const reads = todo > 1;
    put(this.tokens, reads ? `${count(prompt)} prompt` : `${count(known - prompt)} tokens`);
    put(this.k, reads ? "reads" : this.lastK === null ? DASH : `k ${this.lastK}`);
    const share = this.recentDrafted >= 1 ? percent(this.recentAccepted / this.recentDrafted) : DASH;
    put(this.share, reads ? percent(1 - todo / known) : share);
    this.share.title = belief === null ? "of late" : `of late; the engine expects ${percent(belief)}`;
  }

  fit(tick) {
    fit(this.canvas);
    this.unit = this.canvas.height / (Slot.deepest + 1);
    const css = this.unit / devicePixelRatio;
    this.pitch = Math.round(Math.max(3, Math.min(12, 0.62 * css)) * devicePixelRatio);
    this.columns = Math.max(1, Math.floor(this.canvas.width / this.pitch));
    const first = Math.max(0, tick - Math.min(this.columns, PAST) + AHEAD + 1);
    for (let each = first; each < tick; each++) this.mark(each);
  }

  sweep(tick) {
    const x = (tick % this.columns) * this.pitch;
    this.canvas.getContext("2d").clearRect(x, 0, this.pitch * (1 + AHEAD), this.canvas.height);
    this.mark(tick);
  }

  mark(tick) {
    const at = tick % PAST, kind = this.kinds[at];
    if (kind === NONE) return;
    const pen = this.canvas.getContext("2d"), { unit, pitch } = this, height = this.canvas.height;
    const x = (tick % this.columns) * pitch, wide = Math.max(1, pitch - Math.round(devicePixelRatio));
    if (kind === PROMPT) {
      pen.globalAlpha = 0.75;
      pen.fillStyle = colours.read;
      pen.fillRect(x, 0, wide, height);
      pen.globalAlpha = 1;
      return;
    }
    const narrow = Math.max(1, Math.round(wide / 3)), gap = unit >= 3 * devicePixelRatio ? Math.round(devicePixelRatio) : 0;
    for (let j = 0; j <= this.drafted[at]; j++) {
      const rejected = j > this.accepted[at];
      pen.fillStyle = j === 0 ? colours.own : rejected ? colours.rejected : colours.accepted;
      const top = Math.round(height - (j + 1) * unit) + gap, bottom = Math.round(height - j * unit);
      const across = rejected ? narrow : wide;
      pen.fillRect(x + Math.floor((wide - across) / 2), top, across, Math.max(1, bottom - top));
    }
  }
}

const board = {
  slots: [], tick: 0, mine: null, quietSince: 0,

  // As many rows as slots were in use of late: the lowest free slot is always taken next.
  resize(used, now) {
    if (used >= this.slots.length) this.quietSince = now;
    if (used > this.slots.length || now - this.quietSince > 8) {
      while (this.slots.length < used) this.slots.push(new Slot(this.slots.length, $("rows")));
      while (this.slots.length > used) this.slots.pop().node.remove();
      const density = used <= 2 ? 5 : used <= 4 ? 4 : used <= 12 ? 3 : used <= 40 ? 2 : 1;
      $("rows").dataset.density = density;
      $("nobody").hidden = used > 0;
      this.fit();
    }
  },

  fit() { for (const slot of this.slots) slot.fit(this.tick); },

  show(rows, steps, now) {
    const used = Math.max(0, ...rows.map((row) => row[0] + 1), ...steps.flatMap(([slots]) => slots.map((s) => s + 1)));
    this.resize(used, now);
    const held = new Map(rows.map((row) => [row[0], row]));
    this.slots.forEach((slot, at) => slot.take(held.get(at) ?? null));
    const deepest = Math.max(Slot.deepest, ...steps.flatMap((step) => step[1]));
    if (deepest > Slot.deepest) {
      Slot.deepest = deepest;
      this.fit();
    }
    for (const [slots, drafted, accepted, chunk] of steps) {
      for (const slot of this.slots) slot.kinds[this.tick % PAST] = NONE;
      slots.forEach((at, i) => this.slots[at]?.note(this.tick, chunk[i] > 1 ? PROMPT : DECODE, drafted[i], accepted[i]));
      for (const slot of this.slots) slot.sweep(this.tick);
      this.tick++;
    }
  },

  describe() { for (const slot of this.slots) slot.describe(this.mine !== null && slot.call === this.mine); },
};

// ---- the pool, a step, the policy -------------------------------------------------------------

function drawPool([cellBlocks, used, cached]) {
  const canvas = $("c-pool"), ratio = devicePixelRatio, cells = used.length;
  const across = canvas.clientWidth, pitch = cells <= 64 ? 16 : cells <= 160 ? 12 : 9;
  const columns = Math.max(1, Math.floor(across / pitch)), side = (pitch - 2) * ratio;
  const tall = Math.ceil(cells / columns) * pitch;
  if (canvas.height !== Math.round(tall * ratio)) canvas.style.height = `${tall}px`;
  fit(canvas);
  const pen = canvas.getContext("2d");
  for (let cell = 0; cell < cells; cell++) {
    const x = (cell % columns) * pitch * ratio, y = Math.floor(cell / columns) * pitch * ratio;
    const full = used[cell] / cellBlocks, half = cached[cell] / cellBlocks;
    if (!full && !half) {
      const dot = 2 * ratio;
      pen.fillStyle = colours.free;
      pen.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
      continue;
    }
    if (half) {
      pen.fillStyle = colours.cached;
      pen.fillRect(x, y + side / 2, side, side / 2);
    }
    if (full) {
      pen.globalAlpha = 0.35 + 0.65 * full;
      pen.fillStyle = colours.accepted;
      pen.fillRect(x, y, side, side);
      pen.globalAlpha = 1;
    }
  }
  put($("pool-note"), cellBlocks > 1 ? `${cellBlocks} blocks a cell` : "a cell a block");
}

function showSplit(parts, steps) {
  const total = sum(parts.map(([, seconds]) => seconds));
  const list = $("split-text");
  parts.forEach(([name, seconds], at) => {
    $("split").children[at].style.width = percent(seconds / total).replace(" ", "");
    const item = list.children[at] ?? make("li", "", list);
    if (!item.firstChild) item.append(make("i"), make("span"));
    put(item.lastChild, `${name} ${percent(seconds / total)}`);
  });
  put($("step-note"), `${time(total / steps).join(" ")} on average`);
}

function showPolicy(outlook) {
  $("policy").hidden = outlook === null;
  if (outlook === null) return;
  const [drafting, price, , gain, [drafted, predicted, survived]] = outlook;
  const now = price === null ? "now and then looks whether they do" : `drafts pay from λ = ${percent(price)}, gain ${percent(gain)}`;
  put($("policy-note"), drafting ? now : "drafts do not pay now");
  const body = $("depths"), depth = drafted.filter((number) => number > 0).length;
  while (body.children.length > depth) body.lastChild.remove();
  for (let at = 0; at < depth; at++) {
    const line = body.children[at] ?? make("tr", "", body);
    if (!line.firstChild) {
      make("td", "", line).textContent = String(at + 1);
      const meter = make("div", "meter", make("td", "", line));
      meter.append(make("b"), make("i"));
      make("td", "", line), make("td", "", line);
    }
    const [was, thought] = [survived[at] / drafted[at], predicted[at] / drafted[at]];
    const [bar, tick] = line.querySelectorAll(".meter > *");
    [bar.style.width, tick.style.left] = [`${100 * was}%`, `${100 * thought}%`];
    put(line.children[2], percent(thought));
    put(line.children[3], percent(was));
  }
}

// ---- frames -----------------------------------------------------------------------------------

const charts = {
  rate: new Chart("rate", "accepted"),
  first: new Chart("first", "read"),
  between: new Chart("between", "read"),
  k: new Chart("k", "accepted", { ceiling: 2 }),
  accepted: new Chart("accepted", "accepted", { ceiling: 1 }),
  load: new Chart("load", "own", { ceiling: 4 }),
};
let hello = null, lastSaid = 0, looks = [], frames = [], lastLook = null;

// The oldest of `past` within `seconds` before its newest, which the rates are over.
function since(past, seconds) {
  while (past.length > 2 && past[1].at_s <= past.at(-1).at_s - seconds) past.shift();
  return past[0];
}

function mean(now, then) { // of a [sum, count] that grows
  return now[1] > then[1] ? (now[0] - then[0]) / (now[1] - then[1]) : null;
}

function onFrame(frame) {
  setState(frame.state, frame.restarts ? `, ${frame.restarts} restart${frame.restarts > 1 ? "s" : ""}` : "");
  frames.push(frame);
  const then = since(frames, 2), passed = frame.at_s - then.at_s, now = frame.at_s;
  const says = now - lastSaid >= 0.25;
  if (says) lastSaid = now;
  const rate = passed >= 0.5 ? (frame.generation_tokens - then.generation_tokens) / passed : null;
  charts.rate.add(now, rate);
  const [first, between] = ["first_token", "between_tokens"].map((name) => mean(frame[name], then[name]));
  charts.first.add(now, first);
  charts.between.add(now, between);
  if (frame.look) onLook(frame, says);
  if (!says) return;
  charts.rate.say(rate === null ? DASH : count(Math.round(rate)));
  for (const [chart, value] of [[charts.first, first], [charts.between, between]])
    if (value === null) chart.say(DASH); else chart.say(...time(value));
  board.describe();
  if (now - (lastLook?.at_s ?? 0) > 3 && frame.state === "running")
    put($("slots-note"), "no word from the engine for some seconds: a long step");
  for (const chart of Object.values(charts)) chart.draw();
}

function onLook(frame, says) {
  const { slots, steps, num_steps, blocks } = frame.look, now = frame.at_s;
  const [running, , numBlocks, free, cached, stepS, planS, commitS, totals, outlook] = frame.look.stats;
  lastLook = frame;
  const look = { at_s: now, stepS, planS, commitS, ...totals };
  if (looks.length && totals.steps < looks.at(-1).steps) looks = []; // another engine
  looks.push(look);
  const then = since(looks, 2), did = totals.steps - then.steps;
  board.show(slots, steps, now);
  const ks = steps.flatMap(([, drafted, , chunk]) => drafted.filter((_, at) => chunk[at] <= 1));
  const k = ks.length ? sum(ks) / ks.length : null;
  charts.k.add(now, k, k === null ? 0 : Math.min(...ks), k === null ? 0 : Math.max(...ks));
  const drafted = totals.drafted_tokens - then.drafted_tokens;
  const accepted = drafted > 0 ? (totals.accepted_tokens - then.accepted_tokens) / drafted : null;
  charts.accepted.add(now, accepted);
  charts.load.add(now, running, 0, running + frame.queued_requests);
  if (!says) return;
  charts.k.say(k === null ? DASH : k.toFixed(1), k === null ? "" : "on average");
  charts.accepted.say(accepted === null ? DASH : percent(accepted));
  charts.load.say(count(running), `of ${count(hello.max_slots)}, ${count(frame.queued_requests)} wait`);
  put($("slots-note"), did > 0 ? pace(did / (now - then.at_s), num_steps, steps.length) : "");
  drawPool(blocks);
  put($("pool-used"), `${count(numBlocks - free - cached)} used`);
  put($("pool-cached"), `${count(cached)} cached`);
  put($("pool-free"), `${count(free)} free`);
  if (did > 0) {
    const spent = (name) => totals[name] - then[name];
    const parts = [["plan", planS - then.planS], ["draft", spent("draft_s")], ["model", spent("target_s")], ["commit", commitS - then.commitS]];
    const rest = stepS - then.stepS - sum(parts.map((part) => part[1]));
    showSplit([...parts, ["other", Math.max(0, rest)]], did);
  }
  showPolicy(outlook);
}

function pace(stepsPerS, all, seen) {
  const some = seen && all > seen ? `, one column in ${Math.round(all / seen)} shown` : "";
  return `${figures(stepsPerS)} steps a second${some}`;
}

// ---- the stream -------------------------------------------------------------------------------

let key = sessionStorage.getItem("cbatch-key");
const asked = () => (key ? { Authorization: `Bearer ${key}` } : {});
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function setState(state, more = "") {
  $("state").dataset.state = state;
  put($("state"), state + more);
  document.body.classList.toggle("stale", state !== "running" && state !== "stopping");
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, kind, data] = /^(?:event: (\w+)\n)?data: (.*)$/s.exec(part) ?? [];
      if (data) yield [kind, data];
    }
  }
}

async function listen(signal) {
  const response = await fetch("live", { headers: asked(), signal });
  if (response.status === 401) {
    setState("needs a key");
    if (key) put($("key-note"), "That key was not accepted.");
    $("key").hidden = false;
    await new Promise((given) => $("key").addEventListener("submit", given, { once: true }));
    return;
  }
  if (!response.ok) throw new Error((await response.json()).error.message);
  $("key").hidden = true;
  for await (const [kind, data] of events(response))
    if (kind === "hello") onHello(JSON.parse(data)); else onFrame(JSON.parse(data));
}

function onHello(told) {
  hello = told;
  [frames, looks, lastLook] = [[], [], null];
  put($("model"), hello.model);
  document.title = `${hello.model} · cbatch`;
  $("chat").disabled = !hello.chats;
  $("max-tokens").max = hello.max_model_tokens;
}

// For ever: a page that nobody sees lets go of the stream, one whose server is gone comes back.
async function follow() {
  for (let wait = 250; ; ) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    const leaving = new AbortController();
    const leave = () => document.hidden && leaving.abort();
    document.addEventListener("visibilitychange", leave);
    const began = performance.now();
    await listen(leaving.signal).catch((error) => console.info("live:", error.message));
    document.removeEventListener("visibilitychange", leave);
    if ($("key").hidden) setState("reconnecting");
    wait = performance.now() - began > 5000 ? 250 : Math.min(2 * wait, 4000);
    await pause(wait);
  }
}

// ---- the prompt box ---------------------------------------------------------------------------

let halting = null;

async function complete() {
  const chats = document.querySelector("[name=kind]:checked").value === "chat", text = $("prompt").value;
  const body = {
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    stream: true,
    return_metrics: true,
    ...(chats ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
  };
  $("answer").hidden = false;
  $("answer").replaceChildren();
  if (!chats) make("span", "asked", $("answer")).textContent = text;
  const written = document.createTextNode("");
  $("answer").append(written);
  put($("told"), "");
  $("told").className = "note";
  const began = performance.now();
  const response = await fetch(chats ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...asked() },
    body: JSON.stringify(body),
    signal: halting.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const [, data] of events(response)) {
    if (data === "[DONE]") break;
    const { id, error, choices, usage, metrics } = JSON.parse(data);
    if (error) throw new Error(error.message);
    board.mine = id.split("-")[1].slice(0, 6);
    for (const choice of choices) written.data += choice.text ?? choice.delta.content ?? "";
    $("answer").scrollTop = $("answer").scrollHeight;
    if (usage) put($("told"), summary(usage.completion_tokens, performance.now() - began, metrics));
  }
}

function summary(tokens, tookMs, metrics) {
  const said = [`${count(tokens)} token${tokens === 1 ? "" : "s"} in ${time(tookMs / 1e3).join(" ")}`];
  const drafting = metrics?.speculative_decoding;
  if (drafting) {
    said.push(`${drafting.mean_acceptance_length.toFixed(2)} a drafting step`);
    said.push(`${percent(drafting.draft_acceptance_rate)} of drafts accepted`);
  }
  return said.join(" · ");
}

async function onSubmit(event) {
  event.preventDefault();
  if (halting) return;
  halting = new AbortController();
  [$("send").hidden, $("halt").hidden] = [true, false];
  try {
    await complete();
  } catch (error) {
    const halted = error.name === "AbortError";
    put($("told"), halted ? "Stopped." : error.message);
    $("told").className = halted ? "note" : "note wrong";
  }
  [$("send").hidden, $("halt").hidden] = [false, true];
  halting = null;
}

// ---- beginning --------------------------------------------------------------------------------

function redraw() {
  readColours();
  for (const chart of Object.values(charts)) {
    fit(chart.canvas);
    chart.draw();
  }
  board.fit();
  if (lastLook) drawPool(lastLook.look.blocks);
}

$("prompt-form").addEventListener("submit", onSubmit);
$("halt").addEventListener("click", () => halting?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") halting?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === $("prompt")) $("prompt-form").requestSubmit();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key-field").value;
  sessionStorage.setItem("cbatch-key", key);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe($("main"));
redraw();
follow();
