"""The noise of `cbatch/core/request/noise.py` in torch, bit for bit, on any device.

int64 arithmetic replaces unsigned words: a product of two 32-bit values wraps modulo 2**64, and
masking after the shift gives its high word exactly. The logarithm is the specified fp32 polynomial.
Each operation is a separate torch operation, so that nothing is fused.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cbatch.core.request.noise import (
    LN2_BITS,
    LOG1P_COEFFICIENT_BITS,
    MASK32,
    PHILOX_M,
    PHILOX_ROUNDS,
    PHILOX_W,
    SMALL_DRAW,
    THREE_QUARTERS_BITS,
    Purpose,
)

DRAFT, ACCEPT, RESIDUAL, BONUS, COUPLED = map(int, Purpose)


@functools.cache
def constants() -> tuple[float, tuple[float, ...]]:
    """Return ln 2 and the polynomial's coefficients, as Python floats that are exact in fp32."""
    bits = [b - (1 << 32) if b >> 31 else b for b in (LN2_BITS, *LOG1P_COEFFICIENT_BITS)]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist()
    return values[0], tuple(values[1:])


def philox4x32(even: Tensor, odd: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Apply Philox4x32-10 to int64 words below 2**32, lane first: `even` has counter words (c0,
    c2), `odd` (c1, c3), `keys` the two key words, each [2, ...]. Return `even` and `odd`."""
    device = even.device
    lanes_first = (2, *(1,) * (even.dim() - 1))
    multiplier = torch.tensor(PHILOX_M, device=device).view(lanes_first)
    weyl = torch.tensor(PHILOX_W, device=device).view(1, *lanes_first)
    rounds = torch.arange(PHILOX_ROUNDS, device=device).view(-1, *(1,) * even.dim())
    round_keys = (keys + rounds * weyl) & MASK32
    for round_key in round_keys.unbind():
        # High and low word of each product go to the other lane. Only the low 32 bits of `odd`
        # matter: it enters by xor, and the result is masked.
        crossed = (even * multiplier).flip(0)
        even = (crossed >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(MASK32)
        odd = crossed
    return even, odd & MASK32


def token_words(
    keys: Tensor, positions: Tensor, choices: Tensor, purposes: Tensor, vocab_size: int
) -> Tensor:
    """Return the word of every token id: int64 [N, vocab_size], each in [0, 2**32).

    `keys` int64 [N, 2] (low and high word of the seed); the others int64 [N].
    """
    groups = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=keys.device)
    return philox_blocks(keys, positions, choices, purposes, groups[None]).flatten(1)[
        :, :vocab_size
    ]


def words_of(
    keys: Tensor, positions: Tensor, choices: Tensor, purposes: Tensor, token_ids: Tensor
) -> Tensor:
    """Return the words of the tokens `token_ids` int64 [N, W]: int64 [N, W]."""
    blocks = philox_blocks(keys, positions, choices, purposes, token_ids >> 2)
    return blocks.gather(-1, (token_ids & 3)[..., None]).squeeze(-1)


def philox_blocks(
    keys: Tensor, positions: Tensor, choices: Tensor, purposes: Tensor, groups: Tensor
) -> Tensor:
    """Return all four words of the counters with first word `groups` ([N or 1, G]): [N, G, 4]."""
    even = torch.stack(torch.broadcast_tensors(groups, choices[:, None]))
    odd = torch.stack((positions, purposes))[:, :, None]
    even, odd = philox4x32(even, odd, keys.t()[:, :, None])
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def scalar_words(keys: Tensor, positions: Tensor, choices: Tensor, purposes: Tensor) -> Tensor:
    """Return one word for each draw (that of token 0): int64 [N]."""
    return token_words(keys, positions, choices, purposes, vocab_size=1)[:, 0]


def uniform(words: Tensor) -> Tensor:
    """Return u in (0, 1], fp32."""
    return (words + 1).to(torch.float32) * 2.0**-32


def exponential(words: Tensor) -> Tensor:
    """Return E = -ln(1 - u) > 0, fp32, in the form of the specification."""
    ln2, coefficients = constants()
    bits = (MASK32 - words).clamp_(min=1).to(torch.float32).view(torch.int32)
    exponent = (bits - THREE_QUARTERS_BITS) >> 23
    fraction = (bits - (exponent << 23)).view(torch.float32)
    small = words < SMALL_DRAW
    r = torch.where(small, -uniform(words), fraction.sub_(1.0))
    e = (32 - exponent).masked_fill_(small, 0).to(torch.float32)
    poly = r * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        poly = poly.add_(coefficient).mul_(r)
    return e.mul_(ln2).sub_(poly.add_(coefficients[0]).mul_(r))
