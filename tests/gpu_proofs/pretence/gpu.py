"""A machine with a GPU, as far as torch reports, and the whole of `bench.gpu` except its sizes.

Queued operations run when the host waits (`interpreted.stream`), kernels are interpreted, and a
tensor knows its device (`tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from triton.tools.tensor_descriptor import TensorDescriptor

from cbatch.runtime.gpu import device as device_module
from cbatch.runtime.gpu import draft_pass, memory, target_pass
from tests.gpu_proofs.interpreted.references import use_queued_references
from tests.gpu_proofs.interpreted.stream import Event, Graph, Stream, TorchSubstitute, substituted
from tests.gpu_proofs.pretence.tensors import in_all_threads, is_marked
from tests.triton_kernels.interpreter.light import without_overflow_checks

NAME = "a GPU that is not there"
_MEMORY_BYTES = 3 << 30
_PROPERTIES = SimpleNamespace(
    name=NAME, multi_processor_count=2, L2_cache_size=1 << 12, total_memory=_MEMORY_BYTES
)
_CAPTURED_TOKENS = (2, 16)  # numbers of tokens: a graph of each takes time in the interpreter


class _LateStream(Stream):
    """A stream whose operations run on the real machine."""

    def wait_until(self, place: int) -> None:
        with torch._C.DisableTorchFunction():
            super().wait_until(place)

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: there is one stream."""


class _Event(Event):
    def record(self, stream: Stream | None = None) -> None:
        super().record(stream or self.usual)

    usual: Stream


class Cuda(TorchSubstitute):
    """A substitute for `torch.cuda`."""

    def __init__(self) -> None:
        super().__init__()
        self.only = _LateStream()
        self.guards = 0  # contexts that make a device current
        self.Event = type("Event", (_Event,), {"usual": self.only})
        self.Stream = type("Stream", (), {"__new__": lambda cls, device=None: self.only})

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.guards += 1
        try:
            yield
        finally:
            self.guards -= 1

    def current_stream(self, device: Any = None) -> Stream:
        return self.only

    def synchronize(self, device: Any = None) -> None:
        self.only.synchronize()

    @contextmanager
    def graph(
        self, graph: Graph, pool: Any = None, stream: Stream | None = None, **more: Any
    ) -> Iterator[None]:
        current = nullcontext() if self.only.is_current else self.stream(self.only)
        with current, super().graph(graph, pool, self.only, **more):
            yield

    def members(self) -> dict[str, Any]:
        """Return the members of the module that the project uses."""
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: _PROPERTIES,
            "get_device_name": lambda device=None: NAME,
            "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
            "empty_cache": lambda: None,
            "CUDAGraph": Graph,
            **{name: getattr(self, name) for name in _WORK},
        }


_WORK = (
    "Event", "Stream", "current_stream", "device", "graph", "graph_pool_handle", "stream",
    "synchronize",
)  # fmt: skip


def _checked(cuda: Cuda, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Check that a launch gets no memory of the host, and that its device is the current one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not cuda.guards:
            raise RuntimeError("a kernel is launched on whatever device is current")
        given = tree_leaves((args, kwargs))
        bases = (a.base if isinstance(a, TensorDescriptor) else a for a in given)
        if not all(is_marked(tensor) for tensor in bases if isinstance(tensor, Tensor)):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return launch(*args, **kwargs)

    return call


def use_references(cuda: Cuda, patch: pytest.MonkeyPatch) -> None:
    """Replace an engine's kernels by references: a whole model in the interpreter would take
    minutes."""
    without_overflow_checks(patch)
    use_queued_references(cuda.only, patch, partial(_checked, cuda))


@contextmanager
def pretending() -> Iterator[Cuda]:
    cuda = Cuda()
    with substituted(cuda), pytest.MonkeyPatch.context() as patch:
        queued: Callable[..., Any] = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            with torch._C.DisableTorchFunction():
                queued(executor, *args, **kwargs)

        patch.setattr(GridExecutor, "__call__", _checked(cuda, launch))
        for name, value in cuda.members().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(device_module, "SMALL", _CAPTURED_TOKENS)
        for module in (device_module, draft_pass, memory, target_pass):
            patch.setattr(module, "MAX_CAPTURED_TOKENS", _CAPTURED_TOKENS[-1])
        with in_all_threads():
            yield cuda
