"""Rotary positions of a transformers model in one call for queries and keys.

Modelling code calls a function of its own file. Modules that we serve get a `forward` that finds
ours under that name; the file, and whoever else uses it, keeps its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.runtime.cpu.compiled import compiles
from cbatch.runtime.cpu.compiled.rows import Rotary

_NAME = "apply_rotary_pos_emb"
_ASKED_WIDTHS = (16, 8)  # of heads of 16: all of it, half of it

Rotation = Callable[..., tuple[Tensor, Tensor]]
Factors = Callable[[Tensor], Tensor]


@torch.inference_mode()
def replace_rotary(net: nn.Module) -> int:
    """How many modules turn by ours. What is written otherwise than we know keeps its own code."""
    if not compiles(torch.float32):
        return 0
    ours: dict[int, Rotation | None] = {}
    found = 0
    for module in net.modules():
        if "forward" in vars(module):
            continue
        forward: Any = type(module).forward
        theirs = _called_by(inspect.unwrap(forward))
        if theirs is None:
            continue
        if id(theirs) not in ours:
            ours[id(theirs)] = _ours(theirs)
        rotation = ours[id(theirs)]
        made = None if rotation is None else _with(forward, rotation)
        if made is not None:
            module.forward = MethodType(made, module)
            found += 1
    return found


def _called_by(forward: Any) -> Rotation | None:
    """The function of rotary positions that code of a module calls by its name."""
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(_NAME)
    return theirs if isinstance(theirs, FunctionType) else None


def _with(forward: Any, rotation: Rotation) -> FunctionType | None:
    """The same code, which finds `rotation`; None where we do not know how to write it so. Since
    5.24 it is decorated: decorators of `functools.wraps` keep what they do around the new one."""
    if not isinstance(forward, FunctionType):
        return None
    names, cells = forward.__globals__, forward.__closure__
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:
        made = _with(inner, rotation)
        held = [_holds(cell, inner) for cell in cells or ()]
        if made is None or not any(held):
            return None
        pairs = zip(cells or (), held, strict=True)
        cells = tuple(CellType(made) if same else cell for cell, same in pairs)
    elif cells:
        return None
    else:
        names = names | {_NAME: rotation}
    new = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, cells)
    new.__kwdefaults__ = forward.__kwdefaults__
    new.__dict__.update({k: v for k, v in vars(forward).items() if k != "__wrapped__"})
    return new


def _holds(cell: CellType, inner: object) -> bool:
    try:
        return cell.cell_contents is inner
    except ValueError:  # an empty one
        return False


def _ours(theirs: Rotation) -> Rotation | None:
    """None where they compute something else, as far as numbers tell. What is not laid out as usual
    is left to them."""
    rotary = Rotary()
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 16, generator=gen) for heads in (4, 2))
    found: dict[bool, Factors] = {}  # by whether factors are as wide as a head
    for width in _ASKED_WIDTHS:
        cos, sin = torch.randn(2, 1, 3, width, generator=gen)
        for factors in (as_given, doubled):
            try:
                told = theirs(q, k, cos, sin)
                pairs = zip(told, rotary(q, k, factors(cos), factors(sin)), strict=True)
                same = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
            except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
                continue
            if same:
                found[width == 16] = factors
    if not found:
        return None

    def rotated(q: Tensor, k: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if len(given) == 2 and not more and _usual(q, k, given[0]):
            cos, sin = given
            if factors := found.get(cos.shape[-1] == q.shape[-1]):
                return rotary(q, k, factors(cos), factors(sin))
        return theirs(q, k, *given, **more)

    return rotated


def as_given(factors: Tensor) -> Tensor:
    return factors


def doubled(factors: Tensor) -> Tensor:
    """Of models that have those of the first half alone, which are those of the second."""
    return torch.cat([factors, factors], -1)


def _usual(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    return (
        q.dim() == k.dim() == 4
        and q.shape[0] == 1
        and q.dtype == k.dtype == torch.float32
        and q.stride(3) == k.stride(3) == 1
        and cos.dim() == 3
        and cos.shape[:2] == (1, q.shape[2])
    )
