"""Settings that several commands share: the model, the draft model and the engine's options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import knob
from cbatch.demo import demo_paths
from cbatch.engine.options import EngineOptions

MODEL_HELP = "model directory, .gguf file, hub name or smollm2 (default: the demo pair)"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model and the engine's options."""

    draft: Annotated[
        str | None,
        knob(
            "engine",
            "draft model, or an EAGLE or Medusa head of the model",
            "MODEL",
            aliases=("draft_model",),
        ),
    ] = None
    engine: EngineOptions = EngineOptions()


class ModelSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings of a command whose first positional argument is the model."""

    model: Annotated[str | None, knob("", MODEL_HELP, "MODEL")] = None


def model_paths(model: str | None, draft: str | None) -> tuple[str | Path, str | Path | None]:
    """Return the given model and draft, or, without a model, the demo pair. Raises `FieldError` for
    a draft without a model."""
    if model is not None:
        return model, draft
    if draft is not None:
        raise FieldError("--draft", "needs a target model", "name the model as well")
    return demo_paths()
