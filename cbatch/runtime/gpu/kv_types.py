"""FP8 types of the KV cache, and their scales."""

from __future__ import annotations

import torch

from cbatch.core.request.errors import FieldError
from cbatch.runtime.gpu.attention import heads_of
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.memory import Draft
from triton_kernels.attention.table import arch_of, tile_for

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_LEAST_PAGE_TOKENS = 16


def kv_dtype_of(decoder: Draft, kv_cache_dtype: str) -> torch.dtype:
    """Return the type of a model's KV cache: the model's own if `kv_cache_dtype` is "auto", else
    the E4M3 type of its device (AMD has a variant of its own). Raises FieldError if the attention
    kernel has no tile for this model and device with that type."""
    if kv_cache_dtype == "auto":
        return decoder.dtype
    dtype = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
    arch = arch_of(decoder.device)
    try:
        heads = heads_of(decoder.config)
        tile_for(heads, decoder.dtype, _LEAST_PAGE_TOKENS, arch=arch, kv_dtype=dtype)
    except ValueError as error:
        problem = f"fp8 is not supported with {decoder.dtype} on {arch}"
        raise FieldError("kv_cache_dtype", problem, "leave it out") from error
    return dtype


def kv_scales(decoder: Decoder, kv_dtype: torch.dtype) -> list[tuple[float, float]] | None:
    """Return, for each layer, the divisors of K and V before they are stored as `kv_dtype`. None:
    they are stored in the model's dtype, unscaled."""
    if kv_dtype == decoder.dtype:
        return None
    wider = 2.0 if kv_dtype == torch.float8_e4m3fnuz else 1.0  # AMD's type has half the range
    return [(k * wider, v * wider) for k, v in decoder.kv_scales]
