"""A head from its directory, for a target that is loaded."""

from __future__ import annotations

from pathlib import Path

from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.eagle_head import EagleHead
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights


def load_heads(path: Path, target: Model, target_path: str | Path) -> list[EagleHead]:
    """As its layout may be read, the likeliest first. Raises ModelError naming file and field or
    tensor."""
    weights = HeadWeights.of(path)
    rows = open_checkpoint(target_path).head()
    return [EagleHead(each, weights, target, rows) for each in read_head(path, target.config)]
