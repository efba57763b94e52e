"""Which drafter of its chain each slot turns to first: a bandit of few arms for every sequence.

A chain names drafters; one that has no guess passes a row on to the next. Whether a lookup or the
draft model should be asked first differs from text to text, so it is learnt: per slot and drafter
the decayed ratio of sums of acceptance.py, N accepted drafts over D trials, with one difference. A
draft that ends before it was asked to counts as a trial that failed there, since the step gets no
more of it. So with chance p = N / D a drafter asked for k tokens is worth

    1 + p + p^2 + ... + p^k = 1 + p (1 - p^k) / (1 - p)

tokens of a step, which takes 1 + k c times as long as one without drafts: c is the price of one of
its passes over the target's. The order is by the ratio. A drafter counts only where it has a guess
(elsewhere it costs nothing and the next has its turn), so the best order is simply by value.

- Optimism explores: p is the mean of the Beta law of the sums plus a standard deviation. Sums of a
  drafter that is not heard of drift to the fleet's, and its optimism grows, so that one that is far
  behind is tried more and more rarely, and none never. There is no randomness.
- Lookups are heard of without being asked: whoever holds them replays what they would have drafted
  (`cbatch.runtime.drafting.turns`). Only a draft model has to be tried.
- A new sequence begins with the fleet's ratio of every drafter, worth a few trials.

Lossless: the order of a step follows from tokens emitted before it and from verdicts on drafts up
to the first rejection, as k does. What a drafter is about to propose, or how sure it is, has no
part in it. Nor has a clock: prices are given, not measured, since in rejection mode what is
accepted depends on what was proposed.

It lives where drafts are made, since plans do not say who drafts and results not who did. Like a
policy it is pure: whoever drafts in a simulation or a test can hold one, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbatch.core.speculation.acceptance import Rows, decayed, drift
from cbatch.core.speculation.config import LookaheadConfig

_DECAY = LookaheadConfig().decay  # of the sums, a trial
_IDLE_DECAY = 0.92  # of the sums, a decision without trials
_PATIENCE = 64.0  # decisions without a word that are worth one more standard deviation
_PRIOR_TRIALS = 4.0  # that the fleet's word is worth to a slot
_FLEET_MEAN, _FLEET_TRIALS = 0.5, 16.0  # at first
_FLEET_MEMORY_TRIALS = 500.0
_FIRST_DEPTH = 4  # what a slot is taken to be asked for until it was
_LEAST_CHANCE, _MOST_CHANCE = 0.01, 0.98
_TIE = 1e-9  # by how much less an equal value counts one place further behind in the chain


class DrafterChoice:
    """Drafters are numbered as `prices` are: what a pass costs over a step without drafts."""

    def __init__(self, prices: Sequence[float], max_slots: int) -> None:
        shape = len(prices), max_slots
        self._prices = np.array(prices)[:, None]
        self._fleet = np.full((2, len(prices)), _FLEET_TRIALS)  # N and D
        self._fleet[0] *= _FLEET_MEAN
        self._estimate = np.ones((2, *shape))  # N and D
        self._tally = np.zeros((2, *shape))  # accepted and failed since the last decision
        self._unheard = np.zeros(shape)  # decisions in a row
        self._handicap = np.full(shape, np.inf)  # infinite where not `held`
        self._depth = np.full(max_slots, float(_FIRST_DEPTH))
        self.held = np.zeros(shape, dtype=np.bool_)  # is of the slot's chain
        self.chooses = np.zeros(max_slots, dtype=np.bool_)  # its chain has several
        self.ranks = np.zeros(shape, dtype=np.int64)  # 0: has the first turn

    def enter(self, slot: int, chain: Sequence[int], carried: np.ndarray | None = None) -> None:
        """A sequence takes the slot, with what `leave` gave when it was preempted, if it was."""
        self.leave(slot)
        self.chooses[slot] = len(chain) > 1
        self.held[list(chain), slot] = True
        self._handicap[list(chain), slot] = _TIE * np.arange(len(chain))
        self._estimate[:, :, slot] = self._prior() if carried is None else carried
        self._rank(slice(slot, slot + 1))

    def leave(self, slot: int) -> np.ndarray:
        """It leaves the slot. Returns what to remember of it, float64 [2, drafters]."""
        self.chooses[slot] = self.held[:, slot] = False
        self._tally[:, :, slot] = self._unheard[:, slot] = 0.0
        self._handicap[:, slot] = np.inf
        self._depth[slot] = _FIRST_DEPTH
        return self._estimate[:, :, slot].copy()

    def ask(self, slots: np.ndarray, depths: np.ndarray) -> None:
        """How many drafts these slots are asked for, int [rows]."""
        self._depth[slots] = depths

    def observe(
        self,
        drafters: np.ndarray | int,
        slots: np.ndarray,
        accepted: np.ndarray,
        failed: np.ndarray,
    ) -> None:
        """Drafts of these rows, each slot once: how many were accepted, or would have been, and
        whether one was rejected or there were fewer than asked for, bool [rows]."""
        at = drafters * self.chooses.shape[0] + slots
        sums = self._tally.reshape(2, -1)
        sums[0, at] += accepted
        sums[1, at] += failed

    def heard_of(self, drafter: int, slots: np.ndarray) -> np.ndarray:
        """Whether it has been observed in these slots since the last decision, bool [rows]."""
        accepted, failed = self._tally[:, drafter, slots]
        heard: np.ndarray = accepted + failed > 0
        return heard

    def decide(self) -> np.ndarray:
        """Takes in what was observed. Returns the slots whose order changed."""
        accepted, failed = self._tally
        trials = accepted + failed
        unheard = trials == 0
        self._unheard += 1.0
        self._unheard *= unheard
        told = decayed(_DECAY, self._estimate, trials, accepted)
        drifted = drift(_IDLE_DECAY, self._estimate, self._prior())
        self._estimate = np.where(unheard, drifted, told)
        seen = np.add.reduce(trials, axis=1)
        self._fleet *= np.exp(-seen / _FLEET_MEMORY_TRIALS)
        self._fleet[0] += np.add.reduce(accepted, axis=1)
        self._fleet[1] += seen
        self._tally[:] = 0.0
        return self._rank(slice(None))

    def _prior(self) -> np.ndarray:
        """N and D of a sequence without history, float64 [2, drafters]."""
        prior: np.ndarray = _PRIOR_TRIALS * self._fleet / self._fleet[1]
        return prior

    def _rank(self, slots: Rows) -> np.ndarray:
        accepted, trials = self._estimate[:, :, slots]
        depth = self._depth[slots]
        mean = np.minimum(accepted / trials, 1.0)
        deviation = np.sqrt(mean * (1 - mean) / (trials + 1))
        chance = mean + deviation * (1 + self._unheard[:, slots] / _PATIENCE)
        chance = np.minimum(np.maximum(chance, _LEAST_CHANCE), _MOST_CHANCE)
        value = 1 + chance * (1 - np.exp(depth * np.log(chance))) / (1 - chance)
        value /= 1 + self._prices * depth
        value -= self._handicap[:, slots]
        ranks = np.zeros(value.shape, dtype=np.int64)
        for other in value:
            ranks += other > value
        moved: np.ndarray = np.logical_or.reduce(ranks != self.ranks[:, slots])
        self.ranks[:, slots] = ranks
        return moved.nonzero()[0]
