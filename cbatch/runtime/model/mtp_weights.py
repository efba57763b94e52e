"""A model's own head for multi-token prediction (MTP), in its checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from cbatch.runtime.model.checkpoint import Checkpoint
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.gguf_file import GgufTensor, is_gguf, read_gguf
from cbatch.runtime.model.gguf_tensors import mtp_parts
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.weight_files import Safetensors

_PREFIX = "mtp."
FC = "mtp.fc.weight"


class MtpWeights(HeadWeights):
    """The tensors of the head in an open checkpoint, under the names of an EAGLE head. It has no
    embedding and no output matrix of its own."""

    def __init__(self, file: Path, checkpoint: Checkpoint) -> None:
        self.file, self._source, self.names = file, checkpoint.weights, frozenset()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.get(f"{_PREFIX}{name}", shape).contiguous()

    def blocks(self, name: str) -> GgufTensor | None:
        return self._source.blocks(f"{_PREFIX}{name}")


def has_mtp(path: Path, config: ModelConfig) -> bool:
    """Return whether a checkpoint with weights has a head."""
    if is_gguf(path):
        return bool(mtp_parts(read_gguf(path), config))
    return FC in Safetensors(path)
