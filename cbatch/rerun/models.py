"""The models of a recorded run, loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.events import Configured
from cbatch.engine.build import load_core
from cbatch.engine.core import EngineCore
from cbatch.engine.options import EngineOptions
from cbatch.runtime.cpu.executor import TorchExecutor

_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization", "max_model_len")
_SIZES += ("num_speculative_tokens",)


class DraftSizes(NamedTuple):
    """The sizes of a draft model or head."""

    context_tokens: int
    catch_up_price: float
    is_head: bool

    @classmethod
    def of(cls, core: EngineCore) -> DraftSizes:
        config = core.scheduler.config
        assert config.draft_context_tokens is not None
        is_head = bool(core.executor.drafter.hidden_layers)
        return cls(config.draft_context_tokens, config.catch_up_price, is_head)


def load_drafts(engine: Configured, model: str | None, draft: str | None) -> EngineCore:
    """Load the target and its draft, by default those that the log names. Raises `FieldError`."""
    names = {"--model": model or engine.model, "--draft": draft or engine.draft}
    for option, name in names.items():
        if name is None or (Path(name).is_absolute() and not Path(name).exists()):
            problem = "the log does not name it" if name is None else f"{name} does not exist"
            raise FieldError(option, problem, "give the path of the model")
    small: dict[str, Any] = dict.fromkeys(_SIZES)  # only the models are needed
    small |= {"num_blocks": 1, "max_num_seqs": 1, "overlap": 0, "tensor_parallel_size": 1}
    # A log of a later version may have further options.
    known = {k: v for k, v in engine.options.items() if k in EngineOptions.__struct_fields__}
    try:
        options = msgspec.convert(known, EngineOptions)
    except msgspec.ValidationError as error:
        raise FieldError("LOG", f"options: {error}", "record it again") from error
    options = replace(options, lookahead="fixed:1", drafter=(MODEL,), **small)
    core, _, _ = load_core(names["--model"], names["--draft"], options, handles_text=False)
    if not isinstance(core.executor, TorchExecutor):
        core.resources.close()
        raise FieldError("--draft", "is rerun on a CPU only", "hide the GPU: CUDA_VISIBLE_DEVICES=")
    return core
