"""A checkpoint of a Hugging Face directory or a GGUF file, or with numbers drawn for benchmarks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig, ModelError, load_config
from cbatch.runtime.model.gguf_file import GgufTensor, is_gguf, read_gguf
from cbatch.runtime.model.gguf_model import GgufWeights, config_of
from cbatch.runtime.model.rope import has_angles

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RANDOM_STD = 0.02


class WeightSource(Protocol):
    """Tensors by their name in the checkpoint."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, on the CPU in its stored dtype. Raises ModelError if it is absent, broken or
        of another shape."""

    def blocks(self, name: str) -> GgufTensor | None:
        """It as it is stored, where that is in blocks that are to be multiplied with."""
        return None


class Safetensors(WeightSource):
    """A directory with `model.safetensors`, or shards and their index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
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

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._names.get(name)
        if file is None:
            raise ModelError(f"{self.directory}: tensor {name} is missing; the download may be cut")
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except (SafetensorError, OSError) as err:
            raise ModelError(f"{file}: tensor {name} cannot be read ({err!s:.300})") from None
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{file}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        if tensor.dtype not in _DTYPES.values():
            raise ModelError(
                f"{file}: tensor {name} has dtype {tensor.dtype}; "
                f"supported: {', '.join(_DTYPES)} (quantised weights are not)"
            )
        return tensor

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except FileNotFoundError:
                raise ModelError(f"{file}: named by {_INDEX} but not there") from None
            except (SafetensorError, OSError) as err:
                raise ModelError(
                    f"{file}: not a complete safetensors file ({err!s:.300}); download it again"
                ) from None
        return self._files[file]


def _read_index(index: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): index.parent / file for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ModelError(f"{index}: weight_map: cannot be read ({err!r:.300})") from None
    for file in found.values():
        if file.parent != index.parent or "\0" in file.name:
            raise ModelError(f"{index}: weight_map: {str(file)!r:.80} is no file beside it")
    return found


class RandomWeights(WeightSource):
    """Numbers of the usual initialisation, the same for a name and a seed: benchmarks only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
        return torch.empty(shape).normal_(0.0, _RANDOM_STD, generator=generator)


class Checkpoint(NamedTuple):
    """What a model is, its weights, and the dtype to serve them in."""

    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype


def open_checkpoint(
    path_or_name: str | Path,
    dtype: str | torch.dtype = "auto",
    random_weights_seed: int | None = None,
) -> Checkpoint:
    """Of a Hugging Face directory or hub name, or of a GGUF file (the first, where it is split).

    A file's blocks are multiplied with as they are unless `dtype` says what to widen them to.
    `random_weights_seed` draws the weights instead (only the config is read). Raises ModelError for
    whatever in the checkpoint cannot be served, naming file and field or tensor.
    """
    path = resolve_directory(path_or_name, weights=random_weights_seed is None)
    file = read_gguf(path) if is_gguf(path) else None
    config = read_config(path)
    stored = config.torch_dtype
    if dtype == "auto" and stored not in (None, *_DTYPES):
        known = ", ".join(_DTYPES)
        raise ModelError(
            f"{path}: torch_dtype: {stored!r:.40} is not supported; supported: {known}"
        )
    served = resolve_dtype(dtype, stored)
    source: WeightSource
    if random_weights_seed is not None:
        source = RandomWeights(random_weights_seed)
    else:
        as_stored = dtype == "auto"
        source = (
            Safetensors(path)
            if file is None
            else GgufWeights(file, config, served, as_stored=as_stored)
        )
    return Checkpoint(config, source, served)


def read_config(path: Path) -> ModelConfig:
    """What `open_checkpoint` says of a directory or file, without its weights."""
    config = config_of(read_gguf(path)) if is_gguf(path) else load_config(path)
    if not has_angles(config):
        raise ModelError(
            f"{path}: rope: its numbers give positions no finite angles; take the model's own"
        )
    return config


def resolve_dtype(dtype: str | torch.dtype, stored: str | None) -> torch.dtype:
    """The dtype to serve in; "auto" is the checkpoint's own, fp32 if it does not say."""
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = (stored or "float32") if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise ModelError(f"dtype: {name!r} is not supported; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_directory(
    path_or_name: str | Path, *, weights: bool, download: Callable[..., str] | None = None
) -> Path:
    """A local model directory, downloading a hub name (`owner/name`) if need be; a GGUF file as
    it is.

    With `weights` False only config and tokenizer files are fetched. `download` stands in for
    `huggingface_hub.snapshot_download` in tests.
    """
    path = Path(path_or_name).expanduser()
    if is_gguf(path):
        return path
    if path.exists():
        return path if path.is_dir() else path.parent
    name = str(path_or_name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"model: {name}: no such directory; give a Hugging Face model directory, a .gguf file "
            "or a hub name (owner/name)"
        )
    if download is None:
        from huggingface_hub import snapshot_download as download
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(download(name, allow_patterns=patterns))
    except Exception as err:  # the client raises a dozen kinds: HTTP, offline, missing, gated
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelError(
            f"model: {name}: no such directory, and the hub did not give it ({reason}); download "
            "it where the network allows and pass its directory"
        ) from None
