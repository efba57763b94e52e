"""Loading of a transformers model for a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from cbatch.runtime.compiled import compiles
from cbatch.runtime.cpu.transformers_backend.model import TransformersModel
from cbatch.runtime.model.shapes import Numerics
from cbatch.runtime.rank_group import RankGroup
from cbatch.runtime.transformers_backend.loading import load_net, quiet
from cbatch.runtime.transformers_backend.self_test import compare, reference_of
from cbatch.system.machine import memory_bytes

_PACK_BYTES_SHARE = 0.5  # limit of packed copies, as a share of the machine's memory


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
        model = TransformersModel(net, path, served, _numerics(numerics, net, served), ranks)
        compare(model, reference)
    return model


def _numerics(mode: str, net: nn.Module, dtype: torch.dtype) -> Numerics:
    count = sum(parameter.numel() for parameter in net.parameters())
    may_pack = 4 * count < _PACK_BYTES_SHARE * memory_bytes()
    if mode == "auto":
        mode = "invariant" if compiles(dtype) else "fast"
    return Numerics(mode, may_pack)
