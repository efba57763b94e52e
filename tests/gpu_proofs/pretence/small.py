"""`bench.gpu` as on a device, every branch of it, at sizes that an interpreter can take."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from bench.gpu import limits
from bench.gpu.limits import GridHeads, Query, workload

_TIMES = 32  # shorter are long queries, and contexts
_ALIKE = 2  # sequences of a batch
_CANDIDATES = 2  # tiles that are swept, for each model and page
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320,
}  # fmt: skip


def _shorter(name: str) -> list[Query]:
    found: list[Query] = []
    for query in workload(name):
        tokens = query.query_tokens if query.query_tokens <= 8 else query.query_tokens // _TIMES
        one = Query(max(tokens, 2), max(tokens, 2, query.context_tokens // _TIMES))
        one = one if query.query_tokens > 1 else one._replace(query_tokens=1)
        found += [one] * (found.count(one) < _ALIKE)
    return found


def shrink() -> None:
    """In this process, before what it shrinks is imported."""
    limits.workload = _shorter
    for name, heads in limits.HEADS.items():
        limits.HEADS[name] = GridHeads(1, heads.group, 32)
    limits.LLAMA_8B_HEADS = limits.HEADS["llama-8b"]
    limits.MODELS = {name: structs.replace(shape, **_TINY) for name, shape in limits.MODELS.items()}
    limits.DRAFTS = limits.MODELS
    limits.BATCHES, limits.VOCAB = (2, 1), 700
    for module, values in _VALUES.items():
        found = importlib.import_module(f"bench.gpu.{module}")
        for name, value in values.items():
            assert hasattr(found, name), (module, name)
            setattr(found, name, value(found) if callable(value) else value)


def _few(module: Any) -> Callable[..., Any]:
    real = module.candidates
    return lambda *given: itertools.islice(real(*given), _CANDIDATES)


def _plain(_: Any) -> Callable[..., Any]:
    """Nothing is compiled for a device that is not there."""
    return lambda function: function


def _started(module: Any) -> Callable[..., Any]:
    real = module.child_command

    def child_command(out: Path, peers: Path | None) -> Callable[..., Sequence[str]]:
        command = real(out, peers)

        def words(*given: Any) -> list[str]:
            said = list(command(*given))
            at = said.index("bench.gpu")
            return [*said[:at], "tests.gpu_proofs.pretence.job", *said[at:]]

        return words

    return child_command


def _case(module: Any) -> Callable[..., Any]:
    real = module._case

    def case(bench: Any, *, vocab: int, requests: int, **kinds: bool) -> Any:
        return real(bench, vocab=min(vocab, 300), requests=min(requests, 8), **kinds)

    return case


def _tiling(module: Any) -> Any:
    return module.TINY_TILING._replace(block=512, reduce_block=512)  # fewer programs to interpret


def _made(module: Any) -> Callable[..., Any]:
    real = module.make_case
    return lambda drafts, *given, **kinds: real(drafts[:3], *given, **kinds)


def _sizes(module: Any) -> Any:
    return module.FULL._replace(
        batches=limits.BATCHES, prompt_tokens=80, warm_steps=1, window_steps=2, windows=2,
        budget_tokens=128,
    )  # fmt: skip


def _device(module: Any) -> Any:
    return lambda: module.World.DEVICE


_VALUES: dict[str, dict[str, Any]] = {
    "world": {"find_world": _device},
    "timing": {"MOST_SAMPLES": 1, "FEWEST_SAMPLES": 1, "_SAMPLE_S": 1e-3, "_MOST_SETS": 2},
    "ceilings": {"_COPY_BYTES": 1 << 12, "_EDGE": 16},
    "correct_attention": {"_STRESS_LAUNCHES": 3},
    "correct_sampling": {"_case": _case, "TILING": _tiling},
    "correct_laws": {
        "_COUNT": 64, "_WIDE_COUNT": 32, "_GROUP": 32, "_WIDE_VOCAB": 300, "_LIKELIEST": 8,
    },
    "supervise": {"child_command": _started, "SHARDS": 2, "_CELL_S": 900.0},
    "kernels": {"make_case": _made, "_TOKENS": (3, 9), "_WIDTH": 64, "_INTERMEDIATE": 96},
    "peers": {"inductor": _plain},
    "sweep": {"candidates": _few},
    "engine": {"FULL": _sizes, "_PROFILE_S": 0.0, "_SHORT_TOKENS": 2, "_LONG_TOKENS": 4},
}  # fmt: skip
