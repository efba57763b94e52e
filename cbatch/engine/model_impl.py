"""Choice of a model's modelling code: our own or transformers. Loads no weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from cbatch.core.request.errors import FieldError
from cbatch.engine.backends import backend_of
from cbatch.engine.model_files import gguf_of, refuse_model_files
from cbatch.engine.options import EngineOptions
from cbatch.runtime.backend import Impl
from cbatch.runtime.model.config import UnsupportedModelError
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.gguf_file import Gguf, is_gguf
from cbatch.runtime.transformers_backend.support import refuse_unsupported

_MIN_VERSION = 5  # first major version of transformers with the interfaces that we use
_REMEDY = "pip install 'cbatch[models]'"


def choose_impl(path: Path, options: EngineOptions, *, draft: bool = False) -> Impl:
    """Return the modelling code for a model's directory or GGUF file.

    For a draft, `model_impl` "transformers" counts as "auto". Raises `FieldError` if the requested
    code does not support the model, `ModelError` if no code does.
    """
    requested: str | None = options.model_impl
    if draft and requested == "transformers":
        requested = "auto"
    if is_gguf(path):
        if requested == "transformers":
            problem = f"{path} is a GGUF file, which only our own pass supports"
            raise FieldError("model_impl", problem, "use own, or the model's safetensors")
        return "own"
    if requested != "transformers":
        try:
            return _own_impl(path, options)
        except UnsupportedModelError as error:
            if requested == "own":
                raise
            refuse_unsupported(path)
            unusable = _transformers_problem()
            if unusable is not None:
                problem = f"{error} by our own pass, and {unusable}: {_REMEDY}"
                raise UnsupportedModelError(problem) from None
            return "transformers"
    refuse_unsupported(path)
    unusable = _transformers_problem()
    if unusable is not None:
        raise FieldError("model_impl", unusable, _REMEDY)
    return "transformers"


def _own_impl(path: Path, options: EngineOptions) -> Impl:
    """Return which of our two implementations supports the model. Raises `UnsupportedModelError` if
    neither does."""
    config = load_config(path)
    if config.plain:
        return "own"
    backend = backend_of("cpu" if options.device == "auto" else options.device)
    problem = backend.why_not_compiled(config, options.dtype, options.tensor_parallel_size)
    if problem is None:
        return "compiled"
    raise UnsupportedModelError(f"{path}: {config.family} {problem}")


class ModelFiles(NamedTuple):
    """Path of a model, and its modelling code. While this object keeps `gguf`, readers of config,
    weights and tokenizer share it."""

    path: Path
    impl: Impl
    gguf: Gguf | None = None


def check_files(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> tuple[ModelFiles, ModelFiles | None]:
    """Check that the configurations of a model and its draft can be served, before weights
    load. Raises the errors of `choose_impl`."""
    target = _check_files_of(model, "model", options)
    if draft is None:
        return target, None
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory
    from cbatch.runtime.model.head_config import is_head, read_head

    path = resolve_directory(draft, weights=True)
    if not is_head(path):
        _require_method(options.draft_method, "draft_model")
        return target, _check_files_of(draft, "draft", options)
    if target.impl == "own":
        kind = read_head(path, read_config(target.path))[0].kind
        _require_method(options.draft_method, kind)
    return target, ModelFiles(path, "own")


def _require_method(method: str | None, kind: str) -> None:
    if method not in (None, kind):
        problem = f"method {method!r}, but the draft is of method {kind!r}"
        raise FieldError("speculative_config", problem, "correct the method, or leave it out")


def _check_files_of(model: str | Path, field: str, options: EngineOptions) -> ModelFiles:
    local, is_draft = Path(model).expanduser(), field == "draft"
    refuse_model_files(local, field)
    if (local / "config.json").is_file():
        choose_impl(local, options, draft=is_draft)  # refuse before the import of torch
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory

    path = resolve_directory(model, weights=False)
    gguf = gguf_of(path)
    impl = choose_impl(path, options, draft=is_draft)
    if impl != "transformers":
        read_config(path)
    return ModelFiles(path, impl, gguf)


def require_head_support(impl: Impl, *, head: Path | None) -> None:
    """Raise `FieldError` if there is a `head` and the target's code does not support heads."""
    if head is not None and impl != "own":
        problem = f"a head ({head}) needs a target of Llama, Mistral, Qwen2 or Qwen3"
        raise FieldError("draft", problem, "give a draft model, or drafter ngram or suffix")


def _transformers_problem() -> str | None:
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return "transformers, which may support it, is not installed"
    if int(installed.partition(".")[0]) < _MIN_VERSION:
        return f"transformers {installed}, which may support it, is older than {_MIN_VERSION}.0"
    return None
