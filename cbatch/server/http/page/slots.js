// The slots: a row per slot and a column per step. Drawing sweeps from left to right like an
// oscilloscope and overwrites the previous sweep.

import { $, DASH, colours, count, fit, make, percent, setText } from "./draw.js";

const STORED_COLUMNS = 2048; // columns stored, to redraw after a resize
const CLEARED_COLUMNS = 6; // columns cleared in front of the sweep
const NONE = 0,
  DECODE = 1,
  PROMPT = 2;

class Slot {
  static maxDrafts = 3; // drafts that fit in a column

  constructor(number, list) {
    this.node = make("li", "", list);
    this.name = make("span", "slot", this.node);
    make("span", "unseen", this.name).textContent = "slot ";
    this.name.append(String(number));
    this.canvas = make("canvas", "", this.node);
    this.canvas.setAttribute("aria-hidden", "true");
    this.tokens = make("span", "tokens", this.node);
    this.k = make("span", "k", this.node);
    const share = make("span", "share", this.node);
    this.share = make("b", "", share);
    this.unit = make("span", "unseen", share);
    this.kinds = new Uint8Array(STORED_COLUMNS);
    this.drafted = new Uint8Array(STORED_COLUMNS);
    this.accepted = new Uint8Array(STORED_COLUMNS);
    this.setRow(null);
  }

  // `row` is the slot's entry in the view; null: the slot is free.
  setRow(row) {
    const call = row?.[1] ?? null;
    if (!row || call !== this.call)
      [this.recentDrafted, this.recentAccepted, this.lastK] = [0, 0, null];
    [this.row, this.call] = [row, call];
  }

  record(tick, kind, drafted, accepted) {
    const at = tick % STORED_COLUMNS;
    [this.kinds[at], this.drafted[at], this.accepted[at]] = [kind, drafted, accepted];
    if (kind !== DECODE || !this.row) return;
    this.lastK = drafted;
    this.recentDrafted = 0.98 * this.recentDrafted + drafted;
    this.recentAccepted = 0.98 * this.recentAccepted + accepted;
  }

  describe(mine) {
    this.node.className = this.row ? (mine ? "mine" : "") : "idle";
    const [tokens, k, share, unit, title] = this.row ? this.labels() : ["", "", "free", "", ""];
    [this.tokens, this.k, this.share, this.unit].forEach((node, at) =>
      setText(node, [tokens, k, share, unit][at]),
    );
    this.share.title = title;
  }

  labels() {
    const [, , prompt, known, todo, expected] = this.row;
    if (todo > 1)
      return [`${count(prompt)} prompt`, "prefill", percent(1 - todo / known), " of the prompt", ""];
    const tried = this.recentDrafted >= 1;
    const recent = "acceptance of the latest drafts";
    return [
      `${count(known - prompt)} token${known - prompt === 1 ? "" : "s"}`,
      this.lastK === null ? DASH : `k ${this.lastK}`,
      tried ? percent(this.recentAccepted / this.recentDrafted) : DASH,
      tried ? " of drafts accepted" : "",
      expected === null ? recent : `${recent}; the engine expects ${percent(expected)}`,
    ];
  }

  fit(tick) {
    fit(this.canvas);
    this.step = this.canvas.height / (Slot.maxDrafts + 1);
    const css = this.step / devicePixelRatio;
    this.pitch = Math.round(Math.max(3, Math.min(12, 0.62 * css)) * devicePixelRatio);
    this.columns = Math.max(1, Math.floor(this.canvas.width / this.pitch));
    const first = Math.max(0, tick - Math.min(this.columns, STORED_COLUMNS) + CLEARED_COLUMNS + 1);
    for (let each = first; each < tick; each++) this.drawColumn(each);
  }

  sweep(tick) {
    const x = (tick % this.columns) * this.pitch;
    const width = this.pitch * (1 + CLEARED_COLUMNS);
    this.canvas.getContext("2d").clearRect(x, 0, width, this.canvas.height);
    this.drawColumn(tick);
  }

  drawColumn(tick) {
    const at = tick % STORED_COLUMNS;
    const context = this.canvas.getContext("2d");
    const { height } = this.canvas;
    const line = Math.round(devicePixelRatio);
    const x = (tick % this.columns) * this.pitch;
    const wide = Math.max(1, this.pitch - line);
    if (this.kinds[at] === PROMPT) {
      context.fillStyle = colours.read;
      context.fillRect(x, 0, wide, height);
    }
    if (this.kinds[at] !== DECODE) return;
    const narrow = Math.max(1, Math.round(wide / 3));
    const gap = this.step >= 3 * line ? line : 0;
    for (let j = 0; j <= this.drafted[at]; j++) {
      const rejected = j > this.accepted[at];
      const across = rejected ? narrow : wide;
      const top = Math.round(height - (j + 1) * this.step) + gap;
      const bottom = Math.round(height - j * this.step);
      context.fillStyle = j === 0 ? colours.own : rejected ? colours.rejected : colours.accepted;
      context.fillRect(x + Math.floor((wide - across) / 2), top, across, Math.max(1, bottom - top));
    }
  }
}

export const board = {
  slots: [],
  tick: 0,
  mine: null,
  quietSince: 0,

  // Show as many rows as slots were in use recently. The scheduler takes the lowest free slot.
  resize(used, now) {
    if (used >= this.slots.length) this.quietSince = now;
    if (used > this.slots.length || now - this.quietSince > 8) {
      while (this.slots.length < used) this.slots.push(new Slot(this.slots.length, $("rows")));
      while (this.slots.length > used) this.slots.pop().node.remove();
      const density = used <= 2 ? 5 : used <= 4 ? 4 : used <= 12 ? 3 : used <= 40 ? 2 : 1;
      $("rows").dataset.density = density;
      this.fit();
    }
    $("idle").hidden = this.slots.length > 0;
  },

  fit() {
    for (const slot of this.slots) slot.fit(this.tick);
  },

  show(rows, steps, now) {
    const used = Math.max(
      0,
      ...rows.map((row) => row[0] + 1),
      ...steps.flatMap(([slots]) => slots.map((s) => s + 1)),
    );
    this.resize(used, now);
    const rowBySlot = new Map(rows.map((row) => [row[0], row]));
    this.slots.forEach((slot, at) => slot.setRow(rowBySlot.get(at) ?? null));
    const maxDrafts = Math.max(Slot.maxDrafts, ...steps.flatMap((step) => step[1]));
    if (maxDrafts > Slot.maxDrafts) {
      Slot.maxDrafts = maxDrafts;
      this.fit();
    }
    for (const [slots, drafted, accepted, chunk] of steps) {
      for (const slot of this.slots) slot.kinds[this.tick % STORED_COLUMNS] = NONE;
      slots.forEach((at, i) =>
        this.slots[at]?.record(this.tick, chunk[i] > 1 ? PROMPT : DECODE, drafted[i], accepted[i]),
      );
      for (const slot of this.slots) slot.sweep(this.tick);
      this.tick++;
    }
  },

  describe() {
    for (const slot of this.slots) slot.describe(this.mine !== null && slot.call === this.mine);
  },
};
