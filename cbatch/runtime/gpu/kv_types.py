"""Types that keys and values may be held in beside that of the model."""

from __future__ import annotations

import torch

from cbatch.core.request.errors import FieldError
from cbatch.runtime.gpu.attention import heads_of
from cbatch.runtime.gpu.decoder import Decoder
from triton_kernels.attention.table import arch_of, tile_for

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_LEAST_PAGE_TOKENS = 16


def fp8_for(decoder: Decoder) -> torch.dtype:
    """E4M3 as the device of `decoder` has it. Raises FieldError where it, or the model, has none
    that attention can read."""
    dtype = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
    arch = arch_of(decoder.device)
    try:
        heads = heads_of(decoder.config)
        tile_for(heads, decoder.dtype, _LEAST_PAGE_TOKENS, arch=arch, kv_dtype=dtype)
    except ValueError as error:
        problem = f"fp8 is not served with {decoder.dtype} on {arch}"
        raise FieldError("kv_cache_dtype", problem, "leave it out") from error
    return dtype


def kv_scales(decoder: Decoder, held: torch.dtype) -> list[tuple[float, float]] | None:
    """What K and V of each layer are divided by to be `held`; None: they are held as they are."""
    if held == decoder.dtype:
        return None
    wider = 2.0 if held == torch.float8_e4m3fnuz else 1.0  # AMD's kind goes half as far
    return [(k * wider, v * wider) for k, v in decoder.kv_scales]
