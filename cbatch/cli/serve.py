"""`cbatch serve`: the OpenAI API over HTTP, in this process or in replicas on Ray Serve."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path

import msgspec

from cbatch.cli.options import add_engine_flags
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import PREFIX, Settings, read_settings, unknown_variables
from cbatch.core.request.errors import FieldError
from cbatch.process.spawn import end_early_process
from cbatch.server.http.limits import ConnectionLimits, connections_for
from cbatch.server.protocol.errors import EngineLostError
from cbatch.system.heap import share_malloc_arena
from cbatch.system.logs import configure

_logger = logging.getLogger("cbatch")
ENGINE_LOST = 1  # exit status if the engine died and cannot be restarted
_LOST_MESSAGE = "%s; the server exits with status %d and must be restarted"

EPILOG = """\
Every option is also a variable of the environment (--max-num-seqs is CBATCH_MAX_NUM_SEQS) and a key
of a TOML file (max_num_seqs), MODEL too. Flags override variables, which override the file.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        usage="%(prog)s [MODEL] [options]",
        description="Serve the OpenAI API: completions and chat, whole or streamed.",
        epilog=EPILOG,
    )
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    add_engine_flags(parser, ServeSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvloop

    signal.signal(signal.SIGQUIT, lambda *_: signal.raise_signal(signal.SIGTERM))
    file = args.config or os.environ.get(f"{PREFIX}CONFIG")
    settings = read_settings(ServeSettings, args, os.environ, None if file is None else Path(file))
    configure(settings.values.log_format)
    for name in unknown_variables(os.environ, ServeSettings):
        _logger.warning("%s is not a setting of cbatch serve and is ignored", name)
    try:
        with settings.naming():
            if settings.values.ray:
                _serve_on_ray(settings)
                return 0
            refuse_replica_settings(settings)
            limits = settings.values.connections
            max_connections = connections_for(limits.max_connections)  # before uvloop opens files
            limits = msgspec.structs.replace(limits, max_connections=max_connections)
            uvloop.run(serve_engine(settings.values, limits))
    except EngineLostError as error:
        _logger.critical(_LOST_MESSAGE, error, ENGINE_LOST)
        return ENGINE_LOST
    return 0


def _serve_on_ray(settings: Settings[ServeSettings]) -> None:
    from cbatch.cli.ray_serve import require_fit, run_replicas

    end_early_process()  # replicas start their own
    require_fit(settings)
    run_replicas(settings.values)


def refuse_replica_settings(settings: Settings[ServeSettings]) -> None:
    for name in ("min_replicas", "max_replicas", "session_header"):
        if name in settings.given:
            raise FieldError(settings.origin(name), "is for replicas only", "give --ray as well")


async def serve_engine(settings: ServeSettings, limits: ConnectionLimits) -> None:
    from cbatch.cli.model_service import ModelParts

    share_malloc_arena()
    parts = ModelParts(settings)
    with closing(bind(settings.host, settings.port)) as listener:
        service = parts.make_service()
        try:
            threading.Thread(target=_import_http, daemon=True).start()  # while the engine starts
            served = await parts.start(service)
            from cbatch.server.http.app import create_app
            from cbatch.server.http.connections import ServerConfig
            from cbatch.server.http.run import DrainingServer

            _logger.info(f"connections: {limits.connection_limit} at most")
            app = create_app(
                service,
                served,
                keys=parts.keys,
                open_metrics=settings.open_metrics,
                limits=limits,
                cors_origins=settings.cors_origin,
                span_exporter=parts.span_exporter,
            )
            config = ServerConfig(app, limits, log_config=None)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host

            def announce(port: int) -> None:
                # A step log records only clients' requests: with a log, no warm-up requests run.
                service.start_warming(steps=settings.record is None)
                _logger.info(f"serving {served.name} on http://{host}:{port}/v1")

            listen(listener, settings.host, settings.port, config.backlog)
            server = DrainingServer(config, service, grace_s=settings.grace, on_listening=announce)
            await server.serve([listener])
        finally:
            await service.stop()


def _import_http() -> None:
    import cbatch.server.http.app
    import cbatch.server.http.run  # noqa: F401


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket that does not listen yet (see `listen`). No other server can bind
    the port meanwhile. Raises `FieldError`."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        remedy = "use an address of this machine, or 0.0.0.0 for all"
        raise FieldError(
            "host", f"{host!r} is not an address of this machine ({error})", remedy
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        try:
            listener.bind(address)
        except OSError:  # perhaps only because connections of an earlier server are closing
            _share_address(listener, True)
            listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    # Sockets that share an address can be bound to one port as long as none listens.
    _share_address(listener, False)
    return listener


def listen(listener: socket.socket, host: str, port: int, backlog: int) -> None:
    _share_address(listener, True)  # connections inherit it, for the next server on this port
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _bind_error(host, port, error) from error


def _share_address(listener: socket.socket, shared: bool) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)


def _bind_error(host: str, port: int, error: OSError) -> FieldError:
    if error.errno == errno.EADDRINUSE:
        remedy = "stop the program that listens there, or choose another port (0: any free port)"
        return FieldError("port", f"{port} is taken", remedy)
    if error.errno == errno.EACCES:
        return FieldError("port", f"{port} needs privileges", "choose one from 1024 on")
    remedy = "use an address of this machine, or 0.0.0.0 for all"
    return FieldError("host", f"{host!r} cannot be bound ({error.strerror})", remedy)
