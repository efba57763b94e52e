"""How long a step takes by transformers' modelling code, over our own pass.

Of a Llama of SmolLM2-135M's shape with random weights, which are made. Both compute the same
decodes, by turns.

    python -m bench.model_impl [--batch 8] [--context 128] [--dtype bfloat16] [--repeats 12]
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

from bench.report import print_report, rounded
from cbatch.runtime.cpu.decoder import RaggedBatch, load_model
from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model
from cbatch.runtime.model.kv_cache import KVCache

_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_BLOCK_TOKENS = 16
_STEPS = 10  # of a turn


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.dtype)
        rows = measure(Path(folder), args)
    notes = (f"medians of {args.repeats} turns of {_STEPS} steps; ratios within a turn",)
    print_report("a step by transformers' modelling code", rows, notes=notes)


def make(folder: Path, dtype: str) -> None:
    """Writes the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).to(getattr(torch, dtype)).save_pretrained(folder)


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch: medians, and of the ratios within each turn their range."""
    models = {"own": load_model(folder), "transformers": load_transformers_model(folder)}
    found = []
    for batch in args.batch:
        blocks = -(-args.context // _BLOCK_TOKENS)
        step = decodes(batch, args.context, blocks)
        caches = {
            name: KVCache(model.config, batch * blocks, _BLOCK_TOKENS, model.dtype, "cpu")
            for name, model in models.items()
        }
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(args.repeats + 1):  # the first is to get warm
            for name in list(models) if turn % 2 else list(models)[::-1]:
                began_s = time.perf_counter()
                for _ in range(_STEPS):
                    models[name].forward(step, caches[name])
                if turn:
                    times[name].append((time.perf_counter() - began_s) / _STEPS * 1e3)
        ratios = [b / a for a, b in zip(times["own"], times["transformers"], strict=True)]
        found.append(
            {
                "batch": batch,
                "own_ms": rounded(statistics.median(times["own"])),
                "transformers_ms": rounded(statistics.median(times["transformers"])),
                "over_own": rounded(statistics.median(ratios)),
                "least": rounded(min(ratios)),
                "most": rounded(max(ratios)),
            }
        )
    return found


def decodes(batch: int, context: int, blocks: int) -> RaggedBatch:
    """One token each of sequences that are that long."""
    return RaggedBatch(
        tokens=torch.arange(batch) + 100,
        positions=torch.full((batch,), context - 1),
        query_lens=np.ones(batch, np.int32),
        context_lens=np.full(batch, context, np.int32),
        block_tables=np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks),
        logits_index=torch.arange(batch),
    )


if __name__ == "__main__":
    main()
