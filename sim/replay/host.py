"""Replicas that share the processors of one machine with what serves and sends for them.

    arrival -> client -> server of a replica -> its engine's inbox
    step    -> its server -> client, where its tokens have come

An engine's step is work for one processor. So is what its server computes of a request and of each
step, and what the one client (or gateway) does; a server, and the client, do one thing at a time.
Where more work is under way than there are processors, all of it goes on at the same pace, slower.
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
from sim.traces.files import read_whole

_SAME_S = 1e-12  # what rounding leaves of work that is done


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a processor: of a request, of a step whose tokens come by, of each token."""

    request_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < math.inf:
                problem = f"{getattr(self, name)} is not allowed"
                raise FieldError(f"host.{name}", problem, "give 0 or more seconds")

    def of_step(self, num_tokens: int) -> float:
        """Return the seconds for a step that emitted so many tokens: none without tokens."""
        return self.step_s + num_tokens * self.token_s if num_tokens else 0.0


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`crowded`: how many times as long a processor takes while all of them are busy, as those do
    that share a core or a memory; with some of them busy, of that as much. `switch_s`: what a
    server or the client takes more for a piece of work that finds no processor free, and so takes
    one from an engine, with what is in its caches. `server` is of each replica, `client` of all."""

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
        """Of each of so much work under way, of what it has alone on the machine."""
        others = min(busy, self.cores) - 1
        if others <= 0:
            return 1.0 if busy <= self.cores else self.cores / busy
        slower = 1 + (self.crowded - 1) * others / (self.cores - 1)
        return min(self.cores / busy, 1.0) / slower


def read_host(path: str | Path) -> Host:
    """Raises `FieldError` for a file that says none."""
    try:
        return msgspec.json.decode(read_whole(Path(path)), type=Host)
    except FieldError as error:
        raise FieldError(
            "--host", f"{path}: {error.field}: {error.problem}", error.remedy
        ) from None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        remedy = "give a JSON object with cores, crowded, server and client"
        raise FieldError("--host", f"{path} says none ({error})", remedy) from error


class Processors:
    """What is under way, as of the time that it was last told. Time that work takes is counted on
    a clock of its own, which goes at the pace of the moment."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._work: list[tuple[float, int, Callable[[float], Any]]] = []  # a heap, by that clock
        self._now_s = self._done_s = 0.0
        self._count = 0

    def start(self, work_s: float, ended: Callable[[float], Any], now_s: float) -> None:
        """`ended` is called with the time at which so much has been done."""
        self._move(now_s)
        self._count += 1
        heapq.heappush(self._work, (self._done_s + work_s, self._count, ended))

    @property
    def switch_s(self) -> float:
        """What it costs to begin something now that is no engine's step."""
        return self._host.switch_s if len(self._work) >= self._host.cores else 0.0

    def next_s(self) -> float:
        """When something ends, if nothing begins before."""
        if not self._work:
            return math.inf
        left_s = max(self._work[0][0] - self._done_s, 0.0)
        return self._now_s + left_s / self._host.pace(len(self._work))

    def take_ended(self, now_s: float) -> list[Callable[[float], Any]]:
        """What has ended by now, in order; no later than `next_s`."""
        self._move(now_s)
        found = []
        while self._work and self._work[0][0] - self._done_s <= _SAME_S:
            found.append(heapq.heappop(self._work)[2])
        return found

    def _move(self, now_s: float) -> None:
        if self._work:
            self._done_s += (now_s - self._now_s) * self._host.pace(len(self._work))
        self._now_s = now_s


class Clerk:
    """Somebody who does one thing after another."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors
        self._waiting: deque[tuple[float, Callable[[float], Any]]] = deque()
        self._busy = False

    def do(self, work_s: float, ended: Callable[[float], Any], now_s: float) -> None:
        """What takes no time is done at once, if nothing is before it."""
        self._waiting.append((work_s, ended))
        self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
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
        self._go_on(now_s)
