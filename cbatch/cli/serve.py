"""`cbatch serve`: completions over HTTP."""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from cbatch.assembly import load_engine
from cbatch.cli.options import add_engine_options, engine_options, model_paths
from cbatch.text import load_chat_template

GRACE_S = 30  # open streams may finish for this long after a stop signal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve completions over HTTP",
        description="Serve the OpenAI API: completions and chat, whole or streamed.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the demo pair")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-name", metavar="NAME", help="the model's name to clients")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template (default: the model's own)"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ask clients for one of these; repeatable (also: $CBATCH_API_KEY)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from cbatch.server.app import create_app
    from cbatch.server.metrics import snapshot_of
    from cbatch.server.model import ServedModel
    from cbatch.server.service import EngineService

    model, draft = model_paths(args.model, args.draft)
    chat_template = load_chat_template(model, args.chat_template)  # fails before weights load
    engine, info = load_engine(model, draft, engine_options(args))
    console = Console(stderr=True, highlight=False)
    for line in info.lines():
        console.print(line, soft_wrap=True)
    name = args.served_name or (Path(model).name if args.model else "cbatch-demo")
    served = ServedModel(
        name,
        max_model_tokens=info.max_model_tokens,
        created_s=int(time.time()),
        root=str(model),
        tokenizer=engine.tokenizer,
        chat_template=chat_template,
    )
    keys = [*args.api_key, *filter(None, [os.environ.get("CBATCH_API_KEY")])]
    snapshot = partial(snapshot_of, engine)
    console.print(f"serving {name} on http://{args.host}:{args.port}/v1")
    uvicorn.run(
        create_app(EngineService(engine), served, snapshot=snapshot, api_keys=keys),
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )
    return 0
