"""A process that runs a few attacks at once: their tools, and a line about each attack.

`python -m tests.hostile.attacker SETTINGS` runs the attacks in rounds in a random order, so that
each has its turn. It prints when one begins and how it ended.
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
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec

from tests.hostile.server import HOST, HOSTILE_KEY

WORKERS = 3
NICENESS = 10  # the server and the honest clients take precedence on the machine's few cores
ANSWER_S = 45.0  # an engine may be killed and restarted during this time
LONGEST_PAUSE_S = 0.25  # between two attacks of a worker
JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": f"Bearer {HOSTILE_KEY}"}
# Possible for any attack: another attack uses the key's calls or the queue's places.
BUSY = {"429", "503"}


class Settings(msgspec.Struct):
    port: int
    seed: int
    seconds: float
    names: list[str]


class Report(msgspec.Struct):
    """A report of one run of an attack. `end_s` is missing in the report of its start. Outcomes are
    statuses, or how connections ended."""

    attack: str
    begin_s: float
    end_s: float | None = None
    outcomes: dict[str, int] = {}
    slowest_s: float = 0.0
    wrong: list[str] = []


class Attack(NamedTuple):
    """An attack. `allowed` are its outcomes, in addition to those of a busy server. `large` attacks
    never run at the same time: they would fill the queue, and honest clients would be rejected."""

    name: str
    run: Callable[[Target], None]
    allowed: str
    large: bool = False


class Target:
    """The server, as one run of an attack uses it."""

    def __init__(self, port: int, allowed: str, seed: str) -> None:
        self.port = port
        self.rng = random.Random(seed)
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
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> bytes:
        """Make a complete call on a new connection, and record its outcome."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        began_s, outcome, content = time.monotonic(), "unanswered", b""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        with closing(connection):
            try:
                connection.request(method, path, raw, JSON | KEY | (headers or {}))
                response = connection.getresponse()
                outcome, content = str(response.status), response.read()
            except TimeoutError:
                pass
            except (OSError, http.client.HTTPException) as error:
                outcome, content = "closed", repr(error).encode()
        self.note(outcome, began_s, content)
        return content

    def at_once(self, calls: list[Callable[[], Any]]) -> None:
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

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
            self.note("silent", began_s)
            return
        words = line.split(None, 2)
        self.note(words[1].decode() if len(words) > 1 else "closed", began_s, line)


def head(
    length: int | None = None, path: str = "/v1/completions", key: str | None = HOSTILE_KEY
) -> bytes:
    """Return the head of a POST request, whose JSON body the attack sends itself."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def whole(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    return head(len(raw), path) + raw


class _Attacker:
    def __init__(self, settings: Settings, attacks: list[Attack]) -> None:
        self._settings, self._attacks = settings, attacks
        self._end_s = time.monotonic() + settings.seconds
        self._deck: list[Attack] = []
        self._num_dealt = 0
        self._lock, self._large = threading.Lock(), threading.Lock()

    def run(self) -> None:
        """Run attacks until the time is over and each attack has run."""
        threads = [threading.Thread(target=self._work) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _deal(self) -> tuple[Attack, int] | None:
        with self._lock:
            first_round = self._num_dealt < len(self._attacks)
            if time.monotonic() > self._end_s and not first_round:
                return None
            number, seed = self._num_dealt, self._settings.seed
            self._num_dealt += 1
            if not self._deck:
                self._deck = random.Random(f"{seed} {number}").sample(
                    self._attacks, len(self._attacks)
                )
            return self._deck.pop(), number

    def _work(self) -> None:
        while (dealt := self._deal()) is not None:
            attack, number = dealt
            seed = f"{self._settings.seed} {number} {attack.name}"
            target = Target(self._settings.port, attack.allowed, seed)
            with self._large if attack.large else nullcontext():
                report = Report(attack.name, time.monotonic())
                self._tell(report)
                try:
                    attack.run(target)
                except OSError as error:
                    target.note("closed", report.begin_s, repr(error))
            report.end_s = time.monotonic()
            report.outcomes, report.wrong = dict(target.outcomes), target.wrong[:3]
            report.slowest_s = target.slowest_s
            self._tell(report)
            time.sleep(target.rng.uniform(0, LONGEST_PAUSE_S))

    def _tell(self, report: Report) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()


def main() -> None:
    from tests.hostile.attacks import ATTACKS

    os.nice(NICENESS)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    _Attacker(settings, [each for each in ATTACKS if each.name in settings.names]).run()


if __name__ == "__main__":
    main()
