"""Loading of a transformers model for a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from cbatch.runtime.compiled import compiles
from cbatch.runtime.cpu.linear import resolve_numerics
from cbatch.runtime.cpu.transformers_backend.model import TransformersModel
from cbatch.runtime.rank_group import RankGroup
from cbatch.runtime.transformers_backend.loading import load_net, quiet
from cbatch.runtime.transformers_backend.self_test import compare, reference_of


def load_transformers_model(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    numerics: str = "auto",
    random_weights_seed: int | None = None,
    ranks: RankGroup | None = None,
) -> TransformersModel:
    """Load a Hugging Face directory or hub name; with `ranks`, this rank's shard. Raises ModelError
    for a model that cannot be served, with the reason, and FieldError if it cannot be divided
    among ranks."""
    net, path, served = load_net(path_or_name, dtype, random_weights_seed)
    with quiet():
        reference = reference_of(net, path)
        resolved = resolve_numerics(numerics, served, compiled=compiles(served))
        model = TransformersModel(net, path, served, resolved, ranks)
        compare(model, reference)
    return model
