"""`cbatch`: the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from cbatch.cli.generate import INTERRUPTED
from cbatch.core.request.errors import FieldError
from cbatch.text import ChatTemplateError, TokenizerError

COMMANDS = (  # in the order of the help. Each has an `add_parser`, and lives with what it runs
    "cbatch.cli.generate",
    "cbatch.cli.serve",
    "bench.load.cli.command",
    "cbatch.cli.demo",
    "cbatch.cli.train_head",
    "sim.cli.replay_command",
    "sim.cli.capacity",
    "sim.cli.calibrate",
    "sim.cli.trace",
    "bench.load.cli.report",
)
TWO_WORDS = ("sim capacity",)  # a trace may stand where a command of `sim` would
FAILED = 2  # exit status for bad input, as argparse's
UNREAD = 141  # as shells report SIGPIPE, which Python ignores: sockets must not end a server


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cbatch",
        description="Serves language models: many sequences in every step, each speculating with "
        "a lookahead of its own. Without a model the small pair that is shipped is used.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in COMMANDS:
        importlib.import_module(module).add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        return _leave_unread()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich makes that of it
            return _leave_unread()
        raise


# -- inside


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if " ".join(words[:2]) in TWO_WORDS:
        words[:2] = [" ".join(words[:2])]
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


def _leave_unread() -> int:
    """Whoever read the output, `head` say, has seen enough. What is still in a buffer would be
    written at exit, and complained about."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return UNREAD


def _is_bad_input(error: ValueError) -> bool:
    from cbatch.process.connection import EngineStartError
    from cbatch.runtime.model.config import ModelError

    kinds = (FieldError, TokenizerError, ChatTemplateError, ModelError, EngineStartError)
    return isinstance(error, kinds)


if __name__ == "__main__":
    sys.exit(main())
