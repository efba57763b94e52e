"""Recurrent layers by block, compared with the recurrence itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from cbatch.runtime.cpu.torch_recurrence import StateRows, mix
from cbatch.runtime.layers import RecurrenceWeights
from cbatch.runtime.model.records import Recurrence, padded
from cbatch.runtime.state_memory import LayerStates, StateMemory
from tests.runtime.engines import tiny_config
from triton_kernels.recurrence import Sequences, recur

pytestmark = [
    pytest.mark.usefixtures("unchecked_sums"),
    # The gates of padding rows multiply what is uninitialised.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PAGE, DRAFTS, LENGTH = 16, 4, 33
HEADS: dict[str, Any] = {"kernel": 4, "heads": 2, "value_dim": 20, "key_heads": 1, "key_dim": 18}
TILED = HEADS | {"heads": 4, "key_heads": 2}
WIDE = TILED | {"key_dim": 32, "value_dim": 144}  # several blocks of values
CASES = {
    "convolution": Recurrence(rule="convolution", heads=1, value_dim=32, kernel=3),
    "delta": Recurrence(rule="delta", norm_eps=1e-5, tiled=True, **TILED),
    "delta by key head": Recurrence(rule="delta", norm_eps=1e-5, **WIDE),
    "scan": Recurrence(rule="scan", norm_eps=1e-5, groups=2, conv_bias=True, **HEADS),
    "scan without a norm": Recurrence(rule="scan", min_step=0.3, max_step=0.9, **HEADS),
}


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(m: Recurrence) -> RecurrenceWeights:
    of_heads = {"decay": -noise(1, m.heads).exp() / 4, "step_bias": noise(2, m.heads)}
    if m.rule == "scan":
        of_heads["skip"] = noise(3, m.heads)
    if m.norm_eps:
        of_heads["norm"] = 1 + noise(4, m.inner if m.rule == "scan" else m.value_dim) / 4
    bias = noise(5, padded(m.channels)) if m.conv_bias else None
    return RecurrenceWeights(noise(6, m.kernel, padded(m.channels)), bias, **of_heads)


class Run:
    """A sequence in slot 1 next to another one. Memory begins as NaN: what is read must have been
    written."""

    def __init__(self, m: Recurrence, dtype: torch.dtype = torch.float32) -> None:
        config = tiny_config(num_hidden_layers=1)
        config = replace(config, layers=(replace(config.layers[0], mixer=m),))
        self.m, self.weights = m, weights_of(m)
        memory = StateMemory(config, PAGE, 12, 3, DRAFTS).layers[0]
        assert memory is not None
        self.memory: LayerStates = memory
        for part in memory:
            part.fill_(torch.nan)
        self.rows = (noise(7, 2 * LENGTH + DRAFTS, m.row_width) / 2).to(dtype)
        self.out, self.done, self.other = torch.zeros(LENGTH, m.inner, dtype=dtype), 0, 0

    def step(self, count: int, drafts: int = 0) -> None:
        """Run `count` rows and wrong drafts after them, then two rows of the other sequence and two
        of padding."""
        count = min(count, LENGTH - self.done)
        wrong = self.rows[LENGTH : LENGTH + drafts] + self.done / 64
        other = self.rows[LENGTH + DRAFTS + self.other :][:2]
        own, ends = torch.cat([self.rows[self.done : self.done + count], wrong]), self.done + count
        lens = [len(own), 0, len(other)]
        starts = np.cumsum([0, *lens])
        pages = torch.arange(12, dtype=torch.int32).view(2, 6)[[0, 1, 1]] - 1
        pages[0, ends // PAGE + 1 : 4] = -1 if not drafts else pages[0, ends // PAGE + 1 : 4]
        sequences = Sequences(
            torch.from_numpy(starts.astype(np.int32)),
            torch.tensor([self.done + lens[0], 0, self.other + lens[2]], dtype=torch.int32),
            pages.contiguous(),
            torch.tensor([1, 0, 2], dtype=torch.int32),
        )
        rows = torch.cat([own, other, own[:1] * torch.nan, own[:1]])
        out = recur(rows, self.m, self.weights, self.memory, sequences, PAGE)
        self.out[self.done : ends] = out[:count]
        self.done, self.other = ends, self.other + len(other)


@pytest.mark.parametrize("name", CASES)
def test_any_schedule_gives_the_bits_of_the_whole(name: str) -> None:
    m = CASES[name]
    whole, parts = Run(m), Run(m)
    whole.step(LENGTH)
    for count, drafts in ((5, 0), (10, 4), (1, 2), (12, 0), (1, 4), (9, 0)):
        parts.step(count, drafts)
    assert parts.done == LENGTH and torch.equal(whole.out, parts.out)
    run = Run(m)
    sequence = StateRows(0, LENGTH, 0, 1, [-1, 0, 1, 2], PAGE, run.memory.inputs.shape[1])
    expected = mix(m, run.weights, run.memory, run.rows[:LENGTH], sequence)
    assert (whole.out - expected).abs().max() < 1e-5 * expected.std()
    for mine, reference in zip(whole.memory[:2], run.memory[:2], strict=True):
        torch.testing.assert_close(mine[:2], reference[:2], rtol=1e-4, atol=1e-5, equal_nan=True)
