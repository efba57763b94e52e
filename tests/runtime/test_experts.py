"""A mixture of experts by our products, compared with each expert alone and with transformers'
code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct
from cbatch.runtime.compiled.experts import CompiledExperts, Gate, Gating
from cbatch.runtime.cpu.transformers_backend.experts import experts, gate_of, pack_experts
from tests.runtime.marks import needs_compiler
from tests.runtime.test_block_products import stored, whole

pytestmark = needs_compiler

EXPERTS, CHOICES, HIDDEN, INNER = 6, 2, 40, 27
LIMIT, ALPHA = 1.5, 1.7


def clamped(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(gate * ALPHA) * (up.clamp(-LIMIT, LIMIT) + 1)


def halves(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: act(gate_up.chunk(2, dim=-1)[0]) * gate_up.chunk(2, dim=-1)[1]


GATES = {
    "silu": (Gate(Gating.SILU), halves(F.silu)),
    "gelu": (Gate(Gating.GELU_TANH), halves(lambda x: F.gelu(x, approximate="tanh"))),
    "clamped": (Gate(Gating.CLAMPED, LIMIT, ALPHA), clamped),
    "given": (Gate(Gating.CALLER, function=halves(F.relu)), halves(F.relu)),
}


class Made:
    """Random weights and a batch; `dtype` is that of the weights."""

    def __init__(self, dtype: torch.dtype, rows: int = 50, *, bias: bool = True) -> None:
        gen = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        self.gate_up, self.down = (
            (draw(EXPERTS, 2 * INNER, HIDDEN) * 0.3).to(dtype),
            (draw(EXPERTS, HIDDEN, INNER) * 0.3).to(dtype),
        )
        self.biases = [draw(EXPERTS, 2 * INNER), draw(EXPERTS, HIDDEN)] if bias else [None, None]
        self.x, self.weights = draw(rows, HIDDEN), torch.rand(rows, CHOICES, generator=gen)
        scores = torch.rand(rows, EXPERTS, generator=gen)
        scores[:, 4] = 0.0  # which no row chooses
        self.chosen = scores.topk(CHOICES).indices

    def compiled(self, gate: Gate) -> CompiledExperts:
        return CompiledExperts.of(self.gate_up, self.down, gate, *self.biases)

    def reference(self, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the expected sum in fp64."""
        y = torch.zeros(len(self.x), HIDDEN, dtype=torch.float64)
        for row, (which, weights) in enumerate(zip(self.chosen, self.weights, strict=True)):
            for e, weight in zip(which.tolist(), weights, strict=True):
                if e == EXPERTS:
                    continue
                between = self.gate_up[e].double() @ self.x[row].double()
                if self.biases[0] is not None:
                    between = between + self.biases[0][e]
                made = self.down[e].double() @ gate(between)
                if self.biases[1] is not None:
                    made = made + self.biases[1][e]
                y[row] += weight * made
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATES)
def test_it_is_the_sum_of_experts(name: str, dtype: torch.dtype) -> None:
    for bias in (True, False):
        assert_sums(name, dtype, bias=bias)


def assert_sums(name: str, dtype: torch.dtype, *, bias: bool) -> None:
    gate, expected = GATES[name]
    made = Made(dtype, bias=bias)
    made.chosen[7, 1] = made.chosen[9] = EXPERTS  # no expert
    computed = made.compiled(gate)(made.x, made.chosen, made.weights)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-1
    torch.testing.assert_close(
        computed.double(), made.reference(expected), rtol=tolerance, atol=tolerance
    )
    assert not computed[9].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in GATES if name != "given"])
def test_a_row_has_its_own_bits(name: str, dtype: torch.dtype) -> None:
    """Bits are the same with any other rows, by one thread and by several, with choices in any
    order."""
    made, threads = Made(dtype, 300), torch.get_num_threads()
    compiled = made.compiled(GATES[name][0])
    try:
        torch.set_num_threads(1)
        expected = compiled(made.x, made.chosen, made.weights)
        torch.set_num_threads(3)
        turned = compiled(made.x, made.chosen.flip(1), made.weights.flip(1))
        assert torch.equal(turned, expected)
        for start, end in ((0, 1), (5, 6), (7, 10), (20, 53), (299, 300)):
            rows = slice(start, end)
            computed = compiled(made.x[rows], made.chosen[rows], made.weights[rows])
            assert torch.equal(computed, expected[rows]), (start, end)
    finally:
        torch.set_num_threads(threads)


def test_bits_are_those_of_the_products() -> None:
    """Each product is computed alone, and results are added in the order of the experts, for any
    kind of weights."""
    types = ("Q4_K", "Q8_0")
    up, down = ([whole(stored(name)[0])] * 3 for name in types)
    (wide, columns), (out, inner) = up[0].shape, down[0].shape
    gate = Gate(Gating.CALLER, function=lambda x: F.pad(x, (0, inner - wide)))
    compiled = CompiledExperts(up, down, gate)
    gen = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, columns, generator=gen), torch.ones(9, 1)
    computed = compiled(x, torch.arange(9)[:, None] % 3, weights)
    between = F.pad(up[0](x, 9), (0, inner - wide)).contiguous()
    assert computed.shape == (9, out) and torch.equal(computed, down[0](between, 9))


def test_what_does_not_fit_is_refused() -> None:
    made = Made(torch.float32)
    compiled = made.compiled(Gate(Gating.SILU))
    for wrong in (-1, EXPERTS + 1):
        chosen = made.chosen.clone()
        chosen[3, 1] = wrong
        with pytest.raises(IndexError, match="chosen"):
            compiled(made.x, chosen, made.weights)
    with pytest.raises(ValueError, match="x, chosen and weights"):
        compiled(made.x[:, 1:], made.chosen, made.weights)
    with pytest.raises(ValueError, match="without a function"):
        made.compiled(Gate(Gating.CALLER))
    with pytest.raises(ValueError, match="for 27 inputs"):
        CompiledExperts.of(made.gate_up[:, 1:], made.down, Gate(Gating.SILU))
    one = [CompiledProduct(torch.zeros(2 * n, n), None, None) for n in (4, 6)]
    with pytest.raises(ValueError, match="gate_up: experts of 2"):
        CompiledExperts(one, one, Gate(Gating.SILU))
    with pytest.raises(ValueError, match="gate: "):
        made.compiled(Gate(Gating.CALLER, function=lambda x: x))(made.x, made.chosen, made.weights)


# ---- experts of transformers ---------------------------------------------------------------------


def modules() -> dict[str, tuple[Any, Gating]]:
    """Return a module of each weight layout with random weights, and its expected gate."""
    configs = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1}
    gpt_oss = configs.GptOssConfig(
        intermediate_size=INNER, num_local_experts=EXPERTS, swiglu_limit=LIMIT, **sizes
    )
    qwen3 = {"moe_intermediate_size": INNER, "num_experts": EXPERTS, **sizes}
    acts = {"silu": Gating.SILU, "gelu_pytorch_tanh": Gating.GELU_TANH, "relu": Gating.CALLER}
    modules_by_family: dict[str, tuple[Any, Gating]] = {
        act: (Qwen3MoeExperts(configs.Qwen3MoeConfig(hidden_act=act, **qwen3)), gating)
        for act, gating in acts.items()
    }
    return {"gpt-oss": (GptOssExperts(gpt_oss), Gating.CLAMPED), **modules_by_family}


@pytest.mark.parametrize("name", ["gpt-oss", "silu", "gelu_pytorch_tanh", "relu"])
@torch.inference_mode()
def test_experts_of_transformers(name: str) -> None:
    module, gating = modules()[name]
    module.config._experts_implementation = "eager"
    gen = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=gen) * 0.5)
    made = Made(torch.float32)
    expected = module(made.x, made.chosen, made.weights)
    assert gate_of(module).gating is gating
    assert pack_experts(module) and module.gate_up_proj is None
    computed = experts(module, made.x, made.chosen, made.weights)
    torch.testing.assert_close(computed, expected, rtol=2e-5, atol=2e-5)


def test_what_has_no_such_weights_is_left_alone() -> None:
    module = torch.nn.Linear(3, 4)
    assert not pack_experts(module) and module.weight is not None
