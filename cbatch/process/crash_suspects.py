"""Finds the sequence that kills the engine.

Sequences are suspected if a death found them in flight, in reading or in compiling; each such death
is a strike. A sequence's next committed token clears it. After two strikes its group is tried: the
group runs alone. If the engine dies meanwhile, the group is tried again after all other
suspects. These are cleared by then, unless the deaths have an outside cause. A second death alone
proves the group guilty. All other sequences are resumed.
"""

from __future__ import annotations

from collections.abc import Collection

from cbatch.process.open_sequence import OpenSequence

SUSPECT_STRIKES = 2  # after this many strikes a group runs alone.
_CULPRIT_ALONE = 2  # deaths with no other group in flight


class CrashSuspects:
    """Suspected sequences, with their `strikes`. Those of one group are tried together, but cleared
    one by one: a token of one choice says nothing about another."""

    def __init__(self) -> None:
        self.strikes: dict[OpenSequence, int] = {}
        self._lone_deaths: dict[OpenSequence, int] = {}  # by group

    @property
    def groups(self) -> list[OpenSequence]:
        """The groups to try, in this order."""
        groups = [s.group for s, strikes in self.strikes.items() if strikes >= SUSPECT_STRIKES]
        return sorted(dict.fromkeys(groups), key=lambda group: self._lone_deaths.get(group, 0))

    def on_death(self, in_flight: Collection[OpenSequence], *, alone: bool) -> OpenSequence | None:
        """Count a death, for which the sequences `in_flight` are suspected. `alone` says that only
        one group was in flight, cancelled sequences included. Returns the guilty group."""
        if alone:
            for group in {sequence.group for sequence in in_flight}:
                self._lone_deaths[group] = self._lone_deaths.get(group, 0) + 1
        for sequence in in_flight:
            strikes = self.strikes[sequence] = self.strikes.get(sequence, 0) + 1
            lone_deaths = self._lone_deaths.get(sequence.group, 0)
            if strikes > SUSPECT_STRIKES and lone_deaths >= _CULPRIT_ALONE:
                return sequence.group
        return None

    def clear(self, sequence: OpenSequence) -> None:
        """Clear a suspected sequence, after a committed token or its end."""
        del self.strikes[sequence]
        if all(other.group is not sequence.group for other in self.strikes):
            self._lone_deaths.pop(sequence.group, None)
