"""A model's own head for multi-token prediction (MTP), in its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from cbatch.runtime.model.checkpoint import Checkpoint
from cbatch.runtime.model.config import ModelConfig, ModelError
from cbatch.runtime.model.gguf_file import GgufTensor, is_gguf, read_gguf
from cbatch.runtime.model.gguf_tensors import mtp_parts
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.weight_files import Safetensors

_PREFIX = "mtp."
_FC = "mtp.fc.weight"
# One more layer of the model, as in DeepSeek-V3 and GLM-4.5.
_OTHER_LAYOUT = re.compile(r"model\.layers\.\d+\.(eh_proj|enorm)\.weight")


class MtpWeights(HeadWeights):
    """The tensors of the head in an open checkpoint, under the names of an EAGLE head. It has no
    embedding and no output matrix of its own."""

    def __init__(self, file: Path, checkpoint: Checkpoint) -> None:
        self.file, self._source, self.names = file, checkpoint.weights, frozenset()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.get(f"{_PREFIX}{name}", shape).contiguous()

    def blocks(self, name: str) -> GgufTensor | None:
        return self._source.blocks(f"{_PREFIX}{name}")


def why_no_mtp(path: Path, config: ModelConfig) -> str | None:
    """Return what a checkpoint lacks for drafting with its own head; None if it has all."""
    if is_gguf(path):
        has, other = bool(mtp_parts(read_gguf(path), config)), False
    else:
        try:
            names = Safetensors(path).names
        except ModelError:  # a model for random weights has a config only
            names = frozenset()
        has, other = _FC in names, any(map(_OTHER_LAYOUT.fullmatch, names))
    if has:
        return None
    if other:
        return "its MTP layer has the layout of DeepSeek-V3 and GLM-4.5, which is not supported"
    return f"it has no MTP head (tensor {'nextn.eh_proj' if is_gguf(path) else _FC})"
