"""Rotary positions of transformers models by our rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.cpu.compiled.rows import Rotary
from cbatch.runtime.cpu.transformers_backend.rotary import replace_rotary
from tests.runtime.marks import needs_compiler
from tests.runtime.test_fused import made

transformers = pytest.importorskip("transformers")
pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Gemma2", {}),
        ("Qwen3", {}),
        ("Phi3", {}),
        ("StableLm", {"partial_rotary_factor": 0.5}),
    ],
)
@torch.inference_mode()
def test_logits_are_the_same(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, other, tokens = made(family, **changes), made(family, **changes), torch.arange(20)[None]
    expected = net(tokens, use_cache=False).logits
    calls: list[Tensor] = []
    ours = Rotary.__call__

    def counted(self: Rotary, q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(q)
        return ours(self, q, *rest)

    assert replace_rotary(net) == 2
    monkeypatch.setattr(Rotary, "__call__", counted)
    torch.testing.assert_close(net(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2
    assert torch.equal(other(tokens, use_cache=False).logits, expected) and len(calls) == 2
    twice = net(tokens.repeat(2, 1), use_cache=False).logits  # not laid out as a step is
    torch.testing.assert_close(twice[1], expected[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_who_turns_otherwise_keeps_doing_so() -> None:
    """Pairs of neighbours, not halves."""
    assert replace_rotary(made("Cohere")) == 0
