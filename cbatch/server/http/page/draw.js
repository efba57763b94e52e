// Drawing and formatting helpers, and the charts.

export const $ = (id) => document.getElementById(id);
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};
export const make = (tag, name, parent) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  parent?.append(node);
  return node;
};
export const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
export const percent = (share) => `${Math.round(100 * share)} %`;
export const count = (number) => number.toLocaleString("en");
export const figures = (value) => value.toFixed(value < 9.95 ? 2 : value < 99.5 ? 1 : 0);
export const time = (seconds) =>
  seconds < 1 ? [figures(1e3 * seconds), "ms"] : [figures(seconds), "s"];
export const DASH = "–";

export const colours = {};
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of "ink soft line own accepted rejected read cached free".split(" "))
    colours[name] = style.getPropertyValue(`--${name}`);
}

// Resize a canvas to its box in device pixels, so that drawings are sharp.
export function fit(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
  canvas.height = Math.max(1, Math.round(height * devicePixelRatio));
}

// ---- charts: the last minute ------------------------------------------------------------------

export class Chart {
  static SECONDS = [15, 60]; // time span at first, and the longest one

  constructor(name, colour, { ceiling = 0, write = null } = {}) {
    [this.canvas, this.output] = [$(`c-${name}`), $(`v-${name}`)];
    this.scale = this.canvas.parentNode.querySelector("figcaption span");
    this.write = write; // formats the top of the scale; null: not shown
    this.colour = colour;
    this.ceiling = ceiling; // lower bound for the top of the scale
    this.points = []; // [second, value or null, low, high]
  }

  add(at, value, low = 0, high = value) {
    this.points.push([at, value, low, high]);
    while (this.points[0][0] < at - Chart.SECONDS[1]) this.points.shift();
  }

  showValue(text, unit = "") {
    if (this.output.dataset.shown === text + unit) return;
    this.output.dataset.shown = text + unit;
    this.output.replaceChildren(text);
    if (unit) make("small", "", this.output).textContent = ` ${unit}`;
  }

  draw() {
    const { width, height } = this.canvas;
    const context = this.canvas.getContext("2d");
    const ratio = devicePixelRatio;
    const line = 1.5 * ratio;
    context.clearRect(0, 0, width, height);
    context.fillStyle = colours.line;
    context.fillRect(0, height - ratio, width, ratio);
    if (!this.points.length) return;
    const highest = Math.max(this.ceiling, ...this.points.map((p) => p[3] ?? 0));
    setText(this.scale, this.write && highest ? `to ${this.write(highest)}` : "");
    const top = highest || 1;
    const end = this.points.at(-1)[0];
    const spanS = Math.max(Chart.SECONDS[0], end - this.points[0][0]);
    const x = (at) => width - ((end - at) / spanS) * width - line;
    const y = (value) => height - line - (value / top) * (height - 2 * line);
    for (const run of this.runs()) {
      const area = new Path2D();
      const edge = new Path2D();
      for (const [at, value, , high] of run) {
        area.lineTo(x(at), y(high));
        edge.lineTo(x(at), y(value));
      }
      for (const [at, , low] of [...run].reverse()) area.lineTo(x(at), y(low));
      context.fillStyle = context.strokeStyle = colours[this.colour];
      context.globalAlpha = 0.14;
      context.fill(area);
      context.globalAlpha = 1;
      context.lineWidth = line;
      context.lineJoin = "round";
      context.stroke(edge);
    }
  }

  // Runs of points without a null between them, since no line is drawn across a gap.
  runs() {
    const runs = [[]];
    for (const point of this.points)
      if (point[1] !== null) runs.at(-1).push(point);
      else if (runs.at(-1).length) runs.push([]);
    return runs.filter((run) => run.length);
  }
}
