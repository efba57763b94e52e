"""Norms and feed-forwards of a transformers model in one call each.

To call a module costs more than a few rows do in it. Which modules compute what ours do is asked of
them, by numbers, not told by their names alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cbatch.runtime.cpu.compiled import CompiledProduct, compiles
from cbatch.runtime.cpu.compiled.experts import CompiledExperts, Gate, Gating
from cbatch.runtime.cpu.compiled.fused_layer import Gated
from cbatch.runtime.cpu.compiled.rows import RowNorm
from cbatch.runtime.cpu.transformers_backend.products import Product

_NORM_SIZES = (1e-3, 1.0, 30.0)  # of the rows that a norm is asked about: eps is seen in the first
_EPS = ("variance_epsilon", "eps", "epsilon")
_LAYOUTS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
_ACTIVATIONS: dict[Gating, Callable[[Tensor], Tensor]] = {
    Gating.SILU: F.silu,
    Gating.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


class Norm(nn.Module):
    """In the place of an RMSNorm: fp32 rows of any shape."""

    def __init__(self, rows: RowNorm) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x)

    __call__ = forward  # nobody hooks on to it


class FeedForward(nn.Module):
    """In the place of down(act(gate(x)) * up(x)): an expert whom every row has chosen."""

    def __init__(self, gate_up: CompiledProduct, down: CompiledProduct, gating: Gating) -> None:
        super().__init__()
        self.gated = Gated(gate_up, down, gating)
        self._expert = CompiledExperts([gate_up], [down], Gate(gating))
        self._chosen, self._weights = torch.zeros(0, 1, dtype=torch.int64), torch.ones(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        if count > len(self._chosen):
            self._chosen = torch.zeros(2 * count, 1, dtype=torch.int64)
            self._weights = torch.ones(2 * count, 1)
        y = self._expert(rows, self._chosen[:count], self._weights[:count])
        return y.view(*x.shape[:-1], y.shape[-1])

    __call__ = forward


@torch.inference_mode()
def fuse(net: nn.Module) -> int:
    """Replaces what it can, of a model whose products are ours (`Products.replace`) and whose
    other weights are fp32. How many modules it was."""
    if not compiles(torch.float32):
        return 0
    found = 0
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            new = _norm(child) or _feed_forward(child)
            if new is not None:
                setattr(module, name, new)
                found += 1
    return found


def _norm(module: Any) -> Norm | None:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return None
    eps = next((e for e in map(module.__dict__.get, _EPS) if isinstance(e, float)), None)
    if eps is None or weight.dtype != torch.float32:
        return None
    gen = torch.Generator().manual_seed(0)
    asked = torch.randn(1, len(_NORM_SIZES), len(weight), generator=gen)
    asked *= torch.tensor(_NORM_SIZES)[:, None]
    told = _answer(module, asked)
    for offset in (0.0, 1.0):
        rows = RowNorm(weight, eps, offset)
        if told is not None and torch.allclose(told, rows(asked), rtol=1e-5, atol=1e-7):
            return Norm(rows)
    return None


def _feed_forward(module: Any) -> FeedForward | None:
    """Of gate_proj and up_proj, or both in one, and down_proj; nothing else may be in it."""
    names = [name for name, child in module.named_children() if isinstance(child, Product)]
    act = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    layout = next((layout for layout in _LAYOUTS if set(layout) == set(names)), None)
    if layout is None or act is None:
        return None
    *first, down = (getattr(module, name).linear.compiled for name in layout)
    gating = next((g for g, ours in _ACTIVATIONS.items() if _same(act, ours)), None)
    if gating is None or down is None or any(each is None for each in first):
        return None
    try:
        new = FeedForward(CompiledProduct.beside(first), down, gating)
    except ValueError:  # of types or shapes that do not go together
        return None
    gen = torch.Generator().manual_seed(0)
    asked = torch.randn(1, 2, first[0].shape[1], generator=gen)
    told, found = _answer(module, asked), new(asked)
    near = told is not None and (told - found).abs().max() <= 0.01 * found.abs().max()
    return new if near else None


def _same(act: Any, ours: Callable[[Tensor], Tensor]) -> bool:
    asked = torch.linspace(-8, 8, 129)
    told = _answer(act, asked)
    return told is not None and torch.allclose(told, ours(asked), rtol=1e-5, atol=1e-6)


def _answer(module: Any, asked: Tensor) -> Tensor | None:
    """None of who wants to be asked otherwise."""
    try:
        told = module(asked)
    except (TypeError, RuntimeError, AttributeError, IndexError, ValueError):
        return None
    return told if isinstance(told, Tensor) and told.dtype == torch.float32 else None
