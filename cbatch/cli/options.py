"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cbatch.assembly import EngineOptions
from cbatch.cli.settings import add_flags, option, read_settings
from cbatch.core.config import QueuePolicy
from cbatch.core.errors import FieldError
from cbatch.core.request import DRAFTERS, SamplingParams, StructuredOutputs

GIB = 2**30
_engine = partial(option, "engine")
_DRAFTER_HELP = (
    f"who guesses ahead: {', '.join(DRAFTERS)}; repeatable, preferred first (default: the draft "
    "model; the others look up what the text repeats and need none)"
)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a command's models are loaded and run."""

    draft: Annotated[str | None, _engine("small model that guesses ahead", "DIR")] = None
    tokenizer: Annotated[str | None, _engine("tokenizer, if not beside the model", "DIR")] = None
    dtype: Annotated[str, _engine("auto (the model's), float32, bfloat16")] = "auto"
    device: Annotated[str, _engine("auto, cpu, cuda, cuda:1")] = "auto"
    numerics: Annotated[
        Literal["auto", "invariant", "fast"],
        _engine("invariant: a row's bits do not depend on the batch"),
    ] = "auto"
    lookahead: Annotated[
        str,
        _engine("off, ema, goodput, fixed; ema:K drafts at most K, fixed:K always", "POLICY"),
    ] = "goodput"
    drafter: Annotated[tuple[str, ...] | None, _engine(_DRAFTER_HELP, "NAME")] = None
    max_slots: Annotated[int, _engine("sequences that run at once", "N")] = 32
    num_blocks: Annotated[int | None, _engine("KV blocks (default: by memory)", "N")] = None
    kv_memory: Annotated[float | None, _engine("memory for KV", "GIB")] = None
    block_size: Annotated[int, _engine("tokens of a KV block", "TOKENS")] = 16
    max_model_tokens: Annotated[int | None, _engine("context (default: the model's)", "TOKENS")] = (
        None
    )
    step_budget: Annotated[int, _engine("tokens of a step, at most", "TOKENS")] = 1024
    queue_policy: Annotated[QueuePolicy, _engine("who gets a slot first")] = "fcfs"
    ageing: Annotated[float | None, _engine("what waiting a second is worth", "N")] = None
    no_prefix_cache: Annotated[bool, _engine("share no prompt prefixes")] = False
    overlap: Annotated[Literal[0, 1], _engine("1: plan a step while one runs")] = 0
    engine_seed: Annotated[int | None, _engine("draw the requests' seeds from this", "SEED")] = None

    def engine_options(self) -> EngineOptions:
        """Raises `FieldError` by the names of `EngineOptions`; see `NAMES`."""
        return EngineOptions(
            dtype=self.dtype,
            device=self.device,
            numerics=self.numerics,
            lookahead=self.lookahead,
            drafter=self.drafter,
            max_slots=self.max_slots,
            num_blocks=self.num_blocks,
            kv_memory_bytes=None if self.kv_memory is None else int(self.kv_memory * GIB),
            block_size_tokens=self.block_size,
            max_model_tokens=self.max_model_tokens,
            step_budget_tokens=self.step_budget,
            queue_policy=self.queue_policy,
            ageing_per_s=self.ageing,
            prefix_cache=not self.no_prefix_cache,
            overlap=self.overlap,
            seed=self.engine_seed,
            tokenizer=self.tokenizer,
        )


# Fields of the settings, by the names that the engine has for them.
NAMES = {
    "kv_memory_bytes": "kv_memory",
    "block_size_tokens": "block_size",
    "step_budget_tokens": "step_budget",
    "ageing_per_s": "ageing",
    "prefix_cache": "no_prefix_cache",
    "seed": "engine_seed",
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineSettings)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Of a command that takes them from its flags alone. Raises `FieldError` naming the flag."""
    settings = read_settings(EngineSettings, args)
    try:
        return settings.values.engine_options()
    except FieldError as error:
        raise settings.named(error, NAMES) from error


def add_drafter_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--drafter", action="append", metavar="NAME", help=_DRAFTER_HELP)


def drafter_chain(args: argparse.Namespace) -> tuple[str, ...] | None:
    return None if args.drafter is None else tuple(args.drafter)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "for every prompt; a JSON line's own fields come first"
    )
    group.add_argument("--max-tokens", type=int, default=64)
    group.add_argument("--min-tokens", type=int, default=0)
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    group.add_argument("--top-k", type=int)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--seed", type=int, help="of the sampling noise (default: drawn)")
    group.add_argument("-n", type=int, default=1, help="choices for each prompt")
    group.add_argument("--stop", action="append", default=[], help="stop string; repeatable")
    group.add_argument("--stop-token-id", type=int, action="append", default=[])
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="1: none")
    group.add_argument("--presence-penalty", type=float, default=0.0)
    group.add_argument("--frequency-penalty", type=float, default=0.0)
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="added to the logit of a token id; repeatable",
    )
    group.add_argument("--allowed-token-id", type=int, action="append", help="repeatable")
    group.add_argument("--banned-token-id", type=int, action="append", default=[])
    group.add_argument(
        "--structured-outputs",
        metavar="JSON",
        help="""what every output must be, such as '{"regex": "[a-z]+"}' or '{"json": {SCHEMA}}'""",
    )
    group.add_argument("--logprobs", type=int, metavar="N", help="and of the N likeliest tokens")
    group.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt")
    group.add_argument("--logprobs-mode", default="raw", choices=["raw", "processed"])
    group.add_argument("--max-lookahead", type=int, help="cap on k for these prompts")
    group.add_argument(
        "--verification",
        default="auto",
        choices=["auto", "rejection", "coupled"],
        help="of drafts; coupled: drafts cannot move a sampled token (auto: with a seed)",
    )


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


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        n=args.n,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(args.logit_bias),
        allowed_token_ids=None if args.allowed_token_id is None else tuple(args.allowed_token_id),
        banned_token_ids=tuple(args.banned_token_id),
        structured_outputs=_structured(args.structured_outputs),
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        logprobs_mode=args.logprobs_mode,
        max_lookahead=args.max_lookahead,
        verification=args.verification,
    )


def model_paths(model: str | None, draft: str | None) -> tuple[str | Path, str | Path | None]:
    """The model and draft asked for, or the pair that is shipped with the package."""
    if model is not None:
        return model, draft
    if draft is not None:
        raise FieldError("--draft", "needs its target", "name the model as well")
    from cbatch.demo import demo_paths

    return demo_paths()
