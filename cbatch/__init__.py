"""A serving engine for language models with per-slot speculative lookahead.

Public names are imported on first use, so that importing a part of the package, such as the
scheduler, does not import torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# torch's OpenMP threads spin for some 20 ms before they sleep, and keep processors from the threads
# that they wait for. With this count, read when torch is imported, they spin for some 50 us.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from cbatch.core.request.errors import FieldError, RefusedError
    from cbatch.core.request.request import FinishReason, SamplingParams, StructuredOutputs
    from cbatch.core.speculation.config import LookaheadConfig
    from cbatch.engine.build import load_engine
    from cbatch.engine.engine import Engine
    from cbatch.engine.info import EngineInfo
    from cbatch.engine.options import EngineOptions
    from cbatch.llm import LLM
    from cbatch.text.outputs import Choice, Completion, Output, Speculation, TokenLogprob

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "Engine",
    "EngineInfo",
    "EngineOptions",
    "FieldError",
    "FinishReason",
    "LookaheadConfig",
    "Output",
    "RefusedError",
    "SamplingParams",
    "Speculation",
    "StructuredOutputs",
    "TokenLogprob",
    "load_engine",
]

_MODULES = {
    "cbatch.engine.build": ("load_engine",),
    "cbatch.engine.options": ("EngineOptions",),
    "cbatch.engine.info": ("EngineInfo",),
    "cbatch.core.speculation.config": ("LookaheadConfig",),
    "cbatch.core.request.errors": ("FieldError", "RefusedError"),
    "cbatch.core.request.request": ("FinishReason", "SamplingParams", "StructuredOutputs"),
    "cbatch.llm": ("LLM",),
    "cbatch.text.outputs": ("Choice", "Completion", "Output", "Speculation", "TokenLogprob"),
    "cbatch.engine.engine": ("Engine",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
