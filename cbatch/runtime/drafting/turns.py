"""Whose turn it is in each slot, by what has been learnt of the drafters there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.drafting.drafter_choice import DrafterChoice
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.model.arrays import I64, iota

DECIDE_STEPS = 4  # what was learnt in so many steps moves turns together
# Lookups that did not draft are replayed then on the latest tokens, at most so many; in a slot that
# drafts nothing, once so many have come.
REPLAY_TOKENS, IDLE_TOKENS = 4, 12
MOST_REPLAYS = 16  # slots at a time, in turn


class Turns:
    """Turns of all slots, and the choice that orders them.

    Lookups of a chain that come before the model have turns 0, 1, ..., the model has the middle
    one, and those behind it the last. So it is called once a step, whatever the orders.
    """

    def __init__(
        self,
        table: InputBatch,
        lookups: Mapping[str, LookupDrafter],
        *,
        with_model: bool,
        model_price: float,
    ) -> None:
        self._table, self._lookups = table, lookups
        self.names = (*lookups, *((MODEL,) if with_model else ()))
        prices = [model_price if name == MODEL else 0.0 for name in self.names]
        slots = table.max_slots
        self._choice = DrafterChoice(prices, slots)
        # Turn t of a slot belongs to a drafter: bool [turns, slots] for each.
        turns = 2 * len(lookups) + 1
        self._turns = {name: np.zeros((turns, slots), dtype=np.bool_) for name in self.names}
        self._order: list[tuple[int, str]] | None = None  # None: to be found out
        self._chains: list[tuple[str, ...]] = [()] * slots  # that the turns are of
        self._owners: dict[int, tuple[str, int]] = {}
        self._carried: dict[tuple[str, int], NDArray[np.float64]] = {}  # of those who left
        self._by = np.zeros(slots, dtype=np.int64)  # who drafted in this step, for whom it is known
        self._asked = np.zeros(slots, dtype=np.int64)  # drafts of this step
        self._known = np.zeros(slots, dtype=np.int64)  # tokens before this step
        self._replayed = np.zeros(slots, dtype=np.int64)  # tokens at the last replay
        self._idle = np.ones(slots, dtype=np.bool_)  # no drafts since the last decision
        self._steps = 0

    # ---- slots --------------------------------------------------------------------------------

    def admit(self, admission: NewSequence, chain: tuple[str, ...]) -> None:
        """A sequence with this chain, all of `names`, enters a slot."""
        slot, owner = admission.slot, (admission.request_id, admission.choice)
        if len(chain) == 1 and self._chains[slot] == chain:
            return
        self._chains[slot], self._owners[slot] = chain, owner
        self._replayed[slot] = len(admission.tokens)
        numbers = [self.names.index(name) for name in chain]
        self._choice.enter(slot, numbers, self._carried.pop(owner, None))
        self._seat(np.array([slot]))

    def release(self, slot: int) -> None:
        """What was learnt is kept for a while: the sequence may have been preempted. Where there is
        nothing to choose the turns stay, since the next one mostly has the same chain."""
        if len(self._chains[slot]) == 1:
            return
        self._chains[slot] = ()
        owner, chose = self._owners.pop(slot, None), self._choice.chooses[slot]
        learnt = self._choice.leave(slot)
        if owner is not None and chose:
            self._carried[owner] = learnt
            if len(self._carried) > self._table.max_slots:
                del self._carried[next(iter(self._carried))]
        self._seat(np.array([slot]))

    def _seat(self, slots: I64) -> None:
        """Turns of these slots from the ranks of their drafters."""
        ranks, held = self._choice.ranks[:, slots], self._choice.held[:, slots]
        middle = len(self._lookups)
        model = ranks[self.names.index(MODEL)] if MODEL in self.names else middle
        seats = ranks + (middle - model) * (ranks >= model)
        for turns, mine, seat in zip(self._turns.values(), held, seats, strict=True):
            turns[:, slots] = mine & (iota(len(turns))[:, None] == seat)
        self._order = None

    # ---- a step -------------------------------------------------------------------------------

    @property
    def order(self) -> list[tuple[int, str]]:
        """Turns that somebody has, and whose they are."""
        if self._order is None:
            self._order = sorted(
                (int(turn), name)
                for name, turns in self._turns.items()
                for turn in turns.any(axis=1).nonzero()[0]
            )
        return self._order

    def of(self, turn: int, name: str, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether that turn is this drafter's, by slot."""
        return self._turns[name][turn, slots]

    def holds(self, name: str, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether it is of the chain, by slot."""
        held: NDArray[np.bool_] = self._turns[name][:, slots].any(axis=0)
        return held

    def begin_with_lookup(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether a lookup has the first turn, by slot."""
        return np.logical_or.reduce([self.of(0, name, slots) for name in self._lookups])

    def begin(self, slots: NDArray[np.integer], num_tokens: I64, num_drafts: I64) -> None:
        """These slots, with so many known tokens, are asked for drafts."""
        self._known[slots] = num_tokens
        self.ask(slots, num_drafts)

    def ask(self, slots: NDArray[np.integer], num_drafts: I64) -> None:
        self._asked[slots] = num_drafts

    def credit(self, name: str, slots: NDArray[np.integer]) -> None:
        """The drafts of these slots in this step are this drafter's."""
        self._by[slots] = self.names.index(name)

    def learn(self, slots: NDArray[np.integer], num_drafted: I64 | None) -> None:
        """After a step in which `slots` drafted so many tokens (None: nobody any)."""
        choice, known = self._choice, self._table.num_tokens
        if not np.count_nonzero(choice.chooses):
            return
        if num_drafted is not None:
            drafted = slots[(num_drafted > 0) & choice.chooses[slots]]
            asked, accepted = self._asked[drafted], known[drafted] - self._known[drafted] - 1
            choice.ask(drafted, asked)
            choice.observe(self._by[drafted], drafted, np.maximum(accepted, 0), accepted < asked)
            self._idle[drafted] = False
        self._steps += 1
        if self._steps % DECIDE_STEPS:
            return
        waits = self._idle[slots] & (known[slots] - self._replayed[slots] < IDLE_TOKENS)
        due = slots[choice.chooses[slots] & ~waits]
        if len(due) > MOST_REPLAYS:
            due = np.roll(due, -(self._steps // DECIDE_STEPS * MOST_REPLAYS))[:MOST_REPLAYS]
        self._replay(due)
        self._idle[:] = True
        changed = choice.decide()
        if len(changed):
            self._seat(changed)

    def _replay(self, slots: I64) -> None:
        """Score lookups that did not draft on what these slots emitted lately."""
        known = self._table.num_tokens[slots]
        since = np.maximum(self._replayed[slots], known - REPLAY_TOKENS)
        self._replayed[slots] = known
        for number, (name, lookup) in enumerate(self._lookups.items()):
            holds = self.holds(name, slots) & (known > since)
            at = (holds & ~self._choice.heard_of(number, slots)).nonzero()[0]
            if not len(at):
                continue
            depths = known[at] - since[at]
            guessed, hits = lookup.replay(slots[at], since[at], depths)
            at, depths, hits = at[guessed], depths[guessed], hits[guessed]
            self._choice.observe(number, slots[at], hits, hits < depths)
