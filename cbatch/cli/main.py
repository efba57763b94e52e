"""`cbatch`: the command line."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from cbatch import __version__
from cbatch.cli.output import INTERRUPTED, require_place
from cbatch.cli.parser import CommandParser
from cbatch.core.request.errors import FieldError

# In the order of the help: the module of each, which has an `add_parser`, and what it does.
COMMANDS = {
    "generate": ("cbatch.cli.generate", "complete prompts to JSON lines"),
    "serve": ("cbatch.cli.serve", "serve completions over HTTP"),
    "bench": ("bench.load.cli.command", "load-test a server of the OpenAI API"),
    "demo": ("cbatch.cli.demo", "watch the shipped models complete functions, and a model chat"),
    "sim": ("sim.cli.replay_command", "replay a trace through the scheduler on a virtual clock"),
    "sim capacity": ("sim.cli.capacity", "the highest rate at which a trace keeps an SLO"),
    "calibrate": ("cbatch.cli.calibrate", "measure what steps cost here, for cbatch sim --cost"),
    "trace": ("sim.cli.trace", "look at traces of requests, convert, sample and scale them"),
    "report": ("bench.load.cli.report", "compare reports of cbatch bench and cbatch sim"),
}
# Commands of earlier versions, and what to run instead.
MOVED = {"train-head": "run python -m tools.heads in a checkout of cbatch"}
TWO_WORDS = ("sim capacity",)  # a trace may stand where a command of `sim` would
FAILED = 2  # exit status for bad input, as argparse's
# What the system refuses, which is no fault of a command's and needs no traceback.
REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE}
UNREAD = 141  # as shells report SIGPIPE, which Python ignores: sockets must not end a server


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of `command` alone, whatever else is named in its help; None: of every command,
    with all that they import."""
    parser = CommandParser(
        prog="cbatch",
        description="Serves language models: many sequences in every step, each speculating with "
        "a lookahead of its own. Without a model the small pair that is shipped is used.",
    )
    parser.add_argument("--version", action="version", version=f"cbatch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (module, what) in COMMANDS.items():
        if command in (None, name):
            importlib.import_module(module).add_parser(commands)
        else:
            commands.add_parser(name, help=what)
    return parser


def main(
    argv: Sequence[str] | None = None,
    parser_of: Callable[[str], argparse.ArgumentParser] = make_parser,
) -> int:
    """Run one command and return its exit status. `parser_of` makes a parser from the first word;
    the parser sets `run`, a function of the parsed arguments."""
    try:
        try:
            return _run(argv, parser_of)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return UNREAD
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        print(f"cbatch: {error}", file=sys.stderr)
        _abandon_output()
        return FAILED
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich makes that of it
            _abandon_output()
            return UNREAD
        raise


# -- inside


def _run(argv: Sequence[str] | None, parser_of: Callable[[str], argparse.ArgumentParser]) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if " ".join(words[:2]) in TWO_WORDS:
        words[:2] = [" ".join(words[:2])]
    try:
        if words[:1] and words[0] in MOVED:
            raise FieldError(words[0], "is no command of cbatch any more", MOVED[words[0]])
        args = parser_of(words[0] if words else "").parse_args(words)
        require_place("--json", getattr(args, "json", None))
        status: int = args.run(args)
    except ValueError as error:
        if not _is_bad_input(error):
            raise
        print(f"cbatch: {error}", file=sys.stderr)
        return FAILED
    return status


def _abandon_output() -> None:
    """Drop what a stream cannot take, as of a pipe to `head` or on a full disk: it would be written
    at exit, and complained about."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _is_bad_input(error: ValueError) -> bool:
    from cbatch.process.connection import EngineStartError
    from cbatch.runtime.model.config import ModelError
    from cbatch.text import ChatTemplateError, TokenizerError

    kinds = (FieldError, TokenizerError, ChatTemplateError, ModelError, EngineStartError)
    return isinstance(error, kinds)


if __name__ == "__main__":
    sys.exit(main())
