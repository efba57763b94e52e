"""The order in which a slot's drafters are tried, learned from their acceptance in that slot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.drafting.drafter_choice import DrafterChoice
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota

DECIDE_STEPS = 4  # steps between decisions about the order
# At a decision, lookups that did not draft are replayed on a slot's latest REPLAY_TOKENS tokens. In
# a slot without any drafts they are replayed only after IDLE_TOKENS new tokens.
REPLAY_TOKENS, IDLE_TOKENS = 4, 12
MAX_REPLAYS = 16  # maximum number of slots replayed at one decision, in rotation


class Turns:
    """The turns of all slots' drafters, from the ranks of a `DrafterChoice`.

    A step calls the drafters turn by turn, each for the slots where it has that turn. Lookups
    ranked before the draft model have turns 0, 1, ...; the model has the middle turn in every slot;
    lookups ranked after it have the next turns. So the model is called once a step for all slots.
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
        slots = table.max_num_seqs
        self._choice = DrafterChoice(prices, slots)
        # For each drafter, whether it has turn t of a slot: bool [turns, slots].
        turns = 2 * len(lookups) + 1
        self._turns = {name: np.zeros((turns, slots), dtype=np.bool_) for name in self.names}
        self._order: list[tuple[int, str]] | None = None  # None: not computed since the last change
        self._chains: list[tuple[str, ...]] = [()] * slots  # each slot's drafters
        self._owners: dict[int, tuple[str, int]] = {}  # (request id, choice) of each slot
        self._saved_sums: dict[tuple[str, int], NDArray[np.float64]] = {}  # sums of released slots
        self._credited = np.zeros(slots, dtype=np.int64)  # drafter that made this step's drafts
        self._requested = np.zeros(slots, dtype=np.int64)  # drafts requested in this step
        self._known = np.zeros(slots, dtype=np.int64)  # tokens before this step
        self._replayed = np.zeros(slots, dtype=np.int64)  # tokens at the last replay
        self._idle = np.ones(slots, dtype=np.bool_)  # no drafts since the last decision
        self._steps = 0

    # ---- slots --------------------------------------------------------------------------------

    def admit(self, admission: NewSequence, chain: tuple[str, ...]) -> None:
        """Add a sequence with this chain, whose drafters are all in `names`."""
        slot, owner = admission.slot, (admission.request_id, admission.choice)
        if len(chain) == 1 and self._chains[slot] == chain:
            return
        self._chains[slot], self._owners[slot] = chain, owner
        self._replayed[slot] = len(admission.tokens)
        drafters = [self.names.index(name) for name in chain]
        self._choice.enter(slot, drafters, self._saved_sums.pop(owner, None))
        self._set_turns(np.array([slot]))

    def release(self, slot: int) -> None:
        """Free a slot. Its sums are kept for a while, because the sequence may have been preempted.
        A chain of one drafter keeps its turn, because the next sequence usually has the same."""
        if len(self._chains[slot]) == 1:
            return
        self._chains[slot] = ()
        owner, has_several = self._owners.pop(slot, None), self._choice.has_several[slot]
        sums = self._choice.leave(slot)
        if owner is not None and has_several:
            self._saved_sums[owner] = sums
            if len(self._saved_sums) > self._table.max_num_seqs:
                del self._saved_sums[next(iter(self._saved_sums))]
        self._set_turns(np.array([slot]))

    def _set_turns(self, slots: I64) -> None:
        """Set the turns of these slots from the ranks of their drafters."""
        ranks, in_chain = self._choice.ranks[:, slots], self._choice.in_chain[:, slots]
        middle = len(self._lookups)
        model = ranks[self.names.index(MODEL)] if MODEL in self.names else middle
        new_turns = ranks + (middle - model) * (ranks >= model)
        for turns, present, new_turn in zip(self._turns.values(), in_chain, new_turns, strict=True):
            turns[:, slots] = present & (iota(len(turns))[:, None] == new_turn)
        self._order = None

    # ---- a step -------------------------------------------------------------------------------

    @property
    def order(self) -> list[tuple[int, str]]:
        """Return the (turn, drafter) pairs in use, in calling order."""
        if self._order is None:
            self._order = sorted(
                (int(turn), name)
                for name, turns in self._turns.items()
                for turn in turns.any(axis=1).nonzero()[0]
            )
        return self._order

    def has_turn(self, turn: int, name: str, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return whether this drafter has that turn in each of `slots`, bool."""
        return self._turns[name][turn, slots]

    def in_chain(self, name: str, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return whether this drafter is in the chain of each of `slots`, bool."""
        in_chain: NDArray[np.bool_] = self._turns[name][:, slots].any(axis=0)
        return in_chain

    def has_lookup_first(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return whether a lookup has the first turn in each of `slots`, bool."""
        return np.logical_or.reduce([self.has_turn(0, name, slots) for name in self._lookups])

    def begin(self, slots: NDArray[np.integer], num_tokens: I64, num_drafts: I64) -> None:
        """Begin a step in which these slots, with `num_tokens` known tokens, request drafts."""
        self._known[slots] = num_tokens
        self.set_requested(slots, num_drafts)

    def set_requested(self, slots: NDArray[np.integer], num_drafts: I64) -> None:
        """Record the number of drafts that the step requests of each slot."""
        self._requested[slots] = num_drafts

    def credit(self, name: str, slots: NDArray[np.integer]) -> None:
        """Record that this drafter made the drafts of these slots in this step."""
        self._credited[slots] = self.names.index(name)

    def learn(self, slots: NDArray[np.integer], num_drafted: I64 | None) -> None:
        """Learn from a step in which `slots` had `num_drafted` drafts; None: no slot had any."""
        choice, known = self._choice, self._table.num_tokens
        if not np.count_nonzero(choice.has_several):
            return
        if num_drafted is not None:
            drafted = slots[(num_drafted > 0) & choice.has_several[slots]]
            requested = self._requested[drafted]
            accepted = known[drafted] - self._known[drafted] - 1
            missed = accepted < requested
            choice.set_requested(drafted, requested)
            choice.observe(self._credited[drafted], drafted, np.maximum(accepted, 0), missed)
            self._idle[drafted] = False
        self._steps += 1
        if self._steps % DECIDE_STEPS:
            return
        waits = self._idle[slots] & (known[slots] - self._replayed[slots] < IDLE_TOKENS)
        due = slots[choice.has_several[slots] & ~waits]
        if len(due) > MAX_REPLAYS:
            due = np.roll(due, -(self._steps // DECIDE_STEPS * MAX_REPLAYS))[:MAX_REPLAYS]
        self._replay(due)
        self._idle[:] = True
        changed = choice.decide()
        if len(changed):
            self._set_turns(changed)

    def _replay(self, slots: I64) -> None:
        """Score lookups that did not draft: replay them on the latest tokens of these slots."""
        known = self._table.num_tokens[slots]
        since = np.maximum(self._replayed[slots], known - REPLAY_TOKENS)
        self._replayed[slots] = known
        for drafter, (name, lookup) in enumerate(self._lookups.items()):
            replayable = self.in_chain(name, slots) & (known > since)
            at = (replayable & ~self._choice.was_observed(drafter, slots)).nonzero()[0]
            if not len(at):
                continue
            depths = known[at] - since[at]
            guessed, hits = lookup.replay(slots[at], since[at], depths)
            at, depths, hits = at[guessed], depths[guessed], hits[guessed]
            self._choice.observe(drafter, slots[at], hits, hits < depths)
