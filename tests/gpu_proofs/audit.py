"""Audit every launch in the interpreter for faults on a GPU. The interpreter runs programs one
after the other, a GPU at once and in any order.

A launch runs three times from the same memory: in order, reversed and shuffled, and must leave the
same bits. In the first run every address is checked:

- programs may not write what another reads or writes, unless an atomic orders them;
- a program may not read what it stored itself before a barrier;
- all addresses lie inside the tensors that were passed;
- memory that was never written is not read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from tests.gpu_proofs.interpreted.accesses import Accesses, Addresses

Place = tuple[int, int, int]


class UnsoundLaunch(BaseException):
    """A fault of a launch. No `Exception`: the step loop would recover."""


class Audit(TorchDispatchMode):
    """A context in which every launch is audited. `orders`: the orders of the repeated runs."""

    def __init__(self, orders: Sequence[str] = ("reversed", "shuffled")) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.programs = 0
        self.loads = self.stores = 0
        self._orders = orders
        self._random = random.Random(1)
        self._order: list[Place] = []
        self._shape: Place = (1, 1, 1)
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
            patch.setattr(builder, "create_masked_load", self._load(builder.create_masked_load))
            patch.setattr(builder, "create_masked_store", self._store(builder.create_masked_store))
            patch.setattr(builder, "create_atomic_rmw", self._atomic(builder.create_atomic_rmw))
            patch.setattr(builder, "create_barrier", self._barrier(builder.create_barrier))
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
                self.programs += 1
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
        self.loads, self.stores = self.loads + accesses.loads, self.stores + accesses.stores
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

    def _load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def create_masked_load(builder: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            if self._accesses is not None:
                self._accesses.load(Addresses.of(ptrs, mask))
            return real(builder, ptrs, mask, *rest, **more)

        return create_masked_load

    def _store(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def create_masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            if self._accesses is not None:
                self._accesses.store(Addresses.of(ptrs, mask), value.data, mask.data)
            return real(builder, ptrs, value, mask, *rest)

        return create_masked_store

    def _atomic(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def create_atomic_rmw(
            builder: Any, how: Any, ptr: Any, value: Any, mask: Any, sem: Any, *rest: Any
        ) -> Any:
            if self._accesses is not None:
                self._accesses.atomic(
                    Addresses.of(ptr, mask), "ACQUIRE_RELEASE" in str(sem).upper()
                )
            return real(builder, how, ptr, value, mask, sem, *rest)

        return create_atomic_rmw

    def _barrier(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def create_barrier(builder: Any) -> Any:
            if self._accesses is not None:
                self._accesses.barrier()
            return real(builder)

        return create_barrier

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
