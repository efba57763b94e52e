"""Who kills the engine: strikes, trials and verdicts.

Only requests in the step in flight at a death are suspected, and the next token that is committed
for one clears it. From its second strike on a request is tried: it runs alone. If the engine dies
meanwhile it is tried once more, after all others: they have been cleared by then, unless the deaths
come from outside. At its second death alone it is guilty. Everyone else is resumed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

SUSPECT_STRIKES = 2  # from here on it runs alone
_GUILTY_ALONE = 2  # deaths that nobody else was in flight at


@dataclass
class _Record:
    strikes: int = 0
    alone: int = 0


@dataclass
class Evidence:
    """By request id."""

    _records: dict[str, _Record] = field(default_factory=dict)

    @property
    def suspects(self) -> list[str]:
        """To be tried, in this order."""
        found = [name for name, r in self._records.items() if r.strikes >= SUSPECT_STRIKES]
        return sorted(found, key=lambda name: self._records[name].alone)

    def on_death(self, in_flight: Collection[str], *, alone: bool) -> str | None:
        """The engine died with these in flight; `alone`: with nobody else, not even one that has
        left since. Returns the one that is guilty, if any."""
        for name in in_flight:
            record = self._records.setdefault(name, _Record())
            record.strikes += 1
            record.alone += alone
            if record.strikes > SUSPECT_STRIKES and record.alone >= _GUILTY_ALONE:
                return name
        return None

    def clear(self, request_id: str) -> None:
        """A token of it was committed, or it ended."""
        self._records.pop(request_id, None)
