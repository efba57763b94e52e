"""Projections of one input in one product: whoever asks for the first gets the others by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cbatch.runtime.cpu.compiled import CompiledProduct
from cbatch.runtime.cpu.transformers_backend.products import Product

_TOGETHER = ("q_proj", "k_proj", "v_proj")


class _Group:
    """The outputs for an input last seen, until each has been taken."""

    def __init__(self, products: list[CompiledProduct]) -> None:
        """Raises ValueError where they do not go together."""
        self.product = CompiledProduct.beside(products)
        self._sizes = [product.shape[0] for product in products]
        self._input: Tensor | None = None
        self._left: dict[int, Tensor] = {}

    def part(self, at: int, x: Tensor) -> Tensor:
        """[..., out] of product `at`, for fp32 rows [..., in]."""
        if x is not self._input or at not in self._left:
            rows = x.reshape(-1, x.shape[-1])
            made = self.product(rows.float().contiguous(), len(rows))
            parts = made.view(*x.shape[:-1], -1).split(self._sizes, -1)
            self._input, self._left = x, dict(enumerate(parts))
        found = self._left.pop(at)
        if not self._left:
            self._input = None
        return found


class BesideProduct(nn.Module):
    """In the place of a product, of which there is a group."""

    def __init__(self, product: Product, group: _Group, at: int) -> None:
        super().__init__()
        self.weight, self.bias = product.weight, None
        self.in_features, self.out_features = product.in_features, product.out_features
        self.group, self._at = group, at

    def forward(self, x: Tensor) -> Tensor:
        return self.group.part(self._at, x)

    __call__ = forward  # nobody hooks on to it


@torch.inference_mode()
def join_projections(net: nn.Module) -> int:
    """Of queries, keys and values in each module that has all three. How many modules that is."""
    found = 0
    for module in net.modules():
        children = dict(module.named_children())
        products = [children.get(name) for name in _TOGETHER]
        compiled = [p.linear.compiled for p in products if isinstance(p, Product)]
        if len(compiled) != len(_TOGETHER) or any(each is None for each in compiled):
            continue
        try:
            group = _Group(compiled)
        except ValueError:  # of types that are given rows in different ways
            continue
        for at, name in enumerate(_TOGETHER):
            setattr(module, name, BesideProduct(products[at], group, at))
        found += 1
    return found
