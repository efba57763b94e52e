"""Products with constant weights: which implementation computes one, and whether its bits hold."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = (x * in_scale) W^T + b over fp32 rows: [T, in] -> [T, out].

    `in_scale` (the weight of the norm before it) is folded into W where the product runs on an
    fp32 copy of the weights anyway.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> None:
        self.weight, self.bias, self.in_scale = weight, bias, in_scale

    def __call__(self, x: Tensor) -> Tensor:
        if self.in_scale is not None:
            x = x * self.in_scale
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()
