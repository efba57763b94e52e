"""Batches of KV events over ZeroMQ, as vLLM publishes them.

PUB sends [topic, sequence number, batch]. The number counts up from 0, in 8 bytes, big-endian. A
subscriber that misses a batch sends its number to ROUTER. ROUTER answers with the buffered batches
from that number on, as [topic, sequence number, batch], then ["", -1, ""].
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from typing import Any, Literal

import msgspec
import zmq

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


END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1000  # time in which `close` may still send queued batches
REPLAY_TIMEOUT_MS = 5000  # send timeout for a replay to a client that does not read it
_logger = logging.getLogger("cbatch")


class KVEventPublisher:
    """Publish batches without ever blocking the caller. While the queue is full, a batch is only
    buffered for a replay. One thread sends batches, another answers replay requests."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Open the sockets. Raises `FieldError` for an endpoint that cannot be used."""
        self.num_published = self.num_dropped = 0
        self._topic = config.topic.encode()
        self._buffer = deque[tuple[int, bytes]](maxlen=config.buffer_batches)
        self._lock = threading.Lock()  # guards `_buffer`
        self._queue = queue.Queue[tuple[int, bytes] | None](config.max_queue_size)
        self._context = zmq.Context()
        self.replay_endpoint: str | None = None
        try:
            pub = self._context.socket(zmq.PUB)
            pub.sndhwm = config.hwm
            self.endpoint = _open(pub, "endpoint", config.endpoint, binds(config.endpoint))
            self._threads = [threading.Thread(target=self._send, args=(pub,), daemon=True)]
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                # Sending to a client that has left, or does not read, raises `ZMQError`.
                router.router_mandatory, router.sndtimeo = True, REPLAY_TIMEOUT_MS
                where = _open(router, "replay_endpoint", config.replay_endpoint, True)
                self.replay_endpoint = where
                replay = threading.Thread(target=self._replay, args=(router,), daemon=True)
                self._threads.append(replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        for thread in self._threads:
            thread.start()

    def publish(self, batch: bytes) -> None:
        seq = self.num_published
        self.num_published += 1
        with self._lock:
            self._buffer.append((seq, batch))
        try:
            self._queue.put_nowait((seq, batch))
        except queue.Full:
            if not self.num_dropped:
                _logger.warning("KV events come faster than they are sent: some are dropped")
            self.num_dropped += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_LINGER_MS / 1000)
        self._threads[0].join(_LINGER_MS / 1000)
        self._context.term()  # ends threads that still run
        for thread in self._threads:
            thread.join()

    def _send(self, pub: zmq.Socket[bytes]) -> None:
        with pub, contextlib.suppress(zmq.ContextTerminated):
            while (waiting := self._queue.get()) is not None:
                seq, batch = waiting
                pub.send_multipart((self._topic, seq.to_bytes(8, "big"), batch))

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        with router, contextlib.suppress(zmq.ContextTerminated):
            while True:
                match router.recv_multipart():
                    case [client, b"", start] if len(start) == len(END):
                        with contextlib.suppress(zmq.ZMQError):
                            self._answer(router, client, int.from_bytes(start, "big"))

    def _answer(self, router: zmq.Socket[bytes], client: bytes, start: int) -> None:
        with self._lock:
            buffered = list(self._buffer)
        for seq, batch in buffered:
            if seq >= start:
                router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), batch))
        router.send_multipart((client, b"", b"", END, b""))


def configured_publisher(text: str | None, *, caches_prefixes: bool) -> KVEventPublisher | None:
    """Return a publisher that listens on its endpoints, or None if KV events are not configured.
    `text` is the value of `--kv-events-config`. Raises `FieldError` for an invalid one."""
    config = KVEventsConfig() if text is None else read_config(text)
    if not config.publishes:
        return None
    if not caches_prefixes:
        problem = "has no events to publish without the prefix cache"
        raise FieldError("kv_events_config", problem, "leave one of the two out")
    publisher = KVEventPublisher(config)
    replays = "none" if publisher.replay_endpoint is None else publisher.replay_endpoint
    _logger.info(f"KV events: {publisher.endpoint} (replays: {replays})")
    return publisher


def _open(socket: zmq.Socket[bytes], name: str, endpoint: str, bind: bool) -> str:
    socket.linger = _LINGER_MS
    socket.ipv6 = "[" in endpoint or "::" in endpoint
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        remedy = "use a free address of this machine" if bind else "use tcp://HOST:PORT"
        problem = f"cannot be {'bound' if bind else 'connected to'} ({error})"
        raise field_error(name, endpoint, remedy, problem) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
