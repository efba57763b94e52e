"""`cbatch bench`: load-test a server of the OpenAI API, cbatch or any other."""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from bench.load.cli.options import GOODPUT_SHARE, LoadOptions
from bench.load.cli.session import bench
from bench.load.run.selftest import self_test
from cbatch.cli.output import add_json_option, require_place
from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError

EPILOG = """\
Latencies count from the time at which a request was due. A 200 that is empty, cut or malformed is
an error. The report has the definitions of cbatch sim. Without --rate or --trace the load is a
closed loop of --concurrency clients.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s URL [options]",
        description="Load a server of the OpenAI API and measure what its clients see.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, LoadOptions, defaults={"goodput_share": GOODPUT_SHARE})
    add_json_option(parser, "the whole report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = replace(read_settings(LoadOptions, args).values, json=args.json)
    if options.self_test:
        return self_test(options.processes)
    if options.url is None:
        raise FieldError("URL", "is missing", "name the server, as http://localhost:8000")
    for option in ("json", "csv", "records", "page"):
        require_place(f"--{option}", getattr(options, option))
    _allow_files()
    return bench(options)


def _allow_files() -> None:
    """Raise the limit of open files to the maximum: every connection needs a file descriptor."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
