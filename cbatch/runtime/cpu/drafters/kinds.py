"""The drafter class for each kind of draft. A new kind is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.drafters.eagle import EagleDrafter
from cbatch.runtime.cpu.drafters.eagle_head import EagleHead
from cbatch.runtime.cpu.drafters.medusa import MedusaDrafter
from cbatch.runtime.cpu.drafters.medusa_head import MedusaHead
from cbatch.runtime.cpu.transformers_backend.model import TransformersModel
from cbatch.runtime.drafting.contract import ModelDrafter
from cbatch.runtime.drafting.heads.head import Head

# The class of each kind of head.
HEADS: dict[str, Callable[..., Head]]
HEADS = {"eagle3": EagleHead, "eagle": EagleHead, "mtp": EagleHead, "medusa": MedusaHead}
_KINDS: dict[type, Callable[[Any], ModelDrafter]] = {
    Model: DraftModel,
    TransformersModel: DraftModel,
    EagleHead: EagleDrafter,
    MedusaHead: MedusaDrafter,
}


def drafter_of(draft: Model | Head) -> ModelDrafter:
    return _KINDS[type(draft)](draft)
