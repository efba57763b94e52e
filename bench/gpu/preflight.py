"""What the run needs and what it would like to have, before it costs any time: a line each."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from cbatch.engine.backends import problem_of_gpu

_LEAST_BYTES = 40 << 30  # of the largest model with its cache, and of batches of logits


class Missing(NamedTuple):
    what: str
    costs: str  # what is left out without it


def needs() -> str | None:
    """What is missing that nothing runs without, in one line; None if all is there."""
    if not torch.cuda.is_available():
        return "torch sees no GPU (driver, CUDA_VISIBLE_DEVICES, or a torch without CUDA)"
    problem = problem_of_gpu()
    if problem is not None:
        return f"the GPU cannot be used: {problem}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for its launcher: install gcc, or set CC"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton needs Python.h for its launcher: install python3-dev"
    return None


def lacks(peers: Path | None) -> list[Missing]:
    """What some cells are skipped without."""
    checks: tuple[tuple[Callable[[], object], str, str], ...] = (
        (_has_sanitizer, "compute-sanitizer", "its four cells of correctness"),
        (lambda: shutil.which("nvidia-smi"), "nvidia-smi", "clocks and driver"),
        (lambda: find_spec("transformers"), "transformers", "the engine's peer"),
        (lambda: peers and (peers / "vllm").is_dir(), "--peers DIR with vllm/", "vLLM's kernels"),
        (_has_memory, f"{_LEAST_BYTES >> 30} GiB of free memory", "models that do not fit"),
    )
    return [Missing(what, costs) for there, what, costs in checks if not there()]


def _has_sanitizer() -> bool:
    from bench.gpu.combine import sanitizer

    return sanitizer() is not None


def _has_memory() -> bool:
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes >= _LEAST_BYTES


def line(missing: list[Missing]) -> str:
    told = "; ".join(f"{each.what} (skips {each.costs})" for each in missing)
    return f"missing: {told}" if told else "nothing is missing"
