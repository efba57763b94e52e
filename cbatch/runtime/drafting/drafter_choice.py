"""The order of each slot's drafters, learnt by one bandit per sequence, with an arm per drafter.

A chain names drafters. A drafter without a guess for a row passes it on to the next. Which drafter
should be first depends on the text. So each slot and drafter has the decayed sums of acceptance.py:
N accepted drafts, D trials. A draft that is shorter than requested counts as one failed trial. With
p = N / D, a drafter with k requested tokens yields

    1 + p + p^2 + ... + p^k = 1 + p (1 - p^k) / (1 - p)

tokens in a step that takes 1 + k c times as long as a step without drafts; c is the price of a
draft pass in target passes. Drafters are ordered by this ratio. A drafter without a guess is free.

- Exploration is by optimism, not random: p is the mean of the Beta distribution of the sums plus a
  standard deviation. Sums of an unobserved drafter drift to the mean over all slots, and its
  optimism grows. So a bad drafter is tried ever more rarely, but never given up.
- Lookups need no trial: `cbatch.runtime.drafting.turns` replays what they would have drafted.
- A new sequence begins with the mean over all slots, which counts as a few trials.

The order does not change the output's distribution: like k, it depends only on earlier tokens and
on the verification of drafts up to the first rejection. It never depends on a clock or on the
current proposals. Prices are therefore given, not measured.

This code is in the executor because plans and results do not name a row's drafter. It has no
side effects, so simulations and tests can use it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbatch.core.speculation.acceptance import Rows, decayed, drift
from cbatch.core.speculation.config import LookaheadConfig

_DECAY = LookaheadConfig().decay  # factor by which the sums N and D decay per trial
_IDLE_DECAY = 0.92  # factor of the sums' distance to the prior, per decision without trials
_PATIENCE = 64.0  # decisions without trials that add one standard deviation of optimism
_PRIOR_TRIALS = 4.0  # weight of the mean over all slots in a new slot, in trials
_FLEET_MEAN, _FLEET_TRIALS = 0.5, 16.0  # initial mean over all slots, and its trials
_FLEET_MEMORY_TRIALS = 500.0  # trials after which an old trial counts 1/e in that mean
_FIRST_DEPTH = 4  # k assumed for a slot before its first request for drafts
_LEAST_CHANCE, _MOST_CHANCE = 0.01, 0.98  # limits of p
_TIE = 1e-9  # subtracted per place in the chain: among equal values the earlier drafter wins


class DrafterChoice:
    """The order of all slots' drafters. `prices` has the cost of each drafter's pass, relative to a
    step without drafts. A drafter's number is its index in `prices`."""

    def __init__(self, prices: Sequence[float], max_num_seqs: int) -> None:
        shape = len(prices), max_num_seqs
        self._prices = np.array(prices)[:, None]
        self._fleet = np.full((2, len(prices)), _FLEET_TRIALS)  # N and D
        self._fleet[0] *= _FLEET_MEAN
        self._estimate = np.ones((2, *shape))  # N and D
        self._tally = np.zeros((2, *shape))  # accepted and failed since the last decision
        self._unheard = np.zeros(shape)  # decisions in a row without trials
        self._handicap = np.full(shape, np.inf)  # infinite for drafters outside the slot's chain
        self._depth = np.full(max_num_seqs, float(_FIRST_DEPTH))
        self.held = np.zeros(shape, dtype=np.bool_)  # drafter is in the slot's chain
        self.chooses = np.zeros(
            max_num_seqs, dtype=np.bool_
        )  # the slot's chain has several drafters
        self.ranks = np.zeros(shape, dtype=np.int64)  # 0: first

    def enter(self, slot: int, chain: Sequence[int], carried: np.ndarray | None = None) -> None:
        """Take in a sequence. `carried`: the sums from `leave`, if the sequence was preempted."""
        self.leave(slot)
        self.chooses[slot] = len(chain) > 1
        self.held[list(chain), slot] = True
        self._handicap[list(chain), slot] = _TIE * np.arange(len(chain))
        self._estimate[:, :, slot] = self._prior() if carried is None else carried
        self._rank(slice(slot, slot + 1))

    def leave(self, slot: int) -> np.ndarray:
        """Free a slot. Returns its sums N and D, float64 [2, drafters]."""
        self.chooses[slot] = self.held[:, slot] = False
        self._tally[:, :, slot] = self._unheard[:, slot] = 0.0
        self._handicap[:, slot] = np.inf
        self._depth[slot] = _FIRST_DEPTH
        return self._estimate[:, :, slot].copy()

    def ask(self, slots: np.ndarray, depths: np.ndarray) -> None:
        """Set the number of drafts requested of these slots, int [rows]."""
        self._depth[slots] = depths

    def observe(
        self,
        drafters: np.ndarray | int,
        slots: np.ndarray,
        accepted: np.ndarray,
        failed: np.ndarray,
    ) -> None:
        """Record drafts, each slot once. `accepted` int [rows]: drafts that were accepted, or would
        have been. `failed` bool [rows]: a draft was rejected, or there were fewer drafts
        than requested."""
        at = drafters * self.chooses.shape[0] + slots
        sums = self._tally.reshape(2, -1)
        sums[0, at] += accepted
        sums[1, at] += failed

    def heard_of(self, drafter: int, slots: np.ndarray) -> np.ndarray:
        """Return the slots where a drafter was observed since the last decision, bool [rows]."""
        accepted, failed = self._tally[:, drafter, slots]
        heard: np.ndarray = accepted + failed > 0
        return heard

    def decide(self) -> np.ndarray:
        """Update the estimates by all observations. Returns the slots whose order changed."""
        accepted, failed = self._tally
        trials = accepted + failed
        unheard = trials == 0
        self._unheard += 1.0
        self._unheard *= unheard
        updated = decayed(_DECAY, self._estimate, trials, accepted)
        drifted = drift(_IDLE_DECAY, self._estimate, self._prior())
        self._estimate = np.where(unheard, drifted, updated)
        seen = np.add.reduce(trials, axis=1)
        self._fleet *= np.exp(-seen / _FLEET_MEMORY_TRIALS)
        self._fleet[0] += np.add.reduce(accepted, axis=1)
        self._fleet[1] += seen
        self._tally[:] = 0.0
        return self._rank(slice(None))

    def _prior(self) -> np.ndarray:
        """Return N and D of a sequence without history, float64 [2, drafters]."""
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
