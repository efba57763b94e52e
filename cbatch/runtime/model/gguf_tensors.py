"""The tensors of a GGUF file under the names that our own forward pass uses."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.families import Family, family_named
from cbatch.runtime.model.gguf_architectures import GgufArchitecture, architectures
from cbatch.runtime.model.gguf_file import Gguf, GgufTensor
from cbatch.runtime.model.records import (
    Attention,
    Experts,
    FeedForward,
    LayerRecord,
    Norm,
    Recurrence,
)
from cbatch.runtime.model.weight_files import WeightSource

EMBEDDING, ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_FUSED = "attn_qkv", "ffn_gate_up_exps"  # by an option of the converter
_Shape = tuple[int, ...]


class _Part(NamedTuple):
    """A tensor of ours, or a part of one: rows of a tensor of the file."""

    tensor: str
    first_row: int
    shape: _Shape


class _Entry(NamedTuple):
    """A part by our name, and by the file's name without layer and ending."""

    name: str
    stored: str
    shape: _Shape
    kind: str = "weight"


class GgufWeights(WeightSource):
    """The tensors of a GGUF file, widened to `dtype`. With `as_stored`, `blocks` returns quantised
    tensors as they are."""

    def __init__(
        self, file: Gguf, config: ModelConfig, dtype: torch.dtype, *, as_stored: bool = False
    ) -> None:
        self._file, self._dtype, self._as_stored = file, dtype, as_stored
        self._parts = _layout(file, config)[0] | mtp_parts(file, config)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        parts = [self._rows(part) for part in self._parts[name]]
        tensors = [part.dequantised(self._dtype) for part in parts]
        rows_at = 0 if name.endswith(".weight") else 1  # experts come first
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=rows_at)
        if tensor.numel() != torch.Size(shape).numel():
            problem = f"has shape {list(tensor.shape)}, not {list(shape)}"
            raise self._file.error(f"tensor {parts[0].name}", problem)
        return tensor.view(shape)

    def decay(self, module: str, heads: int) -> Tensor:
        (part,) = self._parts[f"{module}.A_log"]
        return self._rows(part).dequantised(torch.float32).view(heads)

    def blocks(self, name: str) -> GgufTensor | None:
        """As in `WeightSource`; a layer's experts [experts, outputs, inputs] are one tensor."""
        parts = [self._rows(part) for part in self._parts.get(name, []) if self._as_stored]
        if not parts or parts[0].type.elements == 1 or len({part.type for part in parts}) > 1:
            return None
        if len(parts) == 1:
            return parts[0]
        *experts, _, columns = parts[0].shape
        rows = np.concatenate([part.raw.reshape(*experts, -1) for part in parts], axis=-1)
        outputs = sum(part.shape[-2] for part in parts)
        return parts[0]._replace(shape=(*experts, outputs, columns), raw=rows.reshape(-1))

    def _rows(self, part: _Part) -> GgufTensor:
        tensor = self._file.tensors[part.tensor]
        if math.prod(part.shape) == math.prod(tensor.shape):
            return tensor
        rows = tensor.rows[part.first_row : part.first_row + part.shape[0]]
        return tensor._replace(shape=part.shape, raw=rows.reshape(-1))


def check_tensors(file: Gguf, config: ModelConfig) -> None:
    """Raise ModelError unless names and shapes of the tensors are those of the config. An unknown
    tensor would mean other arithmetic."""
    _, shapes = _layout(file, config)
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise file.error(f"tensor {name}", "is missing")
        if _trimmed(tensor.shape) != _trimmed(shape):
            problem = f"has shape {list(tensor.shape)}, the metadata say {list(shape)}"
            raise file.error(f"tensor {name}", problem)
        if len(_trimmed(shape)) == 1 and tensor.type.elements > 1:
            problem = f"type {tensor.type.name} is supported for matrices only"
            raise file.error(f"tensor {name}", problem)
    factors = {ROPE_FACTORS} | (
        {SHORT_FACTORS, LONG_FACTORS} if SHORT_FACTORS in file.tensors else set()
    )
    for name in file.tensors.keys() - shapes.keys() - factors - drafting_tensors(file, config):
        problem = f"is not a tensor of a {config.family} model; not supported"
        raise file.error(f"tensor {name}", problem)


def drafting_tensors(file: Gguf, config: ModelConfig) -> set[str]:
    """Return the names of tensors of layers after the last, which draft tokens."""
    if not file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers"):
        return set()
    names = ((re.match(r"blk\.(\d+)\.", name), name) for name in file.tensors)
    return {name for match, name in names if match and int(match[1]) >= config.num_layers}


def mtp_parts(file: Gguf, c: ModelConfig) -> dict[str, list[_Part]]:
    """Return the parts of a head for multi-token prediction, which is the first layer after the
    last; none if it is incomplete, or of another layout than Qwen3.5's."""
    record = next((each for each in c.layers if isinstance(each.mixer, Attention)), None)
    block, size, family = f"blk.{c.num_layers}.", c.hidden_size, family_named(c.family)
    if record is None or record.feed_forward is None or not drafting_tensors(file, c):
        return {}
    architecture = architectures()[file.metadata["general.architecture"]]
    entries = [
        entry._replace(name=f"mtp.layers.0.{entry.name}")
        for part in (_of_mixer, _of_feed_forward)
        for entry in part(record, size, set(), family)
    ]
    entries.append(_Entry("mtp.fc.weight", "nextn.eh_proj", (size, 2 * size)))
    norms = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    for name, stored in (norms | {"norm": "shared_head_norm"}).items():
        entries.append(_Entry(f"mtp.{name}.weight", f"nextn.{stored}", (size,)))
    parts, shapes = _parts_of(file, architecture, [(block, entry) for entry in entries])
    tensors = file.tensors
    fits = [n in tensors and _trimmed(tensors[n].shape) == _trimmed(shapes[n]) for n in shapes]
    return parts if all(fits) else {}


def _trimmed(shape: _Shape) -> _Shape:
    """Return the shape without leading dimensions of 1, which files may leave out."""
    return _trimmed(shape[1:]) if shape[:1] == (1,) and len(shape) > 1 else shape


def _layout(file: Gguf, config: ModelConfig) -> tuple[dict[str, list[_Part]], dict[str, _Shape]]:
    """Return the parts of each tensor of ours, and the shape of each tensor of the file. Our
    matrices that the file stores as one are stacked by rows."""
    architecture = architectures()[file.metadata["general.architecture"]]
    return _parts_of(file, architecture, _entries(file, architecture, config))


def _parts_of(
    file: Gguf, architecture: GgufArchitecture, entries: Iterable[tuple[str, _Entry]]
) -> tuple[dict[str, list[_Part]], dict[str, _Shape]]:
    parts: dict[str, list[_Part]] = defaultdict(list)
    shapes: dict[str, _Shape] = {}
    for layer, entry in entries:
        stored = architecture.names.get(entry.stored, entry.stored)
        tensor = f"{layer}{stored}"
        if entry.kind and tensor not in file.tensors:  # a norm of Falcon-H1 has no ending
            tensor += f".{entry.kind}"
        first_row, *_ = shapes.get(tensor, (0,))
        if first_row and stored == "attn_norm":  # of two mixers
            first_row = 0
        parts[entry.name].append(_Part(tensor, first_row, entry.shape))
        shapes[tensor] = first_row + entry.shape[0], *entry.shape[1:]
    return parts, shapes


def _entries(
    file: Gguf, architecture: GgufArchitecture, c: ModelConfig
) -> Iterator[tuple[str, _Entry]]:
    """Return all parts with the prefix of their layer."""
    matrix = c.vocab_size, c.hidden_size
    yield "", _Entry("model.embed_tokens.weight", "token_embd", matrix)
    for entry in _norm("output_norm", c.norm, c.hidden_size):
        yield "", entry._replace(name=f"model.{entry.name}")
    if not c.tie_embeddings:
        yield "", _Entry("lm_head.weight", "output", matrix)
    if c.head_bias:
        yield "", _Entry("lm_head.bias", "output", (c.vocab_size,), "bias")
    yield from _of_layer_inputs(c)
    family, block = family_named(c.family), 0
    for i, record in enumerate(c.layers):
        blocks = [_of_mixer, _of_feed_forward][: 2 - (record.feed_forward is None)]
        for entries in blocks:
            fused = {name for name in _FUSED if f"blk.{block}.{name}.weight" in file.tensors}
            if architecture.fused_gate:
                fused.add("ffn_up")
            for entry in entries(record, c.hidden_size, fused, family):
                yield f"blk.{block}.", entry._replace(name=f"model.layers.{i}.{entry.name}")
            for entry in _unused(record.mixer, c.hidden_size):
                if f"blk.{block}.{entry.stored}.weight" in file.tensors:
                    yield f"blk.{block}.", entry._replace(name=f"blk.{block}.{entry.stored}")
            block += family.blocks
        block += not family.blocks and record.feed_forward is not None


def _of_layer_inputs(c: ModelConfig) -> Iterator[tuple[str, _Entry]]:
    if c.layer_inputs is None:
        return
    width, norm = c.layer_inputs.width, c.layer_inputs.norm
    table = c.vocab_size, c.num_layers * width
    yield "", _Entry("model.embed_tokens_per_layer.weight", "per_layer_token_embd", table)
    matrix = c.num_layers * width, c.hidden_size
    yield "", _Entry("model.per_layer_model_projection.weight", "per_layer_model_proj", matrix)
    yield "", _Entry(f"model.{norm.name}.weight", "per_layer_proj_norm", (width,))


def _unused(m: Attention | Recurrence, hidden: int) -> Iterator[_Entry]:
    """Yield the K and V of layers that read those of another layer; files may have them."""
    if isinstance(m, Attention) and m.kv_from is not None:
        rows = m.kv_heads * m.key_dim
        yield _Entry("", "attn_k", (rows, hidden))
        yield _Entry("", "attn_v", (rows, hidden))
        yield _Entry("", "attn_k_norm", (m.key_dim,))


def _of_mixer(
    record: LayerRecord, hidden: int, fused: set[str], family: Family
) -> Iterator[_Entry]:
    m = record.mixer
    yield from _norm("attn_norm", m.norm, hidden)
    yield from _norm("post_attention_norm", m.out_norm, hidden)
    if isinstance(m, Recurrence):
        for entry in _recurrence(m, hidden, grouped=family.grouped):
            yield entry._replace(name=f"linear_attn.{entry.name}")
    else:
        yield from _attention(m, hidden, "attn_qkv" in fused)


def _of_feed_forward(
    record: LayerRecord, hidden: int, fused: set[str], family: Family
) -> Iterator[_Entry]:
    f = record.feed_forward
    assert f is not None
    if not record.parallel:
        yield from _norm("ffn_norm", f.norm, hidden)
    yield from _norm("post_ffw_norm", f.out_norm, hidden)
    if isinstance(f, Experts):
        yield from _experts(f, hidden, "ffn_gate_up_exps" in fused)
    else:
        yield from _feed_forward(f, hidden, "ffn_up" in fused)
    if record.injection is not None:
        width = record.injection.inner
        yield _Entry("per_layer_input_gate.weight", "inp_gate", (width, hidden))
        yield _Entry("per_layer_projection.weight", "proj", (hidden, width))
        yield from _norm("post_norm", record.injection.out_norm, hidden)
    if record.scaled:
        yield _Entry("layer_scalar", "layer_output_scale", (1,))


def _norm(stored: str, norm: Norm | None, size: int) -> Iterator[_Entry]:
    if norm is not None and norm.has_weight:
        yield _Entry(f"{norm.name}.weight", stored, (size,))
    if norm is not None and norm.has_bias:
        yield _Entry(f"{norm.name}.bias", stored, (size,), "bias")


def _matrix(name: str, stored: str, shape: _Shape, bias: bool) -> Iterator[_Entry]:
    yield _Entry(f"{name}.weight", stored, shape)
    if bias:
        yield _Entry(f"{name}.bias", stored, shape[:1], "bias")


def _attention(m: Attention, hidden: int, fused: bool) -> Iterator[_Entry]:
    heads = {"k": m.kv_heads * m.key_dim, "v": m.kv_heads * m.value_dim}
    heads = {"q": m.heads * m.key_dim * (1 + m.gate)} | heads
    for letter in dict.fromkeys(m.projections):
        stored, shape = "attn_qkv" if fused else f"attn_{letter}", (heads[letter], hidden)
        yield from _matrix(f"self_attn.{letter}_proj", stored, shape, m.bias)
    width = m.heads * m.value_dim
    yield from _matrix("self_attn.o_proj", "attn_output", (hidden, width), m.out_bias)
    if m.qk_norm is not None:
        for letter in m.projections[:2]:
            size = heads[letter] if m.norms_whole else m.key_dim
            name = f"self_attn.{letter}_{m.qk_norm.name}.weight"
            yield _Entry(name, f"attn_{letter}_norm", (size,))
    if m.sinks:
        yield _Entry("self_attn.sinks", "attn_sinks", (m.heads,))


def _recurrence(m: Recurrence, hidden: int, *, grouped: bool) -> Iterator[_Entry]:
    scan = m.rule == "scan"
    if m.rule == "delta":
        yield _Entry("in_proj_qkv.weight", "attn_qkv", (m.channels, hidden))
        yield _Entry("in_proj_z.weight", "attn_gate", (m.inner, hidden))
        rows = m.heads // m.key_heads if grouped else m.heads
        for _ in range(m.heads // rows):  # factors and rates of the value heads of a key head
            yield _Entry("in_proj_b.weight", "ssm_ba" if grouped else "ssm_beta", (rows, hidden))
            yield _Entry("in_proj_a.weight", "ssm_ba" if grouped else "ssm_alpha", (rows, hidden))
    else:
        yield from _matrix("in_proj", "ssm_in", (m.row_width, hidden), m.bias)
    yield from _matrix("out_proj", "ssm_out", (hidden, m.inner), m.out_bias)
    yield _Entry("conv1d.weight", "ssm_conv1d", (m.channels, m.kernel))
    if m.conv_bias:
        yield _Entry("conv1d.bias", "ssm_conv1d", (m.channels,), "bias")
    if m.key_dim:
        yield _Entry("A_log", "ssm_a", (m.heads, 1) if scan else (m.heads,), "")
        yield _Entry("dt_bias", "ssm_dt", (m.heads,), "bias")
    if scan:
        yield _Entry("D", "ssm_d", (m.heads, 1), "")
    if m.norm_eps:
        shape = (m.groups, m.inner // m.groups) if scan else (m.value_dim,)
        yield _Entry("norm.weight", "ssm_norm", shape)


def _feed_forward(f: FeedForward, hidden: int, fused: bool) -> Iterator[_Entry]:
    if f.gated:
        stored = "ffn_up" if fused else "ffn_gate"
        yield from _matrix("mlp.gate_proj", stored, (f.inner, hidden), f.bias)
    yield from _matrix("mlp.up_proj", "ffn_up", (f.inner, hidden), f.bias)
    yield from _matrix("mlp.down_proj", "ffn_down", (hidden, f.inner), f.bias)


def _experts(f: Experts, hidden: int, fused: bool) -> Iterator[_Entry]:
    yield from _matrix("mlp.gate", "ffn_gate_inp", (f.count, hidden), f.bias)
    halves = [("gate_up_proj", f"ffn_{half}_exps", f.inner, hidden) for half in ("gate", "up")]
    if fused:
        halves = [("gate_up_proj", "ffn_gate_up_exps", 2 * f.inner, hidden)]
    for name, stored, rows, columns in (*halves, ("down_proj", "ffn_down_exps", hidden, f.inner)):
        yield _Entry(f"mlp.experts.{name}", stored, (f.count, rows, columns))
        if f.bias:
            yield _Entry(f"mlp.experts.{name}_bias", stored, (f.count, rows), "bias")
    if f.corrected:
        yield _Entry("mlp.expert_bias", "exp_probs_b", (f.count,), "bias")
    if f.shared:
        inner = f.shared_inner
        for part in ("gate", "up", "down"):
            shape = (hidden, inner) if part == "down" else (inner, hidden)
            yield _Entry(f"mlp.shared_expert.{part}_proj.weight", f"ffn_{part}_shexp", shape)
        if f.shared_gate:
            yield _Entry("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp", (1, hidden))
