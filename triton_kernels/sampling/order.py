"""Device functions that the sampling kernels share: weights and order of tokens, and races.

Tokens of a row are ordered by their distance y = (maximum - logit) / temperature >= 0, ties by id.
The *code* of a token is one integer with this order: the bits of y above the id. Filters keep a
prefix of that order; its end, the *cut*, is a code, too.

A *race* draws a token (Gumbel-max): each token gets an exponential divided by its weight, and the
least wins.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import streams as noise
from triton_kernels.sampling import inputs

GREEDY = tl.constexpr(inputs.GREEDY)
COUPLED_MODE = tl.constexpr(inputs.COUPLED)
REJECTION = tl.constexpr(inputs.REJECTION)
VERIFY = tl.constexpr(inputs.VERIFY)
DRAFT = tl.constexpr(noise.DRAFT)
RESIDUAL = tl.constexpr(noise.RESIDUAL)
BONUS = tl.constexpr(noise.BONUS)
COUPLED = tl.constexpr(noise.COUPLED)

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # logit of a forbidden token
LAST = tl.constexpr(0x7F800001 << 32)  # a cut after every token
ID = tl.constexpr(0xFFFFFFFF)  # mask of the id in a code
NEVER = tl.constexpr(0x7F800000 << 32)  # race key of a token that cannot win


@jit
def lowest_of(kind: tl.constexpr):
    """Return the least finite number of a type of logits, the mark of a forbidden token."""
    lowest = -3.4028234663852886e38
    if kind == tl.bfloat16:
        lowest = -3.3895313892515355e38
    elif kind == tl.float16:
        lowest = -65504.0
    return lowest


@jit
def cleaned(raw):
    """Return logits as fp32, LOWEST where forbidden or not finite, and whether they are finite."""
    x = raw.to(tl.float32)
    sound = tl.abs(x) < float("inf")
    allowed = sound
    if raw.dtype == tl.float16:
        allowed = allowed & (x > lowest_of(raw.dtype))
    return tl.where(allowed, x, LOWEST), sound


@jit
def inverse_of(requests, request):
    """Return 1 / temperature, at most the largest finite number."""
    return tl.minimum(1.0 / tl.load(requests.temperatures + request), 3.4028234663852886e38)


@jit
def weight_of(y):
    return tl.exp2(y * -LOG2_E)


@jit
def key_of(y):
    """Return the bits of distances; they sort as the distances do."""
    return y.to(tl.int32, bitcast=True).to(tl.int64)


@jit
def code_of(y, ids):
    return (key_of(y) << 32) | ids


@jit
def distance_of(code):
    return (code >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def is_filtered(requests, request, vocab):
    """Return whether a request is sampled and has a filter."""
    filtered = tl.load(requests.top_k + request) < vocab
    filtered = filtered | (tl.load(requests.top_p + request) < float("inf"))
    filtered = filtered | (tl.load(requests.min_p + request) > 0.0)
    return filtered & (tl.load(requests.modes + request) != GREEDY)


@jit
def race_of(batch, certain_ptr, request, depth, purpose, any_drawn):
    """Return whether a row needs a race, the purpose of its noise, and the token that must not win
    (-1: none).

    Coupled rows have a purpose of their own, others `purpose`. With VERIFY, a row races if its
    winner may be the next token: after all drafts, or as the replacement of a draft chosen with
    certainty. `any_drawn` is 0 if no draft was drawn. Otherwise `certain_ptr` int32 [B] is 1 for
    the requests whose drafts were chosen with certainty."""
    mode = tl.load(batch.requests.modes + request)
    has_draft = (mode >= REJECTION) & (depth < tl.load(batch.drafts.counts + request))
    has_draft = has_draft & (purpose == VERIFY)
    sampled = (any_drawn != 0) & (tl.load(certain_ptr + request) == 0)
    at = tl.load(batch.drafts.starts + request) + depth
    excluded = tl.load(batch.drafts.tokens + at, mask=has_draft, other=-1)
    stream = tl.where(has_draft, RESIDUAL, tl.where(purpose == VERIFY, BONUS, purpose))
    stream = tl.where(mode == COUPLED_MODE, COUPLED, stream)
    return (mode != GREEDY) & ~(has_draft & sampled), stream, excluded


@jit
def draw_of(coordinates, request, depth):
    """Return seed, position and choice of a row's noise."""
    seed = noise_device.load_seeds(coordinates.keys, request)
    return (
        seed,
        tl.load(coordinates.positions + request) + depth,
        tl.load(coordinates.choices + request),
    )


@jit
def race_key(exponentials, y, ids):
    """Return race keys, E / weight above the id: the least wins, ties go to the lowest id."""
    return code_of(exponentials * tl.exp2(y * LOG2_E), ids)
