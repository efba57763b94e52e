"""`cbatch serve`: completions over HTTP."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from cbatch.assembly import load_engine
from cbatch.cli.options import add_engine_options, engine_options, model_paths

GRACE_S = 30  # open streams may finish for this long after a stop signal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve completions over HTTP",
        description="Serve POST /v1/completions (whole or streamed), /v1/models and /health.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the demo pair")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-name", metavar="NAME", help="the model's name to clients")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from cbatch.server.app import create_app
    from cbatch.server.service import EngineService

    model, draft = model_paths(args.model, args.draft)
    engine, info = load_engine(model, draft, engine_options(args))
    console = Console(stderr=True, highlight=False)
    for line in info.lines():
        console.print(line, soft_wrap=True)
    name = args.served_name or (Path(model).name if args.model else "cbatch-demo")
    console.print(f"serving {name} on http://{args.host}:{args.port}/v1/completions")
    uvicorn.run(
        create_app(EngineService(engine), name),
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )
    return 0
