"""Settings that several commands share: the model, and flags of the engine's options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any

from cbatch.cli.settings import add_flags, flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import knob
from cbatch.demo import demo_paths
from cbatch.engine.options import EngineSettings
from cbatch.engine.unsupported import UNSUPPORTED_OPTIONS, require_neutral_option
from cbatch.text.tool_parsers import ReasoningParser

ChatTemplateFile = Annotated[
    str | None,
    knob("chat", "Jinja template, or the name of one of the model's (default: its own)", "FILE"),
]
ReasoningFormat = Annotated[
    ReasoningParser,
    knob("chat", "format of the model's reasoning; auto: by its chat template"),
]
MODEL_HELP = (
    "model directory, .gguf file, hub name, smollm2 or gemma3-270m (default: the demo pair)"
)


class ModelSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings of a command whose first positional argument is the model."""

    model: Annotated[str | None, knob("", MODEL_HELP, "MODEL")] = None


class _RefuseOption(argparse.Action):
    """An option of other engines: raises `FieldError` unless its value is neutral."""

    def __call__(self, parser: Any, namespace: Any, values: Any, name: str | None = None) -> None:
        option = str(name).removeprefix("--").replace("-", "_")
        require_neutral_option(option, self.nargs == 0 or values, str(name), ())


def add_engine_flags(parser: argparse.ArgumentParser, kind: type[EngineSettings]) -> None:
    add_flags(parser, kind)
    for name, option in UNSUPPORTED_OPTIONS.items():
        is_switch = any(isinstance(value, bool) for value in option.neutral)
        flags = [flag_of(name), *([flag_of(f"no_{name}")] if is_switch else [])]
        nargs = 0 if is_switch else None
        parser.add_argument(*flags, action=_RefuseOption, help=argparse.SUPPRESS, nargs=nargs)


def model_paths(model: str | None, draft: str | None) -> tuple[str | Path, str | Path | None]:
    """Return the given model and draft, or, without a model, the demo pair. Raises `FieldError` for
    a draft without a model."""
    if model is not None:
        return model, draft
    if draft is not None:
        raise FieldError("--draft", "needs a target model", "name the model as well")
    return demo_paths()
