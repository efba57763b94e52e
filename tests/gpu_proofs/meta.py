"""A device whose tensors have shapes and addresses but no values: reads must be explicit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cbatch.runtime.gpu.device import Device

META = torch.device("meta")
_COPIES = {"aten::copy_", "aten::_to_copy"}
READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_dim",
}


class Refused(BaseException):
    """An operation that cannot be queued. No `Exception`: the step loop would recover."""


class MetaDevice(Device):
    """A device that runs a step twice to capture it, as `CudaDevice` does, the second time as a
    capture. Later it runs nothing: a replay launches what was captured. `missed` lists steps that
    were not captured when met."""

    captures = True

    def __init__(self) -> None:
        self.capturing = False
        self.captured: list[Hashable] = []
        self.missed: list[Any] = []
        self.replayed: Counter[Any] = Counter()

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        if key in self.captured:
            self.replayed[key] += 1
            return
        self.missed.append(key)
        function()

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        assert key not in self.captured, f"{key} is captured again"
        function()
        self.capturing = True
        try:
            function()
        finally:
            self.capturing = False
        self.captured.append(key)


class OnlyQueued(TorchDispatchMode):
    """A mode that raises if the host would wait: on reads of values, and on copies without
    `non_blocking`. Within a capture the host's memory may not be read at all."""

    def __init__(self, device: MetaDevice) -> None:
        super().__init__()
        self._device = device
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [t for t in tensors if t.device == META]
        on_host = [t for t in tensors if t.device != META and t.dim()]
        target = kwargs.get("device")
        leaves = bool(on_device) and target is not None and torch.device(target) != META
        enters = bool(on_host) and target is not None and torch.device(target) == META
        if name in READS and on_device or leaves:
            raise Refused(f"{name}: the host reads what the device has")
        if (on_host and on_device) or enters:
            return self._crossed(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _crossed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in _COPIES:
            raise Refused(f"{name}: tensors of the host and of the device")
        if self._device.capturing:
            raise Refused(f"{name}: a copy from or to the host in a capture")
        if name == "aten::_to_copy":  # of a few words, at once
            self.copies["enters"] += 1
            return func(*args, **kwargs)
        target = args[0]
        if not (kwargs.get("non_blocking") or len(args) > 2 and args[2]):
            raise Refused(f"{name}: a copy that waits")
        self.copies["comes back" if target.device != META else "enters"] += 1
        return target
