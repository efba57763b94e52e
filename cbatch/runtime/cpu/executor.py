"""The executor for CPUs: applies a plan's deltas, drafts, runs one ragged forward pass,
verifies."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import Request
from cbatch.core.scheduler.executor import RowError
from cbatch.core.scheduler.plan import Deltas, RowStatus, StepPlan, StepResult
from cbatch.runtime.compiled.threads import sampling_threads
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.verify import RowsToVerify, Verified, verify
from cbatch.runtime.drafting.contract import Drafter, DraftRows, Proposal, StepStates
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.logits_processors import require_grammars
from cbatch.runtime.sampling.logprobs import describe, split_prompt_rows
from cbatch.runtime.sampling.structured import GrammarSource

_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)


class _Rows(NamedTuple):
    """The R rows of a plan that compute something, at their true positions."""

    plan_rows: I64
    slots: NDArray[np.int32]
    known: I64  # known tokens of the sequence
    start: I64  # first position to compute
    num_new_tokens: I64  # known tokens to compute: a chunk, or the last token
    num_drafts: I64  # planned drafts, limited by `max_total_tokens`
    catch_up: NDArray[np.int32]
    wants: NDArray[np.bool_]  # whether the row gets a new token

    def at(self, index: I64) -> _Rows:
        return _Rows(*(field[index] for field in self))


class TorchExecutor:
    """Runs step plans on a model. Call `reset()` after any exception: the state is then
    unspecified.

    If an earlier step was uncommitted when a plan was made, the plan's `query_lens`, `num_drafts`
    and `catch_up` are upper bounds. The executor keeps the true positions. A row that already
    reached `max_total_tokens` emits nothing.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        num_state_pages: int = 0,
        max_drafts: int = 0,
        drafter: Drafter | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.model, self._grammars = model, grammars
        sizes = max_num_seqs, block_size, model.config.vocab_size
        self.table = InputBatch(*sizes, grammars, recurrent=num_state_pages > 0)
        states = {"num_slots": max_num_seqs, "max_drafts": max_drafts}
        blocks = num_blocks, block_size, model.dtype, model.device
        self._keeps_states = False  # whether the drafter reads the states of this step
        self.kv = KVCache(model.config, *blocks, num_pages=num_state_pages, **states)
        self.drafter = drafter
        # For drafters that read hidden states: query lengths and hidden states of the last pass.
        self._hidden: tuple[I64, Tensor] | None = None
        if drafter is not None:
            drafter.bind(self.table, num_blocks)
            model.keep_hidden(drafter.hidden_layers)

    def reset(self) -> None:
        """Forget every slot. KV contents stay: no position is read before it is written."""
        self.table.clear()
        if self.drafter is not None:
            self.drafter.reset()

    def check(self, request: Request) -> None:
        if request.params.structured_outputs is not None:
            require_grammars(self._grammars)

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Increment `counter` [1] in all later steps, at least once per layer of each model. So a
        watcher can distinguish a long step from a step that hangs."""
        self.model.progress = counter
        if self.drafter is not None:
            self.drafter.report_progress(counter)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises ValueError for a plan that does not fit the slots."""
        with torch.inference_mode():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        self._apply(plan.deltas)
        planned = np.count_nonzero(plan.num_drafts) or np.count_nonzero(plan.catch_up)
        drafting = self.drafter is not None and bool(planned)
        self._keeps_states = drafting or plan.keep_states
        rows = self._rows(plan, drafting)
        proposal, draft_s = None, 0.0
        if drafting:
            draft_started = time.perf_counter()
            proposal = self._propose(rows)
            draft_s = time.perf_counter() - draft_started
        verified, prompts = self._forward(rows, proposal)
        tokens, counts, kv_lens = self.advance_rows(rows, verified)
        draft_kv_lens = None
        if self.drafter is not None:
            if self._keeps_states and self.drafter.hidden_layers:
                self._pass_states(rows, kv_lens)
            if drafting:
                self.drafter.truncate(rows.slots, kv_lens)
                draft_kv_lens = self.drafter.kv_lens(plan.slots)
        # Seconds of drafting, and of the rest of the step including bookkeeping.
        durations_s = draft_s, time.perf_counter() - started - draft_s
        result = self._report(plan, rows, proposal, tokens, counts, verified)
        return StepResult(
            **result,
            draft_s=durations_s[0],
            target_s=durations_s[1],
            draft_kv_lens=None if draft_kv_lens is None else draft_kv_lens.astype(np.int32),
            logprobs=(*prompts, *(verified.logprobs if verified is not None else ())),
        )

    def _apply(self, deltas: Deltas) -> None:
        table = self.table
        if deltas.reset:
            self.reset()
        for slot in deltas.released.tolist():
            table.release(slot)
            if self.drafter is not None:
                self.drafter.release(slot)
        if len(deltas.zeroed_blocks):
            self.kv.zero_blocks(deltas.zeroed_blocks)
            if self.drafter is not None:
                self.drafter.zero_blocks(deltas.zeroed_blocks)
        for admission in deltas.new_sequences:
            try:
                table.admit(admission)
                if self.drafter is not None:
                    self.drafter.admit(admission)
            except Exception as error:
                raise RowError(admission.slot, admission.generation, error) from error
        if len(deltas.append_slots):
            table.append_blocks(deltas)
            if self.drafter is not None:
                self.drafter.append_blocks(deltas)
        if deltas.state_pages.size:
            table.add_state_pages(deltas)

    def _rows(self, plan: StepPlan, drafting: bool) -> _Rows:
        table, slots, wants = self.table, plan.slots, plan.wants_logits
        if table.generation[slots].tobytes() != plan.generations.tobytes():
            raise ValueError(
                f"step {plan.step_id}: slots {slots.tolist()} do not hold the planned generations; "
                "send a plan with `deltas.reset` and the whole state"
            )
        known, start = table.num_tokens[slots], table.kv_len[slots]
        remaining = table.max_total[slots] - known
        num_drafts, catch_up = plan.num_drafts, plan.catch_up
        if drafting:  # a row that may not draft any more must not catch up either
            num_drafts = np.maximum(np.minimum(num_drafts, remaining - 1), 0)
            if np.count_nonzero(catch_up):
                catch_up = catch_up * (num_drafts >= np.minimum(plan.num_drafts, 1))
        new = plan.query_lens - plan.num_drafts
        rows = _Rows(iota(len(slots)), slots, known, start, new, num_drafts, catch_up, wants)
        # Leave out rows that failed, and rows that emit a token but have reached their end.
        active = (((remaining > 0) | ~wants) & (table.failed[slots] == 0)).nonzero()[0]
        if len(active) < len(slots):
            rows = rows.at(active)
        end = rows.start + rows.num_new_tokens
        # Rows that get a token must end at their last known token; no row may pass it.
        if ((end > rows.known) | (rows.wants & (end < rows.known))).any():
            raise ValueError(
                f"step {plan.step_id}: query_lens {plan.query_lens.tolist()} do not fit sequences "
                f"of {known.tolist()} tokens with {start.tolist()} in KV"
            )
        return rows

    def _propose(self, rows: _Rows) -> Proposal | None:
        """Return drafts for all rows, written after the known tokens; None if no row got any."""
        assert self.drafter is not None
        at = (rows.num_drafts + rows.catch_up).nonzero()[0]
        if not len(at):
            return None
        draft_rows = DraftRows(rows.slots, rows.known, rows.num_drafts, rows.catch_up)
        if len(at) == len(rows.slots):
            drafts = self.drafter.propose(draft_rows)
        else:
            drafts = self.drafter.propose(DraftRows(*(field[at] for field in draft_rows)))
            drafts = _spread(drafts, at, len(rows.slots))
        if not (np.count_nonzero(drafts.num_drafted) or np.count_nonzero(drafts.non_finite)):
            return None
        row, depth = (iota(drafts.tokens.shape[1]) < drafts.num_drafted[:, None]).nonzero()
        self.table.tokens[rows.slots[row], rows.known[row] + depth] = drafts.tokens[row, depth]
        return drafts

    def _forward(
        self, rows: _Rows, proposal: Proposal | None
    ) -> tuple[Verified | None, list[TokenLogprobs]]:
        """Run one pass over all rows, then verify the rows that get a token. Also return the log
        probabilities of prompts."""
        prompts: list[TokenLogprobs] = []
        if not len(rows.slots):
            return None, prompts
        num_drafted, drafts, probs = np.zeros(len(rows.slots), dtype=np.int64), None, None
        query_lens, num_logits = rows.num_new_tokens, rows.wants
        if proposal is not None:
            num_drafted = proposal.num_drafted
            query_lens, num_logits = query_lens + num_drafted, num_logits * (1 + num_drafted)
            if num_drafted.any():
                drafts, probs = proposal.tokens, proposal.probs
        prompt_logits = self._prompt_rows(rows) if self.table.logprob_requests.prompts else None
        if prompt_logits is not None:
            num_logits = num_logits + prompt_logits
        batch = self.table.ragged(rows.slots, rows.start, query_lens, num_logits)
        hidden = self.model.allocate_hidden(len(batch.tokens)) if self._keeps_states else None
        logits = self.model.forward(batch, self.kv, hidden)
        self._hidden = None if hidden is None else (query_lens, hidden)
        if prompt_logits is not None:
            prompts, logits = self._describe_prompts(rows, logits, prompt_logits, num_logits)
        if not logits.shape[0]:
            return None, prompts
        at = rows.wants.nonzero()[0]
        drafts, slots = None if drafts is None else drafts[at], rows.slots[at]
        rows_to_verify = RowsToVerify(slots, rows.known[at], num_drafted[at], drafts, probs)
        with sampling_threads.limited(len(slots)):
            return verify(logits, rows_to_verify, self.table), prompts

    def _prompt_rows(self, rows: _Rows) -> I64:
        """Return, for each row, how many positions predict a prompt token with a requested
        logprob."""
        requests = self.table.logprob_requests.prompts
        requested = np.array([slot in requests for slot in rows.slots.tolist()], dtype=np.int64)
        return requested * (rows.num_new_tokens - rows.wants)

    def _describe_prompts(
        self, rows: _Rows, logits: Tensor, prompt_logits: I64, num_logits: I64
    ) -> tuple[list[TokenLogprobs], Tensor]:
        requests, table, logprobs = self.table.logprob_requests.prompts, self.table, []
        counts = [(i, int(prompt_logits[i])) for i in prompt_logits.nonzero()[0].tolist()]
        parts, rest = split_prompt_rows(logits, num_logits.cumsum(), counts, num_logits)
        for (i, count), part in zip(counts, parts, strict=True):
            slot, first = int(rows.slots[i]), int(rows.start[i]) + 1
            tokens = table.tokens[slot, first : first + count].copy()
            logprobs.append(describe(slot, first, part, tokens, requests[slot].num_top))
        for slot in rows.slots[rows.wants].tolist():
            requests.pop(slot, None)
        return logprobs, rest

    def advance_rows(self, rows: _Rows, verified: Verified | None) -> tuple[I64, I64, I64]:
        """Apply the result to the slots. Return the emitted tokens, and for each row the numbers
        of emitted tokens and of positions in KV."""
        table = self.table
        kv_lens = rows.start + rows.num_new_tokens
        counts = np.zeros(len(rows.slots), dtype=np.int64)
        tokens = counts[:0]
        if verified is not None:
            at = rows.wants.nonzero()[0]
            slots, known, emits = rows.slots[at], rows.known[at], verified.num_accepted + 1
            if verified.status.any():
                failed = verified.status > 0
                emits *= ~failed
                table.failed[slots[failed]] = verified.status[failed]
            kv_lens[at] += verified.num_accepted
            counts[at] = emits
            row, depth = (iota(verified.tokens.shape[1]) < emits[:, None]).nonzero()
            tokens = verified.tokens[row, depth]
            table.tokens[slots[row], known[row] + depth] = tokens
            table.num_tokens[slots] = known + emits
            if table.logits_processors.num_active:
                table.logits_processors.advance(slots, verified.tokens, emits)
        table.kv_len[rows.slots] = kv_lens
        return tokens, counts, kv_lens

    def _pass_states(self, rows: _Rows, kv_lens: I64) -> None:
        """Pass the hidden states of valid positions to the drafter; rejected drafts are left
        out."""
        last_pass, self._hidden = self._hidden, None
        if last_pass is None or self.drafter is None:
            return
        query_lens, hidden = last_pass
        lens = kv_lens - rows.start
        count = int(lens.sum())
        if count < len(hidden):
            skipped = (query_lens - lens).cumsum() - (query_lens - lens)
            # Skip rejected positions. By NumPy: see `EagleDrafter._ingest_waiting`.
            hidden = torch.from_numpy(hidden.numpy()[iota(count) + skipped.repeat(lens)])
        self.drafter.read_states(StepStates(rows.slots, rows.start, lens, hidden))

    def _report(
        self,
        plan: StepPlan,
        rows: _Rows,
        proposal: Proposal | None,
        tokens: I64,
        counts: I64,
        verified: Verified | None,
    ) -> dict[str, Any]:
        drafted, accepted, row_splits = np.zeros((3, len(plan.slots) + 1), dtype=np.int32)
        status = self.table.failed[plan.slots]
        at, expected = rows.plan_rows, None
        row_splits[at + 1] = counts
        if proposal is not None:
            drafted[at] = proposal.num_drafted
            accepted[at] = np.maximum(counts - 1, 0)
            if proposal.non_finite.any():
                broken = at[proposal.non_finite]
                status[broken] = np.where(status[broken], status[broken], _DRAFT_NON_FINITE)
        if verified is not None and verified.expected_accepted is not None:
            expected = np.zeros(plan.num_rows, dtype=np.float32)
            expected[at[rows.wants]] = verified.expected_accepted
        return {
            "step_id": plan.step_id,
            "generations": plan.generations,
            "tokens": tokens.astype(np.int32),
            "row_splits": row_splits.cumsum(dtype=np.int32),
            "num_drafted": drafted[:-1],
            "num_accepted": accepted[:-1],
            "status": status,
            "expected_accepted": expected,
        }


def _spread(drafts: Proposal, at: I64, num_rows: int) -> Proposal:
    """Extend a proposal for the rows `at` to all rows; the others have no drafts."""

    def spread(part: NDArray[np.generic]) -> NDArray[np.generic]:
        whole = np.zeros((num_rows, *part.shape[1:]), dtype=part.dtype)
        whole[at] = part
        return whole

    return drafts._replace(
        tokens=spread(drafts.tokens),
        num_drafted=spread(drafts.num_drafted),
        non_finite=spread(drafts.non_finite),
    )
