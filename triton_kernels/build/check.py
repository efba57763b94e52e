"""Checks of a launcher's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Shape = tuple[int | None, ...]


def check_fields(group: str, fields: Any, shapes: dict[str, tuple[torch.dtype, Shape]]) -> None:
    """Raise ValueError naming the first field whose type or shape is wrong."""
    for name, (dtype, shape) in shapes.items():
        check_tensor(f"{group}.{name}", getattr(fields, name), dtype, shape)


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: Shape) -> None:
    """Raise ValueError unless `tensor` is contiguous with this dtype and shape, where None is any
    length."""
    fits = tensor.shape == shape or (  # the usual case first: it takes a tenth of the time
        tensor.dim() == len(shape)
        and all(want in (None, have) for have, want in zip(tensor.shape, shape, strict=True))
    )
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        lengths = ["any" if length is None else length for length in shape]
        raise ValueError(
            f"{name}: {tensor.dtype} {list(tensor.shape)} does not fit; give {dtype} {lengths}, "
            "contiguous"
        )
