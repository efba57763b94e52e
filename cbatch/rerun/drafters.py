"""Offline rerun of a drafter over recorded texts: the fate of its drafts at every position.

A token depends on its request alone, not on the batch or on k. Greedy and coupled verification
accept a draft if and only if it is the token that the target chooses. A lookup chooses its drafts
with certainty. Rejection sampling then accepts a draft if and only if it is the emitted token,
because the residual excludes a rejected draft. For a model's drafts that are verified by rejection
this is not enough: the target's own logits then verify them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.request import MODEL, Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import NewSequence
from cbatch.core.scheduler.slot_pages import pages_per_slot
from cbatch.engine.core import EngineCore
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.cpu.verify import RowsToVerify, verify
from cbatch.runtime.drafting.contract import Drafter, DraftRows, ModelDrafter, StepStates
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.lookups import all_lookups
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota

SLOTS = 16  # texts at once
Output = tuple[Request, list[int]]  # a request, and its output tokens


class Fates(NamedTuple):
    """Outcomes of a drafter at the largest k, by position of an output, uint8: its number of
    drafts, and how many of them are accepted. A smaller k cuts both."""

    drafted: np.ndarray
    accepted: np.ndarray


class Rerun(NamedTuple):
    """Fates by request id, and steps whose `draft_s` was measured here."""

    fates: dict[str, Fates]
    samples: list[StepSample]


def rejects(outputs: Iterable[Output]) -> bool:
    """Return whether the drafts of some requests are verified by rejection sampling."""
    return any(not r.params.greedy and not r.params.coupled for r, _ in outputs)


@torch.inference_mode()
def rerun(
    outputs: list[Output],
    config: SchedulerConfig,
    name: str,
    k: int,
    core: EngineCore | None = None,
    on_text: Callable[[], object] = int,
) -> Rerun:
    """Draft `k` tokens at every position of every output, and call `on_text` after each text.
    `core` has the models of the drafter `model`. Lookups need none."""
    drafter: Drafter
    target = None
    if name == MODEL:
        assert core is not None and isinstance(core.executor, TorchExecutor)
        drafter = core.executor.drafter.model  # type: ignore[union-attr]
        if drafter.hidden_layers or rejects(outputs):
            target = core.executor.model
    else:
        drafter = LookupDrafter(all_lookups()[name])
    longest = max(len(request.prompt) + len(output) for request, output in outputs) + k + 1
    texts = _Texts(config, drafter, target, longest, k)
    ordered = sorted(outputs, key=lambda output: len(output[1]))  # texts at once end together
    for first in range(0, len(ordered), SLOTS):
        texts.draft(ordered[first : first + SLOTS])
        for _ in ordered[first : first + SLOTS]:
            on_text()
    return Rerun(texts.fates, texts.samples)


class _Texts:
    """Slots of texts, at each of whose positions a drafter drafts. Drafts are compared with the
    text, or verified by the logits of the `target`."""

    def __init__(
        self,
        config: SchedulerConfig,
        drafter: Drafter,
        target: Model | None,
        longest_tokens: int,
        k: int,
    ) -> None:
        self.fates: dict[str, Fates] = {}
        self.samples: list[StepSample] = []
        self._config, self._drafter, self._target, self._k = config, drafter, target, k
        self._table = InputBatch(SLOTS, config.block_size, config.vocab_size)
        self._width = -(-longest_tokens // config.block_size)  # blocks of a slot
        drafter.bind(self._table, SLOTS * self._width)
        if target is not None:
            sizes = SLOTS * self._width, config.block_size
            self._num_pages = pages_per_slot(k, config.block_size)  # of a slot
            states = {"num_pages": SLOTS * self._num_pages, "num_slots": SLOTS, "max_drafts": k}
            self._kv = KVCache(target.config, *sizes, target.dtype, target.device, **states)
            target.keep_hidden(drafter.hidden_layers)

    def draft(self, outputs: list[Output]) -> None:
        """Draft at all positions of up to `SLOTS` outputs."""
        slots, prompts = iota(len(outputs)), np.array([len(r.prompt) for r, _ in outputs])
        lens = np.array([len(output) for _, output in outputs])
        tokens = np.zeros((len(outputs), int(lens.max()) + self._k), np.int64)
        drafted, accepted = np.zeros((2, len(outputs), int(lens.max())), np.uint8)
        for slot, (request, output) in enumerate(outputs):
            tokens[slot, : len(output)] = output
            self._admit(slot, request, len(output))
        if self._target is not None:
            self._pass(slots, np.zeros_like(prompts), prompts, np.zeros_like(prompts), prompts)
        self._append(slots, tokens[:, 0])
        for position in range(1, int(lens.max())):
            at = (lens > position).nonzero()[0]
            limits = np.minimum(self._k, lens[at] - position - 1)
            counts = self._step(at, limits, tokens[at, position:])
            drafted[at, position], accepted[at, position] = counts
            self._append(at, tokens[at, position])
        for slot, (request, output) in enumerate(outputs):
            fates = Fates(drafted[slot, : len(output)], accepted[slot, : len(output)])
            self.fates[request.request_id] = fates
            self._table.release(slot)
            self._drafter.release(slot)

    def _admit(self, slot: int, request: Request, output_tokens: int) -> None:
        params, prompt = request.params, np.asarray(request.prompt, np.int32)
        eos_ids = () if params.ignore_eos else self._config.eos_ids
        admission = NewSequence(
            slot=slot,
            generation=0,
            request_id=request.request_id,
            seed=request.seed,
            choice=request.choice,
            params=params,
            stop_ids=(*eos_ids, *params.stop_token_ids),
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + output_tokens + self._k,
            kv_len_tokens=0,
            draft_kv_len_tokens=0,
            blocks=np.arange(slot * self._width, (slot + 1) * self._width, dtype=np.int32),
        )
        self._table.admit(admission)
        self._drafter.admit(admission)

    def _append(self, slots: I64, tokens: I64) -> None:
        table = self._table
        table.tokens[slots, table.num_tokens[slots]] = tokens
        table.num_tokens[slots] += 1
        if table.logits_processors.num_active:
            table.logits_processors.advance(slots, tokens[:, None], np.ones_like(slots))

    def _step(self, slots: I64, limits: I64, text: I64) -> tuple[I64, I64]:
        """Draft up to `limits[i]` tokens of each slot. Return the numbers of drafts, and of those
        accepted. `text` [rows, ...] continues each slot."""
        table, known = self._table, self._table.num_tokens[slots]
        drafts, drafted = np.zeros((len(slots), self._k), np.int64), np.zeros_like(slots)
        probs, at, ingested_tokens = None, limits.nonzero()[0], 0
        if isinstance(self._drafter, ModelDrafter):
            ingested_tokens = int((known - 1 - self._drafter.kv_len[slots])[at].sum())
        started_s = time.perf_counter()
        if len(at):
            rows = DraftRows(slots[at], known[at], limits[at], known[at])
            proposal = self._drafter.propose(rows)
            drafted[at], probs = proposal.num_drafted, proposal.probs
            drafts[at, : proposal.tokens.shape[1]] = proposal.tokens
        drafted_s = time.perf_counter()
        if self._target is None:
            equal = (drafts == text[:, : self._k]) & (iota(self._k) < drafted[:, None])
            accepted: I64 = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        else:
            row, depth = (iota(self._k) < drafted[:, None]).nonzero()
            table.tokens[slots[row], known[row] + depth] = drafts[row, depth]
            logits = self._pass(slots, known - 1, 1 + drafted, 1 + drafted, np.ones_like(known))
            checked = RowsToVerify(slots, known, drafted, drafts if len(row) else None, probs)
            accepted = verify(logits, checked, table).num_accepted
        self._drafter.truncate(slots, known)
        work = StepWork(
            rows=len(slots),
            decode_rows=len(slots),
            target_tokens=int((1 + drafted).sum()),
            context_tokens=int((known + drafted).sum()),
            draft_depth=int(drafted.max()),
            draft_tokens=int(drafted.sum()),
            ingested_tokens=ingested_tokens,
            draft_context_tokens=int(known[drafted > 0].sum()),
        )
        if work.draft_depth:
            seconds = drafted_s - started_s, time.perf_counter() - drafted_s
            self.samples.append(StepSample(work, *seconds))
        return drafted, accepted

    def _pass(
        self, slots: I64, starts: I64, query_lens: I64, num_logits: I64, valid: I64
    ) -> torch.Tensor:
        """Return the target's logits of a pass, and let the drafter read the states of its first
        `valid` positions of each row."""
        assert self._target is not None
        batch = self._table.ragged(slots, starts, query_lens, num_logits)
        if self._kv.state is not None:
            batch = replace(batch, **self._states(batch.context_lens, slots))
        hidden = self._target.allocate_hidden(len(batch.tokens))
        logits = self._target.forward(batch, self._kv, hidden)
        if hidden is not None:
            skipped = (query_lens - valid).cumsum() - (query_lens - valid)
            kept = torch.from_numpy(hidden.numpy()[iota(int(valid.sum())) + skipped.repeat(valid)])
            self._drafter.read_states(StepStates(slots, starts, valid, kept))
        return logits

    def _states(self, context_lens: I64, slots: I64) -> dict[str, np.ndarray]:
        """Return the pages of the last block boundaries of each row, which take turns."""
        ends, count = context_lens // self._config.block_size, self._num_pages
        boundaries = iota(int(ends.max()) + 1)
        kept = (boundaries <= ends[:, None]) & (boundaries > ends[:, None] - count)
        pages = np.where(kept, slots[:, None] * count + boundaries % count, -1)
        return {"state_tables": pages.astype(np.int32), "state_slots": slots.astype(np.int32)}
