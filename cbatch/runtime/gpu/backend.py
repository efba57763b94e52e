"""GPUs as devices of an engine. This module can be imported without triton."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from cbatch.core.request.errors import FieldError
from cbatch.runtime.backend import LoadRequest, Requirements
from cbatch.runtime.gpu.support import unsupported_on_gpu
from cbatch.runtime.model.checkpoint import read_config
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.gguf_file import is_gguf
from cbatch.runtime.rank_group import RankGroup

if TYPE_CHECKING:
    from cbatch.runtime.gpu.loaded import GpuModels

_MIN_CAPABILITY = (8, 0)  # Ampere, the first with bf16 and asynchronous copies to shared memory
_UNTESTED = "was never tested on one; --device cuda uses it"
_logger = logging.getLogger("cbatch")


class GpuBackend:
    """Backend with Triton kernels. By default the host plans the next step while one runs, since
    the device would idle otherwise. Attention reads pages of 64 tokens fastest."""

    default_block_size = 64
    default_overlap: Literal[0, 1] = 1

    def may_auto_select(self, needs: Requirements) -> bool:
        """Return whether torch sees a GPU that supports `needs`. Invariant numerics, models other
        than Llama's kind and transformers' code default to the CPU: they were only tested there."""
        if not torch.cuda.is_available():
            return False
        problem = _problem()
        if problem is None and needs.numerics == "invariant":
            problem = f"numerics: 'invariant' {_UNTESTED}"
        if problem is None and (needs.impls != ("own", "own") or not _is_plain(needs.model)):
            problem = f"this model's code {_UNTESTED}"
        if problem is None:
            try:
                self.check_supported(needs)
                return True
            except FieldError as error:
                problem = f"{error.field}: {error.problem}"
        _logger.warning("the GPU that torch sees is not used: %s", problem)
        return False

    def require_device(self, device: str) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(device.partition(":")[2] or 0) >= count:
            built = "" if torch.version.cuda else f" ({torch.__version__} is built without CUDA)"
            problem = f"{device!r} is not available: torch sees {count} GPUs{built}"
            raise FieldError("device", problem, "use auto or cpu")

    def check_supported(self, needs: Requirements) -> None:
        size = needs.block_size
        if needs.tensor_parallel_size > 1:
            problem = f"{needs.tensor_parallel_size} ranks are supported on CPUs only"
            raise FieldError("tensor_parallel_size", problem, "use --device cpu, or leave it out")
        if size is not None and (size < 16 or size & (size - 1)):
            problem = f"{size!r} is not supported on a GPU"
            raise FieldError("block_size", problem, "use 16, 32, 64 or 128, or --device cpu")

    def why_not_compiled(self, config: ModelConfig, num_ranks: int) -> str | None:
        lacking = unsupported_on_gpu(config)
        return None if lacking is None else f"({lacking}) is not supported on a GPU"

    def set_threads(self, threads: int | Literal["auto"], num_ranks: int) -> None:
        pass

    def load(self, request: LoadRequest, ranks: RankGroup | None = None) -> GpuModels:
        from cbatch.runtime.gpu.loaded import load_models

        return load_models(request)


def _is_plain(model: str | Path) -> bool:
    """Return False for a GGUF file whose layers are not all Llama's. `impls` do not say it."""
    return not is_gguf(Path(model)) or read_config(Path(model)).plain


def _problem() -> str | None:
    """Return why the kernels cannot run on the GPU that torch sees, or None if they can."""
    if torch.version.cuda is None:
        return "this torch was not built with CUDA"
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        capability = torch.cuda.get_device_capability()
    except RuntimeError as error:
        return f"it does not respond: {error}"
    if capability < _MIN_CAPABILITY:
        return "its compute capability is {}.{}; kernels need {}.{}".format(
            *capability, *_MIN_CAPABILITY
        )
    return None
