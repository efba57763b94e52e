"""Which drafter drives which draft: a new kind is one file, and a line here."""

from __future__ import annotations

from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.eagle_head import EagleHead
from cbatch.runtime.drafting.draft_model import DraftModel
from cbatch.runtime.drafting.eagle import EagleDrafter

_KINDS = {Model: DraftModel, EagleHead: EagleDrafter}


def drafter_of(draft: Model | EagleHead) -> DraftModel:
    return _KINDS[type(draft)](draft)  # type: ignore[index]
