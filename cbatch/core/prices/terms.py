"""Terms of a step's duration: the factor of each price of a `CostProfile`."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.curve import Curve
from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError

Terms = dict[str, Callable[[StepWork], float]]
# Share of the context of decoding rows that is not in caches, by steps since the last chunk.
_COLD = (1.0, 1.0, 0.5, 0.25, 0.125)
_MIN_IDLE_S = 1e-4  # a shorter idle time costs nothing
MAX_IDLE_S = 0.1  # a longer idle time costs no more


def cold(work: StepWork) -> float:
    """Return the share of the decoding rows' context that is not in caches."""
    since = work.steps_since_prefill
    return _COLD[since] if since < len(_COLD) else 0.0


TARGET: Terms = {
    "logits_token_s": attrgetter("logit_tokens"),
    "context_token_s": attrgetter("context_tokens"),
    "verify_context_token_s": lambda work: work.decode_context_tokens * (work.draft_tokens > 0),
    "row_s": attrgetter("rows"),
    "chunk_s": lambda work: work.rows - work.decode_rows,  # rows that prefill
    "cold_context_token_s": lambda work: work.decode_context_tokens * cold(work),
    "padded_context_token_s": lambda work: work.decode_rows * work.decode_longest_tokens,
    "prefill_context_token_s": attrgetter("prefill_context_tokens"),
    "prefill_pair_s": attrgetter("prefill_pairs"),
    "verify_step_s": lambda work: work.draft_tokens > 0,
    "verify_row_s": lambda work: work.decode_rows * (work.draft_tokens > 0),
    "verify_token_s": attrgetter("draft_tokens"),  # in addition to a target token's price
    "admission_s": attrgetter("admitted"),
}
DRAFT: Terms = {
    "draft_setup_s": lambda work: work.draft_depth > 0,
    "draft_pass_s": attrgetter("draft_depth"),
    "draft_token_s": attrgetter("draft_tokens"),
    "draft_ingest_s": attrgetter("ingested_tokens"),
    "draft_row_s": lambda work: work.decode_rows * (work.draft_depth > 0),
    "draft_context_token_s": attrgetter("draft_context_tokens"),
    "draft_context_pass_s": lambda work: work.draft_context_tokens * work.draft_depth,
    "draft_ingest_setup_s": lambda work: work.ingested_tokens > 0,
}
HOST: Terms = {
    "host_step_s": lambda work: 1,
    "host_cold_s": cold,
    "host_idle_s": lambda work: min(work.idle_s, MAX_IDLE_S),
    "host_row_s": attrgetter("rows"),
    "host_admission_s": attrgetter("admitted"),
    "host_admitting_s": lambda work: work.admitted > 0,  # once per step that admits
    "host_draft_setup_s": lambda work: work.draft_depth > 0,
    "host_draft_row_s": lambda work: work.decode_rows * (work.draft_depth > 0),
    "host_draft_token_s": attrgetter("draft_tokens"),
}
# Added to `HOST` in steps whose draft lengths the adaptive policy chose.
ADAPTIVE: Terms = {
    "host_adaptive_step_s": lambda work: 1,
    "host_adaptive_row_s": attrgetter("rows"),
    "host_adaptive_admission_s": attrgetter("admitted"),
}


class ProfiledCost:
    """A cost model with the prices of a profile. `adaptive`: the adaptive policy chooses the
    draft lengths. Raises `FieldError` for a price without a term."""

    def __init__(self, profile: CostProfile, *, adaptive: bool = False) -> None:
        unknown = profile.further.keys() - (TARGET | DRAFT | HOST | ADAPTIVE).keys()
        if unknown:
            raise FieldError(
                "cost_profile.further", f"{min(unknown)!r} is not a term", "leave it out"
            )
        self._tokens = profile.target_curve()
        self._context = Curve(profile.contexts, profile.context_s)
        self._idle = profile.idles_s, profile.after_idle_s
        self._target, self._draft, self._host = (
            [(of, price) for name, of in terms.items() if (price := profile.price(name))]
            for terms in (TARGET, DRAFT, HOST | ADAPTIVE if adaptive else HOST)
        )

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        """Return the predicted `draft_s`, `target_s` and `host_s` of a step, in seconds."""
        target_s = self._tokens(work.target_tokens) + self._context(work.decode_context_tokens)
        if work.idle_s > _MIN_IDLE_S:
            target_s += float(np.interp(work.idle_s, *self._idle))
        target_s += sum([price * of(work) for of, price in self._target])
        host_s = sum([price * of(work) for of, price in self._host])
        if work.draft_depth or work.ingested_tokens:
            return sum([price * of(work) for of, price in self._draft]), target_s, host_s
        return 0.0, target_s, host_s
