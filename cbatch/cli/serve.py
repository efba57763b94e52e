"""`cbatch serve`: completions over HTTP."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import socket
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from cbatch.cli.options import MODEL_HELP, EngineSettings, model_paths
from cbatch.cli.settings import PREFIX, add_flags, read_settings, unknown_variables
from cbatch.core.request.errors import FieldError
from cbatch.engine.build import load_tokenizers
from cbatch.engine.info import EngineInfo
from cbatch.engine.model_files import chat_template_of, find_model, gguf_of
from cbatch.kv_events.config import KVEventsConfig, read_config
from cbatch.process.factory import EngineFactory
from cbatch.process.messages import Ready
from cbatch.server.http.limits import ConnectionLimits, connections_for
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.tool_parsers import ToolParser, require_parser
from cbatch.server.serving.admission_queue import Limits
from cbatch.steplog.step_log import StepLogError, open_to_append
from cbatch.system.knobs import knob
from cbatch.system.logs import LogFormat, configure
from cbatch.text import ChatTemplate, TextTokenizer

if TYPE_CHECKING:
    from cbatch.kv_events.publisher import KVEventPublisher

_logger = logging.getLogger("cbatch")
_server, _limit, _watching = (partial(knob, name) for name in ("server", "limits", "sight"))
LOST = 1  # exit status where the engine cannot be kept running
Seconds = Annotated[float, Meta(gt=0)]

EPILOG = """\
Every option is also a variable of the environment (--max-slots is CBATCH_MAX_SLOTS) and a key of a
TOML file (max_slots), MODEL too; a flag counts more than a variable, that more than the file.
"""


class ServeSettings(EngineSettings, frozen=True, kw_only=True):
    model: Annotated[str | None, knob("", "")] = None
    host: Annotated[str, _server("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _server("0: any that is free", "N")] = 8000
    served_name: Annotated[str | None, _server("the model's name to clients", "NAME")] = None
    chat_template: Annotated[
        str | None, _server("Jinja template (default: the model's own)", "FILE")
    ] = None
    tool_parser: Annotated[
        ToolParser | None, _server("how the model writes tool calls that are not forced")
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"], _server("auto: generation_config.json has the defaults of calls")
    ] = "auto"
    api_key: Annotated[
        tuple[str, ...], _server("ask clients for one of these; repeatable", "KEY")
    ] = ()
    api_key_file: Annotated[str | None, _server("more of them, one a line", "FILE")] = None
    kv_events_config: Annotated[
        str | None,
        _server("publish what enters and leaves the prefix cache; fields are vLLM's", "JSON"),
    ] = None
    open_metrics: Annotated[bool, _server("/metrics asks for no key")] = False

    max_requests_per_key: Annotated[
        int | None, _limit("calls that a key may have open; beyond: 429", "N")
    ] = None
    limits: Limits = Limits()
    grace: Annotated[float, Meta(ge=0, le=1e6), _limit("to finish in after a stop signal", "S")] = (
        30.0
    )
    connections: ConnectionLimits = ConnectionLimits()
    hang_timeout: Annotated[Seconds, _limit("restart an engine whose step takes longer", "S")] = (
        120.0
    )

    record: Annotated[
        str | None, _watching("append requests and steps, for `cbatch sim`", "FILE")
    ] = None
    log_format: Annotated[LogFormat, _watching("of the lines on standard error")] = "text"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve completions over HTTP",
        usage="cbatch serve [MODEL] [options]",
        description="Serve the OpenAI API: completions and chat, whole or streamed.",
        epilog=EPILOG,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    add_flags(parser, ServeSettings, but=("model",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from cbatch.server.http.run import EngineLostError

    file = args.config or os.environ.get(f"{PREFIX}CONFIG")
    settings = read_settings(ServeSettings, args, os.environ, None if file is None else Path(file))
    configure(settings.values.log_format)
    for name in unknown_variables(os.environ, ServeSettings):
        _logger.warning("%s is no setting of cbatch serve and is ignored", name)
    try:
        uvloop.run(_serve(settings.values))
    except FieldError as error:
        raise settings.named(error) from error
    except EngineLostError as error:
        _logger.critical("%s; the server ends with status %d, to be started anew", error, LOST)
        return LOST
    return 0


async def _serve(settings: ServeSettings) -> None:
    from cbatch.process.client import EngineClient
    from cbatch.process.server import EngineProcess
    from cbatch.server.http.app import create_app
    from cbatch.server.http.connections import ServerConfig
    from cbatch.server.http.keys import KeyRing, read_keys
    from cbatch.server.http.run import DrainingServer
    from cbatch.server.serving.service import EngineService

    # What is wrong with these is told before an engine starts.
    most = connections_for(settings.connections.max_connections)
    connections = msgspec.structs.replace(settings.connections, max_connections=most)
    model, draft = model_paths(settings.model, settings.draft)
    model, draft = find_model(model), None if draft is None else find_model(draft, "draft")
    for field, path in (("model", model), ("draft", draft)):
        require_model(field, path)
    more = [] if settings.api_key_file is None else read_keys(Path(settings.api_key_file))
    keys = KeyRing([*settings.api_key, *more], max_requests_per_key=settings.max_requests_per_key)
    how = settings.generation_config
    options = msgspec.structs.replace(settings.engine, generation_config=how)
    held = gguf_of(model)  # so that it is read once for both
    chat_template = chat_template_of(model, settings.chat_template)
    tokenizer = load_tokenizers(model, draft, options)
    del held
    if settings.tool_parser is not None:
        require_parser(settings.tool_parser, tokenizer)
    require_record(settings.record)
    with closing(bind(settings.host, settings.port)) as listener:
        kv_events = kv_event_publisher(settings)
        factory = EngineFactory(
            model,
            draft,
            options,
            settings.log_format,
            settings.record,
            kv_events=kv_events is not None,
        )
        client = EngineClient(partial(EngineProcess, factory), hang_timeout_s=settings.hang_timeout)
        service = EngineService(
            client, tokenizer, limits=settings.limits, seed=options.seed, kv_events=kv_events
        )
        try:
            served = _served(settings, model, await service.start(), tokenizer, chat_template)
            _logger.info(f"connections: {most} at most")
            app = create_app(
                service, served, keys=keys, open_metrics=settings.open_metrics, limits=connections
            )
            config = ServerConfig(app, connections, log_config=None)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host

            def announce(port: int) -> None:
                _logger.info(f"serving {served.name} on http://{host}:{port}/v1")

            server = DrainingServer(config, service, grace_s=settings.grace, on_listening=announce)
            await server.serve([listener])
        finally:
            await service.stop()


def _served(
    settings: ServeSettings,
    model: str | Path,
    engine: Ready,
    tokenizer: TextTokenizer | None,
    chat_template: ChatTemplate | None,
) -> ServedModel:
    """The model as clients see it, once the log has told what it is."""
    info = msgspec.convert(engine.info, EngineInfo)
    for line in info.lines():
        _logger.info(line)
    return ServedModel(
        settings.served_name or Path(settings.model or "cbatch-demo").name,
        max_model_tokens=engine.config.max_model_tokens,
        vocab_size=engine.config.vocab_size,
        created_s=int(time.time()),
        root=str(model),
        tokenizer=tokenizer,
        chat_template=chat_template,
        tool_parser=settings.tool_parser,
        sampling_defaults=info.sampling_defaults,
    )


def require_model(field: str, path: str | Path | None) -> None:
    """Raises `FieldError` for a directory that is no model's. A name may be one of the hub's."""
    if path is not None and Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        remedy = "name a Hugging Face model directory (config.json, *.safetensors) or a .gguf file"
        raise FieldError(field, f"{path} has no config.json", remedy)


def require_record(path: str | None) -> None:
    """Raises `FieldError` where no step log can be written."""
    if path is None:
        return
    try:
        os.close(open_to_append(Path(path)))
    except (OSError, StepLogError) as error:
        remedy = "name a new file, or a step log, in a folder that exists"
        raise FieldError("record", f"{path} cannot be written ({error})", remedy) from error


def kv_event_publisher(settings: ServeSettings) -> KVEventPublisher | None:
    """None: nothing is to be published. Raises `FieldError`."""
    text = settings.kv_events_config
    config = KVEventsConfig() if text is None else read_config(text)
    if not config.publishes:
        return None
    if not settings.engine.prefix_cache:
        remedy = "leave one of the two out"
        raise FieldError("kv_events_config", "has nothing to tell with --no-prefix-cache", remedy)
    from cbatch.kv_events.publisher import KVEventPublisher

    publisher = KVEventPublisher(config)
    replays = "none" if publisher.replay_endpoint is None else publisher.replay_endpoint
    _logger.info(f"KV events: {publisher.endpoint} (replays: {replays})")
    return publisher


def bind(host: str, port: int) -> socket.socket:
    """The server's socket, which does not listen yet. Raises `FieldError`."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        remedy = "use an address of this machine, or 0.0.0.0 for all"
        raise FieldError("host", f"{host!r} is no address here ({error})", remedy) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unbound(host, port, error) from error
    return listener


def _unbound(host: str, port: int, error: OSError) -> FieldError:
    if error.errno == errno.EADDRINUSE:
        remedy = "stop what listens there, or choose another (0: any that is free)"
        return FieldError("port", f"{port} is taken", remedy)
    if error.errno == errno.EACCES:
        return FieldError("port", f"{port} is not for every user", "choose one from 1024 on")
    remedy = "use an address of this machine, or 0.0.0.0 for all"
    return FieldError("host", f"{host!r} cannot be bound ({error.strerror})", remedy)
