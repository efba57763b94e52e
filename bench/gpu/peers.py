"""Other people's kernels over the same inputs, each called as its own users call it.

torch is always there. vLLM's Triton kernels come from the folder `--peers`: `vllm/` (see
`vllm_peer.FILES`). What cannot be had says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import vllm_peer
from bench.gpu.batches import VerifyCase
from bench.gpu.cells import Absent
from bench.gpu.steps import StepQueries
from bench.gpu.timing import Call
from bench.gpu.world import Bench

# As vLLM's backend sets them for graphs of decodes.
_SEGMENTS, _GRID_2D, _MOST_3D_QUERY = 16, 128, 8


def _vllm(bench: Bench) -> Any:
    if bench.peers is None:
        raise Absent("vllm's files are not supplied (--peers)")
    try:
        return vllm_peer.load(bench.peers)
    except FileNotFoundError as error:
        raise Absent(str(error)) from None


# --- attention ------------------------------------------------------------------------------------


def _equal_lengths(step: StepQueries) -> tuple[int, int]:
    query, context = step.queries[0]
    if any(q != (query, context) for q in step.queries):
        raise Absent("needs sequences of one length")
    return query, context


def _dense(step: StepQueries) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, heads, Q, D]; k and v [B, kv_heads, L, D]: random, contiguous, no pages."""
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
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(query, context)
    attend = functools.partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return [functools.partial(attend, *_dense(step)) for step in steps]


def vllm_attention(bench: Bench, steps: Sequence[StepQueries]) -> list[Call]:
    unified = _vllm(bench).unified_attention
    shape, queries, device = steps[0].shape, steps[0].queries, bench.device
    heads = shape.kv_heads * shape.group
    threshold = _GRID_2D // shape.kv_heads
    segments = (threshold * _MOST_3D_QUERY, heads, _SEGMENTS)
    descale = torch.ones(1, device=device).expand(len(queries), shape.kv_heads)
    common = {
        "max_seqlen_q": max(q.query_tokens for q in queries),
        "max_seqlen_k": max(q.context_tokens for q in queries),
        "softmax_scale": steps[0].scale,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": descale,
        "v_descale": descale,
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.empty(*segments, shape.head_dim, device=device),
        "softmax_segm_max": torch.empty(segments, device=device),
        "softmax_segm_expsum": torch.empty(segments, device=device),
    }
    return [
        functools.partial(
            unified,
            q=q,
            k=step.pool.k_pages,
            v=step.pool.v_pages,
            out=torch.empty_like(q),
            cu_seqlens_q=step.starts,
            seqused_k=step.contexts,
            block_table=step.tables,
            **common,
        )
        for step in steps
        for q in [step.q.reshape(len(step.q), heads, shape.head_dim)]
    ]


# --- sampling and verification --------------------------------------------------------------------


def vllm_verification(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    """The rejection sampler of vLLM's second model runner: from logits, no probabilities."""
    reject = _vllm(bench).rejection_sample
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


def torch_sample(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    """Softmax and an exponential race, as the plain sampler of most engines."""

    def draw(logits: Tensor, temperatures: Tensor) -> Tensor:
        probabilities = (logits.float() / temperatures[:, None]).softmax(dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    return [
        functools.partial(draw, case.batch.logits, case.batch.requests.temperatures)
        for case in cases
    ]


# --- token by token -------------------------------------------------------------------------------


@functools.cache
def inductor(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's compiler makes of a kernel's plain version."""
    return torch.compile(plain, dynamic=False)


Build = Callable[..., Any]
ATTENTION: dict[str, Build] = {
    "vllm triton": vllm_attention,
    "torch sdpa, no pages": sdpa,
}
VERIFICATION: dict[str, Build] = {"vllm triton v2": vllm_verification}
SAMPLING: dict[str, Build] = {"torch": torch_sample}
# What also runs without a GPU: the others compile for one, or are compiled for it.
ANYWHERE = frozenset(("torch", "torch sdpa, no pages", "vllm triton"))
