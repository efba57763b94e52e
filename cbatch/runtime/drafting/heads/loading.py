"""Loading of a draft head for a target that is loaded already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights

H = TypeVar("H", bound=Head)


def load_heads(
    path: Path, target: Any, target_path: str | Path, classes: Mapping[str, Callable[..., H]]
) -> list[H]:
    """Return the head in a directory, once for each way to read its files, the likeliest first.
    `classes`: the head classes of the target's device, by kind. Raises ModelError naming file and
    field or tensor."""
    weights = HeadWeights.of(path)
    rows = getattr(target.head, "weight", None)  # the output matrix on a GPU, unless quantised
    if rows is None:
        rows = open_checkpoint(target_path).head()
    readings = read_head(path, target.config)
    return [classes[each.kind](each, weights, target, rows) for each in readings]
