"""`cbatch trace generate`: write a synthetic trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from cbatch.cli.output import print_line, require_place
from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from sim.workload.distributions import (
    ARRIVALS,
    LENGTHS,
    forms,
    is_drawn,
    parse_arrivals,
    parse_lengths,
)
from sim.workload.generate import Arrivals, Conversations, converse, generate
from sim.workload.lengths import Lengths
from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceRequest

THINK_S = 5.0  # default mean pause before a turn
DEFAULT_ARRIVALS = "poisson"  # default arrival process


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "generate",
        help="generate a synthetic trace",
        description="Generate requests or sessions with random arrivals and lengths.",
    )
    group = parser.add_argument_group(
        "sessions",
        "arrivals are of sessions; the prompt of a turn is the session so far and --prompt",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help=".jsonl or .jsonl.gz file to write")
    lengths = f"prompt length in tokens: {forms(LENGTHS)}"
    parser.add_argument("--prompt", required=True, metavar="DIST", help=lengths)
    parser.add_argument("--output", required=True, metavar="DIST", help="output length in tokens")
    laws = f"poisson (default), or one of {forms(ARRIVALS, 1)}"
    for place, option, kind, metavar, text in (
        (parser, "--rate", float, "R", "requests or sessions per second"),
        (parser, "--arrivals", str, "DIST", laws),
        (parser, "--requests", int, "N", "number of requests"),
        (parser, "--seed", int, "SEED", "seed of random draws (default: 0)"),
        (group, "--sessions", int, "N", "number of sessions, instead of --requests"),
        (group, "--turns", str, "DIST", "turns per session (default: fixed:1)"),
        (group, "--think", float, "SECONDS", f"mean pause before a turn (default: {THINK_S})"),
        (group, "--system-prompt", int, "TOKENS", "length of the system prompt of sessions"),
        (group, "--system-prompts", int, "N", "number of system prompts (default: 1)"),
    ):
        place.add_argument(option, type=kind, metavar=metavar, help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the trace. Raises `FieldError` before anything is written."""
    if (args.requests is None) == (args.sessions is None):
        raise FieldError("--requests", "or --sessions is needed, not both", "say how many")
    requests = _requests(args) if args.sessions is None else _sessions(args)
    return write_trace(args.out, requests, "made up")


def _requests(args: argparse.Namespace) -> Iterable[TraceRequest]:
    for option in ("turns", "think", "system_prompt", "system_prompts"):
        if getattr(args, option) is not None:
            problem = "would be ignored: there are no sessions"
            raise FieldError(flag_of(option), problem, "give --sessions")
    seed = checked_seed(args, drawing=_draws(args))
    return generate(*_distributions(args), requests=args.requests, seed=seed)


def _sessions(args: argparse.Namespace) -> Iterable[TraceRequest]:
    if args.system_prompts is not None and args.system_prompt is None:
        problem = "would be ignored without --system-prompt"
        raise FieldError("--system-prompts", problem, "give --system-prompt")
    turns = args.turns or "fixed:1"
    arrivals, messages, outputs = _distributions(args)
    conversations = Conversations(
        turns=parse_lengths("--turns", turns),
        messages=messages,
        outputs=outputs,
        system_prompts=1 if args.system_prompts is None else args.system_prompts,
        system_prompt_tokens=args.system_prompt or 0,
        think_s=THINK_S if args.think is None else args.think,
    )
    drawing = conversations.think_s > 0 or is_drawn(turns) or _draws(args)
    seed = checked_seed(args, drawing=drawing)
    return converse(arrivals, conversations, sessions=args.sessions, seed=seed)


def _distributions(args: argparse.Namespace) -> tuple[Arrivals, Lengths, Lengths]:
    if args.rate is None is args.arrivals:
        raise FieldError("--rate", "is missing", "give requests per second")
    return (
        parse_arrivals("--arrivals", args.arrivals or DEFAULT_ARRIVALS, args.rate),
        parse_lengths("--prompt", args.prompt),
        parse_lengths("--output", args.output, "output_tokens"),
    )


def _draws(args: argparse.Namespace) -> bool:
    return any(map(is_drawn, (args.arrivals or DEFAULT_ARRIVALS, args.prompt, args.output)))


def checked_seed(args: argparse.Namespace, *, drawing: bool) -> int:
    """Return the seed, by default 0. Raises `FieldError` if a given seed would be ignored."""
    if args.seed is not None and not drawing:
        raise FieldError("--seed", "is not used here", "leave it out")
    return args.seed or 0


def write_trace(
    out: Path,
    requests: Iterable[TraceRequest],
    description: str,
    skipped: Callable[[], int] = lambda: 0,
) -> int:
    """Write a trace in cbatch's own format and print `description`. On an error no file is left.
    `skipped` is called after all requests were read. Raises `FieldError` for an empty trace."""
    require_place("OUT", out)
    partial = out.with_name(f"{out.name}.part{out.suffix}")
    try:
        count = write_requests(partial, requests)
        if not count:
            raise FieldError("OUT", "no request is left", "keep more of it")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{out}: {count:,} requests, {description}")
    print_line({"out": str(out), "requests": count, "skipped": skipped()})
    return 0
