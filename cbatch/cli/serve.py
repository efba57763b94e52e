"""`cbatch serve`: completions over HTTP."""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from cbatch.assembly import EngineFactory, EngineInfo, EngineOptions, load_tokenizers
from cbatch.cli.options import add_engine_options, engine_options, model_paths
from cbatch.text import load_chat_template


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
    group = parser.add_argument_group("limits")
    group.add_argument("--max-queued-requests", type=int, default=256, metavar="N")
    group.add_argument("--max-queued-prompt-tokens", type=int, default=262_144, metavar="N")
    group.add_argument(
        "--queue-timeout", type=float, metavar="S", help="refuse what has waited so long for a slot"
    )
    group.add_argument("--timeout", type=float, metavar="S", help="end what is not done by then")
    group.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="to finish in after a stop signal"
    )
    group.add_argument(
        "--hang-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="kill and restart an engine whose step takes longer (default: 120)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvloop

    model, draft = model_paths(args.model, args.draft)
    uvloop.run(_serve(args, model, draft, engine_options(args)))
    return 0


async def _serve(
    args: argparse.Namespace, model: str | Path, draft: str | Path | None, options: EngineOptions
) -> None:
    import uvicorn

    from cbatch.engine.client import EngineClient
    from cbatch.engine.process import EngineProcess
    from cbatch.server.admission import Limits
    from cbatch.server.app import create_app
    from cbatch.server.keys import KeyRing
    from cbatch.server.model import ServedModel
    from cbatch.server.run import DrainingServer
    from cbatch.server.service import EngineService

    limits = Limits(
        max_queued_requests=args.max_queued_requests,
        max_queued_prompt_tokens=args.max_queued_prompt_tokens,
        queue_timeout_s=args.queue_timeout,
        timeout_s=args.timeout,
    )
    # What is wrong with these is told before an engine starts.
    chat_template = load_chat_template(model, args.chat_template)
    tokenizer = load_tokenizers(model, draft, options)
    launch = partial(EngineProcess, EngineFactory(model, draft, options))
    client = EngineClient(launch, hang_timeout_s=args.hang_timeout)
    service = EngineService(client, tokenizer, limits=limits, seed=options.seed)
    try:
        engine = await service.start()
        console = Console(stderr=True, highlight=False)
        for line in msgspec.convert(engine.info, EngineInfo).lines():
            console.print(line, soft_wrap=True)
        name = args.served_name or (Path(model).name if args.model else "cbatch-demo")
        served = ServedModel(
            name,
            max_model_tokens=engine.config.max_model_tokens,
            created_s=int(time.time()),
            root=str(model),
            tokenizer=tokenizer,
            chat_template=chat_template,
        )
        keys = [*args.api_key, *filter(None, [os.environ.get("CBATCH_API_KEY")])]
        app = create_app(service, served, keys=KeyRing(keys))
        config = uvicorn.Config(app, host=args.host, port=args.port, log_level="warning")

        def announce(port: int) -> None:
            console.print(f"serving {name} on http://{args.host}:{port}/v1")

        server = DrainingServer(config, service, grace_s=args.grace, on_listening=announce)
        await server.serve()
    finally:
        await service.stop()
