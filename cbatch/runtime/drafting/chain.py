"""Several drafters in one engine: each row gets drafts from its first drafter that has any."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.plan import NewSequence, ShadowEvidence
from cbatch.runtime.drafting.contract import Drafter, DraftRows, ModelDrafter, Proposal, StepStates
from cbatch.runtime.drafting.lookup import Evidence, LookupDrafter
from cbatch.runtime.drafting.turns import Turns
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64

# Maximum tokens by which a row's draft model KV catches up in one step, after other drafters
# drafted for the row. A row that lags more catches up in several steps, then drafts.
CATCH_UP_TOKENS = 256
# Number of tokens, emitted without drafts, on which a row's lookup is scored. While its score is
# low, the pause before the next score doubles, to at most 48 tokens.
SCORE_TOKENS, MAX_SCORE_TOKENS = 12, 48
SCORE_STEPS = 4  # steps between scores, because the policy takes time to process a score


class ChainDrafter(Drafter):
    """Drafts with named drafters. A request names its chain (`SamplingParams.drafter`), or gets
    `default`.

    A row is offered to the drafters of its chain, in order, until one of them drafts. Each drafter
    is called once for all its rows. `Turns` learns which drafter each slot tries first.
    `model_price` is the cost of a draft model pass relative to the cost of a target pass. Names
    that are not loaded are skipped; callers that accept requests should `check` the names first.

    While a lookup drafts for a slot, the draft model's KV lags; `kv_lens` reports how much. The
    scheduler plans no catch-up for slots that try a lookup first, since most of it would be wasted.
    The chain catches up when the model drafts again.
    """

    def __init__(
        self,
        *,
        model: ModelDrafter | None = None,
        lookups: Mapping[str, LookupDrafter],
        default: tuple[str, ...],
        model_price: float = 0.0,
    ) -> None:
        self._model_price = model_price
        self.model, self.lookups, self.default = model, dict(lookups), default
        self._drafters: dict[str, Drafter] = {**self.lookups}
        if model is not None:
            self._drafters[MODEL] = model
            self.hidden_layers = model.hidden_layers
        self.check(default)

    def check(self, names: tuple[str, ...]) -> None:
        """Raise FieldError for a name that is not loaded."""
        for name in names:
            if name not in self._drafters:
                loaded = ", ".join(self._drafters) or "none"
                raise FieldError("drafter", f"{name!r} is not loaded", f"use: {loaded}")

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        for drafter in self._drafters.values():
            drafter.bind(table, num_blocks)
        self._forget()

    def reset(self) -> None:
        for drafter in self._drafters.values():
            drafter.reset()
        self._forget()

    def _forget(self) -> None:
        slots = self.table.max_num_seqs
        self._mixed = np.zeros(slots, dtype=np.bool_)  # the chain has drafters other than the model
        self._num_mixed = 0
        self._scored = np.zeros(slots, dtype=np.bool_)  # the chain has a lookup, and may draft
        self._num_scored = 0
        self._since = np.zeros(slots, dtype=np.int64)  # number of tokens at the last draft or score
        self._pause = np.zeros(slots, dtype=np.int64)  # tokens from `_since` to the next score
        self._steps = 0
        self._turns = Turns(
            self.table,
            self.lookups,
            with_model=self.model is not None,
            model_price=self._model_price,
        )

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        for drafter in self._drafters.values():
            drafter.zero_blocks(block_ids)

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        for drafter in self._drafters.values():
            drafter.report_progress(counter)

    def admit(self, admission: NewSequence) -> None:
        for drafter in self._drafters.values():
            drafter.admit(admission)
        chain = admission.params.drafter
        names = self.default if chain is None else chain
        names, slot = tuple(name for name in names if name in self._drafters), admission.slot
        self._mixed[slot] = names != (MODEL,)
        if admission.params.max_lookahead == 0:
            names = names[:1]  # nothing to learn without drafts
        looks_up = any(name in self.lookups for name in names)
        self._scored[slot] = looks_up and admission.params.max_lookahead != 0
        self._since[slot], self._pause[slot] = len(admission.tokens), SCORE_TOKENS
        self._turns.admit(admission, names)
        self._count()

    def release(self, slot: int) -> None:
        for drafter in self._drafters.values():
            drafter.release(slot)
        self._mixed[slot] = self._scored[slot] = False
        self._turns.release(slot)
        self._count()

    def _count(self) -> None:
        self._num_mixed, self._num_scored = map(np.count_nonzero, (self._mixed, self._scored))

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        for drafter in self._drafters.values():
            drafter.truncate(slots, kv_len_tokens)

    def observe(self, slots: NDArray[np.integer], since: I64) -> Evidence:
        """Score each slot's first drafter as `LookupDrafter.observe` does. A slot whose
        first drafter is the model has no trials."""
        trials, hits = np.zeros((2, len(slots)), dtype=np.int64)
        for name, lookup in self.lookups.items():
            at = np.flatnonzero(self._turns.has_turn(0, name, slots))
            if len(at):
                trials[at], hits[at] = lookup.observe(slots[at], since[at])
        return Evidence(trials, hits)

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        if self.model is None:
            return None
        return self.model.kv_len[slots] if self._num_mixed else self.model.kv_lens(slots)

    def read_states(self, states: StepStates) -> None:
        assert self.model is not None, "lookups do not read states"
        self.model.read_states(states)

    def is_mixed(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return whether the chains of `slots` have drafters other than the model, bool."""
        return self._mixed[slots]

    def recall(
        self,
        slots: NDArray[np.integer],
        num_tokens: I64,
        drafting: NDArray[np.integer],
        num_drafts: I64,
        owners: Mapping[str, NDArray[np.integer]],
    ) -> None:
        """Restore the state of a step before `score`, if a later step has already proposed drafts.

        `slots` had `num_tokens` known tokens. `num_drafts` drafts were requested for the slots
        `drafting`, and `owners` has the slots that each drafter drafted for."""
        self._turns.begin(slots, num_tokens, np.zeros_like(num_tokens))
        self._turns.set_requested(drafting, num_drafts)
        for name, drafted in owners.items():
            self._turns.credit(name, drafted)

    def score(self, slots: NDArray[np.integer], num_drafted: I64 | None) -> ShadowEvidence | None:
        """Score a few rows every `SCORE_STEPS` steps, enough that no row waits long for a score."""
        if self._num_mixed:
            self._turns.learn(slots, num_drafted)
        if not self._num_scored:
            return None
        if num_drafted is not None and num_drafted.any():
            drafted = slots[num_drafted > 0]
            self._since[drafted] = self.table.num_tokens[drafted]
        self._steps += 1
        if self._steps % SCORE_STEPS:
            return None
        known = self.table.num_tokens[slots]
        due = (known - self._since[slots] >= self._pause[slots]) & self._scored[slots]
        due &= self._turns.has_lookup_first(slots)
        rows = due.nonzero()[0][: 1 + SCORE_STEPS * len(slots) // SCORE_TOKENS]
        if not len(rows):
            return None
        slots, known = slots[rows], known[rows]
        evidence = self.observe(slots, known - SCORE_TOKENS)
        self._since[slots] = known
        longer = np.minimum(2 * self._pause[slots], MAX_SCORE_TOKENS)
        self._pause[slots] = np.where(3 * evidence.hits < SCORE_TOKENS, longer, SCORE_TOKENS)
        return ShadowEvidence(*(part.astype(np.int32) for part in (rows, *evidence)))

    def propose(self, rows: DraftRows) -> Proposal:
        if self.model is not None and not self._num_mixed:
            return self.model.propose(rows)
        order = self._turns.order
        if len(order) == 1:
            turn, name = order[0]
            if name in self.lookups and self._turns.has_turn(turn, name, rows.slots).all():
                return self.lookups[name].propose(rows)
        self._turns.begin(*rows[:3])
        merger = ProposalMerger(self.table, rows)
        waiting = rows.num_drafts > 0
        self._ingest_slices(rows)
        for turn, name in order:
            at = np.flatnonzero(self._turns.has_turn(turn, name, rows.slots) & waiting)
            if not len(at):
                continue
            part, drafter = DraftRows(*(field[at] for field in rows)), self._drafters[name]
            if drafter is self.model:
                at, part = self._catch_up(at, part)
                if not len(at):
                    continue
            proposal = drafter.propose(part)
            merger.add(at, proposal)
            self._turns.credit(name, part.slots[proposal.num_drafted > 0])
            waiting[at] &= (proposal.num_drafted == 0) & ~proposal.non_finite
        return merger.merged()

    def _ingest_slices(self, rows: DraftRows) -> None:
        """Compute catch-up slices of the model for rows that do not draft yet."""
        if self.model is None:
            return
        at = np.flatnonzero((rows.num_drafts == 0) & self._turns.in_chain(MODEL, rows.slots))
        if len(at):
            self.model.propose(DraftRows(*(field[at] for field in rows)))

    def _catch_up(self, at: I64, rows: DraftRows) -> tuple[I64, DraftRows]:
        """Return the model's rows with their full catch-up; rows that lag too far get a slice and
        no drafts."""
        assert self.model is not None
        fits = rows.num_tokens <= self.model.context_tokens
        if not fits.all():
            at, rows = at[fits], DraftRows(*(field[fits] for field in rows))
        lag = rows.num_tokens - 1 - self.model.kv_len[rows.slots]
        allowed = np.maximum(rows.catch_up, CATCH_UP_TOKENS)
        return at, rows._replace(
            num_drafts=rows.num_drafts * (lag <= allowed), catch_up=np.minimum(lag, allowed)
        )


class ProposalMerger:
    """Merges proposals for some rows of a step into one proposal for all rows."""

    def __init__(self, table: InputBatch, rows: DraftRows) -> None:
        self._vocab_size = table.vocab_size
        self._rejects = table.rejects[rows.slots]
        num_rows = len(rows.slots)
        self._tokens = np.zeros((num_rows, int(rows.num_drafts.max(initial=0))), dtype=np.int64)
        self._num_drafted = np.zeros(num_rows, dtype=np.int64)
        self._non_finite = np.zeros(num_rows, dtype=np.bool_)
        self._probs: list[tuple[I64, Tensor]] = []  # (rows, q of their drafts)

    def add(self, at: I64, proposal: Proposal) -> None:
        """Add a proposal for the rows `at`, ascending, none of which has drafts yet."""
        self._tokens[at, : proposal.tokens.shape[1]] = proposal.tokens
        self._num_drafted[at] = proposal.num_drafted
        self._non_finite[at] |= proposal.non_finite
        if proposal.probs is not None:
            self._probs.append((at[proposal.num_drafted > 0], proposal.probs))

    def merged(self) -> Proposal:
        return Proposal(self._tokens, self._num_drafted, self.merge_probs(), self._non_finite)

    def merge_probs(self) -> Tensor | None:
        """Return q of every draft in rows verified by rejection, or None if no draft has a q.

        If other drafts were drawn from a q, a draft chosen with certainty gets a one-hot q. Bit for
        bit, it gives the same result as no q: u * 1 = u, and max(p - q, 0) removes the draft."""
        if not self._probs:
            return None
        counts = self._num_drafted * self._rejects
        row_of = np.arange(len(counts)).repeat(counts)  # the row of each draft
        if len(self._probs) == 1 and len(self._probs[0][1]) == len(row_of):
            return self._probs[0][1]
        merged = torch.zeros((len(row_of), self._vocab_size))
        certain = np.ones(len(row_of), dtype=np.bool_)
        for at, probs in self._probs:
            drawn = np.isin(row_of, at)
            certain &= ~drawn
            merged[torch.from_numpy(np.flatnonzero(drawn))] = probs
        depth = np.arange(self._tokens.shape[1])
        tokens = self._tokens[self._rejects][depth < counts[self._rejects, None]]
        flat = np.flatnonzero(certain)
        merged[torch.from_numpy(flat), torch.from_numpy(tokens[flat])] = 1.0
        return merged
