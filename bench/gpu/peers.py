"""Peer kernels over the same inputs, called as their own users call them: torch's, and vLLM's if
`--peers` holds it. A peer that is not available raises `NotAvailable`."""

from __future__ import annotations

import functools
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.cells import NotAvailable
from bench.gpu.environment import Bench
from bench.gpu.steps import StepQueries, VerifyCase
from bench.gpu.timing import Call


def unpack(bench: Bench) -> Path:
    """Return the folder with the package `vllm` and its requirements, unpacked if need be."""
    if bench.peers is None:
        raise NotAvailable("vLLM is not supplied (--peers)")
    if (bench.peers / "vllm").is_dir():
        return bench.peers
    folder = bench.out / "peers"
    if not (folder / "vllm").is_dir():
        with tarfile.open(bench.peers / "vllm.txz") as packed:
            packed.extractall(folder, filter="tar")
        for wheel in (bench.peers / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
    return folder


@functools.cache
def load_vllm(folder: Path) -> Callable[..., Any]:
    """Return vLLM's rejection sampler, whose import takes seconds."""
    sys.path.append(str(folder))
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    return rejection_sample


def sdpa(steps: Sequence[StepQueries]) -> list[Call]:
    """Return calls of torch's attention over random contiguous tensors without pages: q [B, heads,
    Q, D]; k, v [B, kv_heads, L, D]."""
    query, context = steps[0].queries[0]
    if any(q != (query, context) for q in steps[0].queries):
        raise NotAvailable("needs sequences of one length")
    mask = causal_lower_right(query, context) if 1 < query < context else None
    attend = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=query == context,
        enable_gqa=True,
    )

    def inputs(step: StepQueries) -> list[torch.Tensor]:
        heads, batch = step.heads, len(step.queries)
        q = step.q.reshape(batch, query, heads.kv_heads * heads.group, heads.head_dim)
        kv = torch.randn(
            (2, batch, heads.kv_heads, context, heads.head_dim), dtype=q.dtype, device=q.device
        )
        return [q.transpose(1, 2).contiguous(), *kv]

    return [partial(attend, *inputs(step)) for step in steps]


def vllm_verification(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    """Return launches of the rejection sampler of vLLM's second model runner, which takes
    logits."""
    reject = load_vllm(unpack(bench))
    return [partial(reject, **_of_verification(case)) for case in cases]


def _of_verification(case: VerifyCase) -> dict[str, Any]:
    batch = case.batch
    counts = batch.drafts.counts.long()
    size, k = len(counts), int(counts.max())
    rows = batch.rows.requests.long(), batch.rows.depths.long()
    drafted = rows[1] > 0  # row 1 + j holds draft j
    sampled = torch.zeros(len(batch.logits), dtype=torch.int64, device=counts.device)
    sampled[drafted] = batch.drafts.tokens.long()
    proposals = case.proposals
    return {
        "target_logits": batch.logits,
        "draft_logits": None if proposals is None else proposals.logits.view(size, k, -1),
        "draft_sampled": sampled,
        "cu_num_logits": F.pad((counts + 1).cumsum(0), (1, 0)).to(torch.int32),
        "idx_mapping": torch.arange(size, dtype=torch.int32, device=counts.device),
        "expanded_local_pos": batch.rows.depths,
        "num_speculative_steps": k,
        "pos": batch.noise.positions[rows[0]] + rows[1],
        "expanded_idx_mapping": batch.rows.requests,
        "temperature": batch.requests.temperatures,
        "seed": batch.noise.keys[:, 0].contiguous(),
    }
