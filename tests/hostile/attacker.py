"""A process that runs a few attacks at once: their tools, and two lines about each attack.

`python -m tests.hostile.attacker SETTINGS` runs the attacks in rounds in a random order. It prints
a line of JSON when an attack begins and when it has ended.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any, NamedTuple

HOST, HOSTILE_KEY = "127.0.0.1", "hostile"
WORKERS = 3
NICENESS = 10  # the server and the honest clients take precedence on the machine's few cores
ANSWER_S = 45.0  # an engine may be killed and restarted during this time
LONGEST_PAUSE_S = 0.25  # between two attacks of a worker
KEY = {"Authorization": f"Bearer {HOSTILE_KEY}"}
# Possible for any attack: another attack uses the key's calls or the queue's places.
BUSY = {"429", "503"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
WORD = "def f(x):\n    return x\n"
STREAM: dict[str, Any] = {"prompt": WORD, "stream": True, "ignore_eos": True}


class Attack(NamedTuple):
    """An attack. `allowed` are its outcomes, in addition to those of a busy server. `large` attacks
    never run at the same time: they would fill the queue, and honest clients would be rejected."""

    run: Callable[[Target], None]
    allowed: str
    large: bool


ATTACKS: dict[str, Attack] = {}


def attack(allowed: str, *, large: bool = False) -> Callable[[Any], Any]:
    """Add a function to `ATTACKS`, under its name."""

    def add(run: Callable[[Target], None]) -> Callable[[Target], None]:
        ATTACKS[run.__name__.replace("_", " ")] = Attack(run, allowed, large)
        return run

    return add


class Target:
    """The server, as one run of an attack uses it. Outcomes are statuses, or how connections
    ended."""

    def __init__(self, port: int, allowed: str, seed: str) -> None:
        self.port, self.rng = port, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.wrong: list[str] = []
        self._allowed = BUSY | set(allowed.split())
        self._lock = threading.Lock()

    def note(self, outcome: object, began_s: float, content: bytes | str = b"") -> None:
        with self._lock:
            self.outcomes[str(outcome)] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if str(outcome) not in self._allowed:
                self.wrong.append(f"{outcome}: {content[:300]!r}")

    def post(
        self,
        body: dict[str, Any] | bytes,
        path: str = COMPLETIONS,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> bytes:
        """Make a complete call on a new connection, and record its outcome."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        began_s, outcome, content = time.monotonic(), "unanswered", b""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        with closing(connection):
            try:
                both = {"Content-Type": "application/json"} | KEY | (headers or {})
                connection.request(method, path, raw, both)
                response = connection.getresponse()
                outcome, content = str(response.status), response.read()
            except TimeoutError:
                pass
            except (OSError, http.client.HTTPException) as error:
                outcome, content = "closed", repr(error).encode()
        self.note(outcome, began_s, content)
        return content

    def at_once(self, calls: list[Callable[[], Any]]) -> None:
        with ThreadPoolExecutor(len(calls)) as pool:
            for call in calls:
                pool.submit(call)

    @contextmanager
    def open(self, raw: bytes) -> Iterator[socket.socket]:
        """Open a connection and send bytes. The attack records the outcome, unless the server
        closes the connection."""
        began_s = time.monotonic()
        try:
            with socket.create_connection((HOST, self.port), timeout=ANSWER_S) as connection:
                connection.sendall(raw)
                yield connection
        except TimeoutError:
            self.note("unanswered", began_s)
        except OSError as error:
            self.note("closed", began_s, repr(error))

    def answered(self, connection: socket.socket, began_s: float, wait_s: float = ANSWER_S) -> None:
        """Record the status of the first response, or that none came in time."""
        connection.settimeout(wait_s)
        try:
            line = connection.recv(4096).partition(b"\r\n")[0]
        except TimeoutError:
            self.note("silent" if wait_s else "held", began_s)
            return
        except BlockingIOError:
            self.note("held", began_s)
            return
        words = line.split(None, 2)
        self.note(words[1].decode() if len(words) > 1 else "closed", began_s, line)


def head(
    length: int | None = None, path: str = COMPLETIONS, key: str | None = HOSTILE_KEY
) -> bytes:
    """Return the head of a POST request, whose JSON body the attack sends itself."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def whole(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    raw = json.dumps(body).encode()
    return head(len(raw), path) + raw


def leave_unread(target: Target, calls: list[bytes], hold_s: float) -> None:
    """Make calls, and do not read their responses."""
    with ExitStack() as stack:
        for raw in calls:
            began_s = time.monotonic()
            connection = stack.enter_context(target.open(raw))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            target.note("left", began_s)
        time.sleep(hold_s)


def run(port: int, seed: int, seconds: float, names: list[str]) -> None:
    """Run attacks until the time is over and each attack has run."""
    end_s = time.monotonic() + seconds
    lock, large = threading.Lock(), threading.Lock()

    def deal() -> Iterator[tuple[int, str]]:
        number = 0
        while True:
            for name in random.Random(f"{seed} {number}").sample(names, len(names)):
                if time.monotonic() > end_s and number >= len(names):
                    return
                yield number, name
                number += 1

    def tell(**report: Any) -> None:
        with lock:
            print(json.dumps(report), flush=True)

    def work() -> None:
        while True:
            with lock:
                number, name = next(deck, (0, ""))
            if not name:
                return
            attacking = ATTACKS[name]
            target = Target(port, attacking.allowed, f"{seed} {number} {name}")
            with large if attacking.large else nullcontext():
                begin_s = time.monotonic()
                tell(attack=name, begin_s=begin_s, end_s=None)
                try:
                    attacking.run(target)
                except OSError as error:
                    target.note("closed", begin_s, repr(error))
            outcome = {"outcomes": target.outcomes, "wrong": target.wrong[:3]}
            outcome["slowest_s"] = target.slowest_s
            tell(attack=name, begin_s=begin_s, end_s=time.monotonic(), **outcome)
            time.sleep(target.rng.uniform(0, LONGEST_PAUSE_S))

    deck = deal()
    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    from tests.hostile import attacker, attacks  # noqa: F401 - they fill `ATTACKS`

    os.nice(NICENESS)
    attacker.run(**json.loads(sys.argv[1]))
