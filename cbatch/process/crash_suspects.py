"""Finds the request that kills the engine.

Requests are suspected if a death found them in flight, in reading or in compiling; each such death
is a strike. A request's next committed token clears it. After two strikes the request's group is
tried: it runs alone. If the engine dies meanwhile, the group is tried again after all other
suspects. These are cleared by then, unless the deaths have an outside cause. A second death alone
proves the group guilty. All other requests are resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SUSPECT_STRIKES = 2  # after this many strikes a group runs alone.
_CULPRIT_ALONE = 2  # deaths with no other group in flight


@dataclass
class _Record:
    group: str
    strikes: int = 0


@dataclass
class CrashSuspects:
    """Suspected requests by id. The requests of one group are tried together, but cleared one by
    one: a token of one choice says nothing about another."""

    _records: dict[str, _Record] = field(default_factory=dict)
    _lone_deaths: dict[str, int] = field(default_factory=dict)  # by group

    @property
    def groups(self) -> list[str]:
        """The groups to try, in this order."""
        groups = [r.group for r in self._records.values() if r.strikes >= SUSPECT_STRIKES]
        return sorted(dict.fromkeys(groups), key=lambda group: self._lone_deaths.get(group, 0))

    def on_death(self, in_flight: Mapping[str, str], *, alone: bool) -> str | None:
        """Count a death. `in_flight` maps the suspected requests to their groups. `alone` says that
        only one group was in flight, cancelled requests included. Returns the guilty group."""
        if alone:
            for group in set(in_flight.values()):
                self._lone_deaths[group] = self._lone_deaths.get(group, 0) + 1
        for name, group in in_flight.items():
            record = self._records.setdefault(name, _Record(group))
            record.strikes += 1
            lone_deaths = self._lone_deaths.get(group, 0)
            if record.strikes > SUSPECT_STRIKES and lone_deaths >= _CULPRIT_ALONE:
                return group
        return None

    def clear(self, request_id: str) -> None:
        """Clear a request, after a committed token or its end."""
        record = self._records.pop(request_id, None)
        if record is not None and all(r.group != record.group for r in self._records.values()):
            self._lone_deaths.pop(record.group, None)
