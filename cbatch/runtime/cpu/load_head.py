"""A head from its directory, for a target that is loaded."""

from __future__ import annotations

from pathlib import Path

from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.eagle_head import EagleHead
from cbatch.runtime.cpu.head import Head
from cbatch.runtime.cpu.medusa_head import MedusaHead
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights

_CLASSES = {"eagle3": EagleHead, "eagle": EagleHead, "medusa": MedusaHead}


def load_heads(path: Path, target: Model, target_path: str | Path) -> list[Head]:
    """As its layout may be read, the likeliest first. Raises ModelError naming file and field or
    tensor."""
    weights = HeadWeights.of(path)
    rows = open_checkpoint(target_path).head()
    readings = read_head(path, target.config)
    return [_CLASSES[each.kind](each, weights, target, rows) for each in readings]
