"""Replicas, their servers and one client that share the processors of one machine.

    arrival -> client -> server of a replica -> its engine's inbox
    step    -> its server -> client, which then has the step's tokens

Each piece of work occupies one processor: an engine's step, a server's work for a request or a
step, and the work of the single client (or gateway). The client and each server do one piece of
work at a time. If more work is in progress than there are processors, all of it slows down equally.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError
from sim.workload.traces.files import read_whole

_SAME_S = 1e-12  # remaining work below this, in seconds, is rounding error


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Processor seconds: per request, per step that emits tokens, and per token."""

    request_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < math.inf:
                problem = f"{getattr(self, name)} is not allowed"
                raise FieldError(f"host.{name}", problem, "give 0 or more seconds")

    def of_step(self, num_tokens: int) -> float:
        """Return the seconds for a step that emitted `num_tokens` tokens: none without tokens."""
        return self.step_s + num_tokens * self.token_s if num_tokens else 0.0


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine with `cores` processors, shared by servers, client and engines.

    `crowded`: factor by which work slows down while all processors are busy, for example because
    they share a core or memory; with fewer busy processors the slowdown is proportionally smaller.
    `switch_s`: extra seconds of a server's or the client's work that starts while no processor is
    free, since it displaces an engine and its caches. `server` is the work of each replica's
    server, `client` that of the one client."""

    cores: int
    crowded: float = 1.0
    switch_s: float = 0.0
    server: Work = Work()
    client: Work = Work()

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise FieldError("host.cores", f"{self.cores} is not allowed", "give 1 or more")
        if not 1 <= self.crowded < math.inf:
            problem = f"{self.crowded} is not allowed"
            raise FieldError("host.crowded", problem, "give 1 (no slower) or more")
        if not 0 <= self.switch_s < math.inf:
            problem = f"{self.switch_s} is not allowed"
            raise FieldError("host.switch_s", problem, "give 0 or more seconds")

    def pace(self, busy: int) -> float:
        """Return the speed of each of `busy` pieces of work, relative to running alone."""
        others = min(busy, self.cores) - 1
        if others <= 0:
            return 1.0 if busy <= self.cores else self.cores / busy
        slower = 1 + (self.crowded - 1) * others / (self.cores - 1)
        return min(self.cores / busy, 1.0) / slower


def read_host(path: str | Path) -> Host:
    """Read a host from a JSON file. Raises `FieldError` if the file describes none."""
    try:
        return msgspec.json.decode(read_whole(Path(path)), type=Host)
    except FieldError as error:
        raise FieldError(
            "--host", f"{path}: {error.field}: {error.problem}", error.remedy
        ) from None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        remedy = "give a JSON object with cores, crowded, server and client"
        raise FieldError("--host", f"{path} does not describe a host ({error})", remedy) from error


class Processors:
    """The work in progress, as of the last call. Times at which work ends are stored on a work
    clock, which advances at the current pace (see `Host.pace`)."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # A heap of (end on the work clock, order of start, callback).
        self._work: list[tuple[float, int, Callable[[float], Any]]] = []
        self._now_s = self._done_s = 0.0
        self._count = 0

    def start(self, work_s: float, ended: Callable[[float], Any], now_s: float) -> None:
        """Start work of `work_s` seconds. `take_ended` returns `ended` when the work is done."""
        self._move(now_s)
        self._count += 1
        heapq.heappush(self._work, (self._done_s + work_s, self._count, ended))

    @property
    def switch_s(self) -> float:
        """Return the extra seconds of a server's or the client's work that starts now."""
        return self._host.switch_s if len(self._work) >= self._host.cores else 0.0

    def next_s(self) -> float:
        """Return when the next piece of work ends, if no other work starts before."""
        if not self._work:
            return math.inf
        left_s = max(self._work[0][0] - self._done_s, 0.0)
        return self._now_s + left_s / self._host.pace(len(self._work))

    def take_ended(self, now_s: float) -> list[Callable[[float], Any]]:
        """Remove and return the callbacks of ended work, in order. `now_s` is at most
        `next_s()`."""
        self._move(now_s)
        callbacks = []
        while self._work and self._work[0][0] - self._done_s <= _SAME_S:
            callbacks.append(heapq.heappop(self._work)[2])
        return callbacks

    def _move(self, now_s: float) -> None:
        if self._work:
            self._done_s += (now_s - self._now_s) * self._host.pace(len(self._work))
        self._now_s = now_s


class SerialWorker:
    """A server or the client, which does one piece of work after another."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors
        self._waiting: deque[tuple[float, Callable[[float], Any]]] = deque()
        self._busy = False

    def do(self, work_s: float, ended: Callable[[float], Any], now_s: float) -> None:
        """Queue a piece of work. Work of 0 s ends at once if nothing is queued before it."""
        self._waiting.append((work_s, ended))
        self._start_next(now_s)

    def _start_next(self, now_s: float) -> None:
        while self._waiting and not self._busy:
            work_s, ended = self._waiting.popleft()
            if work_s:
                self._busy = True
                work_s += self._processors.switch_s
                self._processors.start(work_s, partial(self._done, ended), now_s)
            else:
                ended(now_s)

    def _done(self, ended: Callable[[float], Any], now_s: float) -> None:
        self._busy = False
        ended(now_s)
        self._start_next(now_s)
