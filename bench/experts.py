"""Tokens a second of small mixtures of experts, beside transformers' continuous batching.

Of a Qwen3-MoE and a gpt-oss with random fp32 weights, which are made. Systems take turns, and every
text is compared with what the model's own eager pass says, token by token.

    python -m bench.experts [--batch 8 32] [--output-tokens 32] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine.systems import Prompts, System, build_cbatch
from bench.peers.transformers_peer import build_continuous
from bench.report import print_report, rounded

_COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 192},
    "gpt_oss": {"num_local_experts": 16, "intermediate_size": 192, "sliding_window": 32},
}
_STD = 0.08  # so that texts are no single token


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    args.dtype, args.numerics, args.overlap = "float32", "auto", None
    results = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            results += measure(kind, Path(folder), args)
    print_report("mixtures of experts", results, notes=(f"medians of {args.repeats} turns",))


def measure(kind: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch and system: medians over repeats, and of the ratios within each; `equal`
    is how many texts are the eager pass's."""
    net = make(kind, folder)
    length = args.prompt_tokens + args.output_tokens
    systems = {
        "off": build_cbatch(folder, None, "off", args)[0],
        "ngram": _with_lookups(folder, args),
        "continuous": build_continuous(folder, "float32", most=max(args.batch), tokens=length),
    }
    rng, rows = np.random.default_rng(0), []
    for batch in args.batch:
        prompts = rng.integers(2, 2000, (batch, args.prompt_tokens)).tolist()
        wanted = eager(net, prompts, args.output_tokens)
        speeds: dict[str, list[float]] = {name: [] for name in systems}
        equal = dict.fromkeys(systems, 0)
        for turn in range(args.repeats + 1):  # the first is to get warm
            for name in list(systems) if turn % 2 else list(systems)[::-1]:
                run = systems[name].run(prompts, args.output_tokens)
                equal[name] = sum(a == b for a, b in zip(run.outputs, wanted, strict=True))
                if turn:
                    speeds[name].append(run.tokens_per_s)
        for name, found in speeds.items():
            pairs = zip(found, speeds["continuous"], strict=True)
            rows.append(
                {
                    "model": kind,
                    "batch": batch,
                    "system": name,
                    "output_tokens_per_s": round(statistics.median(found)),
                    "over_continuous": rounded(statistics.median(a / b for a, b in pairs)),
                    "equal": equal[name],
                }
            )
    return rows


def make(kind: str, folder: Path) -> Any:
    """Writes the model and gives it back, with eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **_COMMON | KINDS[kind])
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                weight.normal_(std=_STD)
    net.eval().save_pretrained(folder)
    return net


@torch.inference_mode()
def eager(net: Any, prompts: Prompts, count: int) -> list[list[int]]:
    """Greedy text by passes over all of it, without a cache."""
    tokens = torch.tensor(prompts)
    for _ in range(count):
        last = net(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, last], 1)
    found: list[list[int]] = tokens[:, -count:].tolist()
    return found


def _with_lookups(folder: Path, args: argparse.Namespace) -> System:
    from bench.engine.systems import EngineRun
    from cbatch import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=args.dtype,
        lookahead="goodput",
        drafter=("ngram",),
        max_slots=max(args.batch),
        max_model_tokens=512,
        step_budget_tokens=max(1024, max(args.batch) * args.prompt_tokens),
        prefix_cache=False,
        tokenizer="none",
    )

    def run(prompts: Prompts, output_tokens: int) -> EngineRun:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        started_s = time.perf_counter()
        done = llm.generate(prompts, params)
        seconds = time.perf_counter() - started_s
        return EngineRun(seconds, [list(each.token_ids) for each in done])

    return System("cbatch", "ngram", run)


if __name__ == "__main__":
    main()
