"""Several drafters in one engine: each row gets drafts from its first drafter that has any."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.plan import Deltas, NewSequence
from cbatch.runtime.drafting.contract import Drafter, DraftRows, ModelDrafter, Proposal, StepStates
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64

# Maximum tokens by which a row's draft model KV catches up in one step, after other drafters
# drafted for the row. A row that lags more catches up in several steps, then drafts.
CATCH_UP_TOKENS = 256
Chain = tuple[str, ...]


class ChainDrafter(Drafter):
    """Drafts with named drafters. A request names its chain (`SamplingParams.drafter`), or gets
    `default`.

    A row is offered to the drafters of its chain, in order, until one of them drafts. Names that
    are not loaded are skipped; callers that accept requests should `check` the names first.

    While a lookup drafts for a slot, the draft model's KV lags; `kv_lens` reports how much. The
    scheduler plans no catch-up for slots that try a lookup first, since most of it would be wasted.
    The chain catches up when the model drafts again.
    """

    def __init__(
        self,
        *,
        model: ModelDrafter | None = None,
        lookups: Mapping[str, LookupDrafter],
        default: Chain,
    ) -> None:
        self.model, self.lookups, self.default = model, dict(lookups), default
        self._drafters: dict[str, Drafter] = {**self.lookups}
        if model is not None:
            self._drafters[MODEL] = model
            self.hidden_layers = model.hidden_layers
        self.check(default)

    def check(self, names: Chain) -> None:
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
        self._chains: dict[int, Chain] = {}  # by slot
        # For each drafter its turn in each slot, or -1, see `_turns_of`.
        shape = len(self._drafters), self.table.max_num_seqs
        self._turns = dict(zip(self._drafters, np.full(shape, -1), strict=True))
        self._live: set[Chain] = set()

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        for drafter in self._drafters.values():
            drafter.zero_blocks(block_ids)

    def append_blocks(self, deltas: Deltas) -> None:
        for drafter in self._drafters.values():
            drafter.append_blocks(deltas)

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        for drafter in self._drafters.values():
            drafter.report_progress(counter)

    def admit(self, admission: NewSequence) -> None:
        for drafter in self._drafters.values():
            drafter.admit(admission)
        self._set_chain(admission.slot, self.chain_of(admission.params))

    def chain_of(self, params: SamplingParams) -> Chain:
        """Return the loaded drafters of a request's chain."""
        names = self.default if params.drafter is None else params.drafter
        return tuple(name for name in names if name in self._drafters)

    def release(self, slot: int) -> None:
        for drafter in self._drafters.values():
            drafter.release(slot)
        self._set_chain(slot, None)

    def _set_chain(self, slot: int, chain: Chain | None) -> None:
        for turns in self._turns.values():
            turns[slot] = -1
        self._chains.pop(slot, None)
        if chain is not None:
            self._chains[slot] = chain
            for turn, name in self._turns_of(chain):
                self._turns[name][slot] = turn
        self._live = set(self._chains.values())

    def _turns_of(self, chain: Chain) -> list[tuple[int, str]]:
        """Return the turns of a chain's drafters. A step calls the drafters turn by turn. The draft
        model has the middle turn in every chain, so it is called once for all slots."""
        middle = len(self.lookups)
        place = chain.index(MODEL) if MODEL in chain else middle
        return [(i + (middle - place) * (i >= place), name) for i, name in enumerate(chain)]

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        if self.model is not None:  # a lookup has no KV
            self.model.truncate(slots, kv_len_tokens)

    @property
    def _model_alone(self) -> bool:
        return self._live <= {(MODEL,)}

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        if self.model is None:
            return None
        return None if self._model_alone else self.model.kv_len[slots]

    def read_states(self, states: StepStates) -> None:
        assert self.model is not None, "lookups do not read states"
        self.model.read_states(states)

    def propose(self, rows: DraftRows) -> Proposal:
        if self.model is not None and self._model_alone:
            return self.model.propose(rows)
        if len(self._live) == 1:
            (chain,) = self._live
            if len(chain) == 1 and chain[0] in self.lookups:
                return self.lookups[chain[0]].propose(rows)
        parts: list[tuple[I64, Proposal]] = []
        waiting = rows.num_drafts > 0
        self._ingest_slices(rows)
        for turn, name in sorted({each for chain in self._live for each in self._turns_of(chain)}):
            at = np.flatnonzero((self._turns[name][rows.slots] == turn) & waiting)
            if not len(at):
                continue
            part, drafter = DraftRows(*(field[at] for field in rows)), self._drafters[name]
            if drafter is self.model:
                at, part = self._catch_up(at, part)
                if not len(at):
                    continue
            proposal = drafter.propose(part)
            parts.append((at, proposal))
            waiting[at] &= (proposal.num_drafted == 0) & ~proposal.non_finite
        return merged(self.table, rows, parts)

    def _ingest_slices(self, rows: DraftRows) -> None:
        """Compute catch-up slices of the model for rows that do not draft yet."""
        if self.model is None:
            return
        at = np.flatnonzero((rows.num_drafts == 0) & (self._turns[MODEL][rows.slots] >= 0))
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


def merged(table: InputBatch, rows: DraftRows, parts: list[tuple[I64, Proposal]]) -> Proposal:
    """Merge proposals into one for all rows of a step. `parts` has (rows, their proposal); the rows
    are ascending, and each drafts in one part at most."""
    shape = len(rows.slots), int(rows.num_drafts.max(initial=0))
    tokens, num_drafted = np.zeros(shape, dtype=np.int64), np.zeros(shape[0], dtype=np.int64)
    non_finite = np.zeros(shape[0], dtype=np.bool_)
    for at, proposal in parts:
        tokens[at, : proposal.tokens.shape[1]] = proposal.tokens
        num_drafted[at] = proposal.num_drafted
        non_finite[at] |= proposal.non_finite
    whole = Proposal(tokens, num_drafted, None, non_finite)
    drawn = [(at[part.num_drafted > 0], part.probs) for at, part in parts if part.probs is not None]
    return whole._replace(probs=merged_probs(table, rows, whole, drawn)) if drawn else whole


def merged_probs(
    table: InputBatch, rows: DraftRows, whole: Proposal, drawn: list[tuple[I64, Tensor]]
) -> Tensor:
    """Return q of every draft in rows verified by rejection; `drawn` has (rows, q of their drafts).

    If other drafts were drawn from a q, a draft chosen with certainty gets a one-hot q. Bit for
    bit, it gives the same result as no q: u * 1 = u, and max(p - q, 0) removes the draft."""
    rejects = table.rejects[rows.slots]
    counts = whole.num_drafted * rejects
    row_of = np.arange(len(counts)).repeat(counts)  # the row of each draft
    if len(drawn) == 1 and len(drawn[0][1]) == len(row_of):
        return drawn[0][1]
    q = torch.zeros((len(row_of), table.vocab_size))
    certain = np.ones(len(row_of), dtype=np.bool_)
    for at, probs in drawn:
        is_drawn = np.isin(row_of, at)
        certain &= ~is_drawn
        q[torch.from_numpy(np.flatnonzero(is_drawn))] = probs
    depth = np.arange(whole.tokens.shape[1])
    tokens = whole.tokens[rejects][depth < counts[rejects, None]]
    flat = np.flatnonzero(certain)
    q[torch.from_numpy(flat), torch.from_numpy(tokens[flat])] = 1.0
    return q
