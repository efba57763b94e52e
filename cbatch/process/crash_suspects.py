"""Finds the sequence that kills the engine.

A sequence is suspected if the engine dies while it runs the sequence, reads its request or compiles
its grammar. Each of these deaths is a strike. The next committed token clears the sequence. After
two strikes its group runs alone, on trial. If the engine dies, the group is tried again after all
other suspects, which by then are cleared unless the deaths have an outside cause. After a second
death on trial the group is guilty. All other sequences are resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import Request


class OpenSequence(ABC):
    """One choice of a request, and the handlers of its events on the event loop. `request` and
    `tokens` are the transcript from which another engine resumes the choice. `EngineClient` sets
    all attributes except `request`. No event follows the last row, or a cancel or finish by the
    owner. If a handler raises, `on_failed` is called; no other sequence is affected."""

    request: Request
    tokens: list[int]  # emitted so far
    group: OpenSequence  # first sequence of the group
    wire_id: str | None = None  # id in the running engine, if it has the sequence
    admitted = False

    @abstractmethod
    def on_admitted(self, ago_s: float, cached_tokens: int) -> None:
        """Handle the admission to a slot `ago_s` seconds ago, with `cached_tokens` of the prompt in
        the prefix cache. Called once, even after restarts."""

    @abstractmethod
    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Handle log probabilities of the prompt, or of the tokens of the next `on_step`."""

    @abstractmethod
    def on_step(self, row: OutputRow) -> None:
        """Handle new tokens, which are in `tokens` already, and the finish reason, if any."""

    @abstractmethod
    def on_lost(self, message: str) -> None:
        """Handle the loss of the engine for good."""

    @abstractmethod
    def on_failed(self, error: Exception) -> None:
        """Handle an error of this process or of another handler. The sequence was dropped."""


SUSPECT_STRIKES = 2  # strikes of a sequence, after which its group runs alone
_GUILTY_LONE_DEATHS = 2  # a group is guilty after this many deaths while it was in flight alone


class CrashSuspects:
    """Suspected sequences, with their `strikes`. Sequences of one group are tried together,
    but cleared one by one: a token of one choice does not clear another choice."""

    def __init__(self) -> None:
        self.strikes: dict[OpenSequence, int] = {}
        self._lone_deaths: dict[OpenSequence, int] = {}  # by group

    @property
    def groups(self) -> list[OpenSequence]:
        """Return the groups to try, the group with the fewest deaths on trial first."""
        groups = [s.group for s, strikes in self.strikes.items() if strikes >= SUSPECT_STRIKES]
        return sorted(dict.fromkeys(groups), key=lambda group: self._lone_deaths.get(group, 0))

    def on_death(self, in_flight: Collection[OpenSequence], *, alone: bool) -> OpenSequence | None:
        """Count a death, for which the sequences `in_flight` are suspected. `alone` says that only
        one group was in flight, cancelled sequences included. Returns the guilty group, if any."""
        if alone:
            for group in {sequence.group for sequence in in_flight}:
                self._lone_deaths[group] = self._lone_deaths.get(group, 0) + 1
        for sequence in in_flight:
            strikes = self.strikes[sequence] = self.strikes.get(sequence, 0) + 1
            lone_deaths = self._lone_deaths.get(sequence.group, 0)
            if strikes > SUSPECT_STRIKES and lone_deaths >= _GUILTY_LONE_DEATHS:
                return sequence.group
        return None

    def clear(self, sequence: OpenSequence) -> None:
        del self.strikes[sequence]
        if all(other.group is not sequence.group for other in self.strikes):
            self._lone_deaths.pop(sequence.group, None)
