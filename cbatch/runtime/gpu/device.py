"""What differs between a CUDA device and CPU tensors: graphs, pinned memory, events."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from triton_kernels.build import ahead


class Mark:
    """A point in the device's queue of work. On the CPU everything is done when it is queued."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Until the device has come so far."""

    def seconds_since(self, earlier: Mark) -> float:
        """Between two marks that have been waited for."""
        return self._at_s - earlier._at_s


class Device:
    """The CPU, which runs everything at once and captures nothing."""

    captures = False
    deferred: Collection[Hashable] = ()  # keys whose first `run` captures

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` queues, or replay what was captured for `key`: calls of one key queue
        the same work on the same memory. While requests wait only what was deferred is
        captured."""
        function()

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` queues, and keep it for `run`."""
        function()

    def kernels_of(self, launches: Callable[[], None]) -> dict[str, ahead.Specialisation]:
        """Return the kernels that `launches` would compile."""
        return {}

    def staging(self, words: int) -> Tensor:
        """int32 [words] on the host, from and to which copies do not wait."""
        return torch.zeros(words, dtype=torch.int32)

    def fetch(self, source: Tensor, to: Tensor) -> None:
        """Copy to memory of `staging`; there once a mark behind it has been waited for."""
        to.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return Mark()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work queued within goes to this device's queue."""
        yield

    def synchronize(self) -> None:
        """Until nothing is queued."""


class _Event(Mark):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return earlier._event.elapsed_time(self._event) * 1e-3


class CudaDevice(Device):
    """One stream of its own, and graphs that share one pool of memory: they are replayed one after
    the other on that stream, and nothing that a graph allocates outlives it."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # weights were loaded on another stream
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif key in self.deferred:
            self.capture(key, function)
        else:
            function()

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        # First it is really done: that compiles kernels, and lets libraries set up what may not be
        # set up within a capture. Capturing does nothing but record.
        function()
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads may go on using the device
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            function()
        self._graphs[key] = graph

    def kernels_of(self, launches: Callable[[], None]) -> dict[str, ahead.Specialisation]:
        with ahead.listed() as found:
            launches()
        return found

    def staging(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def mark(self) -> _Event:
        return _Event(self._stream)

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        self._stream.synchronize()


class Instead(Device):
    """In place of a device: what is run is given to `run`."""

    def __init__(self, run: Callable[[Hashable, Callable[[], None]], None]) -> None:
        self.run = run  # type: ignore[method-assign]


def device_for(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else Device()
