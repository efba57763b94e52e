"""Products with constant weights, and the rule that chooses what computes them.

Our kernels compute weights of the types that they support, wherever they can be compiled; torch
computes the rest. The rule reads the processor and the type only, never a timing, so a restart
changes no bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct
from cbatch.runtime.compiled.product import TYPES
from cbatch.runtime.model.config import ModelError


class Linear:
    """y = (x * in_scale) W^T + bias over fp32 rows: [T, in] -> [T, out], both contiguous."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None, *, compiled: bool
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.compiled = CompiledProduct(weight, bias, in_scale) if compiled else None
        if weight.dtype == torch.float16:  # its sums may overflow
            weight = weight.float()
        self._tensors = None if compiled else (weight, bias, in_scale)

    @classmethod
    def of(cls, product: CompiledProduct) -> Linear:
        """Wrap a product of quantised blocks; only our kernels compute those."""
        linear = cls.__new__(cls)
        linear.shape, linear.compiled, linear._tensors = product.shape, product, None
        return linear

    def __call__(self, x: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled(x, len(x))
        assert self._tensors is not None
        weight, bias, in_scale = self._tensors
        x = (x if in_scale is None else x * in_scale).to(weight.dtype)
        y = F.linear(x, weight).float()
        return y if bias is None else y + bias.float()

    @property
    def description(self) -> str:
        """A description of what computes it."""
        return (
            "torch" if self.compiled is None else " ".join(("compiled", *self.compiled.block_types))
        )

    @property
    def num_bytes(self) -> int:
        if self.compiled is not None:
            return self.compiled.num_bytes
        assert self._tensors is not None
        return self._tensors[0].nbytes


def resolve_numerics(requested: str, dtype: torch.dtype, *, compiled: bool) -> str:
    """Resolve "auto": "invariant" if our kernels compute weights of this type, else "fast".

    In an invariant model neither other rows of the step, nor the chunks of a prompt, nor the blocks
    of its KV change the bits of a row's logits."""
    if requested == "invariant" and not compiled:
        if dtype not in TYPES:
            name = str(dtype).removeprefix("torch.")
            problem = f"numerics: 'invariant' is not supported in {name}"
            raise ModelError(f"{problem}; set dtype to bfloat16 or float32, or leave numerics out")
        problem = "numerics: 'invariant' needs compiled kernels"
        raise ModelError(f"{problem}; install a C compiler (gcc), or leave it out")
    return requested if requested != "auto" else "invariant" if compiled else "fast"
