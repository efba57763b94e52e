"""Settings of `cbatch serve`: flags, environment variables and keys of a TOML file."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from msgspec import Meta

from cbatch.cli.options import ModelSettings
from cbatch.core.request.typed import knob
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.protocol.tool_parsers import ReasoningParser, ToolParser
from cbatch.server.serving.admission_queue import Limits
from cbatch.system.logs import LogFormat

_server, _limit, _watching = (partial(knob, name) for name in ("server", "limits", "sight"))
_replicas = partial(knob, "replicas")
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
HeaderName = Annotated[str, Meta(pattern="^[A-Za-z0-9-]+$")]


class ServeSettings(ModelSettings, frozen=True, kw_only=True):
    host: Annotated[str, _server("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _server("0: any that is free", "N")] = 8000
    served_name: Annotated[str | None, _server("the model's name to clients", "NAME")] = None
    chat_template: Annotated[
        str | None, _server("Jinja template, or a name of the model's (default: its own)", "FILE")
    ] = None
    tool_parser: Annotated[
        ToolParser | None, _server("how the model writes tool calls that are not forced")
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser,
        _server("how the model writes thoughts; auto: by its chat template"),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"], _server("auto: generation_config.json has the defaults of calls")
    ] = "auto"
    api_key: Annotated[
        tuple[str, ...], _server("ask clients for one of these; repeatable", "KEY")
    ] = ()
    api_key_file: Annotated[str | None, _server("more of them, one a line", "FILE")] = None
    cors_origin: Annotated[
        tuple[str, ...], _server("pages of this origin may call (*: any); repeatable", "ORIGIN")
    ] = ()
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

    ray: Annotated[bool, _replicas("run replicas by Ray Serve, which listens for them")] = False
    min_replicas: Annotated[Count, _replicas("of --ray, at the least", "N")] = 1
    max_replicas: Annotated[
        Count | None, _replicas("of --ray, under load (default: the least)", "N")
    ] = None
    session_header: Annotated[
        HeaderName | None,
        _replicas("of --ray: calls in which it has the same value go to one replica", "NAME"),
    ] = None
