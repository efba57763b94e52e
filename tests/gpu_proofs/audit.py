"""Audit every launch in the interpreter for faults on a GPU. The interpreter runs programs one
after the other, a GPU at once and in any order. By hand:

    TRITON_INTERPRET=1 python -m pytest -p tests.gpu_proofs.audit tests/triton_kernels/interpreter

A launch runs three times from the same memory: in order, reversed and shuffled, and must leave the
same bits. In the first run every address is checked:

- programs may not write what another reads or writes, unless an atomic orders them;
- a program may not read what it stored itself before a barrier;
- all addresses lie inside the tensors that were passed;
- memory that was never written is not read.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

Program = tuple[int, int, int]
LOAD, STORE, ATOMIC = range(3)


class Addresses(NamedTuple):
    """The addresses of the unmasked lanes of one access."""

    at: np.ndarray  # uint64 [n]
    width: int  # bytes of an element

    @classmethod
    def of(cls, ptrs: Any, mask: Any) -> Addresses:
        at = np.asarray(ptrs.data, dtype=np.uint64)
        lanes = np.broadcast_to(np.asarray(mask.data).astype(np.bool_), at.shape)
        return cls(at[lanes], max(ptrs.get_element_ty().primitive_bitwidth // 8, 1))


class _Access(NamedTuple):
    program: Program
    kind: int
    time: int
    barriers: int  # passed by its program
    at: np.ndarray  # unique


class Accesses:
    """Accesses of a launch. `spans` [n, 2]: the memory passed to it, sorted. `uninitialised`:
    memory that was allocated and not filled, with a flag for every byte written since."""

    def __init__(
        self, spans: np.ndarray, uninitialised: dict[int, tuple[Tensor, np.ndarray]]
    ) -> None:
        self.program: Program = (0, 0, 0)
        self._begins, self._ends = _merged(spans)
        self._uninitialised = uninitialised
        self._log: list[_Access] = []
        self._barriers: Counter[Program] = Counter()
        # By program: the times of others that it has seen.
        self._seen: dict[Program, dict[Program, int]] = {}
        self._released: dict[int, dict[Program, int]] = {}  # by address of an atomic
        self._history: dict[Program, list[tuple[int, dict[Program, int]]]] = {}
        self._fault_counts: Counter[str] = Counter()

    def load(self, addresses: Addresses) -> None:
        self._check_bounds(addresses, "read")
        for begin, (tensor, written) in self._uninitialised.items():
            size = tensor.untyped_storage().nbytes()
            mine = addresses.at[(addresses.at >= begin) & (addresses.at < begin + size)]
            if len(mine) and not written[(mine - np.uint64(begin)).astype(np.int64)].all():
                self._fault_counts["reads memory that was never written"] += 1
        self._log_access(LOAD, addresses.at)

    def store(self, addresses: Addresses) -> None:
        self._check_bounds(addresses, "written")
        for begin, (tensor, written) in self._uninitialised.items():
            size = tensor.untyped_storage().nbytes()
            mine = addresses.at[(addresses.at >= begin) & (addresses.at < begin + size)]
            for byte in range(addresses.width):
                written[(mine - np.uint64(begin)).astype(np.int64) + byte] = True
        self._log_access(STORE, addresses.at)

    def atomic(self, addresses: Addresses, orders: bool) -> None:
        """Record an atomic. With `orders` it releases what its program did, and acquires what
        others released here."""
        self._check_bounds(addresses, "updated")
        self._log_access(ATOMIC, addresses.at)
        if not orders:
            return
        time, seen = len(self._log), self._seen.setdefault(self.program, {})
        for at in addresses.at.tolist():
            times = self._released.setdefault(at, {})
            _update_times(seen, times)
            _update_times(times, seen)
            times[self.program] = time
        self._history.setdefault(self.program, []).append((time, dict(seen)))

    def barrier(self) -> None:
        self._barriers[self.program] += 1

    def faults(self) -> list[str]:
        self._find_races()
        return [f"{fault} ({count} times)" for fault, count in self._fault_counts.items()]

    def _check_bounds(self, addresses: Addresses, how: str) -> None:
        at = addresses.at
        place = np.searchsorted(self._begins, at, side="right").astype(np.int64) - 1
        outside = (place < 0) | (at + np.uint64(addresses.width) > self._ends[place.clip(0)])
        if outside.any():
            self._fault_counts[f"memory outside of what was passed is {how}"] += int(outside.sum())

    def _log_access(self, kind: int, at: np.ndarray) -> None:
        if len(at):
            done = self._barriers[self.program]
            self._log.append(_Access(self.program, kind, len(self._log), done, np.unique(at)))

    def _find_races(self) -> None:
        """Return accesses to one address, one of them a store, without an order."""
        if not any(access.kind != LOAD for access in self._log):
            return
        at = np.concatenate([access.at for access in self._log])
        by = np.repeat(np.arange(len(self._log)), [len(access.at) for access in self._log])
        written = np.unique(
            np.concatenate([access.at for access in self._log if access.kind != LOAD])
        )
        kept = np.isin(at, written)
        at, by = at[kept], by[kept]
        order = np.lexsort((by, at))
        groups = np.split(by[order], np.flatnonzero(np.diff(at[order])) + 1)
        for group in {tuple(group.tolist()) for group in groups if len(group) > 1}:
            for earlier, later in itertools.combinations(group, 2):
                self._compare(self._log[earlier], self._log[later])

    def _compare(self, a: _Access, b: _Access) -> None:
        """Compare two accesses; `a` came before `b` in the interpreter."""
        kinds = {a.kind, b.kind}
        if kinds in ({LOAD}, {ATOMIC}):
            return
        if a.program == b.program:
            if (a.kind, b.kind) == (STORE, LOAD) and a.barriers == b.barriers:
                self._fault_counts["a program reads what it stored, without a barrier"] += 1
            return
        if self._has_seen(b.program, b.time, a):
            return
        what = "writes what another writes" if LOAD not in kinds else "reads what another writes"
        self._fault_counts[f"a program {what}"] += 1

    def _has_seen(self, program: Program, time: int, access: _Access) -> bool:
        for when, seen in reversed(self._history.get(program, [])):
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
    "create_masked_load": lambda log, args: log.load(Addresses.of(args[1], args[2])),
    "create_masked_store": lambda log, args: log.store(Addresses.of(args[1], args[3])),
    "create_atomic_rmw": lambda log, args: log.atomic(
        Addresses.of(args[2], args[4]), "ACQUIRE_RELEASE" in str(args[5]).upper()
    ),
    "create_barrier": lambda log, args: log.barrier(),
}


class UnsoundLaunch(BaseException):
    """A fault of a launch. No `Exception`: the step loop would recover."""


class Audit(TorchDispatchMode):
    """A context in which every launch is audited. `orders`: the orders of the repeated runs."""

    def __init__(self, orders: Sequence[str] = ("reversed", "shuffled")) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self._orders = orders
        self._random = random.Random(1)
        self._order: list[Program] = []
        self._shape: Program = (1, 1, 1)
        self._accesses: Accesses | None = None
        self._uninitialised: dict[int, tuple[Tensor, np.ndarray]] = {}  # by address: bytes written
        self._run_order = "forward"
        self._launching = False  # torch then copies memory that was written before

    @contextmanager
    def auditing(self) -> Iterator[Audit]:
        with pytest.MonkeyPatch.context() as patch, self:
            builder = InterpreterBuilder
            patch.setattr(GridExecutor, "__call__", self._launch(GridExecutor.__call__))
            patch.setattr(builder, "set_grid_dim", self._set_dim(builder.set_grid_dim))
            patch.setattr(builder, "set_grid_idx", self._set_idx(builder.set_grid_idx))
            for name, note in _NOTES.items():
                patch.setattr(builder, name, self._noting(getattr(builder, name), note))
            yield self

    # -- programs in another order

    def _set_dim(self, real: Callable[..., None]) -> Callable[..., None]:
        def set_grid_dim(builder: Any, x: int, y: int, z: int) -> None:
            self._shape = (x, y, z)
            self._order = list(np.ndindex(x, y, z))
            if self._run_order == "reversed":
                self._order.reverse()
            elif self._run_order == "shuffled":
                self._random.shuffle(self._order)
            real(builder, x, y, z)

        return set_grid_dim

    def _set_idx(self, real: Callable[..., None]) -> Callable[..., None]:
        def set_grid_idx(builder: Any, x: int, y: int, z: int) -> None:
            _, ny, nz = self._shape
            place = self._order[(x * ny + y) * nz + z]
            if self._accesses is not None:
                self._accesses.program = place
            real(builder, *place)

        return set_grid_idx

    def _launch(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.launches[executor.fn.__name__] += 1
            self._launching = True
            try:
                fault = self._audit(lambda: real(executor, *args, **kwargs), (args, kwargs))
            finally:
                self._launching, self._accesses = False, None
            if fault:
                raise UnsoundLaunch(f"{executor.fn.__name__}: {fault}")

        return call

    def _audit(self, launch: Callable[[], None], arguments: Any) -> str:
        """Return the fault of a launch, "" if there is none."""
        tensors = list(_tensors(arguments))
        memory = {t.untyped_storage().data_ptr(): _bits(t.untyped_storage()) for t in tensors}
        before = {at: bits.copy() for at, bits in memory.items()}
        uninitialised = {at: written for at, written in self._uninitialised.items() if at in memory}
        self._run_order, self._accesses = "forward", Accesses(_spans(tensors), uninitialised)
        launch()
        accesses, self._accesses = self._accesses, None
        faults = accesses.faults()
        if faults:
            return "; ".join(faults)
        after = {at: bits.copy() for at, bits in memory.items()}
        for order in self._orders:
            self._run_order = order
            for at, bits in memory.items():
                bits[:] = before[at]
            launch()
            if not all(np.array_equal(bits, after[at]) for at, bits in memory.items()):
                return f"programs {order} leave other bits"
        return ""

    # -- addresses

    def _noting(self, real: Callable[..., Any], note: Callable[[Accesses, Any], None]) -> Any:
        """Return an operation of the interpreter that notes its accesses first."""

        def operation(*args: Any, **more: Any) -> Any:
            if self._accesses is not None:
                note(self._accesses, args)
            return real(*args, **more)

        return operation

    # -- memory that was never written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::empty", "aten::new_empty", "aten::empty_strided"):
            if out.numel():
                written = np.zeros(out.untyped_storage().nbytes(), dtype=np.bool_)
                self._uninitialised[out.untyped_storage().data_ptr()] = (out, written)
        elif func._schema.is_mutable and not self._launching:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.numel():
                    uninitialised = self._uninitialised.get(tensor.untyped_storage().data_ptr())
                    if uninitialised is not None:
                        uninitialised[1][:] = True
        return out


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


def _bits(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy()


# --- the plugin of pytest -------------------------------------------------------------------------

_audited: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    """Audit a test. The audit ends after all patches of the test are undone."""
    with Audit().auditing() as audit:
        yield
    _audited.update(audit.launches)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = _audited.total()
    terminalreporter.write_line(f"audited: {len(_audited)} kernels, {count} launches; orders: 3")
