"""Sampling and verification, compiled, against the reference on the same noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.batches import MODES, VerifyCase, make_case
from bench.gpu.cells import Cell, Row
from bench.gpu.verdict import check, none_of, within
from bench.gpu.world import Bench
from triton_kernels.noise import host as noise
from triton_kernels.sampling import TILING, LogitsBatch, Tiling, sample
from triton_kernels.sampling.reference import sample_reference
from triton_kernels.verification.kernel import verify_logits
from triton_kernels.verification.reference_of_logits import verify_reference

TINY_TILING = Tiling(64, 64, 64, 1, 64)


def cells(bench: Bench) -> Iterator[Cell]:
    for vocab, requests, filters, shaped in (
        (300, 900, True, False),
        (300, 300, True, True),
        (128_256, 24, True, True),
        (151_936, 24, False, False),
    ):
        if not bench.full and not (vocab == 300 and shaped):
            continue
        name = f"vocabulary {vocab}{', filters' if filters else ''}{', shaped' if shaped else ''}"
        given = {"vocab": vocab, "requests": requests, "filters": filters, "shaped": shaped}
        yield check(bench, "sample", name, _sampled, given)
        for kind, proposed in (("drawn", True), ("certain", False)):
            case = given | {"proposed": proposed}
            yield check(bench, "verify", f"{name}, {kind} drafts", _verified, case)
    same = "a request alone, in another order: the same tokens"
    yield check(bench, "verify", same, _alone)


def tiling_of(bench: Bench) -> Tiling:
    return TILING if bench.full else TINY_TILING


def _allowed(bench: Bench) -> int:
    """Exponentials and sums of a device differ from the reference's by some 1e-6, which decides a
    close race or the edge of a nucleus once in some ten thousand rows. One is let pass there."""
    return 1 if bench.full else 0


def _case(bench: Bench, *, vocab: int, requests: int, **kinds: bool) -> VerifyCase:
    drafts = [b % 4 for b in range(requests if bench.full else 5)]
    return make_case(drafts, vocab if bench.full else 45, device=bench.device, **kinds)


def _sampled(bench: Bench, given: dict[str, Any]) -> Row:
    case = _case(bench, **given)
    found = sample(case.batch, noise.BONUS, tiling_of(bench)).cpu()
    wanted = sample_reference(*case.to(torch.device("cpu")).batch, noise.BONUS)
    wrong, tried = int((found != wanted).sum()), len(found)
    return within("rows with another token", wrong, _allowed(bench), tried=tried)


def _verified(bench: Bench, given: dict[str, Any]) -> Row:
    case = _case(bench, **given)
    found = verify_logits(*case, tiling_of(bench), blocks=False)
    host = case.to(torch.device("cpu"))
    wanted = verify_reference(host.batch, host.proposals)
    pairs = zip(found, wanted, strict=True)
    differ = torch.stack([mine.cpu().long() != theirs for mine, theirs in pairs]).any(dim=0)
    accepted = found.num_accepted.float().mean()
    return within(
        "requests with another verdict",
        int(differ.sum()),
        _allowed(bench),
        tried=len(differ),
        mean_accepted=round(float(accepted), 3),
    )


def _alone(bench: Bench) -> Row:
    """Requests drawn out of a batch and verified by themselves, the last first."""
    case = _case(bench, vocab=128_256, requests=30, filters=True)
    together = verify_logits(*case, tiling_of(bench), blocks=False)
    wrong, count = 0, len(case.starts)
    for b in reversed(range(count if bench.full else 2)):
        single = verify_logits(
            *_request(case.batch, case.starts, b), None, tiling_of(bench), blocks=False
        )
        wrong += any(
            int(mine[0]) != int(theirs[b]) for mine, theirs in zip(single, together, strict=True)
        )
    modes = case.batch.requests.modes.unique().numel()
    return none_of("requests with another verdict", wrong, count if modes == len(MODES) else 0)


def _request(batch: LogitsBatch, starts: torch.Tensor, b: int) -> tuple[LogitsBatch, torch.Tensor]:
    """Request `b` as a batch of its own; the batch has no shaping."""
    count = int(batch.drafts.counts[b])
    rows = slice(int(starts[b]), int(starts[b]) + count + 1)
    first = int(batch.drafts.starts[b])
    one = slice(b, b + 1)
    requests, where = (
        type(group)(*(field[one].contiguous() for field in group))
        for group in (batch.requests, batch.noise)
    )
    drafts = batch.drafts._replace(
        tokens=batch.drafts.tokens[first : first + count],
        starts=torch.zeros_like(batch.drafts.starts[one]),
        counts=batch.drafts.counts[one].contiguous(),
    )
    of = batch.rows._replace(
        requests=torch.zeros_like(batch.rows.requests[rows]),
        depths=batch.rows.depths[rows].contiguous(),
    )
    made = LogitsBatch(batch.logits[rows], of, requests, where, drafts, None)
    return made, torch.zeros_like(starts[one])
