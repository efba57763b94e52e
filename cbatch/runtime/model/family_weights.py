"""The tensors of any supported checkpoint, under the names that our own forward pass uses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.families import Family, family_named
from cbatch.runtime.model.gguf_file import GgufTensor
from cbatch.runtime.model.records import Experts, Recurrence
from cbatch.runtime.model.weight_files import Safetensors, WeightSource

_EXPERTS = "mlp.experts"


class FamilyWeights(WeightSource):
    """Checkpoint tensors in one form for every family.

    A matrix that the checkpoint fuses with others is returned alone. The experts of a layer are
    stacked as `mlp.experts.gate_up_proj` and `mlp.experts.down_proj` [experts, outputs, inputs].
    Their biases have the suffix `_bias` [experts, outputs].
    """

    def __init__(self, files: WeightSource, config: ModelConfig) -> None:
        self._files, self._family, self._config = files, family_named(config.family), config
        m = config.attention
        q, k, v = m.heads * m.key_dim, m.kv_heads * m.key_dim, m.kv_heads * m.value_dim
        mixers = (each.mixer for each in config.layers)
        self._recurrence = next((m for m in mixers if isinstance(m, Recurrence)), None)
        ends = itertools.accumulate(1 + (each.feed_forward is not None) for each in config.layers)
        self._first_blocks = [0, *ends]
        self._qkv_rows = {"q_proj": q, "k_proj": k, "v_proj": v}

    def scalar(self, name: str) -> float | None:
        return self._files.scalar(name)

    def unread(self) -> set[str]:
        return self._files.unread()

    def blocks(self, name: str) -> GgufTensor | None:
        """As in `WeightSource`; a layer's experts [experts, outputs, inputs] are one tensor."""
        if _EXPERTS in name:
            return self._expert_blocks(name)
        module, _, kind = name.rpartition(".")
        return self._files.blocks(f"{self._stored_name(module)}.{kind}")

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if _EXPERTS in name:
            return self._experts(name, shape)
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if self._family.grouped and last.startswith("in_proj_"):
            return self._grouped(parent, last, shape[1])
        for fused in self._family.fused:
            rows = self._qkv_rows
            if fused == "gate_up_proj":
                rows = dict.fromkeys(("gate_proj", "up_proj"), shape[0])
            if last in rows:
                fused_shape = sum(rows.values()), *shape[1:]
                stored = self._stored_name(f"{parent}.{fused}")
                matrix = self._files.get(f"{stored}.{kind}", fused_shape)
                return dict(zip(rows, matrix.split(list(rows.values())), strict=True))[last]
        tensor = self._files.get(f"{self._stored_name(module)}.{kind}", shape)
        factors = dict(self._config.scales).get(last, (1.0,))
        return tensor if set(factors) == {1.0} else self._scaled(tensor, factors)

    def _scaled(self, weight: Tensor, factors: tuple[float, ...]) -> Tensor:
        """Return the weight times a factor, or times one for each part of a scan's projection."""
        by, m = torch.tensor(factors), self._recurrence
        if len(factors) > 1 and m is not None:
            keys = m.key_heads * m.key_dim
            by = by.repeat_interleave(torch.tensor([m.inner, m.inner, keys, keys, m.heads]))[
                :, None
            ]
        return (weight.float() * by).to(weight.dtype)

    def _grouped(self, parent: str, part: str, columns: int) -> Tensor:
        """Return a projection of a delta rule from tensors with the rows of a key head adjacent:
        its query and key, and the values and gates, or factors and rates, of its value heads."""
        m = self._recurrence
        assert m is not None
        group = m.heads // m.key_heads
        values = group * m.value_dim
        sizes = [m.key_dim, m.key_dim, values, values]
        stored, names = "in_proj_qkvz", ["in_proj_qkv"] * 3 + ["in_proj_z"]
        if part in ("in_proj_a", "in_proj_b"):
            stored, names, sizes = "in_proj_ba", ["in_proj_b", "in_proj_a"], [group, group]
        shape = m.key_heads * sum(sizes), columns
        matrix = self._files.get(f"{self._stored_name(parent)}.{stored}.weight", shape)
        parts = matrix.unflatten(0, (m.key_heads, -1)).split(sizes, dim=1)
        chosen = [each for each, name in zip(parts, names, strict=True) if name == part]
        return torch.cat([each.flatten(0, 1) for each in chosen])

    def _stored_name(self, module: str) -> str:
        if self._family.joint:  # two of our layers
            module = re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) // 2), module)
        layer = re.match(r"model\.layers\.(\d+)\.(mlp|post_)?", module)
        if self._family.blocks and layer:  # the name begins with the number of a block
            block = self._first_blocks[int(layer[1])] + bool(layer[2])
            module = f"backbone.layers.{block}.{module.split('.', 3)[3]}"
        return stored_name(self._family, module)

    def _expert_blocks(self, name: str) -> GgufTensor | None:
        if self._family.stacked:
            whole = self._files.blocks(name)
            if whole is None or "gate_up_proj" not in name:
                return whole
            rows = whole.raw.reshape(*whole.shape[:2], -1)  # of gate and up, alternating
            return whole._replace(raw=np.concatenate([rows[:, ::2], rows[:, 1::2]], 1).reshape(-1))
        f = self._config.layers[int(name.split(".")[2])].feed_forward
        assert isinstance(f, Experts)
        parts: list[GgufTensor] = []
        for one in itertools.chain(*self._expert_names(name, f.count)):
            blocks = self._files.blocks(one)
            if blocks is None or (parts and blocks.type != parts[0].type):
                return None
            parts.append(blocks)
        rows_of_expert = sum(part.shape[0] for part in parts) // f.count
        shape = f.count, rows_of_expert, parts[0].shape[1]
        return GgufTensor(name, parts[0].type, shape, np.concatenate([part.raw for part in parts]))

    def _expert_names(self, name: str, count: int) -> Iterator[list[str]]:
        """Return the names of each expert's matrices, of those that `name` has stacked."""
        experts = self._stored_name(name.partition(_EXPERTS)[0] + _EXPERTS)
        parts = ("gate_proj", "up_proj") if "gate_up_proj" in name else ("down_proj",)
        stored = [stored_name(self._family, part) for part in parts]
        for expert in range(count):
            yield [f"{experts}.{expert}.{part}.weight" for part in stored]

    def _experts(self, name: str, shape: tuple[int, ...]) -> Tensor:
        files, whole = self._files, self._stored_name(name)
        has_whole = isinstance(files, Safetensors) and whole in files
        if self._family.stacked == "outputs" or (has_whole and not self._family.stacked):
            return files.get(whole, shape)
        has_gates = "gate_up_proj" in name
        if self._family.stacked == "inputs":  # a matrix is [experts, inputs, outputs]
            tensor = self._files.get(name, (shape[0], *reversed(shape[1:])))
            tensor = tensor.transpose(1, -1) if tensor.dim() == 3 else tensor
            if has_gates:  # the rows of gate and up alternate
                return torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)
            return tensor
        part_shape = shape[1] // (1 + has_gates), shape[2]
        return torch.stack(
            [
                torch.cat([self._files.get(part, part_shape) for part in parts])
                for parts in self._expert_names(name, shape[0])
            ]
        )


def stored_name(family: Family, module: str) -> str:
    """Return a checkpoint's name of a module."""
    for own_name, stored in family.names.items():
        if module.endswith(own_name):
            return module.removesuffix(own_name) + stored
    return module
