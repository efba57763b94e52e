// The live page. It receives frames (see cbatch/server/serving/live_feed.py) and sends prompts. An
// unknown value is shown as a dash. Text is set as text, never as HTML.

import {
  $,
  Chart,
  DASH,
  colours,
  count,
  figures,
  fit,
  make,
  percent,
  setText,
  readColours,
  sum,
  time,
} from "./draw.js";
import { board } from "./slots.js";

// ---- the pool, a step, the policy -------------------------------------------------------------

function drawPool([cellBlocks, used, cached]) {
  const canvas = $("c-pool");
  const ratio = devicePixelRatio;
  const cells = used.length;
  const across = canvas.clientWidth;
  const pitch = cells <= 64 ? 16 : cells <= 160 ? 12 : 9;
  const columns = Math.max(1, Math.floor(across / pitch));
  const side = (pitch - 2) * ratio;
  const tall = Math.ceil(cells / columns) * pitch;
  if (canvas.height !== Math.round(tall * ratio)) canvas.style.height = `${tall}px`;
  fit(canvas);
  const context = canvas.getContext("2d");
  for (let cell = 0; cell < cells; cell++) {
    const x = (cell % columns) * pitch * ratio;
    const y = Math.floor(cell / columns) * pitch * ratio;
    const full = used[cell] / cellBlocks;
    const half = cached[cell] / cellBlocks;
    if (!full && !half) {
      const dot = 2 * ratio;
      context.fillStyle = colours.free;
      context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
      continue;
    }
    if (half) {
      context.fillStyle = colours.cached;
      context.fillRect(x, y + side / 2, side, side / 2);
    }
    if (full) {
      context.globalAlpha = 0.35 + 0.65 * full;
      context.fillStyle = colours.accepted;
      context.fillRect(x, y, side, side);
      context.globalAlpha = 1;
    }
  }
  setText($("pool-note"), cellBlocks > 1 ? `${cellBlocks} blocks per cell` : "one block per cell");
}

function showSplit(parts, steps) {
  const total = sum(parts.map(([, seconds]) => seconds));
  const list = $("split-text");
  parts.forEach(([name, seconds], at) => {
    $("split").children[at].style.width = percent(seconds / total).replace(" ", "");
    const item = list.children[at] ?? make("li", "", list);
    if (!item.firstChild) item.append(make("i"), make("span"));
    setText(item.lastChild, `${name} ${percent(seconds / total)}`);
  });
  setText($("step-note"), `${time(total / steps).join(" ")} on average`);
}

function showPolicy(policy) {
  $("policy").hidden = policy === null;
  if (policy === null) return;
  const [drafting, threshold, , gain, [drafted, predicted, survived]] = policy;
  const now =
    threshold === null
      ? "testing whether drafts pay"
      : `λ ${percent(threshold)}, gain ${percent(gain)}`;
  setText($("policy-note"), drafting ? now : "drafts do not pay now");
  const body = $("depths");
  const depth = drafted.filter((number) => number > 0).length;
  while (body.children.length > depth) body.lastChild.remove();
  for (let at = 0; at < depth; at++) {
    const line = body.children[at] ?? make("tr", "", body);
    if (!line.firstChild) {
      make("td", "", line).textContent = String(at + 1);
      const meter = make("div", "meter", make("td", "", line));
      meter.append(make("b"), make("i"));
      line.append(make("td"), make("td"));
    }
    const [was, expected] = [survived[at] / drafted[at], predicted[at] / drafted[at]];
    const [bar, tick] = line.querySelectorAll(".meter > *");
    [bar.style.width, tick.style.left] = [`${100 * was}%`, `${100 * expected}%`];
    setText(line.children[2], percent(expected));
    setText(line.children[3], percent(was));
  }
}

// ---- frames -----------------------------------------------------------------------------------

const charts = {
  rate: new Chart("rate", "accepted", { write: (rate) => count(Math.round(rate)) }),
  first: new Chart("first", "read", { write: (seconds) => time(seconds).join(" ") }),
  between: new Chart("between", "read", { write: (seconds) => time(seconds).join(" ") }),
  k: new Chart("k", "accepted", { ceiling: 2, write: String }),
  accepted: new Chart("accepted", "accepted", { ceiling: 1, write: percent }),
  load: new Chart("load", "own", { ceiling: 4, write: count }),
};
let [hello, lastViewFrame, lastShownS] = [null, null, 0];
let [frames, views] = [[], []]; // the last two seconds of each

// Drop entries that are not needed for rates over `seconds`, and return the oldest entry left.
function oldestWithin(past, seconds) {
  while (past.length > 2 && past[1].at_s <= past.at(-1).at_s - seconds) past.shift();
  return past[0];
}

// Mean of the values between two states of a growing [sum, count].
function mean(now, earlier) {
  return now[1] > earlier[1] ? (now[0] - earlier[0]) / (now[1] - earlier[1]) : null;
}

function onFrame(frame) {
  setState(
    frame.state,
    frame.restarts ? `, ${frame.restarts} restart${frame.restarts > 1 ? "s" : ""}` : "",
  );
  frames.push(frame);
  const earlier = oldestWithin(frames, 2);
  const passed = frame.at_s - earlier.at_s;
  const now = performance.now() / 1e3; // the server's clock may restart
  const showsText = now - lastShownS >= 0.25;
  if (showsText) lastShownS = now;
  const tokens = frame.generation_tokens - earlier.generation_tokens;
  const rate = passed >= 0.5 ? tokens / passed : null;
  charts.rate.add(now, rate);
  const [first, between] = ["first_token", "between_tokens"].map((name) =>
    mean(frame[name], earlier[name]),
  );
  charts.first.add(now, first);
  charts.between.add(now, between);
  if (frame.view) onView(frame, now, showsText);
  if (!showsText) return;
  charts.rate.showValue(rate === null ? DASH : count(Math.round(rate)));
  for (const [chart, value] of [
    [charts.first, first],
    [charts.between, between],
  ])
    if (value === null) chart.showValue(DASH);
    else chart.showValue(...time(value));
  board.describe();
  if (lastViewFrame && frame.at_s - lastViewFrame.at_s > 3 && frame.state === "running")
    setText($("slots-note"), "no message from the engine for some seconds: a long step");
  for (const chart of Object.values(charts)) chart.draw();
}

function onView(frame, now, showsText) {
  const { slots, steps, num_steps, blocks } = frame.view;
  const [running, , numBlocks, free, cached, , , stepS, planS, commitS, totals, policy, compiling] =
    frame.view.stats;
  lastViewFrame = frame;
  const view = { at_s: frame.at_s, stepS, planS, commitS, ...totals };
  if (views.length && totals.steps < views.at(-1).steps) views = []; // the engine was restarted
  views.push(view);
  const earlier = oldestWithin(views, 2);
  const newSteps = totals.steps - earlier.steps;
  board.show(slots, steps, now);
  const ks = steps.flatMap(([, drafted, , chunk]) => drafted.filter((_, at) => chunk[at] <= 1));
  const k = ks.length ? sum(ks) / ks.length : null;
  charts.k.add(now, k, k === null ? 0 : Math.min(...ks), k === null ? 0 : Math.max(...ks));
  const drafted = totals.drafted_tokens - earlier.drafted_tokens;
  const survived = totals.accepted_tokens - earlier.accepted_tokens;
  const accepted = drafted > 0 ? survived / drafted : null;
  charts.accepted.add(now, accepted);
  charts.load.add(now, running, 0, running + frame.queued_requests);
  if (!showsText) return;
  charts.k.showValue(k === null ? DASH : k.toFixed(1), k === null ? "" : "on average");
  charts.accepted.showValue(accepted === null ? DASH : percent(accepted));
  charts.load.showValue(
    count(running),
    `of ${count(hello.max_num_seqs)}, ${count(frame.queued_requests)} waiting`,
  );
  const idle = compiling.length ? `still compiling: ${compiling.join("; ")}` : "";
  const stepsPerS = newSteps / (view.at_s - earlier.at_s);
  setText($("slots-note"), newSteps > 0 ? pace(stepsPerS, num_steps, steps.length) : idle);
  drawPool(blocks);
  setText($("pool-used"), `${count(numBlocks - free - cached)} used`);
  setText($("pool-cached"), `${count(cached)} cached`);
  setText($("pool-free"), `${count(free)} free`);
  if (newSteps > 0) {
    const spent = (name) => totals[name] - earlier[name];
    const parts = [
      ["plan", planS - earlier.planS],
      ["draft", spent("draft_s")],
      ["model", spent("target_s")],
      ["commit", commitS - earlier.commitS],
    ];
    const rest = stepS - earlier.stepS - sum(parts.map((part) => part[1]));
    showSplit([...parts, ["other", Math.max(0, rest)]], newSteps);
  }
  showPolicy(policy);
}

function pace(stepsPerS, all, seen) {
  const some = seen && all > seen ? `, 1 of ${Math.round(all / seen)} columns shown` : "";
  return `${figures(stepsPerS)} steps per second${some}`;
}

// ---- the stream -------------------------------------------------------------------------------

let key = sessionStorage.getItem("cbatch-key");
const authHeaders = () => (key ? { Authorization: `Bearer ${key}` } : {});
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function setState(state, more = "") {
  $("state").dataset.state = state;
  setText($("state"), state + more);
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
  const response = await fetch("live", { headers: authHeaders(), signal });
  if (response.status === 401) {
    setState("needs a key");
    if (key) setText($("key-note"), "That key was not accepted.");
    $("key").hidden = false;
    await new Promise((given) => $("key").addEventListener("submit", given, { once: true }));
    return;
  }
  if (!response.ok) throw new Error((await response.json()).error.message);
  $("key").hidden = true;
  for await (const [kind, data] of events(response))
    if (kind === "hello") onHello(JSON.parse(data));
    else onFrame(JSON.parse(data));
}

function onHello(message) {
  hello = message;
  [frames, views, lastViewFrame] = [[], [], null];
  setText($("model"), hello.model);
  document.title = `${hello.model} · cbatch`;
  $("chat").disabled = !hello.has_chat_template;
  $("max-tokens").max = hello.max_model_len;
}

// Keep a stream open for ever: close it while the page is hidden, reconnect if the server is gone.
async function follow() {
  for (let wait = 250; ;) {
    if (document.hidden)
      await new Promise((seen) =>
        document.addEventListener("visibilitychange", seen, { once: true }),
      );
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

let abortController = null;

async function complete() {
  const isChat = document.querySelector("[name=kind]:checked").value === "chat";
  const text = $("prompt").value;
  const body = {
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    stream: true,
    return_metrics: true,
    ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
  };
  $("answer").hidden = false;
  $("answer").replaceChildren();
  if (!isChat) make("span", "asked", $("answer")).textContent = text;
  const written = document.createTextNode("");
  $("answer").append(written);
  setText($("result"), "");
  $("result").className = "note";
  const began = performance.now();
  const response = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authHeaders() },
    body: JSON.stringify(body),
    signal: abortController.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const [, data] of events(response)) {
    if (data === "[DONE]") break;
    const { id, error, choices, usage, metrics } = JSON.parse(data);
    if (error) throw new Error(error.message);
    board.mine = id.split("-")[1].slice(0, 6);
    for (const choice of choices) written.data += choice.text ?? choice.delta.content ?? "";
    $("answer").scrollTop = $("answer").scrollHeight;
    const tookMs = performance.now() - began;
    if (usage) setText($("result"), summary(usage.completion_tokens, tookMs, metrics));
  }
}

function summary(tokens, tookMs, metrics) {
  const parts = [
    `${count(tokens)} token${tokens === 1 ? "" : "s"} in ${time(tookMs / 1e3).join(" ")}`,
  ];
  const drafting = metrics?.speculative_decoding;
  if (drafting) {
    parts.push(`${drafting.mean_acceptance_length.toFixed(2)} tokens per drafting step`);
    parts.push(`${percent(drafting.draft_acceptance_rate)} of drafts accepted`);
  }
  return parts.join(" · ");
}

async function onSubmit(event) {
  event.preventDefault();
  if (abortController) return;
  abortController = new AbortController();
  swap($("send"), $("halt"));
  try {
    await complete();
  } catch (error) {
    const halted = error.name === "AbortError";
    setText($("result"), halted ? "Stopped." : error.message);
    $("result").className = halted ? "note" : "note wrong";
  }
  swap($("halt"), $("send"));
  abortController = null;
}

// Replace a button by another one, which also takes over the keyboard focus.
function swap(old, next) {
  const focused = document.activeElement === old;
  [old.hidden, next.hidden] = [true, false];
  if (focused) next.focus();
}

// ---- start ------------------------------------------------------------------------------------

function redraw() {
  readColours();
  for (const chart of Object.values(charts)) {
    fit(chart.canvas);
    chart.draw();
  }
  board.fit();
  if (lastViewFrame) drawPool(lastViewFrame.view.blocks);
}

$("prompt-form").addEventListener("submit", onSubmit);
$("halt").addEventListener("click", () => abortController?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") abortController?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === $("prompt"))
    $("prompt-form").requestSubmit();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key-field").value;
  sessionStorage.setItem("cbatch-key", key);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let lastWidth = 0;
new ResizeObserver(() => {
  if (lastWidth !== $("main").clientWidth) redraw();
  lastWidth = $("main").clientWidth;
}).observe($("main"));
readColours();
follow();
