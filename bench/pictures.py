"""The pictures of the README and the docs: `python -m bench.pictures`, or `make pictures`.

`peers.png` shows figures of docs/benchmarks.md. `policies.png` is simulated, so it is the same on
every machine. `live-page.png` is the page of the demo server under load in a headless Chromium, and
is left out without that browser.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from bench.browser import MISSING, browsing, until
from bench.report import print_report, rounded
from bench.stalls import served
from cbatch.cli.parser import CommandParser
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import lognormal
from sim.workload.traces.reader import write_requests

pyplot.switch_backend("Agg")  # needs no display
FOLDER = Path("docs/pictures")
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REQUESTS = 300  # plus six per client, so that the last requests have little weight
ACCEPTANCE = "beta:0.6,3"  # acceptance differs widely between requests
COLORS = {"fixed:2": "#8fb8de", "fixed:4": "#5b8db8", "fixed:8": "#2f5d8a", "adaptive": "#d4622a"}
# One thread: idle threads spin, while the browser and the load need a core.
SERVER = (
    f"env OMP_NUM_THREADS=1 {sys.executable} -m cbatch.cli.main serve --port {{port}} "
    "--max-num-seqs 8 --num-blocks 480 --max-model-len 1024"
)
MEASURED = Path("docs/benchmarks.md")
PHASES = ((2, 1_500), (8, 15_000))  # (clients, tokens generated in the phase)
PHASE_LIMIT_S = 90.0  # time limit of a phase, for a busy machine
WIDTH, HEIGHT, SCALE = 1400, 900, 1.4  # page in CSS pixels, and screen pixels per CSS pixel


def simulated(policy: str, clients: int) -> float:
    """Return simulated output tokens per second of Llama-3.1-8B with a 1B draft on an H100.
    Requests have about 200 tokens in and out; each client waits for its answer."""
    length, count = lognormal(200, 0.5), REQUESTS + 6 * clients
    requests = generate(lambda rng: poisson(1.0, rng), length, length, requests=count, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_requests(trace, requests)
        scenario = Scenario(
            trace=str(trace),
            concurrency=clients,
            lookahead=policy,
            max_model_len=8192,
            max_num_batched_tokens=4096,
            draft_model="llama-3.2-1b",
            acceptance=ACCEPTANCE,
            max_num_seqs=max(CLIENTS),
        )
        tokens_per_s = build(scenario).run().output_tokens_per_s
    assert tokens_per_s is not None
    return tokens_per_s


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=160, metadata={"Software": None})
    pyplot.close(figure)


def save_policies(path: Path) -> list[dict[str, Any]]:
    """Draw `policies.png` and return its figures."""
    off = {clients: simulated("off", clients) for clients in CLIENTS}
    lines = {p: [simulated(p, c) / off[c] for c in CLIENTS] for p in COLORS}
    figure, axis = pyplot.subplots(figsize=(8.4, 4.0), layout="constrained")
    axis.axhline(1, color="0.45", lw=1.2, ls=(0, (4, 3)), label="no drafts")
    for policy, ratios in lines.items():
        width, mark = (3.0, 5.5) if policy == "adaptive" else (1.8, 3.5)
        axis.plot(CLIENTS, ratios, "o-", color=COLORS[policy], lw=width, ms=mark, label=policy)
    axis.legend(frameon=False)
    axis.set(xscale="log", ylim=(0.4, 1.6), xlabel="requests in flight")
    axis.set_xticks(CLIENTS, [str(clients) for clients in CLIENTS])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}x")
    axis.grid(axis="y", color="0.92")
    axis.spines[["top", "right"]].set_visible(False)
    title = (
        "Tokens per second over no drafts. Simulated: Llama-3.1-8B with a 1B draft on one H100;\n"
        "acceptance differs between requests"
    )
    axis.set_title(title, loc="left", fontsize=10)
    _save(figure, path)
    return [
        {"policy": policy} | {str(c): rounded(r) for c, r in zip(CLIENTS, ratios, strict=True)}
        for policy, ratios in lines.items()
    ]


def ratios_in_docs(heading: str, machine: str = "F") -> dict[str, list[float]]:
    """Return cbatch's ratios on `machine`, by row, from the first table below `heading` in
    docs/benchmarks.md. The table has a column for each number of requests in flight."""
    table = MEASURED.read_text(encoding="utf-8").split(heading)[1].split("\n#")[0]
    rows = re.findall(
        rf"^\| {machine} \| (.*?)(?: \[\^\w+\])? \| (.*) \|$", table, flags=re.MULTILINE
    )
    return {name: [float(r) for r in re.findall(r"([\d.]+)x", row)] for name, row in rows}


def save_peers(path: Path) -> None:
    """Draw the measured ratios to llama.cpp and vLLM on a CPU, without the columns for prompts."""
    llama = {n.split()[-1]: r[:3] for n, r in ratios_in_docs("### llama.cpp").items()}
    vllm = ratios_in_docs("### vLLM")["cbatch"][:5]
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.1), sharey=True, width_ratios=(1.5, 1))
    shades = list(COLORS.values())
    for at, flight in enumerate((1, 8, 32)):
        bars = [ratios[at] for ratios in llama.values()]
        places = [x + (at - 1) * 0.27 for x in range(len(llama))]
        drawn = axes[0].bar(places, bars, 0.25, color=shades[at], label=f"{flight} in flight")
        axes[0].bar_label(drawn, fmt="%.1f", fontsize=8, padding=1)
    axes[0].legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    drawn = axes[1].bar(range(5), vllm, 0.6, color=COLORS["adaptive"])
    axes[1].bar_label(drawn, fmt="%.1f", fontsize=8, padding=1)
    for axis, name, ticks, label in (
        (axes[0], "llama.cpp, same GGUF file", llama, "GGUF type"),
        (axes[1], "vLLM for CPUs", ("1", "8", "32", "64", "128"), "bf16, requests in flight"),
    ):
        axis.set_xticks(range(len(ticks)), ticks)
        axis.set_xlabel(label, fontsize=9)
        axis.axhline(1, color="0.45", lw=1.2, ls=(0, (4, 3)), zorder=0)
        axis.set_title(f"Tokens per second over {name}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylim=(0, 7.2), yticks=(0, 1, 2, 4, 6), yticklabels=("0", "1x", "2x", "4x", "6x"))
    figure.tight_layout()
    _save(figure, path)


def save_live_page(path: Path) -> None:
    from PIL import Image

    with served(SERVER) as server, browsing(SCALE) as (page, _):
        url = f"http://{server.endpoint.host}:{server.endpoint.port}"
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.goto(f"{url}/")
        for clients, tokens in PHASES:
            words = f"bench {url} --concurrency {clients} --requests 5000 --prompts demo --quiet"
            words += " --output-tokens uniform:80:320"
            load = subprocess.Popen(
                [sys.executable, "-m", "cbatch.cli.main", *words.split()],
                stdout=subprocess.DEVNULL,
            )
            try:
                _wait_for(url, tokens)
                if clients == PHASES[-1][0]:
                    height = page.evaluate("document.documentElement.scrollHeight")
                    page.set_viewport_size({"width": WIDTH, "height": height})
                    page.evaluate("document.getElementById('prompt-form').requestSubmit()")
                    answer = "document.getElementById('answer').textContent"
                    until(page, f"{answer}.split('\\n').length > 5")
                    page.screenshot(path=path)
            finally:
                load.terminate()
                load.wait()
    with Image.open(path) as image:  # a page has few colours, so 96 of them show no difference
        image.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def _wait_for(url: str, tokens: int) -> None:
    """Wait until the server has generated `tokens` more tokens, at most `PHASE_LIMIT_S`."""
    first, deadline_s = _generated(url), time.monotonic() + PHASE_LIMIT_S
    while _generated(url) < first + tokens and time.monotonic() < deadline_s:
        time.sleep(0.2)


def _generated(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        metrics = response.read().decode()
    match = re.search(r"^vllm:generation_tokens_total\{.*\} (.*)$", metrics, re.M)
    return float(match[1]) if match else 0.0


def main() -> None:
    parser = CommandParser(prog="python -m bench.pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder ({FOLDER})")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    save_peers(args.out / "peers.png")
    rows = save_policies(args.out / "policies.png")
    if MISSING is not None:
        print(f"live-page.png: left out, {MISSING}", file=sys.stderr)
    else:
        save_live_page(args.out / "live-page.png")
    print_report("tokens per second over no drafts, by clients; simulated", rows)


if __name__ == "__main__":
    main()
