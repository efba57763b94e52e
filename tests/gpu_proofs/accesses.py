"""Reads and writes of the programs of one launch, and pairs of them without an order on a GPU."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

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
        self.loads = self.stores = 0  # lanes
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
        self.loads += len(addresses.at)
        self._check_bounds(addresses, "read")
        for begin, (tensor, written) in self._uninitialised.items():
            size = tensor.untyped_storage().nbytes()
            mine = addresses.at[(addresses.at >= begin) & (addresses.at < begin + size)]
            if len(mine) and not written[(mine - np.uint64(begin)).astype(np.int64)].all():
                self._fault_counts["reads memory that was never written"] += 1
        self._log_access(LOAD, addresses.at)

    def store(self, addresses: Addresses, values: np.ndarray, mask: np.ndarray) -> None:
        self.stores += len(addresses.at)
        self._check_bounds(addresses, "written")
        for begin, (tensor, written) in self._uninitialised.items():
            size = tensor.untyped_storage().nbytes()
            mine = addresses.at[(addresses.at >= begin) & (addresses.at < begin + size)]
            for byte in range(addresses.width):
                written[(mine - np.uint64(begin)).astype(np.int64) + byte] = True
        if len(np.unique(addresses.at)) < len(addresses.at):
            lanes = np.broadcast_to(np.asarray(mask).astype(np.bool_), np.shape(values))
            pairs = {*zip(addresses.at.tolist(), np.asarray(values)[lanes].tolist(), strict=True)}
            if len(pairs) > len({at for at, _ in pairs}):
                self._fault_counts["lanes of one store differ on a place"] += 1
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
