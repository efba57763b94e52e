"""Verification of a step's drafts. Greedy rows compare drafts with the target's best token, coupled
rows with the token that the target draws. Other sampled rows use rejection sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.scheduler.plan import RowStatus
from cbatch.runtime.cpu.greedy import greedy_tokens
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.filters import filtered_logits, filtered_probs
from cbatch.runtime.sampling.logprobs import LogprobRequest, describe
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    coupled_verify,
    expected_accepted,
    rejection_verify,
)

_OK, _NO_TOKEN = np.uint8(RowStatus.OK), np.uint8(RowStatus.NO_TOKEN)
_STATUS_BY_FINITE = np.array([RowStatus.NON_FINITE, RowStatus.OK], dtype=np.uint8)


class RowsToVerify(NamedTuple):
    """The W rows of a step that get new tokens, row i from position `known[i]` on.

    Row i has `1 + num_drafted[i]` rows of logits, concatenated in the order of i.
    `drafts` is int64 [W, max k or more], or None if no row has drafts. `probs` is fp32 [sum of
    num_drafted over rows verified by rejection, V], or None if all drafts were chosen with
    certainty.
    """

    slots: NDArray[np.integer]
    known: I64
    num_drafted: I64
    drafts: I64 | None
    probs: Tensor | None


class Verified(NamedTuple):
    """The result of a step. Row i emits `tokens[i, : num_accepted[i] + 1]` if its `status` is OK;
    otherwise the status is NON_FINITE or NO_TOKEN.

    `expected_accepted` is as in `StepResult`: None if no row with drafts is verified by rejection.
    """

    tokens: I64  # [W, max k + 1]
    num_accepted: I64
    status: NDArray[np.uint8]
    logprobs: list[TokenLogprobs]  # of the rows that request them
    expected_accepted: NDArray[np.float32] | None = None


def verify(logits: Tensor, rows: RowsToVerify, table: InputBatch) -> Verified:
    """Verify the drafts and choose the next token of each row. The tokens of a row whose status is
    not OK have no meaning."""
    ids, finite = greedy_tokens(logits)
    lens = rows.num_drafted + 1
    starts = lens.cumsum() - lens
    if len(finite) > len(lens):
        finite = np.logical_and.reduceat(finite, starts)
    logprob_rows = (
        _logprob_rows(logits, rows.slots, starts, lens, table)
        if table.logprob_requests.outputs
        else []
    )
    dead_ends: dict[int, int] = {}
    if table.logits_processors.num_active:
        shape_runs = table.logits_processors.shape_runs
        dead_ends = shape_runs(logits, rows.slots, starts, lens - 1, rows.drafts)
        ids, _ = greedy_tokens(logits)
    if rows.drafts is None:
        tokens, num_accepted = ids[:, None], np.zeros(len(ids), dtype=np.int64)
    else:
        tokens, num_accepted = _match(ids, starts, rows.num_drafted, rows.drafts)
    expected: tuple[I64, NDArray[np.float32]] | None = None
    greedy = table.greedy[rows.slots]
    if not greedy.all():
        for mode in (table.rejects, table.coupled):
            at = np.flatnonzero(mode[rows.slots])
            if not len(at):
                continue
            sampled = _sampled(logits, rows, at, starts, lens, table)
            p, drafts, _, num_drafts, noise = sampled
            if mode is table.coupled:
                verdict = coupled_verify(p, drafts, num_drafts, noise)
            else:
                verdict = rejection_verify(*sampled)
                if len(drafts):
                    expected = at, expected_accepted(*sampled[:4], verdict.num_accepted).numpy()
            accepted = verdict.num_accepted.numpy()
            if rows.drafts is not None:
                tokens[at, :-1] = rows.drafts[at, : tokens.shape[1] - 1]
            tokens[at, accepted] = verdict.next_tokens.numpy()
            num_accepted[at] = accepted
    status = _STATUS_BY_FINITE.take(finite)
    for row, depth in dead_ends.items():
        if finite[row] and num_accepted[row] >= depth:
            status[row] = _NO_TOKEN
    logprobs = []
    for logprob_row in logprob_rows:
        if status[logprob_row.row] == _OK:
            logprobs.append(_describe(logprob_row, logits, rows, tokens, num_accepted, table))
    evidence = None
    if expected is not None:
        at, chances = expected
        evidence = num_accepted.astype(np.float32)
        evidence[at] = chances
        evidence[status != _OK] = 0
    return Verified(tokens, num_accepted, status, logprobs, evidence)


class _LogprobRow(NamedTuple):
    row: int
    start: int
    request: LogprobRequest
    raw: Tensor | None  # None: the request is for the distribution after logits processors


def _logprob_rows(
    logits: Tensor, slots: NDArray[np.integer], starts: I64, lens: I64, table: InputBatch
) -> list[_LogprobRow]:
    """Return the rows that request log probabilities. Call it before logits processors run."""
    logprob_rows = []
    for row, slot in enumerate(slots.tolist()):
        request = table.logprob_requests.outputs.get(slot)
        if request is None:
            continue
        start, raw = int(starts[row]), None
        if not request.processed:
            raw = logits[start : start + int(lens[row])]
            raw = raw.clone() if table.logits_processors.active[slot] else raw
        logprob_rows.append(_LogprobRow(row, start, request, raw))
    return logprob_rows


def _describe(
    logprob_row: _LogprobRow,
    logits: Tensor,
    rows: RowsToVerify,
    tokens: I64,
    num_accepted: I64,
    table: InputBatch,
) -> TokenLogprobs:
    row, count = logprob_row.row, int(num_accepted[logprob_row.row]) + 1
    if logprob_row.raw is not None:
        x = logprob_row.raw[:count]
    else:
        slots = rows.slots[row : row + 1].repeat(count)
        shaped = logits[logprob_row.start : logprob_row.start + count]
        x = filtered_logits(shaped, table.filters(slots))
    slot, known = int(rows.slots[row]), int(rows.known[row])
    return describe(slot, known, x, tokens[row, :count].copy(), logprob_row.request.num_top)


def _match(ids: I64, starts: I64, num_drafted: I64, drafts: I64) -> tuple[I64, I64]:
    """Verify greedy rows: accept drafts while they equal the target's best token. Return the best
    tokens [W, max k + 1], and the number of accepted drafts."""
    deepest = int(np.maximum.reduce(num_drafted))
    depth = iota(deepest + 1)
    tokens = ids[starts[:, None] + np.minimum(depth, num_drafted[:, None])]
    agrees = depth < num_drafted[:, None]  # the last column is False: argmin stops there
    agrees[:, :-1] &= tokens[:, :-1] == drafts[:, :deepest]
    return tokens, agrees.argmin(axis=1)


class _Sampled(NamedTuple):
    """B sampled rows, in the shapes of `rejection_verify`."""

    target_probs: Tensor
    draft_tokens: Tensor
    draft_probs: Tensor | None
    num_drafts: Tensor
    noise: NoiseRows


def _sampled(
    logits: Tensor, rows: RowsToVerify, at: I64, starts: I64, lens: I64, table: InputBatch
) -> _Sampled:
    lens = lens[at]
    ends = lens.cumsum()
    total = int(ends[-1])
    if total < len(logits):
        flat = iota(total) + (starts[at] - ends + lens).repeat(lens)
        logits = logits[torch.from_numpy(flat)]
    slots = rows.slots[at]
    draft_tokens = np.zeros(0, dtype=np.int64)
    if rows.drafts is not None:
        drafts = rows.drafts[at]
        draft_tokens = drafts[iota(drafts.shape[1]) < lens[:, None] - 1]
    return _Sampled(
        filtered_probs(logits, table.filters(slots.repeat(lens))),
        torch.from_numpy(draft_tokens),
        None if table.coupled[slots[0]] else rows.probs,
        torch.from_numpy(lens - 1),
        table.noise_rows(slots, rows.known[at]),
    )
