"""Recorded texts and their drafters' fates, for the fake executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.plan import NewSequence, StepPlan
from cbatch.rerun.drafters import Fates
from cbatch.steplog.recorded_run import RecordedText
from sim.executor.acceptance import AcceptanceModel
from sim.executor.fake import TokenSource
from sim.workload.traces.request import TraceRequest

# The most tokens that a lagging draft model of a chain computes before it drafts.
CATCH_UP_TOKENS = 256
Texts = Mapping[str, RecordedText]


def as_traced(text: RecordedText) -> TraceRequest:
    lengths = {"prompt_tokens": len(text.request.prompt), "output_tokens": len(text.output)}
    return TraceRequest(arrival_s=text.arrival_s, **lengths)


class RecordedTokens(TokenSource):
    """The recorded text of each request, by its id."""

    def __init__(self, texts: Texts, max_num_seqs: int) -> None:
        self._texts = texts
        self._answers = np.zeros((max_num_seqs, 0), np.int32)  # texts by slot

    def admit(self, admission: NewSequence) -> None:
        text = self._texts[admission.request_id]
        tokens = (*text.request.prompt, *text.output)
        missing = len(tokens) - self._answers.shape[1]
        if missing > 0:
            self._answers = np.pad(self._answers, ((0, 0), (0, missing)))
        self._answers[admission.slot, : len(tokens)] = tokens

    def tokens(
        self, slots: list[int], known: list[int], counts: np.ndarray | None, splits: np.ndarray
    ) -> np.ndarray:
        counts = np.diff(splits) if counts is None else counts
        first = (np.array(known) - splits[:-1]).repeat(counts)
        tokens: np.ndarray = self._answers[np.repeat(slots, counts), first + np.arange(splits[-1])]
        return tokens


class RecordedDrafts(AcceptanceModel):
    """A chain of drafters whose drafts have the fates of a rerun: the first that has drafts for a
    row makes them. The KV of a draft model lags after drafts of others, and catches up; that of a
    head never lags."""

    def __init__(
        self,
        texts: Texts,
        chain: Sequence[str],
        fates: Mapping[str, Mapping[str, Fates]],
        max_num_seqs: int,
        context_tokens: int = 0,
        is_head: bool = False,
    ) -> None:
        """`fates` are by drafter, then by text. `context_tokens` is the draft model's context."""
        self._texts, self._chain, self._fates = texts, chain, fates
        self._context_tokens, self._is_head = context_tokens, is_head
        self._names = [""] * max_num_seqs  # of the texts, by slot
        self._owners = [MODEL] * max_num_seqs  # drafters of the step, by slot
        self._kv_lens = [0] * max_num_seqs  # of the draft model, by slot

    def admit(self, admission: NewSequence) -> None:
        self._names[admission.slot] = admission.request_id
        self._kv_lens[admission.slot] = admission.draft_kv_len_tokens

    def num_drafted(self, plan: StepPlan, known: list[int]) -> np.ndarray:
        planned, catch_up = plan.num_drafts.tolist(), plan.catch_up.tolist()
        if not (any(planned) or any(catch_up)):
            return plan.num_drafts
        rows = zip(plan.slots.tolist(), known, planned, catch_up, strict=True)
        return np.array([self._draft(*row) for row in rows], np.int32)

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        rows = zip(slots.tolist(), positions.tolist(), num_drafted.tolist(), strict=True)
        accepted = [
            min(drafted, self._fate(self._owners[slot], slot, known)[1]) if drafted else 0
            for slot, known, drafted in rows
        ]
        return np.array(accepted, np.int32)

    def draft_kv_lens(self, plan: StepPlan, kv_lens: Callable[[], list[int]]) -> np.ndarray | None:
        if MODEL not in self._chain or (not self._is_head and len(self._chain) == 1):
            return None
        lens = kv_lens()
        if not self._is_head:
            slots = plan.slots.tolist()
            lens = [min(self._kv_lens[s], n) for s, n in zip(slots, lens, strict=True)]
        return np.array(lens, np.int32)

    def _fate(self, drafter: str, slot: int, known: int) -> tuple[int, int]:
        name = self._names[slot]
        position = known - len(self._texts[name].request.prompt)
        drafted, accepted = self._fates[drafter][name]
        return int(drafted[position]), int(accepted[position])

    def _draft(self, slot: int, known: int, planned: int, catch_up: int) -> int:
        """Return how many drafts a row gets, and note who makes them."""
        if not planned:
            self._kv_lens[slot] = min(self._kv_lens[slot] + catch_up, known - 1)
            return 0
        for drafter in self._chain:
            limit = planned
            if drafter == MODEL:
                limit = min(planned, self._context_tokens + 1 - known)
                if limit < 1 or not (self._is_head or self._catch_up(slot, known, catch_up)):
                    continue
            count = min(limit, self._fate(drafter, slot, known)[0])
            if count > 0:
                self._owners[slot] = drafter
                if drafter == MODEL:
                    self._kv_lens[slot] = known - 1 + count
                return count
        return 0

    def _catch_up(self, slot: int, known: int, catch_up: int) -> bool:
        """Return whether the draft model can draft now. In a chain with others it computes at least
        `CATCH_UP_TOKENS` of what it lacks."""
        kv_len = min(self._kv_lens[slot], known - 1)  # rejected drafts are dropped
        allowed = catch_up if len(self._chain) == 1 else max(catch_up, CATCH_UP_TOKENS)
        self._kv_lens[slot] = min(kv_len + allowed, known - 1)
        return known - 1 - kv_len <= allowed
