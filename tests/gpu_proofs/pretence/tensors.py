"""Tensors of a simulated GPU: they are in the host's memory, but claim to be on the device.

Within `Pretence` all tensors made on `cuda`, and all that are computed from them, are marked. A
marked tensor reports the device `cuda:0`. As on a GPU, it is an error to compute with tensors of
both sides. So is the conversion of a tensor of the device to an array.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_MARK = "_on_pretended_gpu"
# Functions that take tensors of both sides: copies, and indices of the host.
_MIXING = {"copy_", "to", "__getitem__", "__setitem__", "__get__", "__set__", "type_as"}
_MIXING |= {"_has_compatible_shallow_copy_type"}


class MixedDevices(RuntimeError):
    """An error in torch's words."""


def is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, _MARK, False)


def mark(result: Any, but: Sequence[Tensor] = ()) -> Any:
    """Mark tensors as the device's. `but`: tensors that existed before stay where they are."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and not any(leaf is one for one in but):
            setattr(leaf, _MARK, True)
    return result


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class Generator(torch.Generator):
    """A generator of either side; it draws on the host."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = super().__new__(cls, "cpu")
        made._pretended = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self._pretended


class Pretence(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if type(leaf) in (Tensor, torch.nn.Parameter)]
        marked = [tensor for tensor in tensors if is_marked(tensor)]
        if name == "__get__" and marked:
            return _property(func, args)
        if name in ("to", "cpu", "cuda"):
            return _moved(func, name, args, kwargs)
        if name == "numpy" and marked:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        if name not in _MIXING and any(t.dim() and not is_marked(t) for t in tensors) and marked:
            raise MixedDevices(
                f"{name}: Expected all tensors to be on the same device, cuda:0 and cpu"
            )
        there = _placed(name, kwargs)
        if there is None:
            there = bool(marked)
        out = func(*args, **kwargs)
        if name == "__set__" and _field(func) == "data":  # as a module moves its tensors
            setattr(args[0], _MARK, is_marked(args[1]))
        return mark(out, but=tensors) if there else out


def _field(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    answers = {"device": CUDA, "is_cuda": True, "is_cpu": False}
    field = _field(func)
    if field in answers:
        return answers[field]
    out = func(*args)
    return mark(out) if isinstance(out, Tensor) else out


def _placed(name: str, kwargs: dict[str, Any]) -> bool | None:
    """Return the device that the call asks for, and replace it in the call by the host."""
    generator, device = kwargs.get("generator"), kwargs.get("device")
    if kwargs.pop("pin_memory", False) and _is_cuda(device):
        raise RuntimeError("cannot pin 'cuda', only dense CPU tensors can be pinned")
    if device is None:
        return None
    there = _is_cuda(device)
    if generator is not None and (generator.device.type == "cuda") != there:
        raise MixedDevices(f"{name}: Expected a '{device}' device type for generator")
    if there:
        kwargs["device"] = "cpu"
    return there


def _moved(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy on the other side, unless the tensor is there already."""
    tensor, rest, was = args[0], list(args[1:]), is_marked(args[0])
    there = was if name == "to" else name == "cuda"
    if name == "to":
        for at, value in enumerate(rest):
            if isinstance(value, Tensor):
                there, rest[at] = is_marked(value), value.dtype
            elif isinstance(value, str | torch.device) or (at == 0 and type(value) is int):
                there, rest[at] = _is_cuda(value), "cpu"
        if kwargs.get("device") is not None:
            there = _is_cuda(kwargs["device"])
            kwargs["device"] = "cpu"
        out = func(tensor, *rest, **kwargs)
    else:
        out = tensor if there == was else tensor.cpu()
    if there != was and out is tensor or was and out is not tensor and not there:
        out = out.clone()
    if there:
        return mark(out)
    return out


@contextmanager
def in_all_threads() -> Iterator[None]:
    """Enter `Pretence` in this thread and in all that it starts."""
    run = threading.Thread.run

    def pretending(thread: threading.Thread) -> None:
        with Pretence():
            run(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", pretending)
        patch.setattr(torch, "Generator", Generator)
        with Pretence():
            yield
