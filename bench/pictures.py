"""The pictures of the README and the docs: `python -m bench.pictures`, or `make pictures`.

`peers.png` shows figures of docs/benchmarks.md. `policies.png` is simulated, so it is the same on
every machine.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from bench.report import print_report, rounded
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
MEASURED = Path("docs/benchmarks.md")


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


def ratios_in_docs(heading: str, machine: str) -> dict[str, list[float]]:
    """Return cbatch's ratios on `machine`, by row, from the first table below `heading` in
    docs/benchmarks.md. The table has a column for each number of requests in flight."""
    table = MEASURED.read_text(encoding="utf-8").split(heading)[1].split("\n#")[0]
    rows = re.findall(
        rf"^\| {machine} \| (.*?)(?: \[\^\w+\])? \| (.*) \|$", table, flags=re.MULTILINE
    )
    return {name: [float(r) for r in re.findall(r"([\d.]+)x", row)] for name, row in rows}


def save_peers(path: Path) -> None:
    """Draw the measured ratios to llama.cpp and vLLM on a CPU, without the columns for prompts."""
    files = ratios_in_docs("### llama.cpp", "G")
    llama = {n.replace("'s shape", "").replace(" ", "\n"): r[:3] for n, r in files.items()}
    vllm = ratios_in_docs("### vLLM", "F")["cbatch"][:5]
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.1), sharey=True, width_ratios=(1.9, 1))
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
        (axes[0], "llama.cpp, same GGUF file", llama, ""),
        (axes[1], "vLLM for CPUs", ("1", "8", "32", "64", "128"), "bf16, requests in flight"),
    ):
        axis.set_xticks(range(len(ticks)), ticks, fontsize=6.5 if axis is axes[0] else 9)
        axis.set_xlabel(label, fontsize=9)
        axis.axhline(1, color="0.45", lw=1.2, ls=(0, (4, 3)), zorder=0)
        axis.set_title(f"Tokens per second over {name}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylim=(0, 9), yticks=(0, 1, 2, 4, 6, 8))
    axes[0].yaxis.set_major_formatter("{x:g}x")
    figure.tight_layout()
    _save(figure, path)


def main() -> None:
    parser = CommandParser(prog="python -m bench.pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder ({FOLDER})")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    save_peers(args.out / "peers.png")
    rows = save_policies(args.out / "policies.png")
    print_report("tokens per second over no drafts, by clients; simulated", rows)


if __name__ == "__main__":
    main()
