"""The order of each slot's drafters, learned by one bandit per sequence, with an arm per drafter.

A chain names drafters. If a drafter has no guess for a row, the next drafter is tried. The best
first drafter depends on the text. So each slot and drafter has the decayed sums of acceptance.py:
N accepted drafts, D trials. Fewer drafts than requested count as one failed trial. With p = N / D,
a drafter of k requested tokens yields

    1 + p + p^2 + ... + p^k = 1 + p (1 - p^k) / (1 - p)

tokens in a step that takes 1 + k c times as long as a step without drafts; c is the cost of a draft
pass, in target passes. Drafters are ordered by the ratio of tokens to time. A drafter without a
guess costs nothing.

- Exploration is by optimism, not random: p is the mean of the Beta distribution of the sums plus a
  standard deviation. While a drafter has no trials, its sums drift to the mean over all slots, and
  more is added to p. So a bad drafter is tried more and more rarely, but never given up.
- Lookups need no trial: `cbatch.runtime.drafting.turns` replays them on known tokens.
- A new sequence begins with the mean over all slots, with the weight of a few trials.

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
_OPTIMISM_DECISIONS = 64.0  # decisions without trials that add one standard deviation to p
_PRIOR_TRIALS = 4.0  # weight of the mean over all slots in a new slot, in trials
_OVERALL_MEAN, _OVERALL_TRIALS = 0.5, 16.0  # initial mean over all slots, and its trials
_OVERALL_MEMORY_TRIALS = 500.0  # trials after which an old trial counts 1/e in that mean
_FIRST_DEPTH = 4  # k assumed for a slot before its first request for drafts
_MIN_CHANCE, _MAX_CHANCE = 0.01, 0.98  # limits of p
_PLACE_PENALTY = 1e-9  # per place in the chain, so that the earlier of equal drafters is first


class DrafterChoice:
    """The order of all slots' drafters. `prices` has the cost of each drafter's pass, relative to a
    step without drafts. A drafter's number is its index in `prices`."""

    def __init__(self, prices: Sequence[float], max_num_seqs: int) -> None:
        shape = len(prices), max_num_seqs
        self._prices = np.array(prices)[:, None]
        self._overall = np.full((2, len(prices)), _OVERALL_TRIALS)  # N and D
        self._overall[0] *= _OVERALL_MEAN
        self._estimate = np.ones((2, *shape))  # N and D
        self._tally = np.zeros((2, *shape))  # accepted and failed since the last decision
        self._idle_decisions = np.zeros(shape)  # decisions in a row without trials
        self._penalty = np.full(shape, np.inf)  # infinite for drafters outside the slot's chain
        self._depth = np.full(max_num_seqs, float(_FIRST_DEPTH))
        self.in_chain = np.zeros(shape, dtype=np.bool_)  # drafter is in the slot's chain
        self.has_several = np.zeros(max_num_seqs, dtype=np.bool_)  # the chain has several drafters
        self.ranks = np.zeros(shape, dtype=np.int64)  # 0: first

    def enter(self, slot: int, chain: Sequence[int], sums: np.ndarray | None = None) -> None:
        """Add a sequence. `sums`: the result of `leave`, if the sequence was preempted."""
        self.leave(slot)
        self.has_several[slot] = len(chain) > 1
        self.in_chain[list(chain), slot] = True
        self._penalty[list(chain), slot] = _PLACE_PENALTY * np.arange(len(chain))
        self._estimate[:, :, slot] = self._prior() if sums is None else sums
        self._rank(slice(slot, slot + 1))

    def leave(self, slot: int) -> np.ndarray:
        """Free a slot. Returns its sums N and D, float64 [2, drafters]."""
        self.has_several[slot] = self.in_chain[:, slot] = False
        self._tally[:, :, slot] = self._idle_decisions[:, slot] = 0.0
        self._penalty[:, slot] = np.inf
        self._depth[slot] = _FIRST_DEPTH
        return self._estimate[:, :, slot].copy()

    def set_requested(self, slots: np.ndarray, depths: np.ndarray) -> None:
        """Set the number of drafts requested of these slots, int [rows]."""
        self._depth[slots] = depths

    def observe(
        self,
        drafters: np.ndarray | int,
        slots: np.ndarray,
        accepted: np.ndarray,
        failed: np.ndarray,
    ) -> None:
        """Record drafts, each slot at most once. `accepted`, int [rows]: drafts that were accepted,
        or would have been. `failed`, bool [rows]: a draft was rejected, or there were fewer drafts
        than requested."""
        at = drafters * self.has_several.shape[0] + slots
        sums = self._tally.reshape(2, -1)
        sums[0, at] += accepted
        sums[1, at] += failed

    def was_observed(self, drafter: int, slots: np.ndarray) -> np.ndarray:
        """Return the slots where a drafter was observed since the last decision, bool [rows]."""
        accepted, failed = self._tally[:, drafter, slots]
        observed: np.ndarray = accepted + failed > 0
        return observed

    def decide(self) -> np.ndarray:
        """Update the estimates by all observations. Returns the slots whose order changed."""
        accepted, failed = self._tally
        trials = accepted + failed
        idle = trials == 0
        self._idle_decisions += 1.0
        self._idle_decisions *= idle
        updated = decayed(_DECAY, self._estimate, trials, accepted)
        drifted = drift(_IDLE_DECAY, self._estimate, self._prior())
        self._estimate = np.where(idle, drifted, updated)
        num_trials = np.add.reduce(trials, axis=1)
        self._overall *= np.exp(-num_trials / _OVERALL_MEMORY_TRIALS)
        self._overall[0] += np.add.reduce(accepted, axis=1)
        self._overall[1] += num_trials
        self._tally[:] = 0.0
        return self._rank(slice(None))

    def _prior(self) -> np.ndarray:
        """Return N and D of a sequence without history, float64 [2, drafters]."""
        prior: np.ndarray = _PRIOR_TRIALS * self._overall / self._overall[1]
        return prior

    def _rank(self, slots: Rows) -> np.ndarray:
        accepted, trials = self._estimate[:, :, slots]
        depth = self._depth[slots]
        mean = np.minimum(accepted / trials, 1.0)
        deviation = np.sqrt(mean * (1 - mean) / (trials + 1))
        chance = mean + deviation * (1 + self._idle_decisions[:, slots] / _OPTIMISM_DECISIONS)
        chance = np.minimum(np.maximum(chance, _MIN_CHANCE), _MAX_CHANCE)
        value = 1 + chance * (1 - np.exp(depth * np.log(chance))) / (1 - chance)
        value /= 1 + self._prices * depth
        value -= self._penalty[:, slots]
        ranks = np.zeros(value.shape, dtype=np.int64)
        for other in value:
            ranks += other > value
        moved: np.ndarray = np.logical_or.reduce(ranks != self.ranks[:, slots])
        self.ranks[:, slots] = ranks
        return moved.nonzero()[0]
