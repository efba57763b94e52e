"""Sources of weights: the tensors of a checkpoint by name, and the reader of safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cbatch.runtime.model.config import ModelError, require_file
from cbatch.runtime.model.gguf_file import GgufTensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Tensors that a model does not need: derived tensors, scales of activations and KV, and the heads
# and towers that are left out.
_NEEDLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.weight_shape$|\.(input|output|[kqv])_scale$|^mtp\.|^(model\.)?visual\."
)
_NESTED = "model.language_model."  # the prefix of the layers in a model with other parts
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightSource(Protocol):
    """The tensors of a checkpoint, by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, on the CPU in its stored dtype. Raises ModelError if it is absent,
        broken or of another shape."""

    def blocks(self, name: str) -> GgufTensor | None:
        """Return the tensor as stored if products take its quantised blocks directly, else None."""
        return None

    def scalar(self, name: str) -> float | None:
        """Return the value of a tensor with one element, or None if there is no such tensor."""
        return None

    def decay(self, module: str, heads: int) -> Tensor:
        """Return the decay rate of each head of a recurrent layer, below 0, in fp32."""
        return -self.get(f"{module}.A_log", (heads,)).float().exp()

    def unread(self) -> set[str]:
        """Return the names of tensors that have not been read and that a model might need."""
        return set()


class Safetensors(WeightSource):
    """The tensors of a directory with `model.safetensors`, or with shards and their index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._read_names: set[str] = set()
        index = directory / _INDEX
        if index.exists():
            self._names = _read_index(index)
        else:
            file = directory / _SINGLE
            if not file.exists():
                raise ModelError(
                    f"{directory}: neither {_SINGLE} nor {_INDEX} found; "
                    "only safetensors weights can be loaded"
                )
            self._names = dict.fromkeys(self._open(file).keys(), file)
        self._nested = any(name.startswith(_NESTED) for name in self._names)
        self._names = {name.replace(_NESTED, "model.", 1): at for name, at in self._names.items()}
        self.has_vision = any(re.match(r"(model\.)?visual\.", name) for name in self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def type_of(self, name: str) -> str | None:
        """Return the dtype as the file names it (F32, BF16, F8_E4M3), or None without the
        tensor."""
        if name not in self._names:
            return None
        dtype: str = self._read(name, lambda file: file.get_slice(self._stored(name)).get_dtype())
        return dtype

    def scalar(self, name: str) -> float | None:
        if name not in self._names:
            return None
        tensor = self.read(name)
        if tensor.numel() != 1 or not tensor.isfinite().all() or float(tensor) <= 0:
            raise ModelError(f"{self.directory}: tensor {name} is not a number above 0")
        return float(tensor)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor, file = self.read(name), self._names.get(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{file}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json says {list(shape)}"
            )
        if tensor.dtype not in DTYPES.values():
            raise ModelError(
                f"{file}: tensor {name} has dtype {tensor.dtype}; "
                f"supported: {', '.join(DTYPES)} (and quantised types that config.json names)"
            )
        return tensor

    def read(self, name: str) -> Tensor:
        """Return the tensor as stored, of any dtype and shape."""
        tensor: Tensor = self._read(name, lambda file: file.get_tensor(self._stored(name)))
        self._read_names.add(name)
        return tensor

    def _stored(self, name: str) -> str:
        return name.replace("model.", _NESTED, 1) if self._nested else name

    def unread(self) -> set[str]:
        return {n for n in self._names if not _NEEDLESS.search(n)} - self._read_names

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        file = self._names.get(name)
        if file is None:
            raise ModelError(
                f"{self.directory}: tensor {name} is missing; the download may be incomplete"
            )
        try:
            return read(self._open(file))
        except (SafetensorError, OSError) as err:
            raise ModelError(f"{file}: tensor {name} cannot be read ({err!s:.300})") from None

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            require_file(file)
            try:
                self._files[file] = safe_open(file, framework="pt")
            except FileNotFoundError:
                raise ModelError(f"{file}: named by {_INDEX} but missing") from None
            except (SafetensorError, OSError) as err:
                raise ModelError(
                    f"{file}: not a complete safetensors file ({err!s:.300}); download it again"
                ) from None
        return self._files[file]


def _read_index(index: Path) -> dict[str, Path]:
    require_file(index)
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / file for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ModelError(f"{index}: weight_map: cannot be read ({err!r:.300})") from None
    for file in files.values():
        if file.parent != index.parent or "\0" in file.name:
            raise ModelError(
                f"{index}: weight_map: {str(file)!r:.80} is not a file in the same folder"
            )
    return files
