"""Choice of the code that computes a model: our own pass or transformers. Loads nothing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from cbatch.core.request.errors import FieldError
from cbatch.engine.options import EngineOptions
from cbatch.runtime.cpu.transformers_backend.support import refuse_unsupported
from cbatch.runtime.model.config import UnsupportedModelError
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.gguf_file import is_gguf

# "compiled": a family that our own pass computes only with its compiled kernels, on a CPU.
Impl = Literal["own", "compiled", "transformers"]
_LEAST_VERSION = 5  # has the interfaces that we are called by
_REMEDY = "pip install 'cbatch[models]'"


def choose_impl(path: Path, options: EngineOptions, *, draft: bool = False) -> Impl:
    """Return the code for a model's directory or GGUF file.

    `model_impl` transformers does not apply to a draft. Raises `FieldError` if the requested code
    does not serve the model, ModelError if none does.
    """
    asked: str | None = options.model_impl
    if draft and asked == "transformers":
        asked = "auto"
    if is_gguf(path):
        if asked == "transformers":
            problem = f"{path} is a GGUF file, which our own pass alone serves"
            raise FieldError("model_impl", problem, "use own, or the model's safetensors")
        return "own"
    if asked != "transformers":
        try:
            return _own_impl(path, options)
        except UnsupportedModelError as error:
            if asked == "own":
                raise
            refuse_unsupported(path)
            missing = _problem_of_transformers()
            if missing is not None:
                told = f"{error} by our own pass, and {missing}: {_REMEDY}"
                raise UnsupportedModelError(told) from None
            return "transformers"
    refuse_unsupported(path)
    missing = _problem_of_transformers()
    if missing is not None:
        raise FieldError("model_impl", missing, _REMEDY)
    return "transformers"


def _own_impl(path: Path, options: EngineOptions) -> Impl:
    """Return which of our passes computes the model; raise UnsupportedModelError if none does."""
    config = load_config(path)
    if config.plain:
        return "own"
    if options.device.startswith("cuda"):
        problem = "is not computed on a GPU"
    elif options.tensor_parallel > 1:
        problem = "is not shared out over ranks"
    else:
        from cbatch.runtime.cpu.compiled import compiles
        from cbatch.runtime.model.checkpoint import resolve_dtype

        dtype = resolve_dtype(options.dtype, config.torch_dtype)
        if compiles(dtype):
            return "compiled"
        problem = f"needs a C compiler, and float32 or bfloat16, not {dtype}"
    raise UnsupportedModelError(f"{path}: {config.family} {problem}")


def checked_impl(path: Path, options: EngineOptions, *, draft: bool = False) -> Impl:
    """Return `choose_impl`, and check the whole configuration of a model that our pass serves."""
    impl = choose_impl(path, options, draft=draft)
    if impl != "transformers":
        from cbatch.runtime.model.checkpoint import read_config

        read_config(path)
    return impl


def refuse_beside(impl: Impl, *, head: Path | None) -> None:
    """Raise `FieldError` for options that a model of that code does not support."""
    if head is not None and impl != "own":
        problem = f"a head ({head}) needs a target of Llama, Mistral, Qwen2 or Qwen3"
        raise FieldError("draft", problem, "give a draft model, or drafter ngram or suffix")


def _problem_of_transformers() -> str | None:
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "transformers, which may know it, is not installed"
    if int(found.partition(".")[0]) < _LEAST_VERSION:
        return f"transformers {found}, which may know it, is older than {_LEAST_VERSION}.0"
    return None
