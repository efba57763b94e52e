"""Checkpoints: a Hugging Face directory, a GGUF file, or random weights for benchmarks."""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig, ModelError, is_hub_name
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.family_weights import FamilyWeights
from cbatch.runtime.model.gguf_file import WIDENED, Gguf, is_gguf, read_gguf
from cbatch.runtime.model.gguf_model import config_of
from cbatch.runtime.model.gguf_tensors import GgufWeights, drafting_tensors, mtp_parts
from cbatch.runtime.model.quantised import QuantisedWeights
from cbatch.runtime.model.rope import has_angles
from cbatch.runtime.model.weight_files import DTYPES, Safetensors, WeightSource

_RANDOM_STD = 0.02
_EMBEDDING = "model.embed_tokens.weight"
_MAX_NAMED = 4  # names in a warning about unread tensors; one name covers all layers
UNTIED = "%s: tie_word_embeddings: lm_head.weight differs from the embedding and is used"
_logger = logging.getLogger("cbatch")


class RandomWeights(WeightSource):
    """Random weights from the usual initialisation, a function of name and seed: for benchmarks."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
        return torch.empty(shape).normal_(0.0, _RANDOM_STD, generator=generator)


class Checkpoint(NamedTuple):
    """Config and weights of a model, and the dtype to serve it in."""

    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype

    def head(self) -> Tensor:
        """Return the LM head [vocab, hidden]: the embedding, if they are tied."""
        c = self.config
        name = _EMBEDDING if c.tie_embeddings else "lm_head.weight"
        return self.weights.get(name, (c.vocab_size, c.hidden_size))


def open_checkpoint(
    path_or_name: str | Path,
    dtype: str | torch.dtype = "auto",
    random_weights_seed: int | None = None,
) -> Checkpoint:
    """Open a Hugging Face directory or hub name, or a GGUF file (the first part if split).

    Products take quantised weights as they are, unless `dtype` names a type to widen them to. With
    `random_weights_seed` the weights are random, and only the config is read. Raises ModelError for
    anything in the checkpoint that cannot be served, naming the file and the field or tensor.
    """
    path = resolve_directory(path_or_name, weights=random_weights_seed is None)
    file = read_gguf(path) if is_gguf(path) else None
    config = read_config(path)
    stored = config.torch_dtype
    if dtype == "auto" and stored not in (None, *DTYPES):
        known = ", ".join(DTYPES)
        raise ModelError(
            f"{path}: torch_dtype: {stored!r:.40} is not supported; supported: {known}"
        )
    if config.quantisation is not None and stored == "float16":
        stored = "bfloat16"  # as for GGUF files: products take quantised weights as they are
    served = resolve_dtype(dtype, stored)
    source: WeightSource
    if random_weights_seed is not None:
        source = RandomWeights(random_weights_seed)
    else:
        as_stored = dtype == "auto"
        if file is not None:
            if as_stored:
                warn_widened(file, served)
            if drafting_tensors(file, config) and not mtp_parts(file, config):
                _logger.warning("%s: its layers for multi-token prediction are left out", path)
            source = GgufWeights(file, config, served, as_stored=as_stored)
        else:
            source = files = Safetensors(path)
            if files.has_vision:
                _logger.warning("%s: its vision tower is left out; prompts are text only", path)
            if config.tie_embeddings and _has_other_head(files):
                _logger.warning(UNTIED, path)
                config = structs.replace(config, tie_embeddings=False)
            if config.quantisation is not None:
                quantisation = config.quantisation
                source = QuantisedWeights(files, quantisation, config, served, as_stored=as_stored)
            source = FamilyWeights(source, config)
    return Checkpoint(config, source, served)


def _has_other_head(files: Safetensors) -> bool:
    """Return whether the LM head differs from the embedding; transformers always uses the LM
    head."""
    if "lm_head.weight" not in files:
        return False
    head, embedding = files.read("lm_head.weight"), files.read(_EMBEDDING)
    return head.dtype != embedding.dtype or not torch.equal(head, embedding)


def warn_widened(file: Gguf, dtype: torch.dtype) -> None:
    """Log the memory of quantised tensors that no product takes as they are."""
    tensors = [each for each in file.tensors.values() if each.type in WIDENED.values()]
    if tensors:
        types = ", ".join(sorted({each.type.name for each in tensors}))
        stored = sum(each.raw.nbytes for each in tensors) / 1e6
        widened = sum(math.prod(each.shape) for each in tensors) * dtype.itemsize / 1e6
        message = "%s: %d tensors of %s are widened while loading: %.1f MB become %.1f MB"
        _logger.warning(message, file.path, len(tensors), types, stored, widened)


def warn_unread(path: str | Path, names: Iterable[str]) -> None:
    """Log the unread tensors of a checkpoint: its config.json may belong to another model."""
    layers = Counter(re.sub(r"(\.\d+\.).*", r"\1*", name) for name in sorted(names))
    if layers:
        shown = ", ".join([f"{n} ({count})" for n, count in layers.items()][:_MAX_NAMED])
        and_more = f" and {len(layers) - _MAX_NAMED} more" if len(layers) > _MAX_NAMED else ""
        message = "%s: %d tensors are not used (does config.json belong to this model?): %s%s"
        _logger.warning(message, path, layers.total(), shown, and_more)


def read_config(path: Path) -> ModelConfig:
    """Return the config that `open_checkpoint` returns, without reading weights."""
    config = config_of(read_gguf(path)) if is_gguf(path) else load_config(path)
    if not has_angles(config):
        raise ModelError(f"{path}: rope: its values do not give finite angles; use the model's own")
    return config


def resolve_dtype(dtype: str | torch.dtype, stored: str | None) -> torch.dtype:
    """Return the dtype to serve in. "auto" is the checkpoint's own dtype, or fp32 if it has
    none."""
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = (stored or "float32") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ModelError(f"dtype: {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_directory(
    path_or_name: str | Path, *, weights: bool, download: Callable[..., str] | None = None
) -> Path:
    """Return a local model directory, downloading a hub name (`owner/name`) if necessary. A GGUF
    file is returned as it is.

    With `weights` False only config and tokenizer files are downloaded. Tests replace
    `huggingface_hub.snapshot_download` by `download`.
    """
    path = Path(path_or_name).expanduser()
    if is_gguf(path):
        return path
    if path.exists():
        return path if path.is_dir() else path.parent
    name = str(path_or_name)
    if not is_hub_name(name):
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
            f"model: {name}: no such directory, and the hub did not return it ({reason}); download "
            "it where the network allows and pass its directory"
        ) from None
