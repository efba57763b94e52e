"""The tensors of a head (an EAGLE or Medusa drafter), from safetensors or a pickle of tensors."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.weight_files import WeightSource

_SAFE, _PICKLES = "*.safetensors", ("pytorch_model.bin", "*.bin", "*.pt", "*.pth")
# The names that frameworks give the one layer, and the prefixes that they put before all names.
_LAYER_NAMES = ("midlayer.", "model.midlayer.", "model.layers.0.", "layers.0.")
_PREFIXES = ("model.", "draft_model.")
# FasterDecoding's Medusa: blocks are `0.0.linear.weight`, the LM head after them `0.1.weight`.
_MEDUSA_NAME = re.compile(
    r"(?:medusa_heads?\.)?(\d+)\.(?:(\d+)\.linear\.(weight|bias)|\d+\.weight)"
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Tensors(NamedTuple):
    names: Iterable[str]
    shape: Callable[[str], Iterable[int]]
    read: Callable[[str], Tensor]


class HeadWeights(WeightSource):
    """The tensors of a head, read on request. EAGLE tensors have the names of speculators
    (`fc.weight`, `layers.0.self_attn.q_proj.weight`), Medusa's those of vLLM
    (`blocks.0.layers.0.weight`)."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._tensors = _read_safe(file) if file.match(_SAFE) else _read_pickle(file)
        self._stored = {_canonical_name(name): name for name in self._tensors.names}
        self.names = frozenset(self._stored)

    @classmethod
    def of(cls, path: Path) -> HeadWeights:
        """Open the weights in a directory. Raises ModelError if there is no file of tensors. A
        pickle is read by an unpickler that accepts only tensors: code in it is never run."""
        for file in weight_files(path):
            return cls(file)
        raise ModelError(f"{path}: no weights found; a head has {_SAFE}, or {_PICKLES[0]}")

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors.shape(self._stored[name])) if name in self.names else None

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of finite floats. Raises ModelError naming file and tensor."""
        tensor = self.read(name, shape)
        if tensor.dtype not in _FLOATS:
            raise self._error(name, f"has dtype {tensor.dtype}; quantised heads are not supported")
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise self._error(name, "contains values that are not finite; use another head")
        return tensor

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of any dtype."""
        self.require(name, shape)
        return self._tensors.read(self._stored[name]).contiguous()

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless the tensor exists and has this shape."""
        actual = self.shape_of(name)
        if actual is None:
            raise self._error(
                name, "is missing; the download may be incomplete, or the layout not supported"
            )
        if actual != shape:
            problem = f"has shape {list(actual)}, this model and config.json need {list(shape)}"
            raise self._error(name, f"{problem}; use a head that was trained for this model")

    def _error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.file}: tensor {name} {problem}")


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights in a directory, the preferred first."""
    return [file for pattern in (_SAFE, *_PICKLES) for file in sorted(path.glob(pattern))]


def _canonical_name(name: str) -> str:
    medusa = _MEDUSA_NAME.fullmatch(name)
    if medusa is not None:
        head, block, kind = medusa.groups()
        return f"blocks.{head}.layers.{block}.{kind}" if block else f"lm_heads.{head}.weight"
    for prefix in _LAYER_NAMES:
        if name.startswith(prefix):
            return "layers.0." + name.removeprefix(prefix)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read_safe(file: Path) -> _Tensors:
    try:
        tensors = safe_open(file, framework="pt")
        names = list(tensors.keys())
    except (SafetensorError, OSError) as error:
        problem = f"not a complete safetensors file ({error!s:.300}); download it again"
        raise ModelError(f"{file}: {problem}") from None
    return _Tensors(names, lambda name: tensors.get_slice(name).get_shape(), tensors.get_tensor)


def _read_pickle(file: Path) -> _Tensors:
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles of older and newer versions
            mapped = is_zipfile(file)  # older pickles can only be read whole
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        problem = "contains more than tensors; code in a pickle is never run"
        remedy = "use a safetensors file"
        raise ModelError(f"{file}: {problem}; {remedy}") from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: cannot be read ({error!s:.200}); download it again") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ModelError(f"{file}: must be a dict of tensors; use a file of weights")
    return _Tensors(tensors, lambda name: tensors[name].shape, tensors.__getitem__)
