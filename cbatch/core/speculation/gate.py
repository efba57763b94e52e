"""When to decide at all: speculation is on or off for everyone, and neither is for ever.

While it is on, every few steps decide, and k = 0 for everyone is one possible outcome; several such
in a row turn it off. While it is off a step costs a counter. Now and then the decision is made
again, and carried out only if it promises a clear gain (the hysteresis); and now and then one row
drafts a little, as a probe, at intervals that double as long as that brings no better news.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np


class Due(enum.Enum):
    NOTHING = enum.auto()
    PROBE = enum.auto()
    DECISION = enum.auto()


class SpeculationGate(msgspec.Struct):
    """Counts are in steps. Call `due` once a step, `judge` after each decision."""

    switch_gain: float  # predicted gain that turns it on
    on: bool = True
    num_switches: int = 0
    steps: int = 0  # since it was switched
    num_quiet: int = 0  # decisions in a row, while on, that drafted nothing
    probe_in: int = 0
    probe_gap: int = 0
    rows_judged: int = 0
    judged_at: int = 0  # of `steps`
    newcomers: int = 0  # requests that came since

    MOST_QUIET = 2
    CHECK_STEPS = 128
    # Of few rows one or two alone may turn it off, by the way they draft just now.
    FEW_ROWS, MOST_QUIET_OF_FEW, CHECK_STEPS_OF_FEW = 8, 6, 32
    EARLY_CHECK_STEPS = 8
    PROBE_STEPS = 48
    MOST_PROBE_STEPS = 768

    def due(self, num_rows: int, pace: int = 1) -> Due:
        """`pace` is how many times as long as usual a decision stands."""
        self.steps += 1
        if self.on:
            return Due.DECISION
        self.probe_in -= 1
        since = self.steps - self.judged_at
        # New requests may draft well where those before them did not.
        if self.newcomers and 4 * self.newcomers >= num_rows:
            return Due.DECISION
        other_load = not 4 * self.rows_judged <= 5 * num_rows <= 6 * self.rows_judged
        few = num_rows <= self.FEW_ROWS
        check_steps = self.CHECK_STEPS_OF_FEW * pace if few else self.CHECK_STEPS
        if since >= check_steps or (other_load and since >= self.EARLY_CHECK_STEPS):
            return Due.DECISION
        if self.probe_in <= 0:
            self.probe_in = self.probe_gap
            return Due.PROBE
        return Due.NOTHING

    def judge(self, gain: float, num_rows: int) -> bool:
        """Whether a decision that promises `gain` (0: drafts nothing) is carried out."""
        self.rows_judged, self.judged_at, self.newcomers = num_rows, self.steps, 0
        if not self.on:
            if gain > self.switch_gain:
                self._switch()
            return self.on
        self.num_quiet = 0 if gain > 0 else self.num_quiet + 1
        few = num_rows <= self.FEW_ROWS
        if self.num_quiet >= (self.MOST_QUIET_OF_FEW if few else self.MOST_QUIET):
            self._switch()
        return gain > 0

    def observe(self, better: bool) -> None:
        """What a probe found: better than was thought, or not."""
        gap = self.PROBE_STEPS if better else min(2 * self.probe_gap, self.MOST_PROBE_STEPS)
        self.probe_gap = self.probe_in = gap

    def _switch(self) -> None:
        self.on = not self.on
        self.num_switches += 1
        self.steps = self.num_quiet = self.judged_at = 0
        self.probe_gap = self.probe_in = self.PROBE_STEPS


FIRST_ROW_PROBE_STEPS, MOST_ROW_PROBE_STEPS = 16, 256


def rows_to_probe(idle_steps: np.ndarray, news_steps: int, first: int, most: int) -> np.ndarray:
    """Rows, intp, whose k has been 0 for 16, 32, 64, ... steps, and every 256 from there on, since
    `news_steps` ago; at most `most` of them, served in turn from row `first`."""
    idle = idle_steps.astype(np.int64)
    before = np.maximum(idle - news_steps, 0)
    doubled = (np.frexp(idle)[1] > np.frexp(before)[1]) & (idle >= FIRST_ROW_PROBE_STEPS)
    again = idle // MOST_ROW_PROBE_STEPS > before // MOST_ROW_PROBE_STEPS
    due: np.ndarray = (doubled | again).nonzero()[0]
    if len(due) > most:
        due = np.roll(due, -int(np.searchsorted(due, first)))[:most]
    return due
