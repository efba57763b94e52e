"""Honest clients: eight calls that repeat, and the expected answer to each."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from tests.hostile.server import HONEST_KEY, HOST

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_CODE = "def add(a, b):\n"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_SHAPE = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}


class Ask(NamedTuple):
    path: str
    body: dict[str, Any]


def _completion(prompt: str, max_tokens: int, **more: Any) -> Ask:
    return Ask(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens} | more)


def _chat(text: str, max_tokens: int, **more: Any) -> Ask:
    message = {"role": "user", "content": text}
    return Ask(CHAT, {"messages": [message], "max_tokens": max_tokens} | more)


# Calls that are greedy, or have a seed and coupled verification: their texts depend only on the
# call.
ASKS = {
    "greedy": _completion(_CODE, 240, temperature=0, ignore_eos=True),
    "seeded with logprobs": _completion("class Stack:\n", 160, seed=1, logprobs=5, ignore_eos=True),
    "stop strings": _completion(
        "import os\n", 240, temperature=0, stop=["\n\n\n", "return"], min_tokens=40
    ),
    "regex": _completion(
        "x = ", 120, seed=2, structured_outputs={"regex": "((ab|ba)[0-9]{1,3},)+"}
    ),
    "chat with logprobs": _chat(_CODE, 160, temperature=0, logprobs=True, top_logprobs=3),
    "chat of a schema": _chat("a thing as JSON: ", 120, seed=3, response_format=_SHAPE),
    "two choices": _completion(
        "def area(radius):\n", 160, seed=4, n=2, top_k=40, top_p=0.95, ignore_eos=True
    ),
    "penalties": _completion(
        "for i in range(", 200, seed=5, temperature=0.8, repetition_penalty=1.1, prompt_logprobs=1
    ),
}
_MORE = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


class Pause(NamedTuple):
    """The time between two events of a stream, or between its call and the first."""

    stream: str
    from_s: float
    to_s: float
    first: bool

    @property
    def lasted_s(self) -> float:
        return self.to_s - self.from_s


class BrokenError(RuntimeError):
    """A stream was rejected, ended too early, or ended with an error."""


def answer_to(port: int, ask: Ask, on_event: Callable[[float], None] = lambda at_s: None) -> Any:
    """Return the content of one stream except ids and times, independent of its pieces. Raises
    `BrokenError` or `OSError`."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    headers = {"Authorization": f"Bearer {HONEST_KEY}", "Content-Type": "application/json"}
    lines: list[bytes] = []
    with closing(connection):
        connection.request("POST", ask.path, json.dumps(ask.body | _MORE), headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise BrokenError(f"{response.status}: {response.read(500)!r}")
            while line := response.readline():
                if line != b"\n":
                    lines.append(line)
                    on_event(time.monotonic())
    if not lines or lines.pop() != b"data: [DONE]\n":
        raise BrokenError(f"it ended with {lines[-1:]}")
    return _folded([msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines])


def _folded(events: list[Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for event in events:
        if "error" in event:
            raise BrokenError(str(event["error"]))
        for choice in event["choices"]:
            known = whole.setdefault(str(choice["index"]), {})
            known.update(_joined(known, {**choice, "seed": None}))  # random if the call sets none
        if event.get("usage"):
            whole["usage"] = event["usage"]
    return whole


def _joined(known: Any, more: Any) -> Any:
    """Join two parts: texts and lists are concatenated, objects joined by field; other values must
    not change."""
    if isinstance(known, dict) and isinstance(more, dict):
        return {name: _joined(known.get(name), more.get(name)) for name in known | more}
    if isinstance(known, str | list) and type(known) is type(more):
        return known + more
    return known if more is None else more


class Crowd:
    """Clients, one thread for each call, that repeat the call after its answer. Pauses of at least
    `notable_s` are recorded."""

    def __init__(self, port: int, expected: dict[str, Any], notable_s: float) -> None:
        self._port, self._expected, self._notable_s = port, expected, notable_s
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,)) for name in expected]
        self.completed = dict.fromkeys(expected, 0)
        self.pauses: list[Pause] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all calls have ended."""
        self.give_up()
        for thread in self._threads:
            thread.join()

    def give_up(self) -> None:
        """Make no more calls."""
        self._over.set()

    def _ask(self, name: str) -> None:
        while not self._over.is_set():
            try:
                reply = answer_to(self._port, ASKS[name], self._stopwatch(name))
            except (BrokenError, OSError, http.client.HTTPException) as error:
                self.wrong.append(f"{name}: {error!r}")
                self._over.wait(1)
                continue
            self.completed[name] += 1
            if reply != self._expected[name]:
                self.wrong.append(f"{name}: {difference(self._expected[name], reply)}")

    def _stopwatch(self, name: str) -> Callable[[float], None]:
        begin_s = last_s = time.monotonic()

        def on_event(at_s: float) -> None:
            nonlocal last_s
            if at_s - last_s >= self._notable_s:
                self.pauses.append(Pause(name, last_s, at_s, first=last_s == begin_s))
            last_s = at_s

        return on_event


def difference(expected: Any, actual: Any, where: str = "") -> str:
    """Return the first difference."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name in expected | actual:
            if expected.get(name) != actual.get(name):
                return difference(expected.get(name), actual.get(name), f"{where}/{name}")
    if isinstance(expected, str | list) and type(actual) is type(expected):
        same = sum(1 for _ in _same(expected, actual))
        expected, actual = expected[same : same + 20], actual[same : same + 20]
        where += f"[{same}:]"
    return f"{where} is {actual!r}, was {expected!r}"


def _same(one: Any, other: Any) -> Any:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a
