"""The function that transformers calls for experts, and how their weights become our products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cbatch.runtime.cpu.compiled import compiles
from cbatch.runtime.cpu.compiled.experts import CompiledExperts, Gate, Gating

NAME = "cbatch"  # of the implementation, as transformers knows it
HELD = "_cbatch_experts"
_WEIGHTS = ("gate_up_proj", "down_proj")
# Gates are asked about these: so far out that clamps take part.
_ASKED_ROWS, _ASKED_SIZE = 16, 12.0


def register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(module: Any, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden_states [T, hidden], chosen and weights [T, k] -> [T, hidden]; by the module's own
    code where `compile_experts` left it as it was."""
    held: CompiledExperts | None = getattr(module, HELD, None)
    if held is None:
        return type(module).forward.__wrapped__(module, hidden_states, chosen, weights)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return held(rows, chosen, weights).view(hidden_states.shape).to(hidden_states.dtype)


def compile_experts(module: nn.Module) -> bool:
    """Packs a module's experts for `experts`, and lets go of its own weights. False where they are
    none that we multiply with: they are left as they are."""
    if not _ours(module):
        return False
    made = _compiled(module)
    for name in _WEIGHTS:
        setattr(module, name, None)
    object.__setattr__(module, HELD, made)
    return True


def num_bytes(module: nn.Module) -> int:
    """Of the experts of a module that has been compiled."""
    held: CompiledExperts = getattr(module, HELD)
    return sum(product.num_bytes for product in held.products)


def _ours(module: Any) -> bool:
    """Experts of transformers' interface, with gates and nothing behind them."""
    weights = [getattr(module, name, None) for name in _WEIGHTS]
    if not all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights):
        return False
    plain = getattr(module, "has_gate", False) and not getattr(
        module, "has_post_expert_norm", False
    )
    return plain and hasattr(module, "_apply_gate") and all(compiles(w.dtype) for w in weights)


def _compiled(module: Any) -> CompiledExperts:
    gate_up, down = (getattr(module, name).detach() for name in _WEIGHTS)
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in _WEIGHTS]
    bias, down_bias = (None if each is None else each.detach() for each in biases)
    gate = gate_of(module)
    if gate.gating is not Gating.GIVEN and not module.is_concatenated:
        gate_up = _apart(gate_up)
        bias = None if bias is None else _apart(bias)
    return CompiledExperts.of(gate_up, down, gate, bias, down_bias)


def _apart(interleaved: Tensor) -> Tensor:
    """[experts, 2 n, ...] of gates and ups by turns: first gates, then ups."""
    return torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], dim=1)


@torch.inference_mode()
def gate_of(module: Any) -> Gate:
    """Ours that computes what the module's own does, as far as numbers tell; else the module's."""
    gen = torch.Generator().manual_seed(0)
    asked = torch.randn(_ASKED_ROWS, 64, generator=gen, dtype=torch.float64) * _ASKED_SIZE
    together = asked if module.is_concatenated else _together(asked)
    told = module._apply_gate(together)
    gate, up = asked.chunk(2, dim=-1)
    limit, alpha = (float(getattr(module, name, 0.0) or 0.0) for name in ("limit", "alpha"))
    low = gate.clamp(max=limit)
    candidates = {
        Gate(Gating.SILU): nn.functional.silu(gate) * up,
        Gate(Gating.GELU_TANH): nn.functional.gelu(gate, approximate="tanh") * up,
        Gate(Gating.CLAMPED, limit, alpha): low
        * torch.sigmoid(low * alpha)
        * (up.clamp(-limit, limit) + 1),
    }
    for candidate, expected in candidates.items():
        if told.shape == expected.shape and torch.allclose(told.double(), expected, rtol=1e-5):
            return candidate
    return Gate(Gating.GIVEN, function=module._apply_gate)


def _together(halves: Tensor) -> Tensor:
    """Rows of gates, then ups: by turns."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
