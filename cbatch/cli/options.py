"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams, StructuredOutputs
from cbatch.engine.options import DRAFTER_HELP, EngineOptions
from cbatch.system.knobs import knob

MODEL_HELP = "directory, .gguf file, hub name or smollm2 (default: the demo pair)"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a command's models are loaded and run."""

    draft: Annotated[
        str | None,
        knob(
            "engine",
            "small model that guesses ahead, or an EAGLE or Medusa head of this one",
            "MODEL",
        ),
    ] = None
    engine: EngineOptions = EngineOptions()


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineSettings)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Of a command that takes them from its flags alone, which say how to sample, too. Raises
    `FieldError` naming the flag."""
    options = read_settings(EngineSettings, args).values.engine
    return msgspec.structs.replace(options, generation_config="none")


def add_drafter_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--drafter", action="append", metavar="NAME", help=DRAFTER_HELP)


def drafter_chain(args: argparse.Namespace) -> tuple[str, ...] | None:
    return None if args.drafter is None else tuple(args.drafter)


# Of `SamplingParams`, in the order of the help: what it says. `drafter` is the engine's flag.
_SAMPLING = {
    "max_tokens": None,
    "min_tokens": None,
    "temperature": "0: greedy (default)",
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "seed": "of the sampling noise (default: drawn)",
    "n": "choices for each prompt",
    "stop": "stop string; repeatable",
    "stop_token_ids": None,
    "include_stop_str_in_output": "the text ends with what stopped it",
    "skip_special_tokens": "leave control tokens out of the text (default)",
    "spaces_between_special_tokens": "as the tokenizer's decoder puts them (default)",
    "ignore_eos": None,
    "repetition_penalty": "1: none",
    "presence_penalty": None,
    "frequency_penalty": None,
    "logit_bias": "added to the logit of a token id; repeatable",
    "allowed_token_ids": "repeatable",
    "banned_token_ids": None,
    "structured_outputs": (
        """what every output must be, such as '{"regex": "[a-z]+"}' or '{"json": {SCHEMA}}'"""
    ),
    "logprobs": "and of the N likeliest tokens",
    "prompt_logprobs": "the same of the prompt",
    "logprobs_mode": None,
    "max_lookahead": "cap on k for these prompts",
    "verification": (
        "of drafts; coupled: drafts cannot move a sampled token (auto: with a seed); "
        "block: most are accepted"
    ),
}
_METAVARS = {"n": "N", "logprobs": "N", "prompt_logprobs": "N", "logit_bias": "ID=BIAS"}
_METAVARS |= {"structured_outputs": "JSON"}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Flags for the fields of `SamplingParams`, None where one is not given."""
    group = parser.add_argument_group(
        "sampling", "for every prompt; a JSON line's own fields come first"
    )
    kinds = {info.name: info.type for info in msgspec.structs.fields(SamplingParams)}
    for name, text in _SAMPLING.items():
        options: dict[str, Any] = {"help": text, "metavar": _METAVARS.get(name)}
        kind = kinds[name]
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        if kind is bool:
            options = {"help": text, "action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is tuple:
            options |= {"action": "append", "type": get_args(kind)[0]}
        elif get_origin(kind) is dict:
            options |= {"action": "append", "type": _bias}
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif kind is not StructuredOutputs:
            options["type"] = kind
        group.add_argument("-n" if name == "n" else _flag(name), **options)


def _flag(name: str) -> str:
    """One of a list is named at a time."""
    one = name.removesuffix("s") if name.endswith("_ids") else name
    return "--" + one.replace("_", "-")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0}
    for name in _SAMPLING:
        value = getattr(args, _flag(name)[2:].replace("-", "_"))
        if name == "structured_outputs":
            value = _structured(value)
        elif isinstance(value, list):
            value = dict(value) if name == "logit_bias" else tuple(value)
        if value is not None:
            given[name] = value
    return SamplingParams(**given)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        message = f"{text!r} is not a token id and its bias; write 12=-1.5"
        raise argparse.ArgumentTypeError(message) from error


def _structured(text: str | None) -> StructuredOutputs | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=StructuredOutputs)
    except msgspec.DecodeError as error:
        remedy = """write it as '{"regex": "[a-z]+"}'"""
        raise FieldError("--structured-outputs", f"cannot be read ({error})", remedy) from error


def model_paths(model: str | None, draft: str | None) -> tuple[str | Path, str | Path | None]:
    """The model and draft asked for, or the pair that is shipped with the package."""
    if model is not None:
        return model, draft
    if draft is not None:
        raise FieldError("--draft", "needs its target", "name the model as well")
    from cbatch.demo import demo_paths

    return demo_paths()
