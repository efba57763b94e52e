"""`cbatch bench`: how much a server takes, ours or any other of the OpenAI API."""

from __future__ import annotations

import argparse

from bench.load.cli.options import add_options
from cbatch.cli.output import require_place
from cbatch.core.request.errors import FieldError

EPILOG = """\
Latencies count from the time at which a request should have been sent. A 200 that is empty, cut or
malformed is an error. The definitions are those of cbatch sim, whose report this writes.
Without --rate or --trace it is a closed loop: as many clients as --concurrency says.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s URL [options]",
        description="Load a server of the OpenAI API and measure what its clients see.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.self_test:
        from bench.load.run.selftest import self_test

        return self_test(args.processes)
    if args.url is None:
        raise FieldError("URL", "is missing", "name the server, as http://localhost:8000")
    for option in ("json", "csv", "records", "page"):
        require_place(f"--{option}", getattr(args, option))
    _allow_files()
    from bench.load.cli.session import bench

    return bench(args)


def _allow_files() -> None:
    """A connection is a file: as many as the system lets this process have."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
