"""Configuration of lookahead: the policy and its parameters."""

from __future__ import annotations

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import convert_fields

MAX_DRAFTS = 32  # most drafts of a sequence in a step


class LookaheadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy that chooses each slot's k: `off`, `fixed`, `ema`, `adaptive`, or
    `module:Class`, a `LookaheadPolicy` of your own. `k` is the number of drafts of `fixed`, and
    the maximum of the other policies."""

    policy: str = "off"
    k: int = 4
    # Parameters of `ema` and, except `min_survival`, also of `adaptive` (see acceptance.py).
    decay: float = 0.96  # share of an estimate's sums that remains after each trial
    prior_acceptance: float = 0.7  # acceptance of a request without history
    prior_trials: float = 6.0  # weight of the prior, in trials
    min_survival: float = 0.2  # smallest probability of survival at which a token is drafted
    idle_drift: float = 0.95  # share of an estimate that remains after a step without drafts
    switch_gain: float = 0.05  # gain over drafting nothing at which `adaptive` starts to draft

    def __post_init__(self) -> None:
        convert_fields(self)
        for field, ok, remedy in (
            ("lookahead.k", 1 <= self.k <= MAX_DRAFTS, "use 1 to 32; policy `off` drafts nothing"),
            ("lookahead.decay", 0 < self.decay < 1, "use a number in (0, 1)"),
            ("lookahead.prior_acceptance", 0 < self.prior_acceptance < 1, "use a number in (0, 1)"),
            ("lookahead.prior_trials", self.prior_trials > 0, "use a positive number"),
            ("lookahead.min_survival", 0 < self.min_survival < 1, "use a number in (0, 1)"),
            ("lookahead.idle_drift", 0 < self.idle_drift < 1, "use a number in (0, 1)"),
            ("lookahead.switch_gain", 0 <= self.switch_gain < 1, "use a number in [0, 1)"),
        ):
            if not ok:
                raise FieldError(field, "out of range", remedy)
