"""Other people's kernels over the same inputs, each called as its own users call it.

torch is always there. vLLM's Triton kernels, FlashInfer (compiled ahead of time) and Liger come
from the folder `--peers`: `vllm/` (see `vllm_peer.FILES`), `flashinfer/`, `liger_kernel/`. What
cannot be had says why.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import vllm_peer
from bench.gpu.batches import Case
from bench.gpu.cells import Absent
from bench.gpu.grid import CHUNK, DECODE, VERIFY, workload
from bench.gpu.steps import Step
from bench.gpu.timing import Call
from bench.gpu.world import Bench

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
# As vLLM's backend sets them for graphs of decodes.
_SEGMENTS, _GRID_2D, _MOST_3D_QUERY = 16, 128, 8


def _supplied(bench: Bench, name: str) -> Any:
    """A package from the folder of peers, or an installed one."""
    if bench.peers is not None and str(bench.peers) not in sys.path:
        sys.path.insert(0, str(bench.peers))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{name.partition('.')[0]} is not supplied ({error})") from None


def _vllm(bench: Bench) -> Any:
    if bench.peers is None:
        raise Absent("vllm's files are not supplied (--peers)")
    try:
        return vllm_peer.load(bench.peers)
    except FileNotFoundError as error:
        raise Absent(str(error)) from None


# --- attention ------------------------------------------------------------------------------------


def _equal_lengths(step: Step) -> tuple[int, int]:
    query, context = step.queries[0]
    if any(q != (query, context) for q in step.queries):
        raise Absent("needs sequences of one length")
    return query, context


def _dense(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, heads, Q, D]; k and v [B, kv_heads, L, D]: random, contiguous, no pages."""
    query, context = _equal_lengths(step)
    shape, batch = step.shape, len(step.queries)
    q = step.q.reshape(batch, query, shape.kv_heads * shape.group, shape.head_dim)
    kv = (batch, shape.kv_heads, context, shape.head_dim)
    k, v = (torch.randn(kv, dtype=step.q.dtype, device=step.q.device) for _ in range(2))
    return q.transpose(1, 2).contiguous(), k, v


def sdpa(bench: Bench, steps: Sequence[Step]) -> list[Call]:
    query, context = _equal_lengths(steps[0])
    causal, mask = query == context, None
    if 1 < query < context:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(query, context)
    attend = functools.partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return [functools.partial(attend, *_dense(step)) for step in steps]


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(bench: Bench, steps: Sequence[Step]) -> list[Call]:
    from torch.nn.attention.flex_attention import create_block_mask

    if steps[0].queries not in [tuple(workload(name)) for name in (DECODE, VERIFY, CHUNK)]:
        raise Absent("compiled for three workloads only: each takes many seconds")
    query, context = _equal_lengths(steps[0])

    def causal(b: Tensor, h: Tensor, at: Tensor, key: Tensor) -> Tensor:
        return key <= at + (context - query)

    mask = create_block_mask(causal, None, None, query, context, device=str(bench.device))
    attend = functools.partial(_compiled_flex(), block_mask=mask, enable_gqa=True)
    return [functools.partial(attend, *_dense(step)) for step in steps]


def vllm_attention(bench: Bench, steps: Sequence[Step]) -> list[Call]:
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


def flashinfer_attention(bench: Bench, steps: Sequence[Step]) -> list[Call]:
    return [_flashinfer(bench, step) for step in steps]


def _flashinfer(bench: Bench, step: Step) -> Call:
    """Planned on the host, which is not timed, as it is once a step for all layers."""
    package = _flashinfer_package(bench)
    shape, queries, page = step.shape, step.queries, step.pool.page_tokens
    heads, device = shape.kv_heads * shape.group, bench.device
    counts = torch.tensor([-(-q.context_tokens // page) for q in queries], dtype=torch.int32)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
    tables = step.tables.cpu()
    indices = torch.cat([table[:count] for table, count in zip(tables, counts, strict=True)])
    last = torch.tensor([(q.context_tokens - 1) % page + 1 for q in queries], dtype=torch.int32)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    pages = [tensor.to(device) for tensor in (indptr, indices, last)]
    types = {"q_data_type": step.q.dtype, "kv_data_type": step.q.dtype}
    if all(q.query_tokens == 1 for q in queries):
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(*pages, heads, shape.kv_heads, shape.head_dim, page, **types)
    else:
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            step.starts, *pages, heads, shape.kv_heads, shape.head_dim, page, causal=True, **types
        )
    q = step.q.reshape(len(step.q), heads, shape.head_dim)
    return functools.partial(wrapper.run, q, tuple(step.pool), out=torch.empty_like(q))


def _flashinfer_package(bench: Bench) -> Any:
    if bench.device.type != "cuda":
        raise Absent("flashinfer needs a GPU")
    if bench.peers is not None and not (bench.peers / "flashinfer/data/aot").is_dir():
        raise Absent("flashinfer/data/aot is not supplied; compiling it here takes minutes")
    return _supplied(bench, "flashinfer")


# --- sampling and verification --------------------------------------------------------------------


def _expanded(case: Case) -> dict[str, Tensor]:
    """What vLLM's second runner passes about rows."""
    batch = case.batch
    of, depths = batch.rows.requests.long(), batch.rows.depths.long()
    return {
        "pos": batch.noise.positions[of] + depths,
        "expanded_idx_mapping": batch.rows.requests,
        "temperature": batch.requests.temperatures,
        "seed": batch.noise.keys[:, 0].contiguous(),
    }


def vllm_v2(bench: Bench, cases: Sequence[Case]) -> list[Call]:
    """The rejection sampler of vLLM's second model runner: from logits, no probabilities."""
    reject = _vllm(bench).rejection_sample_v2
    return [functools.partial(reject, **_v2_arguments(case)) for case in cases]


def _v2_arguments(case: Case) -> dict[str, Any]:
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
        **_expanded(case),
    }


def vllm_v1(bench: Bench, cases: Sequence[Case]) -> list[Call]:
    """The rejection sampler of vLLM's first runner, given for free: fp32 logits, the drafts'
    probabilities, and the bonus tokens."""
    reject = _vllm(bench).rejection_sample_v1
    calls = []
    for case in cases:
        if case.proposals is None:
            raise Absent("compared where drafts were drawn from a law")
        batch, counts = case.batch, case.batch.drafts.counts
        drafted = batch.rows.depths < counts[batch.rows.requests.long()]

        class Metadata:
            all_greedy, all_random = False, True
            temperature = batch.requests.temperatures
            generators: dict[int, torch.Generator] = {}

        calls.append(
            functools.partial(
                reject,
                batch.drafts.tokens,
                counts.tolist(),
                int(counts.max()),
                counts.cumsum(0).to(torch.int32),
                case.proposals.logits.softmax(dim=-1, dtype=torch.float32),
                batch.logits[drafted].float(),
                torch.zeros(len(counts), 1, dtype=torch.int32, device=bench.device),
                Metadata,
            )
        )
    return calls


def vllm_gumbel(bench: Bench, cases: Sequence[Case]) -> list[Call]:
    sample = _vllm(bench).gumbel_sample
    return [
        functools.partial(
            sample, case.batch.logits, apply_temperature=True, is_drafting=False, **_expanded(case)
        )
        for case in cases
    ]


def torch_sample(bench: Bench, cases: Sequence[Case]) -> list[Call]:
    """Softmax and an exponential race, as the plain sampler of most engines."""

    def draw(logits: Tensor, temperatures: Tensor) -> Tensor:
        probabilities = (logits.float() / temperatures[:, None]).softmax(dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    return [
        functools.partial(draw, case.batch.logits, case.batch.requests.temperatures)
        for case in cases
    ]


def flashinfer_sample(bench: Bench, cases: Sequence[Case]) -> list[Call]:
    package = _flashinfer_package(bench)
    return [
        functools.partial(package.sampling.sampling_from_logits, case.batch.logits.float())
        for case in cases
    ]


# --- token by token: build(bench, *inputs) makes the launch ---------------------------------------


@functools.cache
def _compiled(name: str) -> Any:
    return torch.compile({"norm": _norm, "add_norm": _add_norm, "silu": _silu}[name], dynamic=False)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[1:], weight, 1e-6)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    residual.add_(x)
    return F.rms_norm(residual, x.shape[1:], weight, 1e-6)


def _silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def inductor_norm(bench: Bench, x: Tensor, weight: Tensor, residual: Tensor | None) -> Call:
    if residual is None:
        return functools.partial(_compiled("norm"), x, weight)
    return functools.partial(_compiled("add_norm"), x, residual, weight)


def inductor_silu(bench: Bench, gate_up: Tensor) -> Call:
    return functools.partial(_compiled("silu"), gate_up)


def liger_norm(bench: Bench, x: Tensor, weight: Tensor, residual: Tensor | None) -> Call:
    if residual is None:
        norm = _supplied(bench, "liger_kernel.ops.rms_norm").rms_norm_forward
        return functools.partial(norm, x, weight, 1e-6, 0.0, "llama", True)
    add_norm = _supplied(bench, "liger_kernel.ops.fused_add_rms_norm").fused_add_rms_norm_forward
    return functools.partial(add_norm, x, residual, weight, 1e-6, 0.0, "llama")


def liger_silu(bench: Bench, gate_up: Tensor) -> Call:
    forward = _supplied(bench, "liger_kernel.ops.swiglu").swiglu_forward
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
    return functools.partial(forward, gate, up)


Build = Callable[..., Any]
ATTENTION: dict[str, Build] = {
    "vllm triton": vllm_attention,
    "flashinfer": flashinfer_attention,
    "torch sdpa, no pages": sdpa,
    "torch flex, no pages": flex,
}
VERIFICATION: dict[str, Build] = {"vllm triton v2": vllm_v2, "vllm triton v1": vllm_v1}
SAMPLING: dict[str, Build] = {
    "torch": torch_sample,
    "vllm triton": vllm_gumbel,
    "flashinfer": flashinfer_sample,
}
NORM: dict[str, Build] = {"torch inductor": inductor_norm, "liger": liger_norm}
ACTIVATION: dict[str, Build] = {"torch inductor": inductor_silu, "liger": liger_silu}
# What also runs without a GPU: the others compile for one, or are compiled for it.
ANYWHERE = frozenset(("torch", "torch sdpa, no pages", "vllm triton", "vllm triton v1"))
