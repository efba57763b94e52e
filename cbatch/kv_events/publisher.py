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

import zmq

from cbatch.core.request.errors import FieldError
from cbatch.kv_events.config import KVEventsConfig, binds, field_error, read_config

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
        """Send queued batches for at most a second, then stop the threads."""
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
    """Bind or connect the socket and return its address; for port 0 the system picks a port."""
    socket.linger = _LINGER_MS
    socket.ipv6 = "[" in endpoint or "::" in endpoint
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        remedy = "use a free address of this machine" if bind else "use tcp://HOST:PORT"
        problem = f"cannot be {'bound' if bind else 'connected to'} ({error})"
        raise field_error(name, endpoint, remedy, problem) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
