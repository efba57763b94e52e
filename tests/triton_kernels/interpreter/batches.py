"""Random ragged batches for the sampling kernels, made from request parameters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.gpu.slots import sparse_of
from cbatch.runtime.sampling import noise
from tests.runtime.engines import admission
from tests.triton_kernels.sampling_reference import sample_reference, shaped_logits, weights_of
from triton_kernels.sampling.inputs import (
    COUPLED,
    GREEDY,
    REJECTION,
    Distributions,
    DraftTokens,
    LogitsBatch,
    LogitsShaping,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.sampling.launch import Tiling

SMALL = Tiling(pieces=4, piece=32, chunk=4, list_tokens=128)  # a row has one tile, in most tests
MAX_DRAFTS = 5


class RequestSpec(NamedTuple):
    """One request: its parameters, and its known tokens."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    stop_ids: list[int]

    @property
    def mode(self) -> int:
        if self.params.greedy:
            return GREEDY
        return COUPLED if self.params.coupled else REJECTION

    def admission(self) -> NewSequence:
        tokens, stop_ids = [*self.prompt, *self.output], tuple(self.stop_ids)
        made = admission(0, tokens, num_prompt_tokens=len(self.prompt), stop_ids=stop_ids)
        return structs.replace(made, params=self.params)


def random_request(
    rng: np.random.Generator, vocab: int, *, filters: bool, shaped: bool
) -> RequestSpec:
    """Return a request; about half of them have each parameter, so that all combinations occur."""

    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.5 else otherwise

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(vocab, count, replace=False).tolist())

    fields: dict[str, object] = {
        "temperature": rng.choice([0.0, 0.6, 1.0, 1.7], p=[0.1, 0.3, 0.3, 0.3]),
        "verification": str(rng.choice(["rejection", "coupled"])),
        "max_tokens": 100,
    }
    if filters:
        fields["top_k"] = maybe(int(rng.integers(1, vocab)), None)
        fields["top_p"] = maybe(float(rng.uniform(0.2, 0.99)), 1.0)
        fields["min_p"] = maybe(float(rng.choice([0.02, 0.2])), 0.0)
    output = rng.integers(0, vocab, rng.integers(0, 9)).tolist()
    if shaped:
        allowed = tuple(range(0, vocab, 2)) + ids(4)
        fields["repetition_penalty"] = maybe(float(rng.uniform(0.7, 1.6)), 1.0)
        fields["presence_penalty"] = maybe(float(rng.uniform(-1, 1.5)), 0.0)
        fields["frequency_penalty"] = maybe(float(rng.uniform(-0.5, 1)), 0.0)
        fields["logit_bias"] = maybe({i: float(rng.normal() * 2) for i in ids(4)}, {})
        fields["allowed_token_ids"] = maybe(allowed, None)
        fields["banned_token_ids"] = maybe(ids(5), ())
        fields["min_tokens"] = maybe(len(output) + 2, 0)
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return RequestSpec(params, rng.integers(0, vocab, 6).tolist(), output, list(ids(2)))


def shaping_of(specs: list[RequestSpec], vocab: int) -> LogitsShaping:
    """Return the device state of `specs`, as an executor keeps it."""
    rows = [sparse_of(each.admission(), vocab) for each in specs]
    width = max(len(sparse.listed) for sparse in rows) + MAX_DRAFTS

    def padded(name: str) -> Tensor:
        values = np.zeros((len(rows), width), dtype=getattr(rows[0], name).dtype)
        for row, sparse in zip(values, rows, strict=True):
            row[: len(sparse.listed)] = getattr(sparse, name)
        return torch.from_numpy(values)

    return LogitsShaping(
        plain=torch.from_numpy(np.stack([sparse.plain for sparse in rows])),
        num_listed=torch.tensor([len(sparse.listed) for sparse in rows], dtype=torch.int32),
        penalties=torch.from_numpy(np.stack([sparse.penalties for sparse in rows])),
        min_tokens=torch.tensor([sparse.min_tokens for sparse in rows], dtype=torch.int32),
        **{name: padded(name) for name in ("listed", "bias", "counts", "marks")},
    )


def requests_of(specs: list[RequestSpec], vocab: int) -> Requests:
    params = [each.params for each in specs]

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return Requests(
        torch.tensor([each.mode for each in specs], dtype=torch.int32),
        floats([1.0 if p.greedy else p.temperature for p in params]),
        torch.tensor([vocab if p.top_k is None else p.top_k for p in params], dtype=torch.int32),
        floats([p.top_p if p.top_p < 1 else np.inf for p in params]),
        floats([p.min_p for p in params]),
    )


def noise_of(rng: np.random.Generator, count: int) -> Noise:
    return Noise(
        torch.from_numpy(rng.integers(0, 2**32, (count, 2))),
        torch.from_numpy(rng.integers(0, 3, count)),
        torch.from_numpy(rng.integers(0, 5000, count)),
    )


def random_batch(
    rng: np.random.Generator,
    count: int,
    vocab: int,
    *,
    filters: bool = True,
    shaped: bool = True,
    max_drafts: int = MAX_DRAFTS,
    dtype: torch.dtype = torch.float32,
) -> tuple[LogitsBatch, list[RequestSpec]]:
    """Return `count` requests with ragged k in 0..max_drafts. Logits have ties, and so have the
    edges of filters. Drafts are likely tokens."""
    specs = [random_request(rng, vocab, filters=filters, shaped=shaped) for _ in range(count)]
    num_drafts = torch.from_numpy(rng.integers(0, max_drafts + 1, count))
    rows, starts = rows_of(num_drafts, int((num_drafts + 1).sum()))
    values = np.round(rng.normal(size=(len(rows.depths), vocab)) * 2, 1)
    logits = torch.from_numpy(values).to(dtype)
    likely = logits.float().argsort(dim=-1, descending=True)
    rank = torch.from_numpy(rng.geometric(0.5, len(logits)) - 1).clamp(max=vocab - 1)
    tokens = likely.gather(1, rank[:, None]).squeeze(1)
    drafted = rows.depths < num_drafts[rows.requests.long()]
    draft_starts = starts - torch.arange(count)
    drafts = DraftTokens(
        tokens[drafted].to(torch.int32), draft_starts.to(torch.int32), num_drafts.to(torch.int32)
    )
    shaping = shaping_of(specs, vocab) if shaped else None
    where = noise_of(rng, count)
    return LogitsBatch(logits, rows, requests_of(specs, vocab), where, drafts, shaping), specs


def proposals_for(rng: np.random.Generator, batch: LogitsBatch) -> tuple[LogitsBatch, Proposals]:
    """Replace the drafts of `batch` by ones drawn from proposals; return both.

    Proposals are near the target, filtered and shaped by the requests' parameters, one after the
    other. Drafts of every fourth request are certain.
    """
    drafted = batch.rows.depths < batch.drafts.counts[batch.rows.requests.long()]
    rows = Rows(batch.rows.requests[drafted], batch.rows.depths[drafted])
    near = torch.from_numpy(rng.normal(size=(len(rows.depths), batch.logits.shape[1])) * 0.7)
    logits = (batch.logits[drafted].float() + near).to(batch.logits.dtype)
    certain = (torch.arange(len(batch.drafts.counts)) % 4 == 0).to(torch.int32)
    tokens = batch.drafts.tokens.clone()
    for depth in range(int(batch.drafts.counts.max())):
        drafts = batch.drafts._replace(tokens=tokens)
        drawn = sample_reference(
            logits, rows, batch.requests, batch.noise, drafts, batch.shaping, noise.DRAFT
        )
        here = (rows.depths == depth) & (certain[rows.requests.long()] == 0)
        tokens = torch.where(here, drawn, tokens)
    batch = batch._replace(drafts=batch.drafts._replace(tokens=tokens))
    return batch, proposals_of(batch, logits, rows, certain)


def proposals_of(batch: LogitsBatch, logits: Tensor, rows: Rows, certain: Tensor) -> Proposals:
    """Return proposals with the distributions of the reference."""
    x = shaped_logits(logits, rows, batch.drafts, batch.shaping)
    weights = weights_of(x, rows, batch.requests)
    maxima, masses = x.amax(dim=-1), weights.sum(dim=-1)
    chances = weights.gather(1, batch.drafts.tokens.long()[:, None]).squeeze(1) / masses
    codes = codes_of(x, maxima, rows, batch.requests)
    cuts = torch.where(weights > 0, codes, -1).amax(dim=-1) + 1
    tokens = torch.stack((batch.drafts.tokens, torch.ones_like(batch.drafts.tokens)), dim=1)
    listed = None
    if batch.shaping is not None:
        logits, listed = overlaid(batch, logits, rows, x)
    dists = Distributions(torch.stack((maxima, masses, chances), dim=1), cuts, tokens)
    return Proposals(logits, listed, dists, certain)


def codes_of(x: Tensor, maxima: Tensor, rows: Rows, requests: Requests) -> Tensor:
    """Return codes, int64 [N, V]; see `triton_kernels.sampling.order`."""
    inverse = (1.0 / requests.temperatures)[rows.requests.long()]
    y = (maxima[:, None] - x) * inverse[:, None]
    return (y.view(torch.int32).long() << 32) | torch.arange(x.shape[1])


def overlaid(batch: LogitsBatch, logits: Tensor, rows: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits with marks, and those of the listed tokens, as after a draw."""
    shaping, drafts = batch.shaping, batch.drafts
    assert shaping is not None
    lowest = torch.finfo(logits.dtype).min
    logits = logits.clone()
    listed = torch.full((len(logits), shaping.listed.shape[1]), torch.finfo(torch.float32).min)
    words = shaping.plain[rows.requests.long()].repeat_interleave(32, dim=1)[:, : x.shape[1]]
    plain = (words >> (torch.arange(x.shape[1]) % 32)) & 1 > 0
    for i, (b, depth) in enumerate(zip(*torch.stack(rows).tolist(), strict=True)):
        count, start = int(shaping.num_listed[b]), int(drafts.starts[b])
        ids = shaping.listed[b, :count].tolist()
        if shaping.penalties[b].tolist() != [1, 0, 0]:
            ids += drafts.tokens[start : start + depth].tolist()
        for place, token in enumerate(ids):
            own = place < count or (plain[i, token] and token not in ids[:place])
            if own and x[i, token] > -torch.inf:
                listed[i, place] = x[i, token]
            if own and place >= count:
                plain[i, token] = False
        logits[i, ~plain[i]] = lowest
    return logits, listed


def kept_by(dists: Distributions, batch: LogitsBatch, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return y of shaped logits `x`, and the tokens kept by the cuts of `dists` (bool); both [N,
    V]."""
    codes = codes_of(x, x.amax(dim=-1), batch.rows, batch.requests)
    kept = (codes < dists.cuts[:, None]) & (x > -torch.inf)
    return (codes >> 32).int().view(torch.float32), kept
