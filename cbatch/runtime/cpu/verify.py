"""The verdict on the drafts of a step: greedy rows by comparison with the target's best token,
coupled rows with the token it draws, other sampled rows by rejection sampling, token by token or in
blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.scheduler.plan import RowStatus
from cbatch.runtime.cpu.filters import (
    filtered_logits,
    filtered_probs,
    filters_of,
    greedy_tokens,
    noise_rows,
)
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.block_verification import block_verify
from cbatch.runtime.sampling.logprobs import LogprobRequest, describe
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    coupled_verify,
    expected_accepted,
    rejection_verify,
)

_OK, _NO_TOKEN = np.uint8(RowStatus.OK), np.uint8(RowStatus.NO_TOKEN)
_BY_FINITE = np.array([RowStatus.NON_FINITE, RowStatus.OK], dtype=np.uint8)


class Wanted(NamedTuple):
    """W rows of a step that decide tokens, the first at position `known[i]`.

    Their logits rows, `1 + num_drafted[i]` each, follow one another. `drafts` int64 [W, >= max k],
    `probs` fp32 [sum of num_drafted over rows verified by rejection, V] (None: drafts chosen with
    certainty); `drafts` is None where nobody drafted.
    """

    slots: NDArray[np.integer]
    known: I64
    num_drafted: I64
    drafts: I64 | None
    probs: Tensor | None


class Verified(NamedTuple):
    """Row i emits `tokens[i, : num_accepted[i] + 1]`, provided that its `status` is OK; else it is
    NON_FINITE or NO_TOKEN.

    `expected_accepted` is as in `StepResult`: None if no row with drafts is verified by rejection.
    """

    tokens: I64  # [W, max k + 1]
    num_accepted: I64
    status: NDArray[np.uint8]
    logprobs: list[TokenLogprobs]  # of the rows that ask for them
    expected_accepted: NDArray[np.float32] | None = None


def verify(logits: Tensor, wanted: Wanted, table: InputBatch) -> Verified:
    """Accept, replace and extend. Rows whose status is not OK get an arbitrary verdict."""
    ids, finite = greedy_tokens(logits)
    lens = wanted.num_drafted + 1
    starts = lens.cumsum() - lens
    if len(finite) > len(lens):
        finite = np.logical_and.reduceat(finite, starts)
    asking = (
        _asking(logits, wanted.slots, starts, lens, table) if table.logprob_requests.outputs else []
    )
    dead_ends: dict[int, int] = {}
    if table.logits_processors.num_active:
        shape_runs = table.logits_processors.shape_runs
        dead_ends = shape_runs(logits, wanted.slots, starts, lens - 1, wanted.drafts)
        ids, _ = greedy_tokens(logits)
    if wanted.drafts is None:
        tokens, num_accepted = ids[:, None], np.zeros(len(ids), dtype=np.int64)
    else:
        tokens, num_accepted = _match(ids, starts, wanted.num_drafted, wanted.drafts)
    expected: list[tuple[I64, NDArray[np.float32]]] = []
    greedy = table.greedy[wanted.slots]
    if not greedy.all():
        for judge, mode in (
            (_judge_tokens, table.rejects & ~table.in_blocks),
            (_judge_blocks, table.in_blocks),
            (_judge_coupled, table.coupled),
        ):
            at = np.flatnonzero(mode[wanted.slots])
            if not len(at):
                continue
            sampled = _sampled(logits, wanted, at, starts, lens, table)
            accepted, last, chances = judge(sampled)
            if wanted.drafts is not None:
                tokens[at, :-1] = wanted.drafts[at, : tokens.shape[1] - 1]
            tokens[at, accepted] = last
            num_accepted[at] = accepted
            if chances is not None:
                expected.append((at, chances))
    status = _BY_FINITE.take(finite)
    for row, depth in dead_ends.items():
        if finite[row] and num_accepted[row] >= depth:
            status[row] = _NO_TOKEN
    logprobs = []
    for each in asking:
        if status[each.row] == _OK:
            logprobs.append(_describe(each, logits, wanted, tokens, num_accepted, table))
    evidence = _evidence(num_accepted, expected, status) if expected else None
    return Verified(tokens, num_accepted, status, logprobs, evidence)


def _evidence(
    num_accepted: I64, expected: list[tuple[I64, NDArray[np.float32]]], status: NDArray[np.uint8]
) -> NDArray[np.float32]:
    """What is `expected` of some rows, counts of others; nothing of those that failed."""
    evidence = num_accepted.astype(np.float32)
    for at, chances in expected:
        evidence[at] = chances
    evidence[status != _OK] = 0
    return evidence


class _Asking(NamedTuple):
    """A row that asks for log probabilities, and its logits as the model gave them."""

    row: int
    start: int
    ask: LogprobRequest
    raw: Tensor | None  # None: those of the shaped logits are wanted


def _asking(
    logits: Tensor, slots: NDArray[np.integer], starts: I64, lens: I64, table: InputBatch
) -> list[_Asking]:
    """Before the logits are shaped."""
    asking = []
    for row, slot in enumerate(slots.tolist()):
        ask = table.logprob_requests.outputs.get(slot)
        if ask is None:
            continue
        start, raw = int(starts[row]), None
        if not ask.processed:
            raw = logits[start : start + int(lens[row])]
            raw = raw.clone() if table.logits_processors.active[slot] else raw
        asking.append(_Asking(row, start, ask, raw))
    return asking


def _describe(
    asking: _Asking,
    logits: Tensor,
    wanted: Wanted,
    tokens: I64,
    num_accepted: I64,
    table: InputBatch,
) -> TokenLogprobs:
    """Of the tokens that the row emits."""
    row, count = asking.row, int(num_accepted[asking.row]) + 1
    if asking.raw is not None:
        x = asking.raw[:count]
    else:
        slots = wanted.slots[row : row + 1].repeat(count)
        shaped = logits[asking.start : asking.start + count]
        x = filtered_logits(shaped, filters_of(table, slots))
    slot, known = int(wanted.slots[row]), int(wanted.known[row])
    return describe(slot, known, x, tokens[row, :count].copy(), asking.ask.num_top)


def _match(ids: I64, starts: I64, num_drafted: I64, drafts: I64) -> tuple[I64, I64]:
    """Greedy rows: accept while the draft is the target's own choice, whose next one follows."""
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
    logits: Tensor, wanted: Wanted, at: I64, starts: I64, lens: I64, table: InputBatch
) -> _Sampled:
    """The rows `at` of `wanted`, and the distributions that their requests ask for."""
    lens = lens[at]
    ends = lens.cumsum()
    total = int(ends[-1])
    if total < len(logits):
        flat = iota(total) + (starts[at] - ends + lens).repeat(lens)
        logits = logits[torch.from_numpy(flat)]
    slots = wanted.slots[at]
    draft_tokens = np.zeros(0, dtype=np.int64)
    if wanted.drafts is not None:
        own = wanted.drafts[at]
        draft_tokens = own[iota(own.shape[1]) < lens[:, None] - 1]
    return _Sampled(
        filtered_probs(logits, filters_of(table, slots.repeat(lens))),
        torch.from_numpy(draft_tokens),
        _drafted_from(wanted, at, table),
        torch.from_numpy(lens - 1),
        noise_rows(table, slots, wanted.known[at]),
    )


def _drafted_from(wanted: Wanted, at: I64, table: InputBatch) -> Tensor | None:
    """Of `wanted.probs` what the rows `at` need, which are verified in the same way."""
    if wanted.probs is None or table.coupled[wanted.slots[at[0]]]:
        return None
    rejects = np.flatnonzero(table.rejects[wanted.slots])
    if len(rejects) == len(at):
        return wanted.probs
    needed = np.isin(rejects, at).repeat(wanted.num_drafted[rejects])
    return wanted.probs[torch.from_numpy(needed)]


# The number of accepted drafts of each row, the token after them, and with drafts that were
# verified by rejection, how many could be expected to be accepted.
_Judgement = tuple[I64, I64, NDArray[np.float32] | None]


def _judge_coupled(sampled: _Sampled) -> _Judgement:
    p, draft_tokens, _, num_drafts, noise = sampled
    accepted, following = coupled_verify(p, draft_tokens, num_drafts, noise)
    return accepted.numpy(), following.numpy(), None


def _judge_tokens(sampled: _Sampled) -> _Judgement:
    accepted, following = rejection_verify(*sampled)
    expected = None
    if len(sampled.draft_tokens):
        expected = expected_accepted(*sampled[:4], accepted).numpy()
    return accepted.numpy(), following.numpy(), expected


def _judge_blocks(sampled: _Sampled) -> _Judgement:
    accepted, following, expected = block_verify(*sampled)
    drafted = len(sampled.draft_tokens) > 0
    return accepted.numpy(), following.numpy(), expected.numpy() if drafted else None
