"""Block verification from logits. `cbatch/runtime/sampling/block_verification.py` defines the same
on probabilities.

`decide_kernel` has stored the target's probabilities of the drafts, and the joint ratios c along
them. For sampled drafts, `residual_kernel` has stored the mass R of max(0, c p - q) after each
draft but the last. The kernel here draws a coin for each draft.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import streams as noise
from triton_kernels.sampling import distributions as dist
from triton_kernels.sampling import launch, order

ACCEPT = tl.constexpr(noise.ACCEPT)
DEPTH_STEP = tl.constexpr(noise.DEPTH_STEP)


@jit
def joint_ratio(weight, q):
    """Return min(1, c p / q) for `weight` = c p; 0 if the target forbids the draft."""
    ratio = tl.where(weight >= q, 1.0, weight / tl.where(q > 0.0, q, 1.0))
    return tl.where(weight > 0.0, ratio, 0.0)


@jit
def coin_accepts(u, mass, ratio):
    """Return whether u <= h = R / (R + 1 - c), with u in (0, 1]."""
    return u * (mass + (1.0 - ratio)) <= mass


@jit(
    do_not_specialize=["num_tiles", "any_drawn"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def coins_kernel(
    batch, starts_ptr, certain_ptr, dists, q_dists, decision, chances_ptr, ratios_ptr, masses_ptr,
    num_tiles, any_drawn, TILES: tl.constexpr,
):  # fmt: skip
    """Accept the drafts of a block up to the last one whose coin succeeds. The next token is the
    one drawn by the scan; `finish_kernel` replaces it if a sampled draft is rejected."""
    request = tl.program_id(0)
    if tl.load(batch.requests.modes + request) == order.BLOCK_MODE:
        count = tl.load(batch.drafts.counts + request)
        start, first_draft = tl.load(starts_ptr + request), tl.load(batch.drafts.starts + request)
        sampled = (any_drawn != 0) & (tl.load(certain_ptr + request) == 0)
        seed, position, choice = order.draw_of(batch.noise, request, 0)
        one = tl.zeros([1], tl.int64)
        accepted = count * 0
        for j in range(count):
            row = start + j
            weight = tl.load(ratios_ptr + row) * tl.load(chances_ptr + row)
            q_at = q_dists.floats + (first_draft + j) * dist.DIST_FIELDS + dist.DIST_CHANCE
            q = tl.load(q_at, mask=sampled, other=1.0)
            words = noise_device.scalar_words(
                seed, position + j + one, choice, (j + one) * DEPTH_STEP + ACCEPT
            )
            u = tl.max(noise_device.uniform(words), axis=0)
            last = j + 1 == count
            ratio = tl.load(ratios_ptr + row + 1)
            tile = tl.arange(0, TILES)
            masses = masses_ptr + (row + 1).to(tl.int64) * num_tiles + tile
            in_range = sampled & ~last & (tile < num_tiles)
            mass = tl.sum(tl.load(masses, mask=in_range, other=0.0), axis=0)
            # The residual after a certain draft is all of p but the next draft.
            chance = tl.load(chances_ptr + row + 1, mask=~last, other=0.0)
            mass = tl.where(sampled, mass, ratio * (1.0 - chance))
            accepts = tl.where(last, u * q <= weight, coin_accepts(u, mass, ratio))
            accepted = tl.where((weight > 0.0) & accepts, j + 1, accepted)
        tl.store(decision.num_accepted + request, accepted)
        tl.store(decision.next_tokens + request, tl.load(dists.tokens + 2 * (start + accepted)))


def verify_blocks(kernel_args: dict[str, Any], num_requests: int) -> None:
    """Verify the requests of mode BLOCK; `kernel_args` are those of `kernel.verify_logits`."""
    arguments = {"masses_ptr": kernel_args["scanned"].tiles} | kernel_args
    launch.launch(coins_kernel, (num_requests,), arguments, launch.CompileOptions(1))
