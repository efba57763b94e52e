"""Sampling and verification, compiled, against the reference on the same noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.batches import MODES, make_case
from bench.gpu.cells import Cell, Row
from bench.gpu.verdict import UNMEASURED, none_of, within
from bench.gpu.world import Bench
from triton_kernels import noise
from triton_kernels.sample import TILING, Batch, Tiling, sample
from triton_kernels.sample.reference import sample_reference, verify_reference
from triton_kernels.verify_logits import verify_logits

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
        given = (vocab, requests, filters, shaped)
        yield Cell(
            f"sample {name}",
            {"kernel": "sample", "case": name},
            lambda g=given: _sampled(bench, *g),
        )
        for proposed in (True, False):
            case = f"{name}, {'drawn' if proposed else 'certain'} drafts"
            yield Cell(
                f"verify {case}",
                {"kernel": "verify", "case": case},
                lambda g=given, p=proposed: _verified(bench, *g, p),
            )
    yield Cell(
        "verify rows",
        {"kernel": "verify", "case": "a request alone, in another order: the same tokens"},
        lambda: _alone(bench),
    )


def tiling_of(bench: Bench) -> Tiling:
    return TILING if bench.full else TINY_TILING


def _allowed(bench: Bench) -> int:
    """Exponentials and sums of a device differ from the reference's by some 1e-6, which decides a
    close race or the edge of a nucleus once in some ten thousand rows. One is let pass there."""
    return 1 if bench.full else 0


def _drafts(bench: Bench, requests: int) -> list[int]:
    return [b % 4 for b in range(requests if bench.full else 5)]


def _sampled(bench: Bench, vocab: int, requests: int, filters: bool, shaped: bool) -> Row:
    vocab = vocab if bench.full else 45
    case = make_case(
        _drafts(bench, requests), vocab, device=bench.device, filters=filters, shaped=shaped
    )
    if not bench.world.runs:
        return UNMEASURED
    found = sample(case.batch, noise.BONUS, tiling_of(bench)).cpu()
    wanted = sample_reference(*case.to(torch.device("cpu")).batch, noise.BONUS)
    wrong, tried = int((found != wanted).sum()), len(found)
    return within("rows with another token", wrong, _allowed(bench), tried=tried)


def _verified(
    bench: Bench, vocab: int, requests: int, filters: bool, shaped: bool, proposed: bool
) -> Row:
    vocab = vocab if bench.full else 45
    case = make_case(
        _drafts(bench, requests),
        vocab,
        device=bench.device,
        filters=filters,
        shaped=shaped,
        proposed=proposed,
    )
    if not bench.world.runs:
        return UNMEASURED
    found = verify_logits(*case, tiling_of(bench))
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
    vocab = 128_256 if bench.full else 45
    case = make_case(_drafts(bench, 30), vocab, device=bench.device, filters=True)
    if not bench.world.runs:
        return UNMEASURED
    together = verify_logits(*case, tiling_of(bench))
    wrong, count = 0, len(case.starts)
    for b in reversed(range(count if bench.full else 2)):
        single = verify_logits(*_request(case.batch, case.starts, b), None, tiling_of(bench))
        wrong += any(
            int(mine[0]) != int(theirs[b]) for mine, theirs in zip(single, together, strict=True)
        )
    modes = case.batch.requests.modes.unique().numel()
    return none_of("requests with another verdict", wrong, count if modes == len(MODES) else 0)


def _request(batch: Batch, starts: torch.Tensor, b: int) -> tuple[Batch, torch.Tensor]:
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
    made = Batch(batch.logits[rows], of, requests, where, drafts, None)
    return made, torch.zeros_like(starts[one])
