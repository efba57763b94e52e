"""The fake executor's drafters: the drafter of a row, and the contents of the draft model's KV."""

from __future__ import annotations

import numpy as np

from cbatch.core.request.request import MODEL
from tests.checking.kv import ShadowKV
from tests.checking.language import uniform
from tests.checking.models import Acceptance
from tests.checking.slots import CheckedSlot, RowState, require

SETTLE_TOKENS = 6  # tokens of a row that a lagging model ingests in a step drafted by others
_FIND = 2  # purpose of the noise


class DraftingModel:
    """Chains as in `cbatch.runtime.drafting.chain`: a row goes to the first of its chain that has
    drafts.

    A lookup has some for a share `coverage` of the positions, and writes nothing to the draft's KV.
    The model catches up first; if it lacks more than was planned and more than `SETTLE_TOKENS`, it
    takes a slice of that and drafts nothing.
    """

    def __init__(
        self,
        kv: ShadowKV,
        default_chain: tuple[str, ...],
        context_tokens: int | None,
        coverage: float,
    ) -> None:
        self._kv = kv
        self._default_chain = default_chain
        self._context_tokens = context_tokens
        self._coverage = coverage

    def admit(self, slot: CheckedSlot) -> None:
        names = slot.admission.params.drafter
        slot.chain = self._default_chain if names is None else names

    def check_catch_up(self, slot: CheckedSlot, k: int, catch_up: int, *, overlapped: bool) -> None:
        """Check a planned catch-up. It may be too short only in a plan made before the true
        positions were known, or after a draft that was not finite."""
        if slot.failed or (k == 0 and overlapped):
            return
        behind = slot.num_tokens - 1 - slot.draft_kv_len_tokens
        lag = behind if slot.chain[:1] == (MODEL,) and self._reaches(slot) else 0
        wrong = f"{slot.label}: catch-up {catch_up}, the draft lags {lag}"
        if not overlapped:
            require(catch_up == lag if k else catch_up <= lag, wrong)
            require(k <= self.max_drafts(slot), f"{slot.label}: {k} drafts pass the end")
        elif slot.chain == (MODEL,) and not slot.draft_was_reset:
            require(catch_up >= lag, wrong)

    def max_drafts(self, slot: CheckedSlot) -> int:
        """Return the most drafts that fit: not past the end of the request, nor, with the model
        alone, past the draft's context."""
        limit = slot.admission.max_total_tokens - slot.num_tokens - 1
        if slot.chain == (MODEL,):
            limit = min(limit, self._limit_of_model(slot, limit))
        return max(limit, 0)

    def choose(self, slot: CheckedSlot, k: int, catch_up: int) -> tuple[str | None, int]:
        """Return the drafter, and how many of the planned `k` it drafts."""
        limit = 0 if slot.failed else min(k, self.max_drafts(slot))
        for name in slot.chain if limit else ():
            if name != MODEL:
                if self._finds(slot, slot.num_tokens):
                    return name, limit
            elif self._reaches(slot) and self._settle(slot, catch_up):
                return name, self._limit_of_model(slot, limit)
        return None, 0

    def catch_up(self, row: RowState) -> int:
        """Ingest a planned slice of a longer catch-up: the next `catch_up` known tokens, and no
        drafts. Return how many were ingested."""
        if not row.catch_up or row.planned_drafts:
            return 0
        return self._ingest(row.slot, row.catch_up)

    def write(self, row: RowState, known_tokens: int, hashes: np.ndarray) -> int:
        """Write KV of the known tokens and of all drafts but the last, if the model drafted.
        `hashes` are those of the drafts. Return how many tokens it had to catch up with."""
        if row.drafter != MODEL:
            return 0
        slot = row.slot
        start = slot.draft_kv_len_tokens
        self._kv.write(slot.blocks, start, slot.hashes[start:known_tokens])
        self._kv.write(slot.blocks, known_tokens, hashes[:-1])
        slot.draft_kv_len_tokens = min(known_tokens - 1 + len(hashes), slot.num_tokens - 1)
        return max(known_tokens - 1 - start, 0)

    def kv_lens(self, rows: list[RowState]) -> np.ndarray | None:
        if all(row.slot.chain in ((), (MODEL,)) for row in rows):
            return None
        return np.asarray([row.slot.draft_kv_len_tokens for row in rows], np.int32)

    # -- inside

    def _limit_of_model(self, slot: CheckedSlot, limit: int) -> int:
        if self._context_tokens is None:
            return limit
        return min(limit, self._context_tokens - slot.num_tokens + 1)

    def _reaches(self, slot: CheckedSlot) -> bool:
        return self._limit_of_model(slot, 1) > 0

    def _finds(self, slot: CheckedSlot, position: int) -> bool:
        a = slot.admission
        return uniform(a.seed, a.choice, position, _FIND) < self._coverage

    def _settle(self, slot: CheckedSlot, catch_up: int) -> bool:
        """Return True if the model can draft now. In a chain with others it otherwise ingests some
        of what it lacks."""
        lag = slot.num_tokens - 1 - slot.draft_kv_len_tokens
        alone = slot.chain == (MODEL,)
        can = lag <= (catch_up if alone else max(catch_up, SETTLE_TOKENS))
        if not can and not alone:
            self._ingest(slot, SETTLE_TOKENS)
        return can

    def _ingest(self, slot: CheckedSlot, count: int) -> int:
        start = slot.draft_kv_len_tokens
        stop = min(start + count, slot.num_tokens - 1)
        self._kv.write(slot.blocks, start, slot.hashes[start:stop])
        slot.draft_kv_len_tokens = stop
        return stop - start


def expected_accepted(rows: list[RowState], acceptance: Acceptance) -> np.ndarray | None:
    """Return `StepResult.expected_accepted`: rows that a real executor verifies by rejection know
    the chance of every position that they tried."""
    evidence = np.asarray([row.num_accepted for row in rows], np.float32)
    some = False
    for i, row in enumerate(rows):
        a = row.slot.admission
        if not row.num_drafts or a.params.greedy or a.params.coupled:
            continue
        chance = acceptance.chance(a.request_id)
        if chance is not None:
            evidence[i] = chance * min(row.num_accepted + 1, row.num_drafts)
            some = True
    return evidence if some else None


def forget(row: RowState) -> None:
    """Drop the draft model's KV of a row, since its numbers were not finite."""
    row.slot.draft_kv_len_tokens = 0
    row.slot.draft_was_reset = True
