"""One kernel between the fused QKV projection and attention: QK norm, RoPE and KV write.

A row of the projection is [kv_heads, group + 2, head_dim]: for each KV head its query heads, then
its K, then its V. The two dimensions of a rotary pair are adjacent (`interleave_halves`). Queries
are rotated in place; K and V are written to their slot. Arithmetic is fp32, and elementwise except
for the sums of norms over one row. So a row's bits depend on that row only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels.build.check import check_tensor
from triton_kernels.build.hopper import is_hopper, launch_options
from triton_kernels.build.jit import jit

_MAX_FP8 = {
    dtype: torch.finfo(dtype).max
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
}


@jit
def kv_write_kernel(
    fused_ptr, k_ptr, v_ptr, positions_ptr, slots_ptr, cos_sin_ptr, weight_ptr, scales_ptr, eps,
    k_scale, v_scale, stride_token, stride_page, stride_slot, stride_kv_head, GROUP: tl.constexpr,
    ROLES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr,
    MOST: tl.constexpr, ROTATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Handle one (token, KV head). `ROLES` is group + 2 rounded up to a power of two. `scales_ptr`:
    factors of queries and K of each token, where all heads are normed together."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    roles, dims = tl.arange(0, ROLES)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    inside, rotated = dims < HEAD_DIM, roles <= GROUP
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    rotation = tl.load(cos_sin_ptr + position * HEAD_DIM + dims, mask=inside, other=0.0)
    if weight_ptr is not None:
        weight_at = weight_ptr + roles * HEAD_DIM + dims
        if scales_ptr is not None:
            weight_at += kv_head * ((GROUP + 1) * HEAD_DIM)
        weight = tl.load(weight_at, mask=inside & rotated, other=1.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row_ptr = fused_ptr + token * stride_token + kv_head * ((GROUP + 2) * HEAD_DIM)
    valid = inside & (roles < GROUP + 2)
    x = tl.load(row_ptr + roles * HEAD_DIM + dims, mask=valid, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        if scales_ptr is None:
            mean = tl.sum(x * x, 1, keep_dims=True) / HEAD_DIM
            scale = 1.0 / tl.sqrt_rn(mean + eps)
        else:
            scale = tl.load(scales_ptr + token * 2 + tl.where(roles == GROUP, 1, 0))
        x = tl.where(rotated, x * scale * (1.0 if ROTATED else weight), x)
    rotation = tl.broadcast_to(rotation, [ROLES, BLOCK_DIM])
    cos, sin = tl.split(tl.reshape(rotation, [ROLES, BLOCK_DIM // 2, 2]))
    a, b = tl.split(tl.reshape(x, [ROLES, BLOCK_DIM // 2, 2]))
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    x = tl.where(rotated, tl.reshape(tl.join(real, imaginary), [ROLES, BLOCK_DIM]), x)
    if ROTATED:  # a rotation changes no norm
        x = tl.where(rotated, x * weight, x)

    narrow = x.to(fused_ptr.dtype.element_ty)
    inside = inside & (slot >= 0)  # padding tokens are not written
    tl.store(row_ptr + roles * HEAD_DIM + dims, narrow, mask=inside & (roles < GROUP))
    if MOST is not None:
        x = tl.where(roles == GROUP, x / k_scale, x / v_scale)
        x = tl.minimum(tl.maximum(x, -MOST), MOST)
    at = (slot // PAGE).to(tl.int64) * stride_page + (slot % PAGE) * stride_slot
    at += kv_head * stride_kv_head
    stored = x.to(k_ptr.dtype.element_ty)
    tl.store(k_ptr + at + roles * 0 + dims, stored, mask=inside & (roles == GROUP))
    tl.store(v_ptr + at + roles * 0 + dims, stored, mask=inside & (roles == GROUP + 1))


@jit
def whole_norm_kernel(
    fused_ptr, scales_ptr, eps, stride_token, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    ROLES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store 1 / rms of all queries of one token, and of all its keys."""
    if EARLY:
        gdc_wait()
    token, roles = tl.program_id(0).to(tl.int64), tl.arange(0, ROLES)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    sums = tl.zeros([ROLES], tl.float32)
    for kv_head in range(KV_HEADS):
        at = fused_ptr + token * stride_token + kv_head * ((GROUP + 2) * HEAD_DIM)
        at += roles[:, None] * HEAD_DIM + dims
        valid = (dims < HEAD_DIM) & (roles <= GROUP)[:, None]
        x = tl.load(at, mask=valid, other=0.0).to(tl.float32)
        sums += tl.sum(x * x, 1)
    keys = tl.sum(tl.where(roles == GROUP, sums, 0.0), 0) / (KV_HEADS * HEAD_DIM)
    queries = tl.sum(tl.where(roles < GROUP, sums, 0.0), 0) / (KV_HEADS * GROUP * HEAD_DIM)
    tl.store(scales_ptr + token * 2, 1.0 / tl.sqrt_rn(queries + eps))
    tl.store(scales_ptr + token * 2 + 1, 1.0 / tl.sqrt_rn(keys + eps))


def kv_write(
    fused: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    qk_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms_rotated: bool = False,
    early: bool = False,
) -> None:
    """Rotate the queries of `fused` in place; write its K and V to the pool.

    fused [T, kv_heads, group + 2, head_dim], contiguous rows; positions and slots int32 [T]. A slot
    is `page * page_tokens + offset`, or -1 for a row of padding, which is not changed. cos_sin fp32
    [positions, head_dim / 2, 2] by position (`RotaryTable.cos_sin`). k_pages and v_pages [pages,
    page_tokens, kv_heads, head_dim] have the same strides. Their type is that of `fused` or fp8,
    which stores K / `k_scale` and V / `v_scale`, clamped to its range. qk_weight fp32 [group + 1,
    head_dim]: RMSNorm of each query head and K before the rotation; [kv_heads, group + 1, head_dim]
    norms all query heads of a token together, and all its K. With `norms_rotated`, norms come after
    the rotation. `early` (see `build.hopper`): all inputs but `fused` are read early, and the next
    kernel may begin. Raises ValueError naming the argument that does not fit.
    """
    early = early and is_hopper()
    _check(fused, positions, slots, cos_sin, k_pages, v_pages, qk_weight)
    num_tokens, kv_heads, roles, head_dim = fused.shape
    shape = {"GROUP": roles - 2, "ROLES": triton.next_power_of_2(roles), "HEAD_DIM": head_dim}
    shape |= {"BLOCK_DIM": triton.next_power_of_2(head_dim), "EARLY": early}
    options = {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True, **launch_options(early)}
    scales = None
    if qk_weight is not None and qk_weight.dim() == 3:
        scales = torch.empty(num_tokens, 2, dtype=torch.float32, device=fused.device)
        whole_norm_kernel[(num_tokens,)](
            fused, scales, eps, fused.stride(0), KV_HEADS=kv_heads, **shape, **options
        )
    kv_write_kernel[(num_tokens, kv_heads)](
        fused, k_pages, v_pages, positions, slots, cos_sin, qk_weight, scales, eps, k_scale,
        v_scale, fused.stride(0), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        PAGE=k_pages.shape[1], MOST=_MAX_FP8.get(k_pages.dtype),
        ROTATED=norms_rotated and qk_weight is not None, **shape, **options,
    )  # fmt: skip


def kv_write_reference(
    fused: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    qk_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms_rotated: bool = False,
) -> None:
    """Compute `kv_write` in plain torch."""
    real = slots >= 0
    group = fused.shape[2] - 2
    x = fused[real, :, : group + 1].float()
    if not norms_rotated:
        x = _normed(x, qk_weight, eps)
    rotation = torch.view_as_complex(cos_sin)[positions[real].long()][:, None, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    x = torch.view_as_real(pairs * rotation).flatten(-2)
    if norms_rotated:
        x = _normed(x, qk_weight, eps)
    fused[real, :, :group] = x[:, :, :group].to(fused.dtype)
    slot, page_tokens = slots[real].long(), k_pages.shape[1]
    values = fused[real, :, group + 1].float()
    for pages, rows, scale in ((k_pages, x[:, :, group], k_scale), (v_pages, values, v_scale)):
        largest = _MAX_FP8.get(pages.dtype)
        rows = rows if largest is None else (rows / scale).clamp(-largest, largest)
        pages[slot // page_tokens, slot % page_tokens] = rows.to(pages.dtype)


def _normed(x: Tensor, qk_weight: Tensor | None, eps: float) -> Tensor:
    if qk_weight is None:
        return x
    if qk_weight.dim() == 2:
        return F.rms_norm(x, x.shape[3:], eps=eps) * qk_weight
    parts = x.split([x.shape[2] - 1, 1], dim=2)
    scales = [(part.square().mean((1, 2, 3), keepdim=True) + eps).rsqrt() for part in parts]
    return torch.cat([p * s for p, s in zip(parts, scales, strict=True)], dim=2) * qk_weight


def _check(
    fused: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    qk_weight: Tensor | None,
) -> None:
    if fused.dim() != 4 or fused.shape[2] < 3 or not fused[0].is_contiguous():
        raise ValueError(
            f"fused: {list(fused.shape)} does not fit; give [T, kv_heads, group + 2, head_dim]"
        )
    num_tokens, kv_heads, roles, head_dim = fused.shape
    check_tensor("positions", positions, torch.int32, (num_tokens,))
    check_tensor("slots", slots, torch.int32, (num_tokens,))
    check_tensor("cos_sin", cos_sin, torch.float32, (None, head_dim // 2, 2))
    if qk_weight is not None:
        whole = (kv_heads,) if qk_weight.dim() == 3 else ()
        check_tensor("qk_weight", qk_weight, torch.float32, (*whole, roles - 1, head_dim))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dim() != 4 or tuple(pages.shape[2:]) != (kv_heads, head_dim):
            raise ValueError(
                f"{name}: {list(pages.shape)} does not fit; give [pages, page_tokens, "
                f"{kv_heads}, {head_dim}]"
            )
        if pages.stride() != k_pages.stride() or pages.stride(3) != 1:
            raise ValueError(f"{name}: strides {pages.stride()}; give those of k_pages, the last 1")
        if pages.dtype != k_pages.dtype or pages.dtype not in (fused.dtype, *_MAX_FP8):
            raise ValueError(f"{name}: {pages.dtype}; give {fused.dtype} or an fp8 type")
