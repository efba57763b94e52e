"""The shaped world means what sampling parameters mean, and bites."""

from __future__ import annotations

import numpy as np
import torch

from tests.runtime.reference import slow_filter
from tests.triton_kernels.worlds import ShapedWorld


def slow_law(world: ShapedWorld, logits: list[list[float]], output: list[int]) -> list[float]:
    """The definition, token by token: the law behind the prompt and `output`."""
    shaping = world.shaping
    x = list(logits[[*world.PROMPT, *output][-1]])
    x[shaping.biased[0]] += shaping.biased[1]
    for token in {*world.PROMPT, *output}:
        x[token] *= 1 / shaping.repetition if x[token] > 0 else shaping.repetition
    for token in set(output):
        x[token] -= shaping.presence + shaping.frequency * output.count(token)
    x[shaping.banned] = -np.inf
    if len(output) < shaping.min_tokens:
        x[shaping.stop_id] = -np.inf
    return slow_filter(x, shaping.temperature, shaping.top_k, shaping.top_p, shaping.min_p)


def test_laws_behind_every_prefix_are_those_of_the_definition() -> None:
    world = ShapedWorld(depth=3)
    for logits, laws in (
        (world.target_logits.double().tolist(), world.target),
        (world.draft_logits.double().tolist(), world.draft),
    ):
        pending: list[tuple[int, list[int]]] = [(0, [])]
        while pending:
            state, output = pending.pop()
            want = slow_law(world, logits, output)
            assert np.abs(laws[state].numpy() - want).max() < 1e-6, output
            if len(output) < 3:
                for token in range(world.vocab):
                    child = int(world.after(torch.tensor(state), torch.tensor(token)))
                    pending.append((child, [*output, token]))


def test_filters_cut_and_penalties_move_the_laws() -> None:
    world = ShapedWorld()
    allowed = torch.arange(world.vocab) != world.shaping.banned
    for laws in (world.target, world.draft):
        assert 0.2 < float((laws[:, allowed] == 0).float().mean()) < 0.8
    assert ((world.target > 0) & (world.draft == 0)).any()  # the supports differ both ways
    assert ((world.target == 0) & (world.draft > 0)).any()
    first_order = world.target[1:][world.last[1:] == 2]
    assert float((first_order - first_order[0]).abs().sum(dim=1).max()) > 0.5
