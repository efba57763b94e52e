"""Rotary positions of transformers models by our rows."""

from __future__ import annotations

import functools
from types import MethodType
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

# Releases whose attention is written in a way that we know. Another may be written otherwise: it is
# served by its own code then, and only that its logits stay what they are is asked.
REPLACED_IN = ("5.23", "5.24")
RELEASE = ".".join(transformers.__version__.split(".")[:2])


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

    found = replace_rotary(net)
    assert found == 2 if RELEASE in REPLACED_IN else found in (0, 2)
    monkeypatch.setattr(Rotary, "__call__", counted)
    torch.testing.assert_close(net(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == found
    assert torch.equal(other(tokens, use_cache=False).logits, expected) and len(calls) == found
    twice = net(tokens.repeat(2, 1), use_cache=False).logits  # not laid out as a step is
    torch.testing.assert_close(twice[1], expected[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == found


@pytest.mark.parametrize("decorated", ["by a class", "without telling"])
@torch.inference_mode()
def test_code_that_is_written_otherwise_stays_itself(
    decorated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decorators of which we cannot make another with our function in it."""
    net, tokens = made("Llama"), torch.arange(20)[None]
    expected = net(tokens, use_cache=False).logits
    attends = type(net.get_submodule("model.layers.0.self_attn"))
    kept = attends.forward

    class Decorator:
        __wrapped__ = kept

        def __get__(self, module: Any, kind: Any = None) -> Any:
            return self if module is None else MethodType(kept, module)

    def silent(self: Any, *given: Any, **named: Any) -> Any:
        return kept(self, *given, **named)

    monkeypatch.setattr(attends, "forward", Decorator() if decorated == "by a class" else silent)
    assert replace_rotary(net) == 0
    assert torch.equal(net(tokens, use_cache=False).logits, expected)


@pytest.mark.skipif(RELEASE not in REPLACED_IN, reason="attention as another release writes it")
@torch.inference_mode()
def test_decorators_keep_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    net, tokens = made("Llama"), torch.arange(20)[None]
    attends = type(net.get_submodule("model.layers.0.self_attn"))
    kept, seen = attends.forward, []

    @functools.wraps(kept)
    def noting(self: Any, *given: Any, **named: Any) -> Any:
        seen.append(self)
        return kept(self, *given, **named)

    monkeypatch.setattr(attends, "forward", noting)
    assert replace_rotary(net) == 2
    net(tokens, use_cache=False)
    assert len(seen) == 2


def test_who_turns_otherwise_keeps_doing_so() -> None:
    """Pairs of neighbours, not halves."""
    assert replace_rotary(made("Cohere")) == 0
