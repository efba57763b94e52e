"""Graphs, pinned memory and events of a CUDA device, and their replacements for CPU tensors.

A step's token and row counts are padded to the next bucket, so that few graphs fit every step. Rows
of buffers are padded to a multiple of 16 elements."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from triton_kernels.build import ahead

SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LARGE_STEP = 128
_ROUND_TO = 16


def bucket(count: int, largest: int) -> int:
    """Return the smallest bucket >= `count`, capped at `largest`; 0 for a count of 0."""
    if count <= 0:
        return 0
    if count > SMALL[-1]:
        return min(-(-count // _LARGE_STEP) * _LARGE_STEP, largest)
    return min(SMALL[bisect_left(SMALL, count)], largest)


def aligned(count: int) -> int:
    """Return `count` rounded up to a multiple of 16, the row length of a buffer. Rows then start at
    aligned addresses, so kernels need only a variant with wide loads."""
    return -(-count // _ROUND_TO) * _ROUND_TO


def ladder(largest: int, max_tokens: int = SMALL[-1]) -> list[int]:
    """Return every bucket up to `max_tokens` for counts up to `largest`, in descending order, so
    that smaller graphs reuse the memory that the largest one allocated."""
    counts = (*SMALL, *range(SMALL[-1], largest, _LARGE_STEP), largest)
    buckets = {bucket(count, largest) for count in counts if count <= largest}
    return sorted((b for b in buckets if b <= max_tokens), reverse=True)


class QueueEvent:
    """A point in the device's queue of work. CPU work is finished once it is queued."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached this point."""

    def seconds_since(self, earlier: QueueEvent) -> float:
        """Return the seconds between two events; both must have been waited for."""
        return self._at_s - earlier._at_s


class Device:
    """The CPU: it runs all work immediately and captures nothing."""

    captures = False
    deferred: Collection[Hashable] = ()  # keys that `capture_late` captures after their first `run`

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call `function`, or replay the graph captured for `key`. All calls with one key must
        queue the same work on the same memory."""
        function()

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call `function`, and capture what it queues as the graph for `key`."""
        function()

    def capture_late(self) -> None:
        """Capture the deferred keys that have run, while the device works."""

    def kernels_of(self, launches: Callable[[], None]) -> dict[str, ahead.Specialisation]:
        """Return the kernels that calling `launches` would compile, without running them."""
        return {}

    def staging(self, words: int) -> Tensor:
        """Return int32 [words] of pinned host memory, for asynchronous copies."""
        return torch.zeros(words, dtype=torch.int32)

    def fetch(self, source: Tensor, to: Tensor) -> None:
        """Queue a copy to memory of `staging`, complete once a later event has been waited for."""
        to.copy_(source, non_blocking=True)

    def record_event(self) -> QueueEvent:
        return QueueEvent()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Return a context whose work goes to this device's stream."""
        yield

    def synchronize(self) -> None:
        """Wait until all queued work is done."""


class CudaQueueEvent(QueueEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: QueueEvent) -> float:
        assert isinstance(earlier, CudaQueueEvent)
        return earlier._event.elapsed_time(self._event) * 1e-3


class CudaDevice(Device):
    """A CUDA device with a stream of its own. Its graphs share one memory pool: they are replayed
    one after the other on that stream, and no memory of a graph is used after its replay."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # weights were loaded on another stream
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._late: dict[Hashable, Callable[[], None]] = {}  # deferred keys that have run

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        function()
        if key in self.deferred:
            self._late[key] = function

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        # The first call compiles kernels, and lets libraries allocate what they cannot allocate
        # during capture. The second call only records.
        function()
        self.synchronize()
        torch.cuda.empty_cache()
        self._record(key, function)

    def capture_late(self) -> None:
        if self._late:
            with torch.inference_mode(), self.working():
                while self._late:
                    self._record(*self._late.popitem())

    def _record(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture work that has run before. Unlike `torch.cuda.graph`, do not wait for the device,
        so that no request waits either."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
        self.graphs[key] = graph

    def kernels_of(self, launches: Callable[[], None]) -> dict[str, ahead.Specialisation]:
        with ahead.listed() as kernels:
            launches()
        return kernels

    def staging(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def record_event(self) -> CudaQueueEvent:
        return CudaQueueEvent(self._stream)

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        self._stream.synchronize()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current one, where Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class CallbackDevice(Device):
    """Replacement of a device that passes every key and function to a callback."""

    def __init__(self, run: Callable[[Hashable, Callable[[], None]], None]) -> None:
        self.run = run  # type: ignore[method-assign]


def device_for(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else Device()
