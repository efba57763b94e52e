"""A client that costs little: raw sockets, and nothing parsed but what the caller looks at."""

from __future__ import annotations

import json
import multiprocessing
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast


def read_streams(
    port: int,
    path: str,
    bodies: Sequence[dict[str, Any]],
    note: Callable[[int, bytes], None] | None = None,
) -> int:
    """Opens a stream for each body and reads all to their ends; returns the number of chunks.
    `note` is given whatever comes, with the place of its body."""
    selector = selectors.DefaultSelector()
    for place, body in enumerate(bodies):
        raw = json.dumps(body | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + raw)
        selector.register(connection, selectors.EVENT_READ, place)
    chunks = 0
    while selector.get_map():
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            received = connection.recv(65536)
            chunks += received.count(b"data: {")
            if note is not None:
                note(key.data, received)
            if not received:
                selector.unregister(connection)
                connection.close()
    selector.close()
    return chunks


def elsewhere(work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns, in a process of its own, which a server does not wait for."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)
