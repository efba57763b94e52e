"""`cbatch`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cbatch.cli import bench, calibrate, demo, generate, report, serve, sim, trace
from cbatch.cli.generate import INTERRUPTED
from cbatch.cli.simulate import capacity
from cbatch.core.errors import FieldError
from cbatch.text import ChatTemplateError, TokenizerError

FAILED = 2  # exit status for bad input, as argparse's


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cbatch",
        description="Serves language models: many sequences in every step, each speculating with "
        "a lookahead of its own. Without a model the small pair that is shipped is used.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (generate, serve, bench, demo, sim, capacity, calibrate, trace, report):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if " ".join(words[:2]) == capacity.COMMAND:  # a trace may be where a command of `sim` would be
        words[:2] = [capacity.COMMAND]
    args = make_parser().parse_args(words)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        if not _is_bad_input(error):
            raise
        print(f"cbatch: {error}", file=sys.stderr)
        return FAILED
    return status


def _is_bad_input(error: ValueError) -> bool:
    from cbatch.engine.client import EngineStartError
    from cbatch.runtime.config import ModelError

    kinds = (FieldError, TokenizerError, ChatTemplateError, ModelError, EngineStartError)
    return isinstance(error, kinds)


if __name__ == "__main__":
    sys.exit(main())
