"""Paths of named models; tokenizer, chat template and sampling defaults from a model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cbatch.core.request.errors import FieldError, did_you_mean
from cbatch.core.request.from_json import sampling_from_json
from cbatch.engine.options import EngineOptions
from cbatch.engine.packaged import PACKAGED, packaged_path
from cbatch.runtime.model.config import GENERATION_FILE, ModelError, is_hub_name, read_optional
from cbatch.runtime.model.gguf_file import Gguf, is_gguf, read_gguf
from cbatch.runtime.model.head_config import is_head
from cbatch.text import ChatTemplate, TextTokenizer, load_chat_template, load_tokenizer
from cbatch.text.gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_config

_LARGEST_FP32 = float(np.finfo(np.float32).max)
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
# Fields of `generation_config.json` that vLLM reads too, with their names in `SamplingParams`.
# `do_sample` is ignored, as in vLLM: a request without a temperature is sampled, by default at 1.
_GENERATION_FIELDS = {name: name for name in ("repetition_penalty", *_SAMPLING_FIELDS)} | {
    "max_new_tokens": "max_tokens"
}
_GGUF_FIELDS = {
    "general.sampling.penalty_repeat": "repetition_penalty",
    "general.sampling.temp": "temperature",
    **{f"general.sampling.{name}": name for name in _SAMPLING_FIELDS[1:]},
}


def find_model(model: str | Path, field: str = "model") -> str | Path:
    """Return the path of a packaged model's file, by its name; return any other model unchanged.

    Raises `FieldError` for a name that is neither a path nor a hub name, and for a packaged model
    that is not on this machine.
    """
    name, path_exists = str(model), Path(model).expanduser().exists()
    if name not in PACKAGED or path_exists:
        if not path_exists and not is_hub_name(name):
            remedy = "give a Hugging Face model directory, a .gguf file or a hub name (owner/name)"
            suggestion = did_you_mean(name, PACKAGED)
            raise FieldError(field, f"{name}: no such model{suggestion}", remedy)
        return model
    path = packaged_path(name)
    if path is None or not path.is_file():
        raise FieldError(field, f"{name} is not on this machine", f"run cbatch get {name}")
    return path


def refuse_model_files(path: Path, field: str) -> None:
    """Raise `FieldError` for a directory with a LoRA adapter, or with GGUF files but no
    safetensors."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        for file in sorted(path.glob("*.gguf")):
            raise FieldError(field, f"{path} is a folder of GGUF files", f"name one, say {file}")
    if (path / "adapter_config.json").is_file():
        problem = f"LoRA ({path}) is not supported"
        raise FieldError(field, problem, "merge the adapter into its model first")


def tokenizer_of(model: str | Path) -> TextTokenizer:
    """Return the tokenizer in a model's files, without loading weights. Raises `TokenizerError`, or
    `ModelError` for a GGUF file."""
    file = gguf_of(model)
    return load_tokenizer(model) if file is None else gguf_tokenizer(file.metadata, str(model))


def load_tokenizers(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> TextTokenizer | None:
    """Return the model's tokenizer, or None if the options say "none". Raises `TokenizerError` if
    the draft's tokenizer differs."""
    if options.tokenizer == "none":
        return None
    tokenizer = tokenizer_of(options.tokenizer or model)
    if draft is not None and not is_head(Path(draft)):
        tokenizer_of(draft).require_same_as(tokenizer)
    return tokenizer


def chat_template_of(model: str | Path, file: str | Path | None = None) -> ChatTemplate | None:
    """Return the chat template in `file`, by default the model's own. Raises `ChatTemplateError`,
    or the errors of `tokenizer_of`."""
    model = find_model(model)  # else a packaged model's name would be looked up in the hub
    gguf = gguf_of(model)
    config = None if gguf is None else gguf_tokenizer_config(gguf.metadata, str(model))
    return load_chat_template(model, file, config)


def gguf_of(model: str | Path) -> Gguf | None:
    """Return the model's GGUF file, or None if the model has another format. While a caller keeps
    the result, further calls return it without reading the file."""
    path = Path(find_model(model)).expanduser()
    return read_gguf(path) if is_gguf(path) else None


def sampling_defaults(model: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a model's `generation_config.json`, or the
    metadata of its GGUF file, sets. Raises `ModelError` naming file and field."""
    gguf = gguf_of(model)
    file = model if gguf else model / GENERATION_FILE
    values = gguf.metadata if gguf else read_optional(file)
    defaults: dict[str, Any] = {}
    for name, field in (_GGUF_FIELDS if gguf else _GENERATION_FIELDS).items():
        value = values.get(name)
        if value is None:
            continue
        if gguf and isinstance(value, float) and abs(value) < _LARGEST_FP32:
            value = float(str(np.float32(value)))  # the decimal that the authors wrote
        try:
            params = sampling_from_json({field: value})
        except FieldError as error:
            raise ModelError(
                f"{file}: {name}: {error.problem}; {error.remedy}, or "
                'ignore the file (generation_config="none")'
            ) from error
        if getattr(params, field) is not None:
            defaults[field] = getattr(params, field)
        if params.greedy:  # `top_p` 0 is greedy too
            defaults["temperature"] = 0.0
    return defaults
