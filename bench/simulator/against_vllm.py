"""The simulator against a real vLLM: `python -m bench.simulator.against_vllm --data DIR`.

DIR is the folder `measured` of the shared data (see its README): a vLLM run with the stamps of all
requests, and the layer profiles of the same device, which are all that the cost model knows.
Nothing is fitted to the run. What is assumed:

- the run's own settings: slots, token budget, arrivals and lengths; the KV pool is what vLLM would
  take of the device's memory (`--num-blocks` for another: a pool that does not match ruins TTFT);
- a step is its kernels: vLLM 0.19 schedules a step while the one before it runs, and replays
  captured graphs, so that host work and gaps between kernels are 0 (`--step-host-us` for others);
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
from cbatch.core.scheduler.config import SchedulerConfig
from sim.cost.layer_profiles import LayerProfile
from sim.cost.roofline import ModelShape, load_shape
from sim.executor.modelled import ModelledExecutor
from sim.replay.replay import replay
from sim.report.report import Record, Spread
from sim.traces.reader import Trace
from sim.workload.sources import OpenLoop

RUN = "RTXPRO6000_Llama-3.1-8B"
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 131_072
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


def shape_of(run: Path) -> ModelShape:
    """By the run's name, HARDWARE_MODEL."""
    return load_shape(run.name.split("_", 1)[1].lower())


def pool_blocks(run: Path) -> int:
    """What vLLM takes: a share of the device's memory (GB), less the weights."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    memory, shape = config["nodes"][0]["instances"][0]["npu_mem"], shape_of(run)
    left_bytes = memory["mem_size"] * 1e9 * memory["mem_util"] - shape.weight_bytes
    return int(left_bytes // (shape.kv_token_bytes * BLOCK_TOKENS))


def simulated(
    data: Path, run: Path, num_blocks: int, step_host_s: float
) -> tuple[Measures, dict[str, Any]]:
    """The same requests through our scheduler, and what it was told."""
    engine = json.loads((run / "meta.json").read_text(encoding="utf-8"))["engine_kwargs"]
    profiles = (data / "layer_profiles").joinpath(*run.name.split("_", 1))
    layers = shape_of(run).num_hidden_layers
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=BLOCK_TOKENS,
        max_slots=engine["max_num_seqs"],
        step_budget_tokens=engine["max_num_batched_tokens"],
        max_model_tokens=CONTEXT_TOKENS,
    )
    cost = LayerProfile(profiles, layers=layers, step_host_s=step_host_s)
    executor = ModelledExecutor(max_slots=config.max_slots, cost=cost)
    records: list[Record] = []
    source = OpenLoop(Trace(run / "requests.jsonl"))
    report = replay(source, config, executor, on_record=records.append)
    values = {name: [getattr(record, name) for record in records] for name in BOUNDS}
    found = {name: np.array([v for v in values[name] if v is not None]) for name in BOUNDS}
    names = ("num_blocks", "max_slots", "step_budget_tokens")
    told: dict[str, Any] = {name: getattr(config, name) for name in names}
    told |= {"step_host_us": step_host_s * 1e6}
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
    parser.add_argument("--step-host-us", type=float, default=0.0, help="added to every step")
    args = parser.parse_args()
    run = args.data / "vllm_runs" / args.run
    if not run.is_dir():
        raise SystemExit(str(FieldError("--data", f"{run} is no folder", "name `measured`")))
    blocks = args.num_blocks or pool_blocks(run)
    ours, told = simulated(args.data, run, blocks, args.step_host_us * 1e-6)
    print_report(
        f"simulator against vLLM: {args.run}",
        compare(measured(run / "requests.jsonl"), ours),
        notes=(", ".join(f"{name} {value}" for name, value in told.items()),),
        extra={"settings": told},
    )


if __name__ == "__main__":
    main()
