"""Settings of `cbatch serve`: flags, environment variables and keys of a TOML file."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from msgspec import Meta

from cbatch.cli.options import ChatTemplateFile, ModelSettings, ReasoningFormat
from cbatch.core.request.typed import knob
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.serving.admission_queue import Limits
from cbatch.system.logs import LogFormat
from cbatch.text.tool_parsers import ToolParserSetting

_server, _limit, _watching = (partial(knob, name) for name in ("server", "limits", "logs"))
_replicas = partial(knob, "replicas")
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
HeaderName = Annotated[str, Meta(pattern="^[A-Za-z0-9-]+$")]


class ServeSettings(ModelSettings, frozen=True, kw_only=True):
    host: Annotated[str, _server("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _server("port; 0: any free port", "N")] = 8000
    served_model_name: Annotated[str | None, _server("name of the model in the API", "NAME")] = None
    chat_template: ChatTemplateFile = None
    tool_parser: Annotated[
        ToolParserSetting,
        knob(
            "chat",
            "format of the model's tool calls; auto: by its chat template",
            name="tool_call_parser",
        ),
    ] = "auto"
    reasoning_parser: ReasoningFormat = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        _server("auto: take default sampling parameters from generation_config.json"),
    ] = "auto"
    api_key: Annotated[
        tuple[str, ...] | None, _server("require one of these API keys; repeatable", "KEY")
    ] = None
    api_key_file: Annotated[
        str | None, _server("file with more API keys, one per line", "FILE")
    ] = None
    share_prefix_cache: Annotated[
        bool, _server("let all API keys share cached beginnings of prompts (default: each its own)")
    ] = False
    cors_origin: Annotated[
        tuple[str, ...], _server("web origin that may call the API (*: any); repeatable", "ORIGIN")
    ] = ()
    kv_events_config: Annotated[
        str | None,
        _server("publish events of the prefix cache; fields as in vLLM", "JSON"),
    ] = None
    open_metrics: Annotated[bool, _server("serve /metrics without a key")] = False

    max_requests_per_key: Annotated[
        int | None, _limit("open calls per API key; more get 429", "N")
    ] = None
    limits: Limits = Limits()
    grace: Annotated[
        float, Meta(ge=0, le=1e6), _limit("time for open requests after a stop signal", "S")
    ] = 30.0
    connections: ConnectionLimits = ConnectionLimits()
    hang_timeout: Annotated[Seconds, _limit("restart the engine if a step takes longer", "S")] = (
        120.0
    )

    record: Annotated[
        str | None,
        _watching(
            "append steps and requests, with the token ids of prompts and outputs (your users' "
            "texts), to FILE, for `cbatch advise` and `cbatch sim`",
            "FILE",
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        _watching("OpenTelemetry collector for traces", "URL", aliases=("otlp_traces_endpoint",)),
    ] = None
    log_format: Annotated[LogFormat, _watching("format of log lines")] = "text"

    ray: Annotated[bool, _replicas("run replicas on Ray Serve")] = False
    min_replicas: Annotated[Count, _replicas("minimum number of replicas", "N")] = 1
    max_replicas: Annotated[
        Count | None, _replicas("maximum number of replicas (default: the minimum)", "N")
    ] = None
    session_header: Annotated[
        HeaderName | None,
        _replicas("send calls with the same value of this header to the same replica", "NAME"),
    ] = None
