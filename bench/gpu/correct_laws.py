"""T1 to T3 on the compiled kernels at full size: the law of what is emitted, one token and three
together, and of what is accepted. A sample passes within 5 standard deviations, which a right
kernel misses once in some million runs; the same sample must be 10 away from a law 3 % off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.gpu.cells import Cell, Row
from bench.gpu.correct_sampling import tiling_of
from bench.gpu.laws import MarkovChain, accept_z, chi_square_z, joint_z
from bench.gpu.verdict import check, within
from bench.gpu.world import Bench
from triton_kernels.noise import host as noise
from triton_kernels.sampling import (
    COUPLED,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    Noise,
    Proposals,
    Requests,
    Rows,
    Tiling,
    rows_of,
    sample,
)
from triton_kernels.verification.kernel import verify_logits

DEEPEST = 3
_BOUND, _POWER = 5.0, 10.0
_COUNT, _TINY_COUNT, _WIDE_COUNT = 1_000_000, 16, 100_000
_GROUP, _TINY_GROUP = 50_000, 8  # multiples of the number of k's
_WIDE_VOCAB, _LIKELIEST = 128_256, 64
_SHIFT = 0.03
_MODES = {"rejection": REJECTION, "coupled": COUPLED}


def cells(bench: Bench) -> Iterator[Cell]:
    laws = (
        ("T2, three tokens together, each k", _three_tokens),
        (f"T1, a token of {_WIDE_VOCAB}", _wide_token),
        ("T3, acceptance at each depth", _acceptance),
    )
    for (name, mode), (law, run) in itertools.product(_MODES.items(), laws):
        yield check(bench, "verify", f"law {law}, {name}", run, mode)


class Decoded(NamedTuple):
    """Tokens [N, length]; drafts and accepts of the first step [N]."""

    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray


def decode(chain: MarkovChain, mode: int, length: int, at: Tensor, tiling: Tiling) -> Decoded:
    """The sequences numbered `at`, in that order, each with a key of its own, k = 0..`DEEPEST` in
    turn, all in one ragged batch a step."""
    device, count = at.device, len(at)
    target, draft = (torch.from_numpy(np.log(law)).float().to(device) for law in chain)
    k = at % (DEEPEST + 1)
    row = torch.arange(count, device=device)
    out = torch.zeros((count, length * (DEEPEST + 1)), dtype=torch.int64, device=device)
    have, state = torch.zeros_like(at), torch.zeros_like(at)
    first: tuple[np.ndarray, np.ndarray] | None = None
    for _ in range(length):  # every step emits at least one token
        where = noise_of(at, have)
        states, drafts = _draft(draft, state, mode, where, tiling)
        accepted, last = _verify(target, draft, states, drafts, k, mode, where, tiling)
        first = first or (k.cpu().numpy(), accepted.cpu().numpy())
        for depth in range(DEEPEST + 1):
            token = torch.where(depth == accepted, last, drafts[:, min(depth, DEEPEST - 1)])
            live = depth <= accepted
            out[row[live], (have + depth)[live]] = token[live]
        have, state = have + accepted + 1, last
    assert first is not None
    return Decoded(out[:, :length].cpu().numpy(), *first)


def noise_of(at: Tensor, positions: Tensor) -> Noise:
    keys = torch.stack((at, torch.full_like(at, 77)), dim=1)
    return Noise(keys, torch.zeros_like(at), positions)


def plain_requests(count: int, vocab: int, mode: int, device: torch.device) -> Requests:
    """Temperature 1, no filters."""
    ones = torch.ones(count, device=device)
    modes = torch.full((count,), mode, dtype=torch.int32, device=device)
    return Requests(modes, ones, torch.full_like(modes, vocab), ones * torch.inf, ones * 0)


def _drawn(logits: Tensor, where: Noise, mode: int, tiling: Tiling) -> Tensor:
    """A draft of each row of logits, int32."""
    count, vocab = logits.shape
    zeros = torch.zeros(count, dtype=torch.int32, device=logits.device)
    rows = Rows(torch.arange(count, dtype=torch.int32, device=logits.device), zeros)
    requests = plain_requests(count, vocab, mode, logits.device)
    none = DraftTokens(zeros, zeros, zeros)
    return sample(LogitsBatch(logits, rows, requests, where, none, None), noise.DRAFT, tiling)


def _draft(
    draft: Tensor, state: Tensor, mode: int, where: Noise, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """States [N, DEEPEST + 1] behind j drafts, and the drafts [N, DEEPEST]."""
    states = [state]
    for depth in range(DEEPEST):
        here = where._replace(positions=where.positions + depth)
        states.append(_drawn(draft[states[-1]], here, mode, tiling).long())
    return torch.stack(states, dim=1), torch.stack(states[1:], dim=1)


def _verify(
    target: Tensor,
    draft: Tensor,
    states: Tensor,
    drafts: Tensor,
    k: Tensor,
    mode: int,
    where: Noise,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    rows, starts = rows_of(k, int((k + 1).sum()))
    of, depths = rows.requests.long(), rows.depths.long()
    drafted = depths < k[of]
    at = of[drafted], depths[drafted]
    batch = LogitsBatch(
        target[states[of, depths]],
        rows,
        plain_requests(len(k), len(target), mode, target.device),
        where,
        DraftTokens(*(x.to(torch.int32) for x in (drafts[at], k.cumsum(0) - k, k))),
        None,
    )
    proposals = Proposals(
        draft[states[at]],
        Rows(*(field[drafted].contiguous() for field in rows)),
        torch.zeros_like(batch.drafts.counts),
    )
    found = verify_logits(batch, starts, proposals, tiling, blocks=False)
    return found.num_accepted.long(), found.next_tokens.long()


def _run(bench: Bench, chain: MarkovChain, mode: int, length: int) -> Decoded:
    tiling, groups = tiling_of(bench), _groups(bench, _COUNT if bench.full else _TINY_COUNT)
    parts = [decode(chain, mode, length, at, tiling) for at in groups]
    return Decoded(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def _groups(bench: Bench, count: int) -> tuple[Tensor, ...]:
    """Numbers 0 .. count - 1, as many at a time as leave memory for the lists of their rows."""
    return torch.arange(count, device=bench.device).split(_GROUP if bench.full else _TINY_GROUP)


def _verdict(bench: Bench, what: str, z: float, power: float, count: int) -> Row:
    row = within(what, abs(z), _BOUND, power=power, tried=count)
    if bench.full and power < _POWER:
        row["status"] = "wrong: the sample could not tell"
    return row


def _three_tokens(bench: Bench, mode: int) -> Row:
    """Of the whole ragged batch, and of the sequences of each k."""
    chain = MarkovChain.make(5, seed=17)
    tokens = _run(bench, chain, mode, 3 if bench.full else 2).tokens
    parts = [tokens] + [tokens[k :: DEEPEST + 1] for k in range(DEEPEST + 1)]
    z = max((joint_z(part, chain) for part in parts), key=abs)
    far = min(joint_z(part, chain.moved(_SHIFT)) for part in parts)
    return _verdict(bench, "farthest z of 125 cells", z, far, len(tokens))


def _acceptance(bench: Bench, mode: int) -> Row:
    chain = MarkovChain.make(5, seed=17)
    run = _run(bench, chain, mode, 1)
    coupled = mode == COUPLED
    z = accept_z(run.drafted, run.accepted, chain.accepted(coupled, DEEPEST))
    far = accept_z(run.drafted, run.accepted, chain.accepted(not coupled, DEEPEST))
    return _verdict(bench, "farthest z of depths and histogram", z, far, len(run.drafted))


def _wide_token(bench: Bench, mode: int) -> Row:
    """One law over a whole vocabulary, one draft each: every request reads the same two rows. The
    likeliest tokens are cells of their own, the rest are one."""
    vocab = _WIDE_VOCAB if bench.full else 100
    count = _WIDE_COUNT if bench.full else 16
    device = bench.device
    generator = torch.Generator(device).manual_seed(9)
    target = torch.randn(vocab, generator=generator, device=device) * 3
    draft = target + torch.randn(vocab, generator=generator, device=device)
    hit = [_first_tokens(target, draft, at, mode, tiling_of(bench)) for at in _groups(bench, count)]
    first = torch.cat(hit)
    law = target.double().softmax(dim=0)
    likeliest = law.topk(min(_LIKELIEST, vocab // 2)).indices
    cells = torch.cat((law[likeliest], (1 - law[likeliest].sum())[None])).cpu().numpy()
    counts = torch.bincount(first, minlength=vocab)[likeliest]
    hits = torch.cat((counts, count - counts.sum(dim=0, keepdim=True))).cpu().numpy()
    off = cells * (1 - _SHIFT)
    off[0] += _SHIFT
    z, far = chi_square_z(hits, cells), chi_square_z(hits, off)
    return _verdict(bench, "z of the likeliest and the rest", z, far, count)


def _first_tokens(target: Tensor, draft: Tensor, at: Tensor, mode: int, tiling: Tiling) -> Tensor:
    """The first token of each request `at`, int64, after a step with one draft."""
    count, zeros = len(at), torch.zeros_like(at)
    where, narrow = noise_of(at, zeros), zeros.to(torch.int32)
    drafts = _drawn(draft.expand(count, -1), where, mode, tiling).contiguous()
    lines = torch.arange(count, dtype=torch.int32, device=at.device)
    rows, starts = rows_of(zeros + 1, 2 * count)
    requests = plain_requests(count, len(target), mode, at.device)
    given = DraftTokens(drafts, lines, narrow + 1)
    batch = LogitsBatch(target.expand(2 * count, -1), rows, requests, where, given, None)
    proposals = Proposals(draft.expand(count, -1), Rows(lines, narrow), narrow)
    found = verify_logits(batch, starts, proposals, tiling, blocks=False)
    return torch.where(found.num_accepted > 0, drafts, found.next_tokens).long()
