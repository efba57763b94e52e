"""The part of torch.cuda that `CudaDevice` uses, on CPU tensors: a stream that runs nothing before
the host waits, and graphs that are tapes.

Within a stream no operation runs when it is called. It is recorded with its actual tensors, gets
memory full of garbage for its result, and runs in its turn when the host waits. A host that reads
or overwrites too early is noticed, and so is a copy from or to pinned memory that waits.

A capture records operations on a tape. A replay fills what the capture allocated with garbage
again, then runs the tape and nothing else. A graph that relies on values of the host, on memory
that moved or on what another graph left is noticed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from cbatch.runtime.gpu import device as device_module

_GARBAGE = 0xFF  # bytes: NaN, and -1
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::new_empty"}
_NO_COPIES = {"aten::detach", "aten::alias", "aten::lift_fresh"}
_READS = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"),
    *("aten::masked_select", "aten::nonzero", "aten::_unique2", "aten::unique_dim"),
}
Work = Callable[[], object]


class HostWaits(BaseException):
    """A read or a copy for which the host waits. No `Exception`: the step loop would recover."""


class DeviceFault(BaseException):
    """A queued operation failed, as with an index out of range: the device is lost."""


class Stream(TorchDispatchMode):
    """A stream; `seen` counts events."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._queue: list[Work] = []
        self.done = 0
        self.tape: list[Work] | None = None  # of the current capture
        self.allocations: list[Tensor] = []  # made in the current capture
        self.pinned: list[Tensor] = []  # memory of the host
        self.is_current = self._is_running = False

    @property
    def is_recording(self) -> bool:
        """Return True if calls are recorded and run later."""
        return self.is_current and not self._is_running

    def enqueue(self, work: Work) -> None:
        (self._queue if self.tape is None else self.tape).append(work)

    def end(self) -> int:
        return self.done + len(self._queue)

    def wait_until(self, place: int) -> None:
        """Run what was queued before `place`."""
        if self.tape is not None:
            raise HostWaits("the host waits within a capture")
        while self.done < place:
            work = self._queue.pop(0)
            self.done += 1
            self._is_running = True
            try:
                with _disable_current_modes(), torch.inference_mode():
                    work()
            except Exception as error:
                raise DeviceFault(str(error)) from error
            finally:
                self._is_running = False

    def synchronize(self) -> None:
        self.wait_until(self.end())

    def read(self) -> None:
        """Run all work for a read by the host."""
        self.seen["reads"] += 1
        self.synchronize()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if name in _READS:
            self.read()
            return func(*args, **kwargs)
        if func.is_view or name in _NO_COPIES:
            out = func(*args, **kwargs)  # some operations copy where no view is possible
            return (
                out if _addresses(out) <= _addresses(args) else self._computed(func, args, kwargs)
            )
        if name in _ALLOCATIONS:
            return self._allocated(func(*args, **kwargs))
        if func._schema.is_mutable:
            if name == "aten::copy_":
                self._check_copy(*args, **kwargs)
            self.enqueue(lambda: func(*args, **kwargs))
            return _changed_argument(func, args, kwargs)
        return self._computed(func, args, kwargs)

    def _check_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        pinned = _addresses(self.pinned)
        for tensor, how in ((source, "copies to the device"), (target, "copies to the host")):
            if _addresses(tensor) <= pinned:
                self.seen[how] += 1
                if not non_blocking or self.tape is not None:
                    raise HostWaits("a copy that waits, or in a capture")

    def _allocated(self, out: Tensor) -> Tensor:
        _fill_with_garbage(out)
        if self.tape is not None:
            self.allocations.append(out)
        return out

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return memory for the result of an operation that runs later."""
        shapes = func(*tree_map(_blank, args), **tree_map(_blank, kwargs))

        def allocated(like: Any) -> Any:
            if not isinstance(like, Tensor):
                return like
            return self._allocated(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype))

        return self.later(tree_map(allocated, shapes), lambda: func(*args, **kwargs))

    def later(self, out: Any, function: Callable[[], Any]) -> Any:
        """Return `out`, and fill it with the results of a function in its turn."""

        def work() -> None:
            for mine, computed in zip(tree_leaves(out), tree_leaves(function()), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(computed)

        self.enqueue(work)
        return out


def _addresses(values: Any) -> set[int]:
    leaves = tree_leaves(values)
    return {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, Tensor)}


def _blank(value: Any) -> Any:
    """Return zeros of the same shape, which any operation takes."""
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _changed_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that changes an argument: that argument."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return value
    return kwargs["out"]


def _fill_with_garbage(tensor: Tensor) -> None:
    if tensor.numel():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_GARBAGE)


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self.at = 0

    def record(self, stream: Stream) -> None:
        self._stream, self.at = stream, stream.end()

    def synchronize(self) -> None:
        self._stream.wait_until(self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self._stream.done >= max(self.at, end.at), "a time that is not known yet"
        return float(end.at - self.at + 1)


class Graph:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.tape, self.allocations = stream, [], []

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert self.stream.is_current
        self.stream.seen["captured"] += 1
        self.stream.tape, self.stream.allocations = self.tape, self.allocations

    def capture_end(self) -> None:
        self.stream.tape = None

    def replay(self) -> None:
        self.stream.seen["replayed"] += 1

        def work() -> None:
            for tensor in self.allocations:
                _fill_with_garbage(tensor)
            for operation in self.tape:
                operation()

        self.stream.enqueue(work)


class TorchSubstitute:
    """A substitute for the module torch, where a device is made."""

    Event = Event

    def __init__(self) -> None:
        self.only = Stream()
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - torch's name
        return self.only

    def CUDAGraph(self) -> Graph:  # noqa: N802 - torch's name
        return Graph(self.only)

    def zeros(self, *shape: int, pin_memory: bool = False, **more: Any) -> Tensor:
        """Return zeros. Pinned memory is the host's, and there at once."""
        with _disable_current_modes():
            made = torch.zeros(*shape, **more)
        self.only.pinned += [made] * pin_memory
        return made

    def synchronize(self, device: torch.device) -> None:
        self.only.synchronize()

    def graph_pool_handle(self) -> int:
        return 0

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with stream:
            stream.is_current = True
            try:
                yield
            finally:
                stream.is_current = False


@contextmanager
def substituted() -> Iterator[Stream]:
    """Let `CudaDevice(cpu)` work on this stream."""
    torch_module = TorchSubstitute()
    stream, real = torch_module.only, GridExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> None:
        if stream.is_recording:
            stream.enqueue(lambda: real(executor, *args, **kwargs))
        else:
            real(executor, *args, **kwargs)

    def to_host(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)  # a mode recognises calls by this name
        def read(tensor: Tensor) -> Any:
            if stream.is_recording:
                stream.read()
            return method(tensor)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("cpu", "tolist"):
            patch.setattr(Tensor, name, to_host(getattr(Tensor, name)))
        patch.setattr(device_module, "torch", torch_module)
        patch.setattr(GridExecutor, "__call__", call)
        yield stream


def as_queued(
    stream: Stream, function: Callable[..., Any], result: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` as one operation of the stream. `result` allocates memory for its results
    from the same arguments; the results are tensors or None."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not stream.is_recording:
            return function(*args, **kwargs)
        return stream.later(result(*args, **kwargs), lambda: function(*args, **kwargs))

    return call
