"""`bench.gpu` as on a device, with every branch of it, at sizes that an interpreter can take."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

from msgspec import structs

from bench.gpu import limits
from bench.gpu.limits import GridHeads, Query, workload

_TIMES = 32  # factor by which long queries and contexts are shorter
_ALIKE = 2  # sequences of a batch with one length
_CANDIDATES = 2  # tiles of a sweep, for each model and page size
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320,
}  # fmt: skip


def _shorter(name: str) -> list[Query]:
    kept: list[Query] = []
    for query in workload(name):
        tokens = query.query_tokens if query.query_tokens <= 8 else query.query_tokens // _TIMES
        one = Query(max(tokens, 2), max(tokens, 2, query.context_tokens // _TIMES))
        one = one if query.query_tokens > 1 else one._replace(query_tokens=1)
        kept += [one] * (kept.count(one) < _ALIKE)
    return kept


def shrink() -> None:
    """Shrink sizes in this process, before the modules that use them are imported."""
    limits.workload = _shorter
    for name, heads in limits.HEADS.items():
        limits.HEADS[name] = GridHeads(1, heads.group, 32)
    limits.LLAMA_8B_HEADS = limits.HEADS["llama-8b"]
    limits.MODELS = {name: structs.replace(shape, **_TINY) for name, shape in limits.MODELS.items()}
    limits.BATCHES, limits.VOCAB = (2, 1), 2100
    for module, values in _VALUES.items():
        imported = importlib.import_module(f"bench.gpu.{module}")
        for name, value in values.items():
            assert hasattr(imported, name), (module, name)
            setattr(imported, name, value(imported) if callable(value) else value)


def _few(module: Any) -> Callable[..., Any]:
    real = module.tunings
    return lambda *given: itertools.islice(real(*given), _CANDIDATES)


def _started(module: Any) -> Callable[..., Any]:
    """Start parts of the run on the same simulated machine."""
    real = module.parts

    def parts(*given: Any) -> list[Any]:
        smaller = []
        for part in real(*given):
            at = part.command.index("bench.gpu")
            words = (*part.command[:at], "tests.gpu_proofs.pretence.job", *part.command[at:])
            smaller.append(part._replace(command=words, most_s=3600.0))
        return smaller

    return parts


def _nothing(_: Any) -> Callable[..., dict[str, int]]:
    """Do nothing: kernels are interpreted."""
    return lambda *_: {"kernels": 0}


def _unprofiled(_: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return no profile: a torch without CUDA has no profiler of kernels."""

    def step_kernels(step: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
        for _ in range(steps):
            step()
        return []

    return step_kernels


def _few_tests(module: Any) -> Callable[..., list[str]]:
    real, plugin = module.command, ("-p", "tests.gpu_proofs.pretence.plugin")
    return lambda *more, **_: real(*more, *plugin, "-k", "test_rows", processes=0)


def _sizes(module: Any) -> Any:
    return module.FULL._replace(
        batches=limits.BATCHES, prompt_tokens=80, warm_steps=1, window_steps=2, windows=2,
        budget_tokens=128,
    )  # fmt: skip


def _fast(module: Any) -> Any:
    """Products of `invariant` are interpreted, which takes minutes."""
    return [setting for setting in module.SETTINGS if setting.numerics == "fast"]


def _device(module: Any) -> Any:
    return lambda: module.RunMode.DEVICE


_VALUES: dict[str, dict[str, Any]] = {
    "environment": {"find_mode": _device},
    "timing": {"MOST_SAMPLES": 1, "FEWEST_SAMPLES": 1, "_SAMPLE_S": 1e-3, "_MOST_SETS": 2},
    "ceilings": {"_BYTES": 1 << 16, "_EDGE": 16, "_PROGRAMS": 2},
    "correctness": {"command": _few_tests},
    "__main__": {"parts": _started},
    "kernels": {"_STEPS": ((3, 2), (2, 0), (1, 3)), "_PRODUCT_ROWS": (3, 9), "_WIDTH": 64,
                "_INTERMEDIATE": 96, "_compile": _nothing},
    "sweep": {"tunings": _few, "_compile": _nothing},
    "engine": {"FULL": _sizes, "_PROFILE_S": 0.0, "_PROFILED": {("off", "greedy"): (2,)},
               "step_kernels": _unprofiled},
    "models": {"_STREAMS": 2, "_TOKENS": 4, "_RUNS": 2, "_MEASURED_S": 0.0,
                "SETTINGS": _fast},
}  # fmt: skip
