"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.core.request.typed import knob
from cbatch.engine.options import EngineOptions

MODEL_HELP = "directory, .gguf file, hub name or smollm2 (default: the demo pair)"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a command's models are loaded and run."""

    draft: Annotated[
        str | None,
        knob(
            "engine",
            "small model that guesses ahead, or an EAGLE or Medusa head of this one",
            "MODEL",
            aliases=("draft_model",),
        ),
    ] = None
    engine: EngineOptions = EngineOptions()


class ModelSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings of a command whose first word is the model."""

    model: Annotated[str | None, knob("", MODEL_HELP, "MODEL")] = None


_BY_DEFAULT = {"max_tokens": 64, "temperature": 0.0}  # where a command's own differ


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineSettings)


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """Read the flags of a command that says how to sample by its own flags, too. Raises
    `FieldError` naming the flag."""
    found = read_settings(EngineSettings, args).values
    return replace(found, engine=replace(found.engine, generation_config="none"))


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Flags for the fields of `SamplingParams`; `drafter` is the engine's."""
    about = {"sampling": "for every prompt; a JSON line's own fields come first"}
    add_flags(parser, SamplingParams, defaults=_BY_DEFAULT, about=about)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises `FieldError` naming the flag."""
    return read_settings(SamplingParams, args, defaults=_BY_DEFAULT).values


def model_paths(model: str | None, draft: str | None) -> tuple[str | Path, str | Path | None]:
    """The model and draft asked for, or the pair that is shipped with the package."""
    if model is not None:
        return model, draft
    if draft is not None:
        raise FieldError("--draft", "needs its target", "name the model as well")
    from cbatch.demo import demo_paths

    return demo_paths()
