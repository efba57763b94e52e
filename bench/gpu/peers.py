"""Peer kernels over the same inputs, called as their own users call them: torch's, and vLLM's
Triton kernels if `--peers` holds vLLM. A peer that is not available raises `NotAvailable`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.batches import VerifyCase
from bench.gpu.cells import NotAvailable
from bench.gpu.environment import Bench
from bench.gpu.steps import StepQueries
from bench.gpu.timing import Call
from bench.gpu.vllm_engine import unpack


@functools.cache
def load_vllm(bench: Bench) -> Callable[..., Any]:
    """Return vLLM's rejection sampler, whose import takes seconds. Raises `NotAvailable` without
    vLLM."""
    if bench.peers is None:
        raise NotAvailable("vLLM is not supplied (--peers)")
    sys.path.append(str(unpack(bench.peers, bench.out / "peers")))
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    return rejection_sample


# --- attention ------------------------------------------------------------------------------------


def _equal_lengths(step: StepQueries) -> tuple[int, int]:
    query, context = step.queries[0]
    if any(q != (query, context) for q in step.queries):
        raise NotAvailable("needs sequences of one length")
    return query, context


def _dense(step: StepQueries) -> tuple[Tensor, Tensor, Tensor]:
    """Return random contiguous tensors without pages: q [B, heads, Q, D]; k, v [B, kv_heads, L,
    D]."""
    query, context = _equal_lengths(step)
    shape, batch = step.shape, len(step.queries)
    q = step.q.reshape(batch, query, shape.kv_heads * shape.group, shape.head_dim)
    kv = (batch, shape.kv_heads, context, shape.head_dim)
    k, v = (torch.randn(kv, dtype=step.q.dtype, device=step.q.device) for _ in range(2))
    return q.transpose(1, 2).contiguous(), k, v


def sdpa(bench: Bench, steps: Sequence[StepQueries]) -> list[Call]:
    query, context = _equal_lengths(steps[0])
    causal, mask = query == context, None
    if 1 < query < context:
        mask = causal_lower_right(query, context)
    attend = functools.partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return [functools.partial(attend, *_dense(step)) for step in steps]


# --- sampling and verification --------------------------------------------------------------------


def vllm_verification(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    """Return launches of the rejection sampler of vLLM's second model runner, which takes
    logits."""
    reject = load_vllm(bench)
    return [functools.partial(reject, **_of_verification(case)) for case in cases]


def _of_verification(case: VerifyCase) -> dict[str, Any]:
    batch = case.batch
    counts = batch.drafts.counts.long()
    size, k = len(counts), int(counts.max())
    rows = batch.rows.requests.long(), batch.rows.depths.long()
    drafted = rows[1] > 0  # row 1 + j holds draft j
    sampled = torch.zeros(len(batch.logits), dtype=torch.int64, device=counts.device)
    sampled[drafted] = batch.drafts.tokens.long()
    draft_logits = None
    if case.proposals is not None:
        draft_logits = case.proposals.logits.view(size, k, -1)
    ends = (counts + 1).cumsum(0)
    return {
        "target_logits": batch.logits,
        "draft_logits": draft_logits,
        "draft_sampled": sampled,
        "cu_num_logits": torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
        "idx_mapping": torch.arange(size, dtype=torch.int32, device=counts.device),
        "expanded_local_pos": batch.rows.depths,
        "num_speculative_steps": k,
        "pos": batch.noise.positions[rows[0]] + rows[1],
        "expanded_idx_mapping": batch.rows.requests,
        "temperature": batch.requests.temperatures,
        "seed": batch.noise.keys[:, 0].contiguous(),
    }


Build = Callable[..., Any]
ATTENTION: dict[str, Build] = {"torch sdpa, no pages": sdpa}
VERIFICATION: dict[str, Build] = {"vllm": vllm_verification}
# Implementations that also run without a GPU.
RUN_WITHOUT_GPU = frozenset(ATTENTION)
