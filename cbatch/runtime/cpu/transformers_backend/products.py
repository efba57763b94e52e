"""Replaces the products of a transformers model by ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cbatch.runtime.cpu.linear import Linear


class Product(nn.Module):
    """Replaces an `nn.Linear`: fp32 rows of any shape [..., in] -> [..., out]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = linear.shape
        # For code that reads type or shape of the weight, which has no contents.
        self.weight = torch.zeros(1).expand(linear.shape)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return _rows(self.linear, x)

    __call__ = forward  # skips the handling of hooks: there are none


class ProductWeight(nn.Parameter):
    """A weight that modelling code passes to `F.linear`; the call then runs our product."""

    linear: Linear

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and type(args[1]) is cls:
            x, weight, *bias = args
            y = _rows(weight.linear, x)
            return y if not bias or bias[0] is None else y + bias[0]
        if func in _CASTS and type(args[0]) is cls and args[1:] in ((), (args[0].dtype,)):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.detach)


def _rows(linear: Linear, x: Tensor) -> Tensor:
    out, columns = linear.shape
    rows = x.reshape(-1, columns)
    if not rows.shape[0]:
        return x.new_empty(*x.shape[:-1], out, dtype=torch.float32)
    if rows.dtype != torch.float32:
        rows = rows.float()
    return linear(rows.contiguous()).view(*x.shape[:-1], out)


class Products:
    """Replaces the products of a model. Modules that share weights share one product."""

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        self._linears: dict[tuple[int, tuple[int, ...], int | None], Linear] = {}
        self._key_tensors: list[Tensor] = []  # tensors whose addresses are keys of `_linears`

    def replace(self, net: nn.Module) -> None:
        from transformers.pytorch_utils import Conv1D

        for module in list(net.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, Product(self._linear(child.weight, child.bias)))
                elif type(child) is Conv1D:
                    setattr(module, name, Product(self._linear(child.weight, child.bias, True)))
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                continue
            for name, weight in list(module.named_parameters(recurse=False)):
                if (
                    "bias" not in name
                    and weight.dim() == 2
                    and weight.is_floating_point()
                    and min(weight.shape) > 1
                ):
                    self._wrap(module, name, weight)
        self._key_tensors.clear()

    def linears(self) -> Iterator[Linear]:
        yield from self._linears.values()

    def _wrap(self, module: nn.Module, name: str, weight: nn.Parameter) -> None:
        wrapped = torch.Tensor._make_subclass(ProductWeight, weight.detach().float())
        wrapped.linear = self._linear(wrapped.detach().as_subclass(Tensor), None)
        del module._parameters[name]
        object.__setattr__(module, name, wrapped)

    def _linear(self, weight: Tensor, bias: Tensor | None, transposed: bool = False) -> Linear:
        key = weight.data_ptr(), tuple(weight.shape), None if bias is None else bias.data_ptr()
        if key not in self._linears:
            self._key_tensors.append(weight)
            matrix = (weight.detach().T if transposed else weight.detach()).contiguous()
            bias_fp32 = None if bias is None else bias.detach().float()
            self._linears[key] = Linear(matrix, bias_fp32, None, compiled=self._compiled)
        return self._linears[key]


def widen(net: nn.Module) -> None:
    """Convert all parameters except those of products to fp32; embeddings convert their outputs."""
    embeddings = set()
    for module in net.modules():
        if isinstance(module, nn.Embedding) and module.weight.dtype != torch.float32:
            module.register_forward_hook(_to_float)
            embeddings.add(id(module.weight))
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point() and id(tensor) not in embeddings:
            tensor.data = tensor.data.float()


def _to_float(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()
