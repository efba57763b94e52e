"""The tensors of a head, under one spelling: of safetensors, or a pickle of tensors alone."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cbatch.runtime.model.config import ModelError

_SAFE, _PICKLES = "*.safetensors", ("pytorch_model.bin", "*.bin", "*.pt", "*.pth")
# What frameworks call the one layer, and what they put before names.
_LAYER_NAMES = ("midlayer.", "model.midlayer.", "model.layers.0.", "layers.0.")
_PREFIXES = ("model.", "draft_model.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class HeadWeights:
    """Tensors by the names of speculators: `fc.weight`, `layers.0.self_attn.q_proj.weight`."""

    def __init__(self, file: Path, tensors: dict[str, Any]) -> None:
        self.file = file
        self._tensors = {_spelled(name): tensor for name, tensor in tensors.items()}
        self.names = frozenset(self._tensors)

    @classmethod
    def of(cls, path: Path) -> HeadWeights:
        """Raises ModelError for what is no file of tensors. A pickle is read by an unpickler that
        knows tensors alone: code in it is never run."""
        for file in weight_files(path):
            return cls(file, (_read_safe if file.match(_SAFE) else _read_pickle)(file))
        raise ModelError(f"{path}: no weights found; a head has {_SAFE}, or {_PICKLES[0]}")

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tuple(tensor.shape)

    def get(self, name: str, *shape: int) -> Tensor:
        """Of floats that are numbers. Raises ModelError naming file and tensor."""
        tensor = self.any(name, *shape)
        if tensor.dtype not in _FLOATS:
            raise self._error(name, f"has dtype {tensor.dtype}; quantised heads are not supported")
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise self._error(name, "holds numbers that are not finite; take another head")
        return tensor

    def any(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._error(name, "is missing; the download may be cut, or the layout another")
        if tuple(tensor.shape) != shape:
            have, want = list(tensor.shape), list(shape)
            problem = f"has shape {have}, this model and config.json ask for {want}"
            raise self._error(name, f"{problem}; use a head that was trained for this model")
        return tensor

    def _error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.file}: tensor {name} {problem}")


def weight_files(path: Path) -> list[Path]:
    """The preferred first."""
    return [file for pattern in (_SAFE, *_PICKLES) for file in sorted(path.glob(pattern))]


def _spelled(name: str) -> str:
    for prefix in _LAYER_NAMES:
        if name.startswith(prefix):
            return "layers.0." + name.removeprefix(prefix)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read_safe(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as held:
            return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        problem = f"not a complete safetensors file ({error!s:.300}); download it again"
        raise ModelError(f"{file}: {problem}") from None


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of older and newer pickles
            held = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        problem = "holds more than tensors: code in a pickle could do anything and is not run"
        remedy = "take a safetensors file of it"
        raise ModelError(f"{file}: {problem}; {remedy}") from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: cannot be read ({error!s:.200}); download it again") from None
    if not isinstance(held, dict) or not all(isinstance(t, Tensor) for t in held.values()):
        raise ModelError(f"{file}: must hold tensors by their names; take a file of weights")
    return held
