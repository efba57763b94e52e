"""vLLM's Triton kernels from a few of its files, without an installed vLLM: a folder `vllm/` with
the files below, as they lie in its wheel. Everything else that they import is a stand-in that the
kernels never reach."""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock

import torch
import triton
import triton.language as tl

FILES = (
    "v1/attention/ops/triton_unified_attention.py",
    "v1/attention/ops/triton_attention_helpers.py",
    "v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
    "v1/worker/gpu/sample/gumbel.py",
    "v1/worker/gpu/sample/watermark.py",
    "v1/worker/gpu/sample/min_p.py",
    "v1/worker/gpu/sample/penalties.py",
    "v1/spec_decode/fly.py",
    "utils/math_utils.py",
)
_REQUIRED = FILES[0], FILES[2], FILES[3]


class KVQuantMode(enum.IntEnum):
    NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)


class _StandIn(MagicMock):
    """For a name that is imported and not used. It is false, and as a decorator does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).__bool__ = lambda _: False  # each has a type of its own
        self.side_effect = lambda *given, **more: (
            given[0] if len(given) == 1 and callable(given[0]) and not more else DEFAULT
        )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        file = f"{name.replace('.', '/').partition('/')[2]}.py"
        if file in FILES:
            return importlib.util.spec_from_file_location(name, self.root / "vllm" / file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return _StandIn(**_GIVEN.get(spec.name, dict)())

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to do."""


def _triton_utils() -> dict[str, Any]:
    from triton.language.extra import libdevice

    return {"tl": tl, "triton": triton, "tldevice": libdevice, "HAS_TRITON": True}


def _platform() -> dict[str, Any]:
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    platform = _StandIn(  # all else that it may be is false
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: here[0] == family // 10,
        is_device_capability=lambda capability: capability == here,
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
    )
    return {"current_platform": platform}


def _launching(*, warmup_inputs: Any = None, kernel: Any = None) -> Callable[..., Any]:
    """In place of vLLM's decorator of launchers: the function gives the grid and what is not among
    its own arguments, whose names are those of the kernel but for `_ptr`."""

    def decorate(launcher: Callable[..., Any]) -> Callable[..., Any]:
        if kernel is None:
            return launcher
        signature = inspect.signature(launcher)

        def launch(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            grid, more = launcher(*args, **options)[:2]
            given = dict(more)
            for name, value in bound.arguments.items():
                known = next((n for n in (name, f"{name}_ptr") if n in kernel.arg_names), None)
                if known is not None:
                    given.setdefault(known, value)
            return kernel[grid](**given)

        return launch

    return decorate


_GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "vllm.triton_utils": _triton_utils,
    "vllm.platforms": _platform,
    "vllm.envs": lambda: {"VLLM_BATCH_INVARIANT": False},
    "vllm.v1.kv_cache_interface": lambda: {"KVQuantMode": KVQuantMode},
    "vllm.model_executor.warmup.jit_warmup_triton_helper": lambda: {
        "triton_kernel_dispatcher_with_warmup": _launching
    },
    "vllm.config.model": lambda: {"PROCESSED_LOGPROBS_MODES": ()},
    "vllm.utils.torch_utils": lambda: {"async_tensor_h2d": lambda x, **_: torch.as_tensor(x)},
}


def load(root: Path) -> types.SimpleNamespace:
    """`unified_attention` and `rejection_sample`. Raises FileNotFoundError naming what is
    missing."""
    missing = [file for file in _REQUIRED if not (root / "vllm" / file).exists()]
    if missing:
        raise FileNotFoundError(f"vllm/{missing[0]} is not in {root.name}")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(root))
    attention, rejection, _ = (
        importlib.import_module("vllm." + file.removesuffix(".py").replace("/", "."))
        for file in _REQUIRED
    )
    return types.SimpleNamespace(
        unified_attention=attention.unified_attention,
        rejection_sample=rejection.rejection_sample,
    )
