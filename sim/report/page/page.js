const DATA = /*data*/;
const RUNS = DATA.runs;
const WIDTH = 520, HEIGHT = 250, LEFT = 52, RIGHT = 14, TOP = 10, BOTTOM = 34;
const shown = RUNS.map(() => true);
const color = (run) => `var(--run${run % 8})`;

// ---- small helpers

function node(tag, attributes = {}, text = null) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + " G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return compact(value * 1e6) + " µs";
  if (value !== 0 && Math.abs(value) < 1) return compact(value * 1e3) + " ms";
  return compact(value) + " s";
}

const percent = (value) => (value === null || value === undefined ? "–" : compact(value * 100) + " %");

function ticks(low, high, log) {
  if (log) {
    const marks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const lead of high / low < 200 ? [1, 2, 5] : [1]) marks.push(lead * 10 ** power);
    return marks.filter((mark) => mark >= low * 0.999 && mark <= high * 1.001);
  }
  const rough = (high - low) / 5 || 1;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = base * [1, 2, 5, 10].find((lead) => lead * base >= rough);
  const marks = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high + step * 1e-6; mark += step) marks.push(mark);
  return marks;
}

// ---- a chart: lines or dots of each run over one pair of axes

function chart(spec) {
  const lines = spec.lines.filter((line) => line.points.length);
  if (!lines.length) return;
  const card = node("div", { class: "card chart", tabindex: "0", role: "img" });
  card.append(node("h2", {}, spec.title), node("p", { class: "note" }, spec.note));
  card.setAttribute("aria-label", `${spec.title}. ${spec.note}`);
  const svg = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  const tip = node("div", { class: "tip", hidden: "" });
  let log = Boolean(spec.log);
  if (spec.canLog) {
    const toggle = node("button", { class: "toggle", type: "button" }, log ? "linear" : "log");
    toggle.addEventListener("click", () => { log = !log; toggle.textContent = log ? "linear" : "log"; draw(); });
    card.append(toggle);
  }
  card.append(svg, tip);
  document.getElementById("charts").append(card);
  let axes = null;

  function draw() {
    svg.replaceChildren();
    const seen = lines.filter((line) => shown[line.run]);
    const points = seen.flatMap((line) => line.points).filter((p) => !log || p[0] > 0);
    if (!points.length) { axes = null; return; }
    const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
    const extent = (values, from) => {
      const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      return [from === 0 ? Math.min(0, low) : low, high > low || from === 0 ? (high || 1) : low + 1];
    };
    const [x0, x1] = extent(xs, log || !spec.fromZero ? null : 0), [y0, y1] = spec.yRange || extent(ys, 0);
    const fx = log ? (x) => Math.log(x / x0) / Math.log(x1 / x0 || 2) : (x) => (x - x0) / (x1 - x0 || 1);
    const px = (x) => LEFT + fx(x) * (WIDTH - LEFT - RIGHT);
    const py = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0 || 1)) * (HEIGHT - TOP - BOTTOM);
    axes = { px, py, seen };
    for (const mark of ticks(y0, y1, false)) {
      svg.append(node("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(mark), y2: py(mark) }));
      svg.append(node("text", { x: LEFT - 6, y: py(mark) + 4, "text-anchor": "end" }, spec.y(mark)));
    }
    for (const mark of ticks(x0, x1, log))
      svg.append(node("text", { x: px(mark), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, spec.x(mark)));
    svg.append(node("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 2, "text-anchor": "middle" }, spec.xName));
    for (const line of seen) {
      const paint = line.color || color(line.run);
      if (spec.dots) {
        for (const p of line.points)
          if (!log || p[0] > 0) svg.append(node("circle", { class: "dot", cx: px(p[0]), cy: py(p[1]), r: spec.dots, style: `fill:${paint}` }));
        if (!spec.join) continue;
      }
      let path = "", gap = true;
      for (const p of line.points) {
        if (p[1] === null || (log && p[0] <= 0)) { gap = true; continue; }
        path += `${gap ? "M" : "L"}${px(p[0]).toFixed(1)} ${py(p[1]).toFixed(1)}`;
        gap = false;
      }
      svg.append(node("path", { class: "series", d: path, style: `stroke:${paint}`, "stroke-dasharray": line.dash || "none" }));
    }
  }

  function point(event) {
    if (!axes) return;
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const near = axes.seen.map((line) => {
      let best = null, least = Infinity;
      for (const p of line.points) {
        if (p[1] === null) continue;
        const dx = axes.px(p[0]) - x, dy = spec.dots && !spec.join ? axes.py(p[1]) - y : 0;
        if (dx * dx + dy * dy < least) { least = dx * dx + dy * dy; best = p; }
      }
      return { line, best, least };
    }).filter((nearest) => nearest.best);
    if (!near.length) return;
    svg.querySelectorAll(".cross").forEach((old) => old.remove());
    const first = near.reduce((a, b) => (a.least <= b.least ? a : b));
    const kept = spec.dots && !spec.join ? [first] : near;
    const at = axes.px(first.best[0]);
    svg.append(node("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    tip.textContent = [`${spec.xName}: ${spec.x(first.best[0])}`]
      .concat(kept.map(({ line, best }) => `${line.name}: ${spec.y(best[1])}${best[2] ? " · " + best[2] : ""}`)).join("\n");
    tip.hidden = false;
    const left = at / scale + 16;
    tip.style.left = `${left > box.width * 0.6 ? left - tip.offsetWidth - 12 : left + 8}px`;
    tip.style.top = `${svg.offsetTop + 12}px`;
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; svg.querySelectorAll(".cross").forEach((old) => old.remove()); });
  redraws.push(draw);
  draw();
}

const redraws = [];
const perRun = (make) => RUNS.map((run, index) => ({ run: index, name: run.name, points: make(run) || [] }));

function cdf(title, note, measure) {
  chart({
    title, note, xName: "time", canLog: true, log: true, yRange: [0, 1], x: seconds, y: percent,
    lines: perRun((run) => {
      const cuts = run.quantiles[measure] || [];
      return cuts.map((cut, index) => [cut, index / (cuts.length - 1)]);
    }),
  });
}

function overTime(title, note, format, columns, yRange = null) {
  chart({
    title, note, xName: "time", x: seconds, y: format, yRange, fromZero: true,
    lines: columns.flatMap(([field, name, dash]) =>
      perRun((run) => run.series && run.series[field] && run.series[field].some((value) => value !== null)
        ? run.series[field].map((value, index) => [index * run.series.length_s, value]) : null)
        .map((line) => ({ ...line, dash, name: columns.length > 1 ? `${line.name}, ${name}` : line.name }))),
  });
}

function scatter(title, note, measure, format) {
  chart({
    title, note, xName: "arrival", x: seconds, y: format, dots: 2.2, fromZero: true,
    lines: perRun((run) => run.points && run.points.arrival_s
      .map((arrival, index) => [arrival - run.points.arrival_s[0], run.points[measure][index],
        `${run.points.prompt_tokens[index]} in, ${run.points.output_tokens[index]} out`])
      .filter((p) => p[1] !== null)),
  });
}

// ---- the page

function headline() {
  const report = RUNS[0].report, place = document.getElementById("headline");
  const cards = [
    ["requests", compact(report.requests), report.requests_per_s === null ? "" : `${compact(report.requests_per_s)}/s`],
    ["output tokens", compact(report.output_tokens_per_s), "a second"],
    ["time to first token, p99", seconds(report.ttft_s.p99), `p50 ${seconds(report.ttft_s.p50)}`],
    ["time per output token, p99", seconds(report.tpot_s.p99), `p50 ${seconds(report.tpot_s.p50)}`],
    ["end to end, p99", seconds(report.e2e_s.p99), `p50 ${seconds(report.e2e_s.p50)}`],
  ];
  if (report.goodput) cards.push(["goodput", percent(report.goodput.share), `${compact(report.goodput.requests_per_s)} requests/s`]);
  if (report.speculation) cards.push(["drafts accepted", percent(report.speculation.acceptance), `${compact(report.speculation.tokens_per_step)} tokens a row and step`]);
  for (const [name, value, unit] of cards) {
    const card = node("div", { class: "card" }), line = node("div");
    line.append(node("span", { class: "value" }, value), node("span", { class: "unit" }, unit));
    card.append(node("div", { class: "note" }, RUNS.length > 1 ? `${name} (${RUNS[0].name})` : name), line);
    place.append(card);
  }
}

function figures() {
  const rows = [
    ["requests", (r) => r.requests, compact], ["duration", (r) => r.duration_s, seconds],
    ["requests a second", (r) => r.requests_per_s, compact],
    ["output tokens a second", (r) => r.output_tokens_per_s, compact],
    ["computed prompt tokens a second", (r) => r.prompt_tokens_per_s, compact],
  ];
  for (const [field, name] of [["ttft_s", "time to first token"], ["tpot_s", "time per output token"], ["itl_s", "between tokens"], ["e2e_s", "end to end"], ["queue_s", "in the queue"]])
    for (const cut of ["mean", "p50", "p90", "p99"]) rows.push([`${name}, ${cut}`, (r) => r[field] && r[field][cut], seconds]);
  rows.push(["goodput", (r) => r.goodput && r.goodput.share, percent], ["drafts accepted", (r) => (r.speculation || r.server || {}).acceptance, percent],
    ["tokens a row and step", (r) => r.speculation && r.speculation.tokens_per_step, compact],
    ["steps", (r) => r.steps, compact], ["running, mean", (r) => r.mean_running, compact], ["preemptions", (r) => r.preemptions, compact],
    ["prompt tokens from the cache", (r) => r.prefix_hit_tokens, compact], ["refused", (r) => r.refused && r.refused.length, compact],
    ["failed", (r) => r.errors && Object.values(r.errors).reduce((a, b) => a + b, 0), compact]);
  const table = node("table"), head = node("tr"), body = node("tbody"), top = node("thead");
  head.append(node("th", { scope: "col" }, ""), ...RUNS.map((run) => node("th", { scope: "col" }, run.name)));
  for (const [name, get, format] of rows) {
    const values = RUNS.map((run) => get(run.report));
    if (values.every((value) => value === null || value === undefined)) continue;
    const row = node("tr");
    row.append(node("th", { scope: "row", style: "font-weight:400" }, name));
    values.forEach((value, index) => {
      const cell = node("td", {}, format(value));
      if (index && values[0] && typeof value === "number") cell.append(node("small", {}, `${value >= values[0] ? "+" : "−"}${compact(Math.abs(value / values[0] - 1) * 100)} %`));
      row.append(cell);
    });
    body.append(row);
  }
  top.append(head);
  table.append(top, body);
  const place = document.getElementById("figures");
  place.append(table);
  RUNS.forEach((run) => {
    const details = node("details");
    details.append(node("summary", {}, `settings of ${run.name}`), node("pre", {}, JSON.stringify(run.report.settings, null, 2)));
    place.append(details);
  });
}

function switches() {
  if (RUNS.length < 2) return;
  RUNS.forEach((run, index) => {
    const button = node("button", { type: "button", "aria-pressed": "true" });
    button.append(node("span", { class: "key", style: `background:${color(index)}` }), node("span", {}, run.name));
    button.addEventListener("click", () => {
      shown[index] = !shown[index];
      button.setAttribute("aria-pressed", String(shown[index]));
      redraws.forEach((draw) => draw());
    });
    document.getElementById("runs").append(button);
  });
}

function versus(title, note, value, format) {
  const of = (run) => run.report.requests_per_s;
  chart({
    title, note, xName: "requests a second", x: compact, y: format, dots: 4, fromZero: true,
    lines: perRun((run) => of(run) !== null && value(run.report) !== null && value(run.report) !== undefined ? [[of(run), value(run.report)]] : null),
  });
}

document.title = DATA.title;
document.getElementById("title").textContent = DATA.title;
const named = ({ settings }) => ["model", "draft_model", "gpu", "machine"].filter((name) => typeof settings[name] === "string")
  .map((name) => `, ${name.replace("_", " ")} ${settings[name]}`).join("");
document.getElementById("subtitle").textContent = RUNS.map(({ report }) => `${report.kind}: ${compact(report.requests)} requests in ${seconds(report.duration_s)}${named(report)}`)
  .filter((text, index, all) => all.indexOf(text) === index).slice(0, 4).join(" · ");
switches();
headline();
cdf("Time to first token", "share of requests that had theirs within so long", "ttft_s");
cdf("Time per output token", "share of requests", "tpot_s");
cdf("End to end", "share of requests", "e2e_s");
scatter("Time to first token over time", "a dot is a request", "ttft_s", seconds);
scatter("Time per output token over time", "a dot is a request", "tpot_s", seconds);
overTime("Output", "tokens a second", compact, [["output_tokens_per_s", "", null]]);
overTime("Prompts", "computed tokens a second", compact, [["prompt_tokens_per_s", "", null]]);
overTime("Batch", "requests running, and waiting (dashed)", compact, [["running", "running", null], ["waiting", "waiting", "5 4"]]);
overTime("KV pool", "share of blocks in use", percent, [["kv_share", "", null]], [0, 1]);
overTime("Step", "mean duration of a step", seconds, [["step_s", "", null]]);
overTime("Lookahead", "drafts a row that emitted, mean k", compact, [["drafted_per_row", "", null]]);
overTime("Acceptance", "share of drafts", percent, [["acceptance", "", null]], [0, 1]);
if (RUNS.length > 2) {
  versus("Goodput against load", "share of requests that met their objectives; a dot is a run", (r) => r.goodput && r.goodput.share, percent);
  versus("Time to first token against load", "p99; a dot is a run", (r) => r.ttft_s.p99, seconds);
}
figures();
document.getElementById("foot").textContent = "Drawn by cbatch from one report each; definitions are in its README. Percentiles are linear between ranks.";
