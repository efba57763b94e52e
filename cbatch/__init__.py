"""A serving engine for language models with per-slot speculative lookahead.

Names are imported when they are first used, so that a part of the package (the scheduler alone,
say) loads nothing of the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.assembly import EngineOptions, load_engine
    from cbatch.core.config import LookaheadConfig
    from cbatch.core.errors import FieldError, RefusedError
    from cbatch.core.request import FinishReason, SamplingParams, StructuredOutputs
    from cbatch.info import EngineInfo
    from cbatch.llm import LLM
    from cbatch.outputs import Choice, Completion, Output, Speculation, TokenLogprob
    from cbatch.stepwise import Engine

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
    "cbatch.assembly": ("EngineOptions", "load_engine"),
    "cbatch.info": ("EngineInfo",),
    "cbatch.core.config": ("LookaheadConfig",),
    "cbatch.core.errors": ("FieldError", "RefusedError"),
    "cbatch.core.request": ("FinishReason", "SamplingParams", "StructuredOutputs"),
    "cbatch.llm": ("LLM",),
    "cbatch.outputs": ("Choice", "Completion", "Output", "Speculation", "TokenLogprob"),
    "cbatch.stepwise": ("Engine",),
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
