"""The simulator against a real vLLM: `python -m bench.simulator.against_vllm --data DIR`.

DIR is the folder `measured` of the shared data (see its README): a vLLM run with the stamps of all
requests, and the layer profiles of the same device, which are all that the cost model knows.
Nothing is fitted to the run. What is assumed:

- the run's own settings: slots, token budget, arrivals and lengths; the KV pool is what vLLM would
  take of the device's memory (`--num-blocks` for another: a pool that does not match ruins TTFT);
- a step is its kernels: vLLM 0.19 schedules a step while the one before it runs, and replays
  captured graphs, so that host work and gaps between kernels are 0;
- a token is there when its step ends, and prompts share no prefix.

TTFT and end to end count from a request's arrival. The run's arrivals and tokens are stamped by two
clocks, taken to differ by a constant such that no request was queued before it arrived.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import print_report
from cbatch.core.request.errors import FieldError
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.cost.roofline import load_shape
from sim.report.report import Record, Spread

RUN = "RTXPRO6000_Llama-3.1-8B"
BLOCK_TOKENS = 16
BOUNDS = {"ttft_s": 0.08, "tpot_s": 0.02, "e2e_s": 0.03}  # of the mean, from the issue
Measures = dict[str, np.ndarray]  # seconds by request


def measured(path: Path) -> Measures:
    """Of the run's requests."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "output_toks")
    arrival, queued, first, last, tokens = (np.array([r[name] for r in rows]) for name in names)
    arrival_s = arrival + (queued - arrival).min()
    several = tokens > 1
    return {
        "ttft_s": first - arrival_s,
        "tpot_s": (last - first)[several] / (tokens - 1)[several],
        "e2e_s": last - arrival_s,
    }


def pool_blocks(run: Path, model: str) -> int:
    """What vLLM takes: a share of the device's memory (GB), less the weights."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    memory, shape = config["nodes"][0]["instances"][0]["npu_mem"], load_shape(model)
    left_bytes = memory["mem_size"] * 1e9 * memory["mem_util"] - shape.weight_bytes
    return int(left_bytes // (shape.kv_token_bytes * BLOCK_TOKENS))


def simulated(data: Path, run: Path, num_blocks: int | None) -> tuple[Measures, dict[str, Any]]:
    """The same requests through our scheduler, and what it was told."""
    hardware, _, model = run.name.partition("_")
    engine = json.loads((run / "meta.json").read_text(encoding="utf-8"))["engine_kwargs"]
    scenario = Scenario(
        trace=str(run / "requests.jsonl"),
        cost_table=str(data / "layer_profiles" / hardware / model),
        model=model,
        num_blocks=num_blocks or pool_blocks(run, model),
        block_size=BLOCK_TOKENS,
        max_slots=engine["max_num_seqs"],
        step_budget=engine["max_num_batched_tokens"],
    )
    simulation, records = build(scenario), list[Record]()
    report = simulation.run(on_record=records.append)
    values = {name: [getattr(record, name) for record in records] for name in BOUNDS}
    found = {name: np.array([v for v in values[name] if v is not None]) for name in BOUNDS}
    names = ("num_blocks", "max_slots", "step_budget_tokens")
    told = {name: simulation.settings[name] for name in names}
    return found, told | {"steps": report.steps, "preemptions": report.preemptions}


def compare(real: Measures, ours: Measures) -> list[dict[str, Any]]:
    """A row for each measure and cut, in milliseconds; only means have a bound."""
    rows = []
    for name, bound in BOUNDS.items():
        for cut in ("mean", "p50", "p90", "p99"):
            one, other = (getattr(Spread.of(v[name]), cut) * 1e3 for v in (real, ours))
            limit = bound if cut == "mean" else None
            error = other / one - 1
            rows.append(
                {
                    "measure": f"{name.removesuffix('_s')}_ms",
                    "cut": cut,
                    "vllm": round(one, 2),
                    "simulated": round(other, 2),
                    "error": round(error, 4),
                    "bound": limit,
                    "within": None if limit is None else abs(error) <= limit,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder `measured`")
    parser.add_argument("--run", default=RUN, help=f"a folder of its vllm_runs (default: {RUN})")
    parser.add_argument("--num-blocks", type=int, help="of the KV pool")
    args = parser.parse_args()
    run = args.data / "vllm_runs" / args.run
    if not run.is_dir():
        raise SystemExit(str(FieldError("--data", f"{run} is no folder", "name `measured`")))
    ours, told = simulated(args.data, run, args.num_blocks)
    print_report(
        f"simulator against vLLM: {args.run}",
        compare(measured(run / "requests.jsonl"), ours),
        notes=(", ".join(f"{name} {value}" for name, value in told.items()),),
        extra={"settings": told},
    )


if __name__ == "__main__":
    main()
