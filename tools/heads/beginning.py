"""Where the training of an EAGLE-3 head begins: at a linear guess, found by least squares.

What the model's last layer makes at t + 1, normed, is guessed as F x + B e, of the states x that
are read at t and the embedding e of the token at t + 1. F is what `fc` holds. B, as far as the rank
of the values goes, is done by one query head of each KV head, which attends to its own position
alone. All else adds nothing yet. That takes a minute, and saves hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.heads.eagle_net import EagleNet
from tools.heads.lessons import Lesson

RIDGE = 0.02  # of the mean of the diagonal
MOST_TOKENS, MOST_FOR_CONSTANT = 1 << 16, 1 << 13
# Of what is guessed: a norm is behind it, and what is small learns faster.
GUESS_RMS = 0.2
# Where queries and keys meet at their own position: pairs of dimensions, those that turn fastest,
# and how long they are there. One position on, that is worth exp(-7) of it.
OWN_PAIRS, OWN_LENGTH = 4, 8.0


class _Pair(NamedTuple):
    """Of n places of a lesson: what is read [n, read], the normed embeddings behind it [n, hidden],
    and what is to be guessed [n, hidden]."""

    read: Tensor
    known: Tensor
    wanted: Tensor


@torch.no_grad()
def begin(net: EagleNet, lessons: Sequence[Lesson]) -> None:
    """Sets the weights of `net`, but for its norms, which it goes by."""
    num_read = net.fc.weight.shape[1]
    own, with_wanted = torch.zeros(2)
    for pair in _pairs(net, lessons, MOST_TOKENS):
        x = torch.cat((pair.read, pair.known), -1)
        own, with_wanted = own + x.T @ x, with_wanted + x.T @ pair.wanted
    linear = _solve(own, with_wanted)
    net.fc.weight.copy_(linear[:, :num_read] * GUESS_RMS)
    net.layers[0].mlp.down_proj.weight.zero_()
    _attend_to_own(net, _constant(net, lessons))
    _put_into_values(net, linear[:, num_read:] * GUESS_RMS, own[num_read:, num_read:])


def _solve(own: Tensor, with_wanted: Tensor) -> Tensor:
    """[wanted, n] from sums of x x^T [n, n] and of x y^T [n, wanted]."""
    found: Tensor = torch.linalg.solve(_ridged(own), with_wanted)
    return found.T


def _ridged(own: Tensor) -> Tensor:
    return own + torch.eye(len(own)) * own.diagonal().mean() * RIDGE


def _pairs(net: EagleNet, lessons: Sequence[Lesson], most: int) -> Iterator[_Pair]:
    """Of places whose next token but one counts."""
    used, norms = 0, list(net.fc_norm)
    for lesson in lessons:
        first = max(lesson.num_given - 2, 0)
        states = lesson.states[first:].float()
        if len(states) < 2:
            continue
        read = torch.cat([norm(states[:-1, i]) for i, norm in enumerate(norms)], -1)
        known = net.parts.embedding[lesson.tokens[first + 1 : -1].long()].float()
        wanted = F.rms_norm(states[1:, -1], states.shape[-1:], eps=net.shape.rms_norm_eps)
        yield _Pair(read, net.layers[0].input_layernorm(known), wanted)
        used += len(wanted)
        if used >= most:
            return


def _constant(net: EagleNet, lessons: Sequence[Lesson]) -> Tensor:
    """By which what attention reads, [2 hidden], gives nearly 1 everywhere."""
    parts = []
    for pair in _pairs(net, lessons, MOST_FOR_CONSTANT):
        state = net.layers[0].hidden_norm(net.fc(pair.read))
        parts.append(torch.cat((pair.known, state), -1))
    x = torch.cat(parts)
    return _solve(x.T @ x, x.sum(0)[:, None])[0]


def _attend_to_own(net: EagleNet, constant: Tensor) -> None:
    """The first query head of each KV head; the others do without the dimensions it uses."""
    s, attention = net.shape, net.layers[0].self_attn
    pairs, half = min(OWN_PAIRS, s.head_dim // 2), s.head_dim // 2
    group = s.num_heads // s.num_kv_heads
    queries = attention.q_proj.weight.view(s.num_kv_heads, group, s.head_dim, -1)
    keys = attention.k_proj.weight.view(s.num_kv_heads, s.head_dim, -1)
    queries[:, 0] = 0
    for at in (0, half):
        queries[:, :, at : at + pairs] = 0
        keys[:, at : at + pairs] = 0
    queries[:, 0, :pairs] = constant * OWN_LENGTH
    keys[:, :pairs] = constant * OWN_LENGTH


def _put_into_values(net: EagleNet, linear: Tensor, spread: Tensor) -> None:
    """The best approximation, of the rank there is, of [hidden, hidden] for embeddings whose sum of
    x x^T is `spread`."""
    s, attention = net.shape, net.layers[0].self_attn
    root = torch.linalg.cholesky(_ridged(spread))
    out, sizes, into = torch.linalg.svd(linear @ root)
    rank = min(s.num_kv_heads * s.head_dim, len(sizes))
    roots = sizes[:rank].sqrt()
    values = torch.linalg.solve_triangular(root, into[:rank], upper=False, left=False)
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, : s.hidden_size] = values * roots[:, None]
    at, group = torch.arange(rank), s.num_heads // s.num_kv_heads
    attention.o_proj.weight.zero_()
    columns = at // s.head_dim * group * s.head_dim + at % s.head_dim
    attention.o_proj.weight[:, columns] = out[:, :rank] * roots
