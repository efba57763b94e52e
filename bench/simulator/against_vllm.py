"""Compare the simulator with a real vLLM: `python -m bench.simulator.against_vllm --data DIR`.

DIR is the folder `measured` of the shared data (see its README). It has a vLLM run with the time
stamps of all requests, and layer profiles of the same device. The profiles are the cost model's
only input; nothing is fitted to the run. Assumptions:

- slots, token budget, arrivals and lengths are the run's. The KV pool is the run's if recorded,
  else computed by vLLM's rules. `--num-blocks` sets another size; a wrong size makes TTFT wrong.
- a step takes the time of its kernels: vLLM 0.19 schedules a step while the one before it runs, and
  replays captured graphs, so host work and gaps between kernels are 0.
- a token is available when its step ends, and prompts share no prefix.

TTFT and end-to-end time count from a request's arrival. Two clocks stamp the run's arrivals and its
tokens. Their offset is taken as constant, such that no request was queued before it arrived.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import print_report
from cbatch.cli.parser import CommandParser
from cbatch.core.request.errors import FieldError
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.cost.pool import MEMORY_SHARE, PoolSettings, pool_blocks, recorded_blocks
from sim.cost.roofline import Gpu, RooflineConfig
from sim.cost.shapes import load_shape
from sim.report.report import Record, Spread

RUN = "RTXPRO6000_Llama-3.1-8B"
BLOCK_TOKENS = 16
# Memory of a card, as CUDA reports it in later records of the same benchmark.
USABLE_BYTES = {"RTXPRO6000": 101_976_440_832, "RTX4090": 25_250_627_584}
BOUNDS = {"ttft_s": 0.08, "tpot_s": 0.02, "e2e_s": 0.03}  # allowed relative errors of the mean
Measures = dict[str, np.ndarray]  # by measure: seconds of each request


def measured(path: Path) -> Measures:
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


def run_blocks(run: Path, model: str) -> int:
    """Return the number of blocks in the run's KV pool: as recorded, or by vLLM's rules from the
    card's memory. Raises `FieldError` if neither is known."""
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    recorded, hardware = meta.get("kv_cache") or {}, meta.get("hardware") or {}
    if recorded.get("num_gpu_blocks"):
        return recorded_blocks(run / "meta.json", BLOCK_TOKENS)[0]
    card = run.name.partition("_")[0]
    total_bytes = hardware.get("device_total_memory_bytes") or USABLE_BYTES.get(card)
    if total_bytes is None:
        problem = f"{run} has neither blocks nor its device's memory"
        raise FieldError("--num-blocks", problem, "give them")
    engine, version = meta["engine_kwargs"], meta["vllm_version"].split(".")
    settings = PoolSettings(
        block_tokens=BLOCK_TOKENS,
        step_tokens=engine["max_num_batched_tokens"],
        max_rows=engine["max_num_seqs"],
        gpu_memory_utilization=recorded.get("gpu_memory_utilization", MEMORY_SHARE),
        rules="vllm-0.21" if (int(version[0]), int(version[1])) >= (0, 21) else "vllm-0.19",
    )
    shape, parts = load_shape(model), engine.get("tensor_parallel_size", 1)
    ignored = dict.fromkeys(("bf16_flops", "memory_bytes_per_s", "link_bytes_per_s"), 1.0)
    gpu = Gpu(**ignored, memory_bytes=total_bytes, source="memory alone")
    return pool_blocks(RooflineConfig(gpu=gpu, shape=shape, tensor_parallel_size=parts), settings)


def simulated(data: Path, run: Path, num_blocks: int | None) -> tuple[Measures, dict[str, Any]]:
    """Return the times of the same requests through cbatch's scheduler, and its settings."""
    hardware, _, model = run.name.partition("_")
    engine = json.loads((run / "meta.json").read_text(encoding="utf-8"))["engine_kwargs"]
    scenario = Scenario(
        trace=str(run / "requests.jsonl"),
        cost_table=str(data / "layer_profiles" / hardware / model),
        model=model,
        num_blocks=num_blocks or run_blocks(run, model),
        block_size=BLOCK_TOKENS,
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        prompt_share=1.0,
    )
    simulation, records = build(scenario), list[Record]()
    report = simulation.run(on_record=records.append)
    values = {name: [getattr(record, name) for record in records] for name in BOUNDS}
    measures = {name: np.array([v for v in values[name] if v is not None]) for name in BOUNDS}
    names = ("num_blocks", "max_num_seqs", "max_num_batched_tokens")
    settings = {name: simulation.settings[name] for name in names}
    return measures, settings | {"steps": report.steps, "preemptions": report.preemptions}


def compare(real: Measures, simulated: Measures) -> list[dict[str, Any]]:
    """Return a row for each measure and percentile, in milliseconds; only means have a bound."""
    rows = []
    for name, bound in BOUNDS.items():
        for cut in ("mean", "p50", "p90", "p99"):
            real_ms, simulated_ms = (
                getattr(Spread.of(v[name]), cut) * 1e3 for v in (real, simulated)
            )
            limit = bound if cut == "mean" else None
            error = simulated_ms / real_ms - 1
            rows.append(
                {
                    "measure": f"{name.removesuffix('_s')}_ms",
                    "cut": cut,
                    "vllm": round(real_ms, 2),
                    "simulated": round(simulated_ms, 2),
                    "error": round(error, 4),
                    "bound": limit,
                    "within": None if limit is None else abs(error) <= limit,
                }
            )
    return rows


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder `measured`")
    parser.add_argument("--run", default=RUN, help=f"folder in DIR/vllm_runs (default: {RUN})")
    parser.add_argument("--num-blocks", type=int, help="blocks of the KV pool")
    args = parser.parse_args()
    run = args.data / "vllm_runs" / args.run
    if not run.is_dir():
        raise SystemExit(str(FieldError("--data", f"{run} is not a folder", "name `measured`")))
    try:
        real = measured(run / "requests.jsonl")
        simulated_times, settings = simulated(args.data, run, args.num_blocks)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{run}: {type(error).__name__}: {error}") from None
    print_report(
        f"simulator against vLLM: {args.run}",
        compare(real, simulated_times),
        notes=(", ".join(f"{name} {value}" for name, value in settings.items()),),
        extra={"settings": settings},
    )


if __name__ == "__main__":
    main()
