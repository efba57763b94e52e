"""A serving engine for language models with per-slot speculative lookahead.

Names are imported when they are first used, so that a part of the package (the scheduler alone,
say) loads nothing of the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

__version__ = "0.1.0"
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
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
