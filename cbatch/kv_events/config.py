"""The value of `--kv-events-config`, with vLLM's field names."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cbatch.core.request.errors import FieldError

SETTING = "kv_events_config"
_MAX_INT = 2**31 - 1  # the largest value ZeroMQ takes for a high-water mark
_FIELDS = (
    "enable_kv_cache_events (true, false), publisher (zmq, null), endpoint, replay_endpoint, topic "
    "(text), buffer_steps, hwm, max_queue_size (numbers)"
)
_EXAMPLE = '{"enable_kv_cache_events": true}'


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields and defaults are vLLM's. `publisher=None` means `zmq` if events are enabled."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int | None = None  # batches kept for replay requests; None: 10,000
    hwm: int = 100_000  # batches queued for a slow subscriber; 0: no limit
    max_queue_size: int = 100_000  # batches that wait to be sent
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def buffer_batches(self) -> int:
        if self.replay_endpoint is None:
            return 0
        return 10_000 if self.buffer_steps is None else self.buffer_steps


def binds(endpoint: str) -> bool:
    """Return whether to bind the endpoint, not connect to it: as in vLLM, a wildcard or a file."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def read_config(text: str) -> KVEventsConfig:
    """Parse the setting's JSON. Raises `FieldError` with the setting and the field in it."""
    try:
        config = msgspec.json.decode(text.encode(), type=KVEventsConfig)
    except msgspec.ValidationError as error:
        raise FieldError(SETTING, str(error), f"use {_FIELDS}") from error
    except msgspec.DecodeError as error:
        raise FieldError(SETTING, f"is not JSON ({error})", f"write it as '{_EXAMPLE}'") from error
    _check(config)
    return config


def field_error(name: str, value: Any, remedy: str, problem: str = "is not allowed") -> FieldError:
    return FieldError(SETTING, f"{name}: {value!r} {problem}", remedy)


def _check(config: KVEventsConfig) -> None:
    for name, minimum in (("buffer_steps", 1), ("hwm", 0), ("max_queue_size", 1)):
        value = getattr(config, name)
        if value is not None and not minimum <= value <= _MAX_INT:
            raise field_error(name, value, f"give {minimum} to {_MAX_INT}")
    if config.buffer_steps is not None and config.replay_endpoint is None:
        remedy = "give a replay_endpoint, or leave buffer_steps out"
        raise field_error(
            "buffer_steps", config.buffer_steps, remedy, "has no replay_endpoint to serve"
        )
    listen = "tcp://*:PORT or ipc://FILE to listen"
    _check_endpoint("endpoint", config.endpoint, f"use {listen}, tcp://HOST:PORT to connect")
    if config.endpoint.startswith("tcp://0.0.0.0:"):
        raise field_error(
            "endpoint", config.endpoint, f"use {listen}", "is an address to connect to"
        )
    if config.replay_endpoint is not None:
        _check_endpoint("replay_endpoint", config.replay_endpoint, f"use {listen}")


def _check_endpoint(name: str, endpoint: str, remedy: str) -> None:
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest:
        raise field_error(name, endpoint, remedy)
