"""Mixtures of experts (MoE), by the compiled products."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, c_long
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.product import MAX_LANES, CompiledProduct, LinearStruct
from cbatch.runtime.compiled.structs import struct
from cbatch.runtime.compiled.threads import num_threads
from cbatch.runtime.model.records import Experts

_ALIGNMENT_BYTES = 64
_SINGLE_THREAD_BELOW = 1 << 18  # multiplications below which one thread is faster


class Gating(enum.IntEnum):
    """Activations of an expert, in this order: silu(gate) * up; gelu(gate) * up in the tanh form;
    gate * sigmoid(alpha * gate) * (up + 1) of clamped inputs; a `Gate.function`; relu(gate)^2 *
    up."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    CALLER = 3
    RELU_SQUARED = 4


class Gate(NamedTuple):
    """An activation. CLAMPED uses `limit` and `alpha`. CALLER uses `function`, which maps [pairs,
    outputs of gate_up] to [pairs, inputs of down]; a pair is a row and one of its experts. The
    function must be batch-invariant."""

    gating: Gating
    limit: float = 0.0
    alpha: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None


_Step, MixtureStruct = struct("expert_step"), struct("mixture")  # of experts.h


class CompiledExperts:
    """Experts down(gate(gate_up(x))). The outputs of a row's chosen experts are weighted and
    summed, in the order of the experts."""

    def __init__(
        self, gate_up: Sequence[CompiledProduct], down: Sequence[CompiledProduct], gate: Gate
    ) -> None:
        """Take a gate_up and a down product for each expert, without `in_scale`; all of a list have
        one shape and type. The outputs of gate_up are all gates, then all ups, or the inputs of
        `function`. Raises ValueError for shapes that do not fit together."""
        _check(gate_up, down, gate)
        kernel = library()
        assert kernel is not None  # the products exist
        self._products = [*gate_up], [*down]  # the structs below hold addresses
        self._gate_up = (LinearStruct * len(gate_up))(*(each.struct for each in gate_up))
        self._down = (LinearStruct * len(down))(*(each.struct for each in down))
        self.gate, self.num_experts = gate, len(gate_up)
        self._gate_up_width, self._columns = gate_up[0].shape
        self._out, self._inner = down[0].shape
        self._bytes, self._run = kernel.experts_bytes, kernel.run_experts
        self._bytes.argtypes, self._bytes.restype = [POINTER(_Step)], c_long
        self._run.argtypes, self._run.restype = [POINTER(_Step)], c_long

    @classmethod
    def of(
        cls,
        gate_up: Iterable[Tensor],
        down: Iterable[Tensor],
        gate: Gate,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> CompiledExperts:
        """Pack each expert's weights [outputs, inputs], fp32 or bf16, and biases [experts,
        outputs]. Raises ValueError if there is no kernel for their type."""
        parts = [
            [
                CompiledProduct(each.contiguous(), None if bias is None else bias[i], None)
                for i, each in enumerate(weight)
            ]
            for weight, bias in ((gate_up, gate_up_bias), (down, down_bias))
        ]
        return cls(*parts, gate)

    @property
    def products(self) -> list[CompiledProduct]:
        gate_up, down = self._products
        return [*gate_up, *down]

    def mixture(self, experts: Experts) -> Any:
        """Return the struct of a layer for the whole pass. Experts after the first `experts.count`
        are shared."""
        shared = self.num_experts - experts.count
        numbers = experts.count, experts.chosen, shared, experts.normalized
        return MixtureStruct(self._gate_up, self._down, *numbers, *self.gate[:3])

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return fp32 [T, outputs of down] for fp32 x [T, inputs of gate_up], int64 `chosen` [T, k]
        and fp32 `weights` [T, k]. An entry `num_experts` in `chosen` means no expert. Raises
        IndexError for other invalid entries, ValueError for wrong shapes."""
        rows, choices = chosen.shape
        if x.shape != (rows, self._columns) or weights.shape != chosen.shape:
            shapes = [tuple(each.shape) for each in (x, chosen, weights)]
            raise ValueError(f"experts: x, chosen and weights of {shapes}")
        x, weights = x.float().contiguous(), weights.float().contiguous()
        chosen = chosen.to(torch.int64).contiguous()
        y = x.new_empty(rows, self._out)
        pairs, stride = rows * choices, (-(-self._gate_up_width // MAX_LANES) + 1) * MAX_LANES
        gate_up_out = x.new_empty(pairs, stride)
        step = _Step(
            self._gate_up,
            self._down,
            x.data_ptr(),
            weights.data_ptr(),
            None,
            chosen.data_ptr(),
            gate_up_out.data_ptr(),
            y.data_ptr(),
            None,
            self.num_experts,
            rows,
            choices,
            self._columns,
            stride,
            self._out,
            self.gate.gating,
            3,
            self._threads(pairs),
            self.gate.limit,
            self.gate.alpha,
        )
        memory = torch.empty(self._bytes(step) + _ALIGNMENT_BYTES, dtype=torch.uint8)
        step.memory = memory.data_ptr() + -memory.data_ptr() % _ALIGNMENT_BYTES
        if self.gate.function is None:
            self._call(step, 3)
            return y
        num_pairs = self._call(step, 1)
        inputs = gate_up_out[:num_pairs, : self._gate_up_width]
        inner = self.gate.function(inputs).float().contiguous()
        if inner.shape != (num_pairs, self._inner):
            raise ValueError(f"gate: {tuple(inner.shape)}, not {(num_pairs, self._inner)}")
        step.inner = inner.data_ptr()
        self._call(step, 2)
        return y

    def _threads(self, pairs: int) -> int:
        work = pairs * (self._gate_up_width * self._columns + self._out * self._inner)
        return 1 if work < _SINGLE_THREAD_BELOW else num_threads()

    def _call(self, step: Any, parts: int) -> int:
        """Run parts 1, 2 or both (3), see experts.h; return the number of (row, expert) pairs."""
        step.parts = parts
        pairs = int(self._run(step))
        if pairs < 0:
            raise IndexError(f"chosen: a number that is not one of {self.num_experts} experts")
        return pairs


def _check(gate_up: Sequence[CompiledProduct], down: Sequence[CompiledProduct], gate: Gate) -> None:
    """Raises ValueError unless the products of all experts fit together."""
    for name, products in (("gate_up", gate_up), ("down", down)):
        kinds = {(each.shape, each.parts) for each in products}
        if len(kinds) != 1:
            raise ValueError(f"{name}: experts of {len(kinds)} shapes and types")
    if len(gate_up) != len(down):
        raise ValueError(f"experts: {len(gate_up)} of gate_up, {len(down)} of down")
    given, wide, inner = gate.function is not None, gate_up[0].shape[0], down[0].shape[1]
    if given is not (gate.gating is Gating.CALLER):
        raise ValueError(f"gate: {gate.gating.name} {'with' if given else 'without'} a function")
    if not given and wide != 2 * inner:
        raise ValueError(f"gate: {wide} outputs of gate_up for {inner} inputs of down")
