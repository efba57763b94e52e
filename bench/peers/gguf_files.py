"""GGUF files of values and tensors, by the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from torch import Tensor

F32, F16, Q8_0, BF16 = (GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "BF16"))


class Stored(NamedTuple):
    kind: int
    shape: tuple[int, ...]
    data: bytes


def stored(tensor: Tensor, kind: int = F32) -> Stored:
    """Return the tensor stored as `kind`; vectors are fp32, as converters leave them."""
    number = GGMLQuantizationType(F32 if tensor.ndim == 1 else kind)
    blocks = gguf.quantize(tensor.float().contiguous().numpy(), number)
    return Stored(number, tuple(tensor.shape), blocks.tobytes())


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, Stored], alignment: int = 32
) -> None:
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data = [{}]  # the architecture is in `metadata`
    writer.data_alignment = alignment
    for key, value in metadata.items():
        kind = GGUFValueType.get_type(value)
        if kind is GGUFValueType.INT32 and value >= 0:
            kind = GGUFValueType.UINT32  # llama.cpp requires unsigned sizes and ids
        writer.add_key_value(key, value, kind)
    for name, (number, shape, data) in tensors.items():
        writer.add_tensor(name, np.frombuffer(data, np.int8), shape, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
