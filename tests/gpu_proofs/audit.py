"""Audit every launch in the interpreter for races. The interpreter runs programs one after the
other, a GPU at once and in any order. By hand:

    TRITON_INTERPRET=1 python -m pytest -p tests.gpu_proofs.audit tests/triton_kernels/interpreter

Every address of a launch is checked:

- programs may not write what another reads or writes, unless an atomic orders them, so that any
  order of programs leaves the same bits;
- a program may not read what it stored itself before a barrier;
- all addresses lie inside the tensors that were passed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

Program = tuple[int, int, int]
LOAD, STORE, ATOMIC = range(3)


class _Access(NamedTuple):
    program: Program
    kind: int
    time: int
    barriers: int  # passed by its program
    at: np.ndarray  # unique


class Accesses:
    """Accesses of a launch. `spans` [n, 2]: the memory passed to it, sorted."""

    def __init__(self, spans: np.ndarray) -> None:
        self.program: Program = (0, 0, 0)
        self._begins, self._ends = _merged(spans)
        self._log: list[_Access] = []
        self._barriers: Counter[Program] = Counter()
        # By program: the times of others that it has seen.
        self._seen: defaultdict[Program, dict[Program, int]] = defaultdict(dict)
        self._released: defaultdict[int, dict[Program, int]] = defaultdict(dict)  # by address
        self._history: defaultdict[Program, list[tuple[int, dict[Program, int]]]]
        self._history = defaultdict(list)
        self._faults: Counter[str] = Counter()

    def note(self, kind: int, ptrs: Any, mask: Any, orders: bool = False) -> None:
        """Record an access. An atomic with `orders` releases what its program did, and acquires
        what others released there."""
        at = np.asarray(ptrs.data, dtype=np.uint64)
        at = at[np.broadcast_to(np.asarray(mask.data).astype(np.bool_), at.shape)]
        if not len(at):
            return
        width = np.uint64(max(ptrs.get_element_ty().primitive_bitwidth // 8, 1))
        place = np.searchsorted(self._begins, at, side="right").astype(np.int64) - 1
        outside = (place < 0) | (at + width > self._ends[place.clip(0)])
        if outside.any():
            self._faults["reads or writes outside of what was passed"] += 1
        done = self._barriers[self.program]
        self._log.append(_Access(self.program, kind, len(self._log), done, np.unique(at)))
        if not orders:
            return
        time, seen = len(self._log), self._seen[self.program]
        for address in at.tolist():
            times = self._released[address]
            _update_times(seen, times)
            _update_times(times, seen)
            times[self.program] = time
        self._history[self.program].append((time, dict(seen)))

    def barrier(self) -> None:
        self._barriers[self.program] += 1

    def faults(self) -> list[str]:
        """Describe accesses to one address, one of them a store, without an order, and others."""
        written = [access.at for access in self._log if access.kind != LOAD]
        if written:
            at = np.concatenate([access.at for access in self._log])
            by = np.repeat(np.arange(len(self._log)), [len(access.at) for access in self._log])
            kept = np.isin(at, np.unique(np.concatenate(written)))
            at, by = at[kept], by[kept]
            order = np.lexsort((by, at))
            groups = np.split(by[order], np.flatnonzero(np.diff(at[order])) + 1)
            for group in {tuple(group.tolist()) for group in groups if len(group) > 1}:
                for earlier, later in itertools.combinations(group, 2):
                    self._compare(self._log[earlier], self._log[later])
        return [f"{fault} ({count} times)" for fault, count in self._faults.items()]

    def _compare(self, a: _Access, b: _Access) -> None:
        """Compare two accesses; `a` came before `b` in the interpreter."""
        kinds = {a.kind, b.kind}
        if kinds in ({LOAD}, {ATOMIC}):
            return
        if a.program == b.program:
            if (a.kind, b.kind) == (STORE, LOAD) and a.barriers == b.barriers:
                self._faults["a program reads what it stored, without a barrier"] += 1
        elif not self._has_seen(b.program, b.time, a):
            what = "writes" if LOAD not in kinds else "reads"
            self._faults[f"a program {what} what another writes"] += 1

    def _has_seen(self, program: Program, time: int, access: _Access) -> bool:
        for when, seen in reversed(self._history[program]):
            if when <= time:
                return seen.get(access.program, -1) > access.time
        return False


def _merged(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join spans that touch or overlap; return beginnings and ends."""
    begins, ends = [], []
    for begin, end in spans.tolist():
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return np.array(begins, dtype=np.uint64), np.array(ends, dtype=np.uint64)


def _update_times(into: dict[Program, int], more: dict[Program, int]) -> None:
    for program, time in more.items():
        into[program] = max(time, into.get(program, -1))


# Operations of the interpreter's builder, which is their first argument.
_NOTES: dict[str, Callable[[Accesses, Any], None]] = {
    "set_grid_idx": lambda log, args: setattr(log, "program", args[1:]),
    "create_masked_load": lambda log, args: log.note(LOAD, args[1], args[2]),
    "create_masked_store": lambda log, args: log.note(STORE, args[1], args[3]),
    "create_atomic_rmw": lambda log, args: log.note(
        ATOMIC, args[2], args[4], "ACQUIRE_RELEASE" in str(args[5]).upper()
    ),
    "create_barrier": lambda log, args: log.barrier(),
}


class UnsoundLaunch(BaseException):
    """A fault of a launch. No `Exception`: the step loop would recover."""


@contextmanager
def auditing() -> Iterator[Counter[str]]:
    """Audit every launch in this context; yield their counts by kernel."""
    launches, current = Counter[str](), list[Accesses]()
    run = GridExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> None:
        launches[executor.fn.__name__] += 1
        current.append(Accesses(_spans([*_tensors(args), *_tensors(kwargs)])))
        try:
            run(executor, *args, **kwargs)
        finally:
            accesses = current.pop()
        if faults := accesses.faults():
            raise UnsoundLaunch(f"{executor.fn.__name__}: {'; '.join(faults)}")

    def noting(real: Callable[..., Any], note: Callable[[Accesses, Any], None]) -> Any:
        def operation(*args: Any, **more: Any) -> Any:
            if current:
                note(current[-1], args)
            return real(*args, **more)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", call)
        for name, note in _NOTES.items():
            patch.setattr(InterpreterBuilder, name, noting(getattr(InterpreterBuilder, name), note))
        yield launches


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, tuple | dict):
            yield from _tensors(value)
        elif isinstance(value, interpreter.TensorDescriptor):
            yield value.base
        elif isinstance(value, Tensor) and value.numel():
            yield value


def _spans(tensors: list[Tensor]) -> np.ndarray:
    """Return [n, 2] uint64: the first byte of each tensor, and the byte after its last."""
    spans = set()
    for t in tensors:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        spans.add((t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize))
    return np.array(sorted(spans), dtype=np.uint64).reshape(-1, 2)


# --- the plugin of pytest -------------------------------------------------------------------------

_audited: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    """Audit a test. The audit ends after all patches of the test are undone."""
    with auditing() as launches:
        yield
    _audited.update(launches)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = _audited.total()
    terminalreporter.write_line(f"audited: {len(_audited)} kernels, {count} launches")
