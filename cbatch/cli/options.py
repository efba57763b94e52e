"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from cbatch.assembly import EngineOptions
from cbatch.core.errors import FieldError
from cbatch.core.request import DRAFTERS, SamplingParams, StructuredOutputs

GIB = 2**30


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--draft", metavar="DIR", help="small model that guesses ahead")
    group.add_argument("--tokenizer", metavar="DIR", help="tokenizer, if not beside the model")
    group.add_argument("--dtype", default="auto", help="auto (the model's), float32, bfloat16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    group.add_argument(
        "--numerics",
        default="auto",
        choices=["auto", "invariant", "fast"],
        help="invariant: a row's bits do not depend on the batch",
    )
    group.add_argument(
        "--lookahead",
        default="goodput",
        metavar="POLICY",
        help="off, ema, goodput, fixed; ema:K drafts at most K, fixed:K always (default: goodput)",
    )
    add_drafter_option(group)
    group.add_argument("--max-slots", type=int, default=32, help="sequences that run at once")
    group.add_argument("--num-blocks", type=int, help="KV blocks (default: by memory)")
    group.add_argument("--kv-memory", type=float, metavar="GIB", help="memory for KV")
    group.add_argument("--block-size", type=int, default=16, help="tokens of a KV block")
    group.add_argument("--max-model-tokens", type=int, help="context (default: the model's)")
    group.add_argument("--step-budget", type=int, default=1024, help="tokens of a step, at most")
    group.add_argument("--queue-policy", default="fcfs", choices=["fcfs", "priority", "shortest"])
    group.add_argument("--ageing", type=float, help="what waiting a second is worth")
    group.add_argument("--no-prefix-cache", action="store_true", help="share no prompt prefixes")
    group.add_argument(
        "--overlap", type=int, default=0, choices=[0, 1], help="1: plan a step while one runs"
    )
    group.add_argument(
        "--engine-seed", type=int, metavar="SEED", help="draw the requests' seeds from this"
    )


def add_drafter_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help=f"who guesses ahead: {', '.join(DRAFTERS)}; repeatable, preferred first (default: the "
        "draft model; the others look up what the text repeats and need none)",
    )


def drafter_chain(args: argparse.Namespace) -> tuple[str, ...] | None:
    return None if args.drafter is None else tuple(args.drafter)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        dtype=args.dtype,
        device=args.device,
        numerics=args.numerics,
        lookahead=args.lookahead,
        drafter=drafter_chain(args),
        max_slots=args.max_slots,
        num_blocks=args.num_blocks,
        kv_memory_bytes=None if args.kv_memory is None else int(args.kv_memory * GIB),
        block_size_tokens=args.block_size,
        max_model_tokens=args.max_model_tokens,
        step_budget_tokens=args.step_budget,
        queue_policy=args.queue_policy,
        ageing_per_s=args.ageing,
        prefix_cache=not args.no_prefix_cache,
        overlap=args.overlap,
        seed=args.engine_seed,
        tokenizer=args.tokenizer,
    )


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
