"""Initial weights of an EAGLE-3 head: a linear prediction, fitted by least squares.

The target's last hidden state at t + 1, after its norm, is predicted as F x + B e. Here x are the
hidden states read at t, and e is the embedding of the token at t + 1. F is stored in `fc`. B is
approximated by V and output projections, so its rank is at most that of V. One query head of each
KV head is used, and attends only to its own position. All other parts add nothing at first. The fit
takes a minute and saves hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.heads.eagle_net import EagleNet
from tools.heads.lessons import Lesson

RIDGE = 0.02  # ridge term, relative to the mean of the diagonal.
MAX_TOKENS, MAX_DIRECTION_TOKENS = 1 << 16, 1 << 13  # samples for fit and `_constant_direction`
# RMS of the predictions. Any value works, because a norm follows; small values learn faster.
PREDICTION_RMS = 0.2
# Attention to the own position uses the `OWN_PAIRS` pairs of dimensions that rotate fastest, and
# queries and keys of norm `OWN_NORM`. A neighbouring position has exp(-7) times the weight.
OWN_PAIRS, OWN_NORM = 4, 8.0


class _Samples(NamedTuple):
    """Data from n positions of a lesson: normed hidden states [n, read_size], normed embeddings of
    the next tokens [n, hidden], and the targets of the prediction [n, hidden]."""

    states: Tensor
    embedded: Tensor
    targets: Tensor


@torch.no_grad()
def set_initial_weights(net: EagleNet, lessons: Sequence[Lesson]) -> None:
    """Set the weights of `net`, except its norms, which the fit uses as they are."""
    read_size = net.fc.weight.shape[1]
    gram, moments = torch.zeros(2)
    for samples in _samples(net, lessons, MAX_TOKENS):
        x = torch.cat((samples.states, samples.embedded), -1)
        gram, moments = gram + x.T @ x, moments + x.T @ samples.targets
    linear = _solve(gram, moments)
    net.fc.weight.copy_(linear[:, :read_size] * PREDICTION_RMS)
    net.layers[0].mlp.down_proj.weight.zero_()
    _attend_to_own_position(net, _constant_direction(net, lessons))
    _set_values(net, linear[:, read_size:] * PREDICTION_RMS, gram[read_size:, read_size:])


def _solve(gram: Tensor, moments: Tensor) -> Tensor:
    """Return the W [targets, n] of y = W x with the least error (ridge regression), from the sums
    of x x^T [n, n] and of x y^T [n, targets]."""
    solution: Tensor = torch.linalg.solve(_ridged(gram), moments)
    return solution.T


def _ridged(gram: Tensor) -> Tensor:
    return gram + torch.eye(len(gram)) * gram.diagonal().mean() * RIDGE


def _samples(net: EagleNet, lessons: Sequence[Lesson], max_tokens: int) -> Iterator[_Samples]:
    """Yield samples of each lesson, until there are `max_tokens`."""
    used, norms = 0, list(net.fc_norm)
    for lesson in lessons:
        first = max(lesson.num_given - 2, 0)
        states = lesson.states[first:].float()
        if len(states) < 2:
            continue
        read = torch.cat([norm(states[:-1, i]) for i, norm in enumerate(norms)], -1)
        embedded = net.parts.embedding[lesson.tokens[first + 1 : -1].long()].float()
        targets = F.rms_norm(states[1:, -1], states.shape[-1:], eps=net.shape.rms_norm_eps)
        yield _Samples(read, net.layers[0].input_layernorm(embedded), targets)
        used += len(targets)
        if used >= max_tokens:
            return


def _constant_direction(net: EagleNet, lessons: Sequence[Lesson]) -> Tensor:
    """Return the vector [2 hidden] whose product with the input of attention is nearly 1
    anywhere."""
    parts = []
    for samples in _samples(net, lessons, MAX_DIRECTION_TOKENS):
        state = net.layers[0].hidden_norm(net.fc(samples.states))
        parts.append(torch.cat((samples.embedded, state), -1))
    x = torch.cat(parts)
    return _solve(x.T @ x, x.sum(0)[:, None])[0]


def _attend_to_own_position(net: EagleNet, constant: Tensor) -> None:
    """Make the first query head of each KV head attend to its own position. The other query heads
    get zeros in the dimensions used for that."""
    s, attention = net.shape, net.layers[0].self_attn
    pairs, half = min(OWN_PAIRS, s.head_dim // 2), s.head_dim // 2
    group = s.num_heads // s.num_kv_heads
    queries = attention.q_proj.weight.view(s.num_kv_heads, group, s.head_dim, -1)
    keys = attention.k_proj.weight.view(s.num_kv_heads, s.head_dim, -1)
    queries[:, 0] = 0
    for at in (0, half):
        queries[:, :, at : at + pairs] = 0
        keys[:, at : at + pairs] = 0
    queries[:, 0, :pairs] = constant * OWN_NORM
    keys[:, :pairs] = constant * OWN_NORM


def _set_values(net: EagleNet, linear: Tensor, covariance: Tensor) -> None:
    """Store `linear` [hidden, hidden] in the V and output projections, approximated at the
    highest rank that these can hold. The approximation is best for embeddings whose sum of x x^T is
    `covariance`."""
    s, attention = net.shape, net.layers[0].self_attn
    factor = torch.linalg.cholesky(_ridged(covariance))
    left, singular, right = torch.linalg.svd(linear @ factor)
    rank = min(s.num_kv_heads * s.head_dim, len(singular))
    sqrt_singular = singular[:rank].sqrt()
    values = torch.linalg.solve_triangular(factor, right[:rank], upper=False, left=False)
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, : s.hidden_size] = values * sqrt_singular[:, None]
    index, group = torch.arange(rank), s.num_heads // s.num_kv_heads
    attention.o_proj.weight.zero_()
    columns = index // s.head_dim * group * s.head_dim + index % s.head_dim
    attention.o_proj.weight[:, columns] = left[:, :rank] * sqrt_singular
