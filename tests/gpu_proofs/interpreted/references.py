"""References in place of the kernels of a decoder and of the verdict, each as one operation of a
stream. Only the bookkeeping of a step then remains to be interpreted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.gpu import attention as attend
from cbatch.runtime.gpu import draft_pass as drafting
from cbatch.runtime.gpu import heads, layers, modelling, products
from cbatch.runtime.gpu import target_pass as verifying
from tests.gpu_proofs.interpreted.stream import Stream, as_queued
from tests.triton_kernels.interpreter.batches import overlaid
from tests.triton_kernels.sampling_reference import (
    sample_reference,
    shaped_logits,
    verify_reference,
)
from triton_kernels.attention import WorkList, attention_reference
from triton_kernels.layers.activation import activate_reference
from triton_kernels.layers.kv_write import kv_write_reference
from triton_kernels.layers.norm import norm_rows_reference
from triton_kernels.sampling.inputs import (
    GREEDY,
    Distributions,
    DraftTokens,
    LogitsBatch,
    Proposals,
    Rows,
)
from triton_kernels.verification.kernel import VerifyOutput


def use_references(stream: Stream, patch: pytest.MonkeyPatch) -> None:
    planned: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(query_starts: Tensor, contexts: Tensor, work: WorkList) -> None:
        planned[id(work.items)] = query_starts.clone(), contexts.clone()

    def attention(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        tables: Tensor,
        out: Tensor,
        work: WorkList,
        *,
        scale: float,
        first_key: int,
        soft_cap: float | None,
        sinks: Tensor | None,
        k_scale: float,
        v_scale: float,
        num_programs: int,
    ) -> None:
        starts, contexts = planned[id(work.items)]
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        shape: Any = {"scale": scale, "soft_cap": soft_cap, "window": work.window}
        shape |= {"first_key": first_key, "sinks": sinks}
        result = attention_reference(
            q, k_pages, v_pages, tables, starts, contexts, **shape, **scales
        )
        for start, stop in itertools.pairwise(starts.tolist()):
            if work.queries[0] <= stop - start <= work.queries[1]:
                out[start:stop] = result[start:stop].view(stop - start, -1)

    for module, name, reference, result in (
        (attend, "plan", plan, _nothing),
        (attend, "attention", attention, _nothing),
        (layers, "kv_write", kv_write_reference, _nothing),
        (modelling, "kv_write", kv_write_reference, _nothing),
        (products, "norm_rows", norm_rows_reference, _like),
        (layers, "activate", activate_reference, _half),
        (heads, "norm_rows", norm_rows_reference, _like),
        (drafting, "draw", _draw, _nothing),
        (verifying, "verify_logits", _verify, _verdict),
    ):

        def launch(*args: Any, reference: Any = reference, **options: Any) -> Any:
            options.pop("early", None)
            return reference(*args, **options)

        patch.setattr(module, name, as_queued(stream, launch, result))


def _nothing(*_: object, **__: object) -> None:
    return None


def _like(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x)


def _half(rows: Tensor, *_: object, gated: bool, **__: object) -> Tensor:
    return rows.new_empty(len(rows), rows.shape[1] // (1 + gated))


def _verdict(batch: Any, starts: Tensor, *_: object, **__: object) -> VerifyOutput:
    return VerifyOutput(*(torch.empty_like(starts) for _ in VerifyOutput._fields))


def _draw(
    batch: LogitsBatch,
    purpose: int,
    *,
    dists: Distributions,
    first: int,
    step: int,
    listed: Tensor | None,
) -> None:
    at = first + step * torch.arange(len(batch.logits))
    dists.tokens[at, 0] = sample_reference(*batch, purpose)
    dists.tokens[at, 1] = batch.logits.isfinite().all(dim=-1).int()
    if listed is not None:
        x = shaped_logits(batch.logits, batch.rows, batch.drafts, batch.shaping)
        logits, shaped = overlaid(batch, batch.logits, batch.rows, x)
        batch.logits.copy_(torch.where(batch.logits.isfinite(), logits, batch.logits))
        listed.copy_(shaped)


def _verify(
    batch: LogitsBatch, starts: Tensor, proposals: Proposals | None, *, filtered: bool
) -> VerifyOutput:
    """Verify by the reference; `verify_reference` does not support slots without logits or padding
    rows."""
    modes, requests = batch.requests.modes, batch.requests
    filters = (
        (requests.top_k < batch.logits.shape[1])
        | (requests.top_p < torch.inf)
        | (requests.min_p > 0)
    )
    assert filtered >= bool((filters & (modes != GREEDY)).any())
    deciding = torch.unique(batch.rows.requests[: _num_rows(batch)]).long()
    decision = VerifyOutput(*(torch.zeros(len(starts), dtype=torch.int32) for _ in range(3)))
    if not len(deciding):
        return decision
    renumbered = torch.zeros(len(starts), dtype=torch.int32)
    renumbered[deciding] = torch.arange(len(deciding), dtype=torch.int32)

    def own(fields: Any) -> Any:
        return type(fields)(*(field[deciding] for field in fields))

    counts = batch.drafts.counts[deciding]
    flat = [
        int(start) + j
        for start, count in zip(batch.drafts.starts[deciding], counts, strict=True)
        for j in range(int(count))
    ]
    where = torch.tensor(flat, dtype=torch.int64)
    tokens = batch.drafts.tokens[where]
    rows = _num_rows(batch)
    owners = renumbered[batch.rows.requests[:rows].long()]
    compact = LogitsBatch(
        batch.logits[:rows],
        Rows(owners, batch.rows.depths[:rows]),
        own(batch.requests),
        own(batch.noise),
        DraftTokens(tokens, (counts.cumsum(0) - counts).int(), counts),
        None if batch.shaping is None else own(batch.shaping),
    )
    drawn = None
    if proposals is not None:
        # Drafts by lookups come after drawn ones, and were drawn from nothing.
        where = where.clamp(max=len(proposals.logits) - 1)
        drawn = Proposals(
            proposals.logits[where],
            None if proposals.listed is None else proposals.listed[where],
            Distributions(*(field[where] for field in proposals.dists)),
            proposals.certain[deciding],
        )
    for field, values in zip(decision, verify_reference(compact, drawn), strict=True):
        field[deciding] = values.int()
    return decision


def _num_rows(batch: LogitsBatch) -> int:
    """Count rows without padding, which belongs to the last request."""
    return int((batch.rows.requests < len(batch.requests.modes) - 1).sum())
