"""`cbatch calibrate`: measure step durations on this machine and write a cost profile for
`cbatch sim --cost`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import msgspec

from cbatch.cli.console import TextConsole
from cbatch.cli.options import ModelSettings, add_engine_flags, model_paths
from cbatch.cli.output import add_json_option, print_figures, require_place
from cbatch.cli.settings import read_settings
from cbatch.core.prices.calibration import Accuracy
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.executor import Executor
from cbatch.engine.build import load_engine
from cbatch.engine.prices.calibrator import calibrate

SECONDS = 180.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "calibrate",
        usage="%(prog)s [MODEL] --out FILE [options]",
        description="Measure steps of many sizes, draft lengths and contexts, fit a cost profile "
        "to them, and print how well the profile predicts other steps.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="cost profile to write, in JSON"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time of all measured steps")
    add_json_option(parser, "the accuracy of the profile")
    add_engine_flags(parser, ModelSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(ModelSettings, args)
    values = settings.values
    if values.engine.overlap:
        raise FieldError("--overlap", "the simulator's loop is serial", "leave it out")
    if not 0 < args.seconds < math.inf:
        raise FieldError("--seconds", f"{args.seconds} is not allowed", "give more than 0")
    require_place("--out", args.out)
    console = TextConsole(stderr=True)
    without_text = {"generation_config": "none", "tokenizer": "none", "overlap": 0}
    options = msgspec.structs.replace(values.engine, **without_text)
    with settings.naming():
        engine, info = load_engine(*model_paths(values.model, values.draft), options)
    for line in info.lines():
        console.print(line, soft_wrap=True)
    executor = engine.core.executor
    assert isinstance(executor, Executor)
    console.print(f"measuring steps for {args.seconds:g} s")
    config = engine.scheduler.config
    if values.engine.drafter is None and config.draft_context_tokens is None:
        # Lookups cannot be calibrated, nor what was measured with them.
        config = msgspec.structs.replace(config, drafter=None, cost_profile=None)
    profile = calibrate(executor, config, info, seconds=args.seconds)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    console.print(f"fitted to {_accuracy_text(profile.fitted)}", soft_wrap=True)
    console.print(f"other steps: {_accuracy_text(profile.held_out)}", soft_wrap=True)
    row = msgspec.to_builtins({"fitted": profile.fitted, "held_out": profile.held_out})
    document = {"results": [row], "machine": profile.machine, "versions": profile.versions}
    print_figures(document, args.json)
    return 0


def _accuracy_text(accuracy: Accuracy) -> str:
    return (
        f"{accuracy.steps:,} steps, {accuracy.total:+.1%} in all; "
        f"of a step {accuracy.p50:.1%} (p50) and {accuracy.p90:.1%} (p90)"
    )
