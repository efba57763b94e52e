"""The experts function that transformers calls, and the packing of experts for our matrix
products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cbatch.runtime.compiled import compiles
from cbatch.runtime.compiled.experts import CompiledExperts, Gate, Gating

NAME = "cbatch"  # the name of our implementation in transformers
PACKED_EXPERTS = "_cbatch_experts"  # the attribute of a module that holds its packed experts
_WEIGHTS = ("gate_up_proj", "down_proj")
# Inputs for comparing gate functions: large enough for clamps to take effect.
_PROBE_ROWS, _PROBE_STD = 16, 12.0


def register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(module: Any, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute experts: hidden_states [T, hidden], chosen and weights [T, k] -> [T, hidden]. A
    module that `pack_experts` does not support runs its own code."""
    packed: CompiledExperts | None = getattr(module, PACKED_EXPERTS, None)
    if packed is None:
        return type(module).forward.__wrapped__(module, hidden_states, chosen, weights)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return packed(rows, chosen, weights).view(hidden_states.shape).to(hidden_states.dtype)


def pack_experts(module: nn.Module) -> bool:
    """Pack a module's experts for `experts` and free its own weights. Return False for a module
    that our matrix products do not support, which is left as it is."""
    if not _is_supported(module):
        return False
    packed = _packed(module)
    for name in _WEIGHTS:
        setattr(module, name, None)
    object.__setattr__(module, PACKED_EXPERTS, packed)
    return True


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's packed experts."""
    packed: CompiledExperts = getattr(module, PACKED_EXPERTS)
    return sum(product.num_bytes for product in packed.products)


def _is_supported(module: Any) -> bool:
    """Return whether a module has transformers' experts interface, with gates and without a norm
    after the experts."""
    weights = [getattr(module, name, None) for name in _WEIGHTS]
    if not all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights):
        return False
    plain = getattr(module, "has_gate", False) and not getattr(
        module, "has_post_expert_norm", False
    )
    return plain and hasattr(module, "_apply_gate") and all(compiles(w.dtype) for w in weights)


def _packed(module: Any) -> CompiledExperts:
    gate_up, down = (getattr(module, name).detach() for name in _WEIGHTS)
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in _WEIGHTS]
    bias, down_bias = (None if each is None else each.detach() for each in biases)
    gate = gate_of(module)
    if gate.gating != Gating.CALLER and not module.is_concatenated:
        gate_up = _deinterleaved(gate_up)
        bias = None if bias is None else _deinterleaved(bias)
    return CompiledExperts.of(gate_up, down, gate, bias, down_bias)


def _deinterleaved(interleaved: Tensor) -> Tensor:
    """Reorder alternating gates and ups [experts, 2 n, ...] to all gates before all ups."""
    return torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], dim=1)


@torch.inference_mode()
def gate_of(module: Any) -> Gate:
    """Return our gate that computes the same numbers as the module's, else the module's gate."""
    gen = torch.Generator().manual_seed(0)
    inputs = torch.randn(_PROBE_ROWS, 64, generator=gen, dtype=torch.float64) * _PROBE_STD
    arranged = inputs if module.is_concatenated else _interleaved(inputs)
    outputs = module._apply_gate(arranged)
    gate, up = inputs.chunk(2, dim=-1)
    limit, alpha = (float(getattr(module, name, 0.0) or 0.0) for name in ("limit", "alpha"))
    clamped_gate = gate.clamp(max=limit)
    candidates = {
        Gate(Gating.SILU): nn.functional.silu(gate) * up,
        Gate(Gating.GELU_TANH): nn.functional.gelu(gate, approximate="tanh") * up,
        Gate(Gating.CLAMPED, limit, alpha): clamped_gate
        * torch.sigmoid(clamped_gate * alpha)
        * (up.clamp(-limit, limit) + 1),
    }
    for candidate, expected in candidates.items():
        if outputs.shape == expected.shape and torch.allclose(
            outputs.double(), expected, rtol=1e-5
        ):
            return candidate
    return Gate(Gating.CALLER, function=module._apply_gate)


def _interleaved(halves: Tensor) -> Tensor:
    """Reorder the rows gates, ups to gate 0, up 0, gate 1, up 1, and so on."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
