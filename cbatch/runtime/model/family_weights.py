"""The tensors of any supported checkpoint, under the names that our own forward pass uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.families import Family, family_named
from cbatch.runtime.model.gguf_file import GgufTensor
from cbatch.runtime.model.records import Experts
from cbatch.runtime.model.weight_files import WeightSource

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
        # Fused matrix -> {part: rows}.
        self._fused_rows = {
            "qkv_proj": {"q_proj": q, "k_proj": k, "v_proj": v},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.widest_inner),
        }

    def scalar(self, name: str) -> float | None:
        return self._files.scalar(name)

    def unread(self) -> set[str]:
        return self._files.unread()

    def blocks(self, name: str) -> GgufTensor | None:
        """As in `WeightSource`; a layer's experts [experts, outputs, inputs] are one tensor."""
        if _EXPERTS in name:
            return self._expert_blocks(name)
        module, _, kind = name.rpartition(".")
        return self._files.blocks(f"{stored_name(self._family, module)}.{kind}")

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if _EXPERTS in name:
            return self._experts(name, shape)
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        for fused in self._family.fused:
            rows = self._fused_rows[fused]
            if last in rows:
                fused_shape = sum(rows.values()), *shape[1:]
                matrix = self._files.get(f"{parent}.{fused}.{kind}", fused_shape)
                return dict(zip(rows, matrix.split(list(rows.values())), strict=True))[last]
        return self._files.get(f"{stored_name(self._family, module)}.{kind}", shape)

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
        experts = stored_name(self._family, name.partition(_EXPERTS)[0] + _EXPERTS)
        parts = ("gate_proj", "up_proj") if "gate_up_proj" in name else ("down_proj",)
        stored = [stored_name(self._family, part) for part in parts]
        for expert in range(count):
            yield [f"{experts}.{expert}.{part}.weight" for part in stored]

    def _experts(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._family.stacked == "outputs":
            return self._files.get(stored_name(self._family, name), shape)
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
