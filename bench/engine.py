"""Output tokens a second of the whole engine beside Hugging Face `generate`, on the same weights in
the same run: `python -m bench.engine [MODEL] [--draft MODEL]`.

Without a model it measures the demo pair on its own prompts; `--shape llama-100m` writes a model
of that shape with random weights and prompts it with random tokens (without a draft: the acceptance
of a random one means nothing). Every system gets the same prompts, greedy, and generates exactly
the same number of tokens for each; systems take turns within a repeat, and ratios are taken within
it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.report import print_report, rounded
from bench.shapes import SHAPES, write_random_model
from cbatch import LLM, SamplingParams
from cbatch.demo import demo_paths, demo_prompts
from cbatch.outputs import Speculation
from cbatch.text import load_tokenizer

Prompts = list[list[int]]


class Run(msgspec.Struct):
    """Timed batches, and how their lookahead went."""

    seconds: float
    outputs: list[list[int]]  # token ids, in order of the prompts
    speculation: Speculation | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def accepted(self) -> float | None:
        """Tokens a decoding step of a sequence, 1.0 without drafts."""
        return self.speculation.mean_accepted_tokens if self.speculation else None

    @property
    def speculating_share(self) -> float | None:
        """Of decoding steps: those that drafted."""
        return self.speculation.drafting_share if self.speculation else None


class System(msgspec.Struct):
    """Something that completes a batch of prompts of equal length, greedily."""

    name: str
    lookahead: str
    run: Callable[[Prompts, int], Run]


def build_cbatch(model: Path, draft: Path | None, lookahead: str, args: Any) -> tuple[System, LLM]:
    most = max(args.batch)
    llm = LLM(
        model,
        draft if lookahead != "off" else None,
        dtype=args.dtype,
        numerics=args.numerics,
        lookahead=lookahead,
        max_slots=most,
        max_model_tokens=args.prompt_tokens + args.output_tokens,
        step_budget_tokens=max(1024, most * args.prompt_tokens),
        overlap=args.overlap,
        prefix_cache=False,  # the same prompts come again in every repeat
        tokenizer="none",
    )

    def run(prompts: Prompts, output_tokens: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        started_s = time.perf_counter()
        completions = llm.generate(prompts, params)
        seconds = time.perf_counter() - started_s
        total = Speculation()
        for completion in completions:
            total.merge(completion.speculation)
        return Run(seconds, [list(completion.token_ids) for completion in completions], total)

    return System("cbatch", lookahead, run), llm


def build_transformers(model: Path, dtype: str) -> System:
    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    # As ours with `ignore_eos`: a minimum of tokens would forbid that id, which changes the text.
    peer.generation_config.eos_token_id = None

    def run(prompts: Prompts, output_tokens: int) -> Run:
        ids = torch.tensor(prompts)
        started_s = time.perf_counter()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started_s
        return Run(seconds, out[:, ids.shape[1] :].tolist())

    return System("transformers", "off", run)


def make_prompts(model: Path, tokens: int, count: int, real: bool) -> Prompts:
    """`count` prompts of one length: the demo's (the last `tokens` of each), or random ids."""
    if not real:
        rng = np.random.default_rng(0)
        vocab_size = min(shape["vocab_size"] for shape in SHAPES.values())
        return [rng.integers(1, vocab_size - 1, tokens).tolist() for _ in range(count)]
    tokenizer = load_tokenizer(model)
    pool = [list(tokenizer.encode(prompt)) for prompt in demo_prompts()]
    long_enough = [ids[-tokens:] for ids in pool if len(ids) >= tokens] or pool
    shortest = min(len(ids) for ids in long_enough)
    return [long_enough[i % len(long_enough)][-shortest:] for i in range(count)]


def run_batches(system: System, prompts: Prompts, batch: int, output_tokens: int) -> Run:
    """One batch after the other; small batches take several, since prompts differ."""
    runs = [
        system.run(prompts[at : at + batch], output_tokens) for at in range(0, len(prompts), batch)
    ]
    outputs = [ids for run in runs for ids in run.outputs]
    whole = Run(sum(run.seconds for run in runs), outputs)
    for run in runs:
        if run.speculation is not None:
            whole.speculation = whole.speculation or Speculation()
            whole.speculation.merge(run.speculation)
    return whole


def measure(systems: Sequence[System], prompts: Prompts, batch: int, args: Any) -> list[list[Run]]:
    """Runs by system, in repeats; the order turns round from one repeat to the next."""
    for system in systems:
        system.run(prompts[:batch], min(8, args.output_tokens))
    runs: list[list[Run]] = [[] for _ in systems]
    gc.collect()
    for repeat in range(args.repeats):
        order = list(range(len(systems)))
        for index in order if repeat % 2 == 0 else reversed(order):
            run = run_batches(systems[index], prompts, batch, args.output_tokens)
            runs[index].append(run)
    return runs


def rows_of(systems: Sequence[System], runs: list[list[Run]], batch: int, dtype: str) -> list[Any]:
    """A row a system: medians, and medians of the ratios taken within a repeat."""
    speeds = [[run.tokens / run.seconds for run in system_runs] for system_runs in runs]
    by_name = {(s.name, s.lookahead): speed for s, speed in zip(systems, speeds, strict=True)}
    rows = []
    for system, speed, system_runs in zip(systems, speeds, runs, strict=True):
        row = {
            "system": system.name,
            "lookahead": system.lookahead,
            "batch": batch,
            "dtype": dtype,
            "output_tokens_per_s": round(statistics.median(speed), 1),
            "mean_accepted_tokens": rounded(system_runs[-1].accepted),
            "steps_with_drafts": rounded(system_runs[-1].speculating_share),
        }
        for name, base in (("transformers", "off"), ("cbatch", "off")):
            reference = by_name.get((name, base))
            ratios = [a / b for a, b in zip(speed, reference, strict=True)] if reference else []
            key = "ratio_to_transformers" if name == "transformers" else "ratio_to_off"
            row[key] = rounded(statistics.median(ratios)) if ratios else None
        rows.append(row)
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a model directory; default: the demo")
    parser.add_argument("--draft", type=Path, help="the draft's directory")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lookahead", nargs="+", default=["off", "fixed:4", "ema"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--numerics", default="auto", choices=["auto", "invariant", "fast"])
    parser.add_argument("--overlap", type=int, default=0, choices=[0, 1])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="at least so many a repeat")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    args = parser.parse_args(argv)
    if args.shape and (args.model or args.draft):
        parser.error("--shape writes its own model: give no MODEL and no --draft")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        model, draft = args.model, args.draft
        if args.shape:
            model = write_random_model(args.shape, Path(folder), args.dtype)
        elif model is None:
            model, draft = demo_paths()
        lookaheads = args.lookahead if draft else ["off"]
        built = [build_cbatch(model, draft, lookahead, args) for lookahead in lookaheads]
        systems = [system for system, _ in built]
        if not args.no_peer:
            systems.append(build_transformers(model, args.dtype))
        rows: list[dict[str, Any]] = []
        for batch in args.batch:
            count = -(-max(batch, args.prompts) // batch) * batch
            prompts = make_prompts(model, args.prompt_tokens, count, real=not args.shape)
            rows += rows_of(systems, measure(systems, prompts, batch, args), batch, args.dtype)
            print(f"batch {batch} measured", flush=True)
    info = built[0][1].info
    print_report(
        f"engine: {args.shape or model.name}, {len(prompts[0])} tokens in, "
        f"{args.output_tokens} out, greedy",
        rows,
        notes=(
            f"numerics {info.numerics}; {info.row_invariance}; overlap depth {args.overlap}",
            f"medians of {args.repeats} repeats in alternating order; ratios within a repeat",
        ),
        extra={"numerics": info.numerics, "row_invariant": info.row_invariant},
    )


if __name__ == "__main__":
    main()
