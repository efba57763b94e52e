"""Loading of an engine's models on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from cbatch.runtime.backend import Impl, LoadRequest
from cbatch.runtime.drafting.heads.loading import load_heads
from cbatch.runtime.drafting.heads.trial import take_head
from cbatch.runtime.gpu.decoder import Decoder, load_decoder
from cbatch.runtime.gpu.device import current
from cbatch.runtime.gpu.heads import CLASSES
from cbatch.runtime.gpu.loaded import GpuModels
from cbatch.runtime.gpu.modelling import load_modelling_decoder
from cbatch.runtime.gpu.one_call import OneCall


def load_models(request: LoadRequest) -> GpuModels:
    """Load a target and its draft; see `Backend.load`."""
    with current(torch.device(request.device)):  # tests of models and heads launch kernels
        target, kv_dtype = _load(request.model, request.impls[0], request), request.kv_cache_dtype
        if request.draft is None:
            return GpuModels(target, None, kv_dtype)
        if not request.trial_texts:
            return GpuModels(target, _load(request.draft, request.impls[1], request), kv_dtype)
        heads = load_heads(Path(request.draft), target, request.model, CLASSES)
        head = take_head(request.draft, heads, OneCall(target), request.trial_texts)
        return GpuModels(target, head, kv_dtype)


def _load(path: str | Path, impl: Impl, request: LoadRequest) -> Decoder:
    names = "dtype", "device", "numerics", "random_weights_seed"
    settings: Any = {name: getattr(request, name) for name in names}
    if impl == "transformers":  # it has the interface of a `Decoder`
        return cast("Decoder", load_modelling_decoder(path, **settings))
    return load_decoder(path, **settings)
