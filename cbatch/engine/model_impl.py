"""Whose modelling code computes a model: our own pass, or that of transformers. Loads nothing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from cbatch.core.request.errors import FieldError
from cbatch.engine.options import ModelImpl
from cbatch.runtime.cpu.transformers_backend.support import refuse_unsupported
from cbatch.runtime.model.config import UnsupportedModelError, load_config
from cbatch.runtime.model.gguf_file import is_gguf

Impl = Literal["own", "transformers"]
_LEAST_VERSION = 5  # has the interfaces that we are called by
_REMEDY = "pip install 'cbatch[models]'"


def choose_impl(path: Path, asked: ModelImpl) -> Impl:
    """For a model's directory or GGUF file. Raises `FieldError` where what is asked for cannot be
    had, ModelError for a model that nobody here serves."""
    if is_gguf(path):
        if asked == "transformers":
            problem = f"{path} is a GGUF file, which our own pass alone serves"
            raise FieldError("model_impl", problem, "use own, or the model's safetensors")
        return "own"
    if asked == "own":
        return "own"
    if asked == "auto":
        try:
            load_config(path)
            return "own"
        except UnsupportedModelError as error:
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


def checked_impl(path: Path, asked: ModelImpl) -> Impl:
    """`choose_impl` for a model that is to be read next: what our own pass serves is looked at in
    whole."""
    impl = choose_impl(path, asked)
    if impl == "own":
        from cbatch.runtime.model.checkpoint import read_config

        read_config(path)
    return impl


def refuse_beside_transformers(*, head: Path | None) -> None:
    """What our own code alone serves. Raises `FieldError`."""
    if head is not None:
        problem = f"a head ({head}) reads states that transformers' modelling code does not give"
        raise FieldError("draft", problem, "give a draft model, or drafter ngram or suffix")


def _problem_of_transformers() -> str | None:
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "transformers, which may know it, is not installed"
    if int(found.partition(".")[0]) < _LEAST_VERSION:
        return f"transformers {found}, which may know it, is older than {_LEAST_VERSION}.0"
    return None
