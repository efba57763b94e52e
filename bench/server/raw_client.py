"""A client with little overhead: raw sockets, and parsing only by the caller's `note`."""

from __future__ import annotations

import json
import multiprocessing
import re
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast


def read_streams(
    port: int,
    path: str,
    bodies: Sequence[dict[str, Any]],
    note: Callable[[int, bytes], None] | None = None,
) -> int:
    """Open a stream for each body and read all to their ends. Return the number of chunks.
    `note` receives the index of the stream and the bytes of each read."""
    selector = selectors.DefaultSelector()
    for stream, body in enumerate(bodies):
        raw = json.dumps(body | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + raw)
        selector.register(connection, selectors.EVENT_READ, stream)
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


class TimedRead(NamedTuple):
    seconds: float  # from the first byte sent to the last one received
    tokens: int
    chunks: int
    client_s: float  # processor seconds of the client


def read_tokens(port: int, prompts: list[list[int]], output_tokens: int) -> TimedRead:
    """Read all tokens. Call this function in its own process. Raises RuntimeError if tokens are
    missing."""
    body = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    # With token ids, each step sends a chunk even without a tokenizer.
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    ends = [b""] * len(prompts)

    def note(stream: int, received: bytes) -> None:
        ends[stream] = (ends[stream] + received)[-4096:]

    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    bodies = [body | {"prompt": prompt} for prompt in prompts]
    chunks = read_streams(port, "/v1/completions", bodies, note)
    seconds = time.perf_counter() - began_s
    matches = [re.search(rb'"completion_tokens":(\d+)', text) for text in ends]
    tokens = sum(int(match[1]) for match in matches if match)
    expected = len(prompts) * output_tokens
    if tokens != expected:
        last = next(text for text, match in zip(ends, matches, strict=True) if not match or tokens)
        words = last.partition(b"\r\n\r\n")[2][-500:].decode(errors="replace").strip()
        raise RuntimeError(f"received {tokens} tokens instead of {expected}: {words}")
    return TimedRead(seconds, tokens, chunks, time.process_time() - began_cpu_s)


def in_subprocess(work: Callable[..., Any], *args: Any) -> Any:
    """Return `work(*args)`, computed in a new process so that the server is not delayed."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)
