"""Entry point of the `cbatch` command."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cbatch import __version__
from cbatch.cli.output import FAILED, INTERRUPTED, require_place
from cbatch.cli.parser import CommandParser
from cbatch.core.request.errors import FieldError, InputError
from cbatch.process.spawn import early_process
from cbatch.system.heap import MEMORY_REMEDY, memory_problem
from cbatch.system.terminal import shown

AddParser = Callable[[Any], None]  # argument: the result of `add_subparsers`
# Summaries by command, in the order of help.
COMMANDS = {
    "get": "download a small model",
    "generate": "complete prompts to JSON lines",
    "chat": "talk with a model in the terminal",
    "serve": "serve completions over HTTP",
    "bench": "load-test a server of the OpenAI API",
    "check": "check whether the answers of a server are consistent",
    "demo": "show the shipped models: they complete functions, then chat",
    "sim": "replay a trace through the scheduler on a virtual clock",
    "sim capacity": "find the highest rate at which a trace meets its objectives",
    "advise": "find the best settings for a run recorded by cbatch serve --record",
    "calibrate": "measure the cost of steps on this machine, for cbatch sim --cost",
    "trace": "show, convert, sample, scale and generate traces of requests",
    "report": "compare reports of cbatch bench and cbatch sim",
}
# Group of entry points. Each is an `add_parser`, under its command's name with `-` for a space.
GROUP = "cbatch.commands"
# Two-word commands. They cannot be subparsers of `sim`: its first argument may be a trace file.
TWO_WORDS = ("sim capacity",)

# Errors of the operating system, such as a full disk, that are printed without a traceback.
EXPECTED_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE}
# Too little memory, a terminal that hung up, a stream opened the wrong way.
EXPECTED_ERRNOS |= {errno.ENOMEM, errno.EIO, errno.EBADF}
# Exit status after a broken pipe, the status with which shells report SIGPIPE. Python ignores the
# signal itself, as a server must: a client that closes its socket must not end the process.
BROKEN_PIPE = 141


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser. Only the module of `command` is imported; other commands have only a
    help line. If `command` is None, the modules of all are imported. Raises `FieldError` for a
    command that the installed metadata does not name."""
    parser = CommandParser(
        prog="cbatch",
        description="Serves language models: many sequences in every step, each speculating with "
        "a lookahead of its own. Without a model, the small pair of target and draft that is "
        "shipped is used.",
    )
    parser.add_argument("--version", action="version", version=f"cbatch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if command in (None, name):
            _adder_of(name)(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _adder_of(command: str) -> AddParser:
    """Return the function that adds the parser of a command. Commands of other packages are found
    by their entry points, since `cbatch` imports neither `sim` nor `bench`."""
    if command == "generate":
        from cbatch.cli.generate import add_parser
    elif command == "chat":
        from cbatch.cli.chat import add_parser
    elif command == "serve":
        from cbatch.cli.serve import add_parser
    elif command == "demo":
        from cbatch.cli.demo import add_parser
    elif command == "get":
        from cbatch.cli.get import add_parser
    elif command == "calibrate":
        from cbatch.cli.calibrate import add_parser
    else:
        return _registered(command)
    return add_parser


def _registered(command: str) -> AddParser:
    from importlib.metadata import entry_points

    problem = "is not registered: the installed cbatch is older than this code"
    for point in entry_points(group=GROUP, name=command.replace(" ", "-")):
        try:
            adder: AddParser = point.load()
        except ModuleNotFoundError as error:
            if error.name is None or not f"{point.module}.".startswith(f"{error.name}."):
                raise  # a dependency of the command is missing
            problem += f" (there is no {error.name})"
        else:
            return adder
    raise FieldError(command, problem, "install it again; in a checkout: pip install -e .")


def main(
    argv: Sequence[str] | None = None,
    parser_of: Callable[[str], argparse.ArgumentParser] = make_parser,
) -> int:
    """Run one command and return its exit status. `parser_of` makes a parser from the name of the
    command. The parser sets the default `run`, a function of the parsed arguments."""
    _prepare_streams()
    try:
        try:
            return _run(argv, parser_of)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return BROKEN_PIPE
    except (MemoryError, ImportError, RuntimeError) as error:
        problem = memory_problem(error)
        if problem is None:
            raise
        print(f"cbatch: memory: {problem}; {MEMORY_REMEDY}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno not in EXPECTED_ERRNOS:
            raise
        print(shown(f"cbatch: {error}", sys.stderr), file=sys.stderr)
        _abandon_output()
        return FAILED
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich exits on a broken pipe
            _abandon_output()
            return BROKEN_PIPE
        raise


def _run(argv: Sequence[str] | None, parser_of: Callable[[str], argparse.ArgumentParser]) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if " ".join(words[:2]) in TWO_WORDS:
        words[:2] = [" ".join(words[:2])]
    try:
        with _early_engine(words):
            args = parser_of(words[0] if words else "").parse_args(words)
            require_place("--json", getattr(args, "json", None))
            status: int = args.run(args)
    except InputError as error:
        print(shown(f"cbatch: {error}", sys.stderr), file=sys.stderr)
        return FAILED
    return status


def _early_engine(words: list[str]) -> AbstractContextManager[None]:
    """Return a context in which the engine's process of `cbatch serve` already imports torch, while
    this process imports the server."""
    if words[:1] != ["serve"] or {"-h", "--help", "--ray"}.intersection(words):
        return nullcontext()
    return early_process()


def _prepare_streams() -> None:
    """Replace closed standard streams by the null device, before a file gets their number, and
    escape characters that the encoding of standard output lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _abandon_output() -> None:
    """Replace an output stream that fails to flush by the null device. Python would flush it again
    at exit, and print a second error about a closed pipe or a full disk."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


if __name__ == "__main__":
    sys.exit(main())
