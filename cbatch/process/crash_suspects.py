"""Who kills the engine: strikes, trials and verdicts.

Only requests that the engine was busy with at a death are suspected (in the step in flight, or
being read), and the next token that is committed for one clears it. From the second strike of one
of its requests on a call is tried: it runs alone. If the engine dies meanwhile it is tried once
more, after all others: they have been cleared by then, unless the deaths come from outside. At its
second death alone it is the culprit. Everyone else is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SUSPECT_STRIKES = 2  # from here on its call runs alone
_CULPRIT_ALONE = 2  # deaths that no other call was in flight at


@dataclass
class _Record:
    call: str
    strikes: int = 0


@dataclass
class CrashSuspects:
    """Requests by their id; those of one call are tried and judged together, and each is cleared
    by itself: what its siblings bring says nothing about it."""

    _records: dict[str, _Record] = field(default_factory=dict)
    _lone_deaths: dict[str, int] = field(default_factory=dict)  # by call

    @property
    def calls(self) -> list[str]:
        """To be tried, in this order."""
        found = [r.call for r in self._records.values() if r.strikes >= SUSPECT_STRIKES]
        return sorted(dict.fromkeys(found), key=lambda call: self._lone_deaths.get(call, 0))

    def on_death(self, in_flight: Mapping[str, str], *, alone: bool) -> str | None:
        """The engine died with these in flight, each of a call; `alone`: of one, and with nobody
        else, not even one that has left since. Returns the culprit, if it is found."""
        if alone:
            for call in set(in_flight.values()):
                self._lone_deaths[call] = self._lone_deaths.get(call, 0) + 1
        for name, call in in_flight.items():
            record = self._records.setdefault(name, _Record(call))
            record.strikes += 1
            lone_deaths = self._lone_deaths.get(call, 0)
            if record.strikes > SUSPECT_STRIKES and lone_deaths >= _CULPRIT_ALONE:
                return call
        return None

    def clear(self, request_id: str) -> None:
        """A token of it was committed, or it ended."""
        record = self._records.pop(request_id, None)
        if record is not None and all(r.call != record.call for r in self._records.values()):
            self._lone_deaths.pop(record.call, None)
