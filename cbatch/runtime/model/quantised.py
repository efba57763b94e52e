"""Quantised weights of Hugging Face directories: compressed-tensors, GPTQ, AWQ, fp8 and MXFP4.

Weights are integers of 4 or 8 bits, with a scale and a zero point for each group of columns.
Weights that equal a GGUF block type bit for bit are multiplied as GGUF blocks (`_as_blocks` names
the one exception). All other weights are widened while loading. The shapes of a matrix's
tensors give its bits and its group size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig, ModelError
from cbatch.runtime.model.families import family_named
from cbatch.runtime.model.family_weights import stored_name
from cbatch.runtime.model.gguf_file import TYPES, GgufTensor
from cbatch.runtime.model.quantisation import Quantisation
from cbatch.runtime.model.records import Experts
from cbatch.runtime.model.weight_files import Safetensors, WeightSource

_BLOCK_TYPES = {each.name: each for each in TYPES.values()}
_BLOCK = 32  # columns of a block
AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of columns 0 .. 7 in a 32-bit word
_FP8 = "F8_E4M3"  # the name of the dtype in safetensors files
_MXFP4 = "_blocks"  # the ending of codes, which have no other quantised form
_MAIN = {"compressed-tensors": "weight_packed", "gptq": "qweight", "awq": "qweight"}


class Codes(NamedTuple):
    """A quantised matrix [out, in]: (codes - zeros) * scales, by groups of columns."""

    codes: Tensor  # uint8 [out, in]
    scales: Tensor  # fp32 [out, groups]
    zeros: Tensor  # int32 [out, groups]
    bits: int
    group_of: Tensor  # int64 [in]; ascending, except with GPTQ's sorting of columns (act-order)

    @property
    def in_order(self) -> bool:
        size = len(self.group_of) // self.scales.shape[1]
        return bool((self.group_of == torch.arange(len(self.group_of)) // max(size, 1)).all())

    def values(self) -> Tensor:
        """Return the matrix in fp32."""
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return (self.codes.int() - zeros).float() * scales


class QuantisedWeights(WeightSource):
    """The tensors of a directory, with quantised ones widened to `dtype`. With `as_stored`,
    `blocks` returns matrices that can be multiplied as blocks."""

    def __init__(
        self,
        files: Safetensors,
        quantisation: Quantisation,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        as_stored: bool,
    ) -> None:
        self._files, self._quantisation, self._dtype = files, quantisation, dtype
        self._as_stored = as_stored
        self._shapes = {name: shape for name, shape in _matrices(config)}

    def scalar(self, name: str) -> float | None:
        return self._files.scalar(name)

    def unread(self) -> set[str]:
        return self._files.unread()

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        module, _, kind = name.rpartition(".")
        if f"{name}{_MXFP4}" in self._files:  # the family stores it as [experts, inputs, outputs]
            experts, columns, out = shape
            stored = self._mxfp4(name, (experts, out, columns))
            return stored.dequantised(self._dtype).transpose(1, 2)
        if kind != "weight" or len(shape) != 2:
            return self._files.get(name, shape)
        if self._main(module) in self._files:
            return self._codes(module, *shape).values().to(self._dtype)
        if self._files.type_of(name) == _FP8:
            return self._widened(module, shape)
        return self._files.get(name, shape)

    def blocks(self, name: str) -> GgufTensor | None:
        module = name.removesuffix(".weight")
        if self._as_stored and f"{name}{_MXFP4}" in self._files:
            return self._mxfp4(name, self._shapes[name])
        if not self._as_stored or name not in self._shapes or self._main(module) not in self._files:
            return None
        return _as_blocks(name, self._codes(module, *self._shapes[name]))

    def _main(self, module: str) -> str:
        """Return the name of the tensor that only a quantised matrix has."""
        return f"{module}.{_MAIN.get(self._quantisation.method, '')}"

    def _error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._files.directory}: tensor {name}: {problem}")

    def _mxfp4(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """Read `_blocks`, whose bytes have two adjacent columns, and `_scales`, the exponents plus
        127. In a GGUF block, a byte has columns i and i + 16."""
        codes, scales = (self._files.read(f"{name}{each}") for each in (_MXFP4, "_scales"))
        groups = *shape[:-1], shape[-1] // _BLOCK
        for read, expected in ((codes, (*groups, _BLOCK // 2)), (scales, groups)):
            if tuple(read.shape) != expected or read.dtype != torch.uint8:
                problem = f"{read.dtype} {list(read.shape)} is not uint8 {list(expected)}"
                raise self._error(name, problem)
        halves = codes.unflatten(-1, (2, -1))  # the bytes of columns 0 to 15, and of the others
        even = (halves[..., 0, :] & 15) | (halves[..., 1, :] & 15) << 4
        odd = halves[..., 0, :] >> 4 | halves[..., 1, :] & 240
        body = torch.stack([even, odd], dim=-1).flatten(-2)
        raw: np.ndarray = torch.cat([scales.unsqueeze(-1), body], dim=-1).flatten().numpy()
        return GgufTensor(name, _BLOCK_TYPES["MXFP4"], shape, raw)

    def _codes(self, module: str, out: int, columns: int) -> Codes:
        if self._quantisation.method == "compressed-tensors":
            return self._packed(module, out, columns)
        return self._transposed(module, out, columns)

    def _packed(self, module: str, out: int, columns: int) -> Codes:
        """Read compressed-tensors' `pack-quantized` format. Codes are packed along the columns,
        zero points along the rows. Both are stored plus half their range."""
        name = f"{module}.weight_packed"
        words, bits = self._words(name, out, columns, along=1)
        codes = _unpacked(words, bits, range(32 // bits))[:, :columns]
        half = 1 << (bits - 1)
        scales = self._scales(f"{module}.weight_scale", out, columns, rows_first=True)
        zeros = torch.full(scales.shape, half, dtype=torch.int32)
        zeros_name = f"{module}.weight_zero_point"
        if zeros_name in self._files:
            stored = self._files.read(zeros_name)
            if stored.dtype == torch.int32:
                stored = self._integers(zeros_name).t()
                stored = _unpacked(stored, bits, range(32 // bits)).t()[:out].int()
            else:
                stored = stored.int() + half
            zeros = self._fitting(zeros_name, stored, tuple(scales.shape))
        order = self._order(f"{module}.weight_g_idx", columns, scales.shape[1])
        return Codes(codes, scales, zeros, bits, order)

    def _transposed(self, module: str, out: int, columns: int) -> Codes:
        """Read GPTQ or AWQ, stored as [in, out]. GPTQ packs words along the inputs, AWQ along the
        outputs, in the order `AWQ_POSITIONS`."""
        name, awq = f"{module}.qweight", self._quantisation.method == "awq"
        words, bits = self._words(name, columns, out, along=1 if awq else 0)
        positions = AWQ_POSITIONS if awq else range(32 // bits)
        if awq and bits != 4:
            raise self._error(name, f"has {bits} bits, AWQ's have 4")
        codes = _unpacked(words if awq else words.t(), bits, positions)
        codes = codes.t() if awq else codes
        scales = self._scales(f"{module}.scales", out, columns, rows_first=False)
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int32)
        zeros_name = f"{module}.qzeros"
        if zeros_name in self._files:
            stored = _unpacked(self._integers(zeros_name), bits, positions).t()
            stored = stored.int() + self._quantisation.zero_shift
            zeros = self._fitting(zeros_name, stored, tuple(scales.shape))
        order = self._order(f"{module}.g_idx", columns, scales.shape[1])
        return Codes(codes, scales, zeros, bits, order)

    def _integers(self, name: str) -> Tensor:
        words = self._files.read(name)
        if words.dtype != torch.int32 or words.dim() != 2:
            raise self._error(name, f"{words.dtype} {list(words.shape)} is not a matrix of int32")
        return words

    def _words(self, name: str, rows: int, columns: int, *, along: int) -> tuple[Tensor, int]:
        """Return the words packed along a dimension of [rows, columns], and the bits of a value."""
        words = self._integers(name)
        for bits in (4, 8):
            shape = [rows, columns]
            shape[along] = -(-shape[along] * bits // 32)
            if list(words.shape) == shape:
                return words, bits
        problem = f"has shape {list(words.shape)}, not {[rows, columns]} in 4 or 8 bits"
        raise self._error(name, problem)

    def _fitting(self, name: str, zeros: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(zeros.shape) != shape:
            raise self._error(name, f"holds {list(zeros.shape)}, its scales are {list(shape)}")
        return zeros

    def _scales(self, name: str, out: int, columns: int, *, rows_first: bool) -> Tensor:
        stored = self._files.read(name)
        if not stored.is_floating_point() or stored.dim() != 2:
            raise self._error(name, f"{stored.dtype} {list(stored.shape)} are not scales")
        scales = stored.float() if rows_first else stored.float().t()
        fits = len(scales) == out and scales.shape[1] and columns % scales.shape[1] == 0
        if not fits or not scales.isfinite().all():
            problem = f"{list(stored.shape)} are not finite scales of a matrix {[out, columns]}"
            raise self._error(name, problem)
        return scales.contiguous()

    def _order(self, name: str, columns: int, groups: int) -> Tensor:
        if name not in self._files:
            return torch.arange(columns) // (columns // groups)
        order = self._files.read(name).long()
        if order.shape != (columns,) or order.min() < 0 or order.max() >= groups:
            raise self._error(name, f"is not one of {groups} groups for each of {columns} columns")
        return order

    def _widened(self, module: str, shape: tuple[int, ...]) -> Tensor:
        """Widen fp8 with a scale for the matrix, each row, or each block of rows and columns."""
        weight = self._files.read(f"{module}.weight")
        if tuple(weight.shape) != shape:
            problem = f"has shape {list(weight.shape)}, config.json says {list(shape)}"
            raise self._error(f"{module}.weight", problem)
        names = [f"{module}.weight_scale_inv", f"{module}.weight_scale"]
        name = next((name for name in names if name in self._files), None)
        if name is None:
            raise self._error(names[1], "is missing")
        scale, (out, columns) = self._files.read(name).float(), shape
        if not scale.isfinite().all():
            raise self._error(name, "is not finite")
        if scale.numel() == 1:
            return (weight.float() * scale.view(1, 1)).to(self._dtype)
        if tuple(scale.shape) in ((out, 1), (out,)):
            return (weight.float() * scale.view(-1, 1)).to(self._dtype)
        rows, width = self._quantisation.block_rows or 128, self._quantisation.block_columns or 128
        if tuple(scale.shape) != (-(-out // rows), -(-columns // width)):
            raise self._error(
                name, f"{list(scale.shape)} does not fit {rows} x {width} of {list(shape)}"
            )
        scales = scale[torch.arange(out) // rows][:, torch.arange(columns) // width]
        return (weight.float() * scales).to(self._dtype)


def _unpacked(words: Tensor, bits: int, positions: Any) -> Tensor:
    """Return uint8 [rows, values] of int32 [rows, words], value i of a word at `positions[i]`."""
    shifts = torch.tensor([bits * position for position in positions], dtype=torch.int32)
    values = (words.contiguous().unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return values.flatten(1).to(torch.uint8)


def _as_blocks(name: str, matrix: Codes) -> GgufTensor | None:
    """Return the matrix as GGUF blocks; None if its groups, or its scales in fp16, do not fit.

    Zero points in the middle of the range give Q4_0 or Q8_0. Other 4-bit zero points give Q4_1,
    whose offset is rounded to 11 bits: an error of less than 1/130 of a quantisation step."""
    out, columns = matrix.codes.shape
    groups = matrix.scales.shape[1]
    scales = matrix.scales.half()
    exact = bool((scales.float() == matrix.scales).all())
    if columns % _BLOCK or (columns // groups) % _BLOCK or not matrix.in_order or not exact:
        return None
    middle = bool((matrix.zeros == 1 << (matrix.bits - 1)).all())
    offsets = (-matrix.zeros * matrix.scales).half()
    if not middle and (matrix.bits != 4 or not offsets.isfinite().all()):
        return None
    kind = _BLOCK_TYPES["Q8_0" if matrix.bits == 8 else "Q4_0" if middle else "Q4_1"]
    times = columns // groups // _BLOCK
    heads = [scales] if middle else [scales, offsets]
    codes = matrix.codes.view(out, -1, _BLOCK)
    if matrix.bits == 8:
        body = (codes.int() - 128).to(torch.int8).view(torch.uint8)
    else:
        body = codes[..., :16] | codes[..., 16:] << 4
    packed_heads = [h.repeat_interleave(times, 1).unsqueeze(2).view(torch.uint8) for h in heads]
    raw: np.ndarray = torch.cat([*packed_heads, body], dim=2).flatten().numpy()
    return GgufTensor(name, kind, (out, columns), raw)


def _matrices(c: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return the checkpoint's names of matrices, or of stacked experts, and our shapes."""
    hidden, m, family = c.hidden_size, c.attention, family_named(c.family)
    k, v, width = m.kv_heads * m.key_dim, m.kv_heads * m.value_dim, m.heads * m.value_dim
    q = m.heads * m.key_dim * (1 + m.gate)
    matrices: list[tuple[str, tuple[int, ...]]] = [("lm_head.weight", (c.vocab_size, hidden))]

    def add(place: str, **shapes: tuple[int, int]) -> None:
        for name, shape in shapes.items():
            matrices.append((f"{stored_name(family, f'{place}.{name}_proj')}.weight", shape))

    def add_forward(place: str, inner: int) -> None:
        add(place, gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner))

    for i, layer in enumerate(c.layers):
        name, f = f"model.layers.{i}", layer.feed_forward
        add(f"{name}.self_attn", q=(q, hidden), k=(k, hidden), v=(v, hidden), o=(hidden, width))
        if not isinstance(f, Experts):
            add_forward(f"{name}.mlp", 0 if f is None else f.inner)
            continue
        experts = stored_name(family, f"{name}.mlp.experts")
        for expert in range(0 if family.stacked else f.count):
            add_forward(f"{experts}.{expert}", f.inner)
        if f.shared:
            add_forward(f"{name}.mlp.shared_expert", f.shared * f.inner)
        matrices.append((f"{name}.mlp.experts.gate_up_proj", (f.count, 2 * f.inner, hidden)))
        matrices.append((f"{name}.mlp.experts.down_proj", (f.count, hidden, f.inner)))
    return matrices
