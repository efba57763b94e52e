"""A server under attack: honest streams, attacks and kills in parallel, and the state at the
end. Times are by `time.monotonic`."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tests.hostile.attacker import ANSWER_S, Target
from tests.hostile.server import CALLS_PER_KEY, ROOT, Server
from tests.server.http_client import CHAT, COMPLETIONS, wait_until

MIB = 2**20
REST_S = 6.0  # time without a call, in which server and engine return unused memory
STEADY = 2 * MIB  # less growth from look to look is none
NOTABLE_S = 0.2  # shorter pauses are not kept
GRACE_S = 1.5  # after the next engine is ready, until all streams continue
LOOK_S, DRAIN_S = 2.0, 15.0
# Message of uvloop about a response to a client that has disconnected.
LEFT = "the handler is closed"
MORE_FILES = 8  # additional files that may be open at the end
CODE = "def add(a, b):\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
SHAPE = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
REGEX = {"regex": "((ab|ba)[0-9]{1,3},)+"}
AROUND = {"around": "start: before @answer\nbefore[lazy]: /(?s:.){12,30};/"}
# Calls that are greedy, or have a seed and coupled verification: their texts depend only on the
# call. A call has a prompt or, for a chat, a message.
ASKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "greedy": (CODE, 120, {"temperature": 0, "ignore_eos": True}),
    "seeded with logprobs": ("class Stack:\n", 80, {"seed": 1, "logprobs": 5, "ignore_eos": True}),
    "regex after text": ("x = ", 80, {"temperature": 0, "structured_outputs": REGEX | AROUND}),
    "chat with logprobs": (CODE, 80, {"temperature": 0, "logprobs": True, "top_logprobs": 3}),
    "chat of a schema": ("a thing as JSON: ", 120, {"seed": 3, "response_format": SHAPE}),
    "two choices": (CODE, 80, {"seed": 4, "n": 2, "top_k": 40, "top_p": 0.95, "stop": ["return"]}),
    "penalties": (
        "for i in range(",
        100,
        {"seed": 5, "temperature": 0.8, "repetition_penalty": 1.1, "prompt_logprobs": 1},
    ),
}


class BrokenError(RuntimeError):
    """A stream was rejected, ended too early, or ended with an error."""


def answer_to(server: Server, name: str, on_event: Callable[[], None] = lambda: None) -> Any:
    """Return the content of one stream except ids and times, independent of its pieces. Raises
    `BrokenError`, `OSError` or `HTTPException`."""
    text, max_tokens, fields = ASKS[name]
    chat = name.startswith("chat")
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    fields = {"stream_options": {"include_usage": True}, "return_token_ids": True} | fields
    fields |= {"max_tokens": max_tokens, "stream": True}
    lines: list[bytes] = []
    with server.open(prompt | fields, CHAT if chat else COMPLETIONS) as response:
        if response.status != 200:
            raise BrokenError(f"{response.status}: {response.read(500)!r}")
        while line := response.readline():
            on_event()  # also for a ping
            if line.startswith(b"data: "):
                lines.append(line)
    if not lines or lines.pop() != b"data: [DONE]\n":
        raise BrokenError(f"it ended with {lines[-1:]}")
    whole: dict[str, Any] = {}
    for event in (json.loads(line.removeprefix(b"data: ")) for line in lines):
        if "error" in event:
            raise BrokenError(str(event["error"]))
        for choice in event["choices"]:
            known = whole.setdefault(str(choice["index"]), {})
            known.update(_joined(known, {**choice, "seed": None}))  # random if the call sets none
        whole["usage"] = event.get("usage") or whole.get("usage")
    return whole


def _joined(known: Any, more: Any) -> Any:
    """Join two parts: texts and lists are concatenated, objects joined by field; other values must
    not change."""
    if isinstance(known, dict) and isinstance(more, dict):
        return {name: _joined(known.get(name), more.get(name)) for name in known | more}
    if isinstance(known, str | list) and type(known) is type(more):
        return known + more
    return known if more is None else more


class Siege:
    """One run, and what was observed. The constructor asks an idle server for the expected
    answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.expected = {name: answer_to(server, name) for name in ASKS}
        self.reports: list[dict[str, Any]] = []  # of the starts and ends of attacks
        self.kills: list[tuple[float, float]] = []  # of engines: times of death and replacement
        self.worker_kills: list[tuple[float, float]] = []  # of fork servers of workers
        # Pauses of streams: its name, and the times of the events around it.
        self.pauses: list[tuple[str, float, float]] = []
        self.completed = dict.fromkeys(ASKS, 0)
        self.wrong: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._over = threading.Event()

    def warm_up(self, rest_s: float) -> list[int]:
        """Use all slots, all blocks and every kind of call, alone and together, until memory stays.
        So what is kept for good is counted before the run. Return the memory."""
        rng = random.Random(0)
        looks: list[list[int]] = []
        while len(looks) < 2 or (len(looks) < 10 and sum(looks[-1]) - sum(looks[-2]) > STEADY):
            for _ in range(5):
                prompts = [rng.choices(range(3, 400), k=1000) for _ in range(8)]
                self.server.post({"prompt": prompts, "max_tokens": 1})
            self.server.post({"prompt": "x", "n": 32, "max_tokens": 8, "logprobs": 20})
            self.ask_alone()
            with ThreadPoolExecutor(len(ASKS)) as pool:
                list(pool.map(self._ask_once, ASKS))
            time.sleep(rest_s)
            looks.append(self.server.memory())
            print("MiB of server, engine, others:", *(each // MIB for each in looks[-1]))
        return looks[-1]

    def ask_alone(self) -> None:
        """Make each call while no other runs."""
        for name in ASKS:
            self._ask_once(name)

    def attack(self, names: list[str], *, seconds: float, seed: int, kills: int) -> None:
        """Attack the server until the time is over or the server has ended."""
        self._files_before = self.server.metrics()["process_open_fds"]
        settings = {"port": self.server.port, "seed": seed, "seconds": seconds, "names": names}
        command = [sys.executable, "-m", "tests.hostile.attacker", json.dumps(settings)]
        begin_s = time.monotonic()
        with ExitStack() as stack:
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            )
            killing = partial(self._kill, begin_s + seconds, seconds / (kills + 1), seed)
            works = [partial(self._ask, name) for name in ASKS]
            for work in (*works, partial(self._listen, process), killing):
                stack.enter_context(_running(work))
            stack.callback(self._over.set)
            while (status := process.poll()) is None and self.server.alive:
                if time.monotonic() > begin_s + seconds + 60 + 2 * ANSWER_S:
                    self.wrong.append("the attacks do not end")
                    break
                time.sleep(LOOK_S)
                print(self._progress(begin_s), flush=True)
            process.kill()
        if status:
            self.wrong.append(f"the attacker ended with status {status}")
        for report in self.reports:
            self.outcomes.update(report.get("outcomes", {}))
        if not self.server.alive:
            status, words = self.server.process.returncode, self.server.log()[1]
            self.wrong.insert(0, f"the server ended with {status}: {words}")

    def look_after(self, rest_s: float) -> list[int]:
        """Check the resources that the server uses after the last call, and stop it. Return the
        memory, unless `rest_s` is 0."""
        server, wrong = self.server, self.wrong
        try:
            wait_until(lambda: not server.held(), DRAIN_S)
        except AssertionError:
            wrong.append(f"still held: {server.held()}")
        metrics = server.metrics()
        if (count := metrics["cbatch:engine_restarts_total"]) != len(self.kills):
            wrong.append(f"{count} restarts of an engine that was killed {len(self.kills)} times")
        if (count := metrics["process_open_fds"]) > self._files_before + MORE_FILES:
            wrong.append(f"{count} open files, {self._files_before} before")
        if (
            metrics["cbatch:lookahead_tokens_count"]
            == metrics["cbatch:lookahead_tokens_bucket/1.0"]
        ):
            wrong.append("no step drafted two tokens")
        probe = Target(server.port, "200", "")
        probe.at_once([lambda: probe.post({"prompt": "x", "max_tokens": 64})] * CALLS_PER_KEY)
        if set(probe.outcomes) != {"200"}:
            wrong.append(f"calls of a key that has none open: {probe.outcomes}")
        memory = self.warm_up(rest_s) if rest_s else []
        server.kill_engine()
        deaths = [line for line in server.log()[0] if "open_requests" in line]
        if deaths[-1]["open_requests"]:
            wrong.append(f"transcripts of no call: {deaths[-1]}")
        self.ask_alone()
        if (status := server.stop()) != 0:
            wrong.append(f"asked to stop, it ended with {status}")
        errors = [line for line in server.log()[0] if line["level"] in ("error", "critical")]
        errors = [line for line in errors if LEFT not in line.get("exception", "")]
        wrong += [f"the log: {line}"[:2000] for line in errors[:3]]
        return memory

    def unexcused(self) -> list[str]:
        """Describe pauses that no kill explains, the longest first, each after its length."""
        kills = [*self.kills, *self.worker_kills]
        ends = {(r["attack"], r["begin_s"]): r["end_s"] for r in self.reports}
        lines = []
        for stream, from_s, to_s in sorted(self.pauses, key=lambda one: one[1] - one[2]):
            if all(to_s < a or from_s > b + GRACE_S for a, b in kills):
                during = ", ".join(
                    name
                    for (name, begin_s), end_s in ends.items()
                    if begin_s < to_s and (end_s is None or end_s > from_s)
                )
                lines.append(f"{to_s - from_s:.2f} s in {stream!r}, during {during}")
        return lines

    def table(self) -> str:
        lines = [f"{'attack':34}{'runs':>6}{'slowest':>12}  outcomes"]
        by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for report in self.reports:
            if report["end_s"] is not None:
                by_name[report["attack"]].append(report)
        for name, reports in sorted(by_name.items()):
            outcomes = sum((Counter(each["outcomes"]) for each in reports), Counter[str]())
            slowest_s = max(each["slowest_s"] for each in reports)
            counts = "  ".join(f"{key}: {count}" for key, count in sorted(outcomes.items()))
            lines.append(f"{name:34}{len(reports):>6}{slowest_s:>10.2f} s  {counts}")
        return "\n".join(lines)

    # -- threads

    def _ask(self, name: str) -> None:
        """Repeat a call until the end. Notable pauses of its streams are recorded."""
        while not self._over.is_set() and self.server.alive:
            last_s = time.monotonic()

            def on_event() -> None:
                nonlocal last_s
                before_s, last_s = last_s, time.monotonic()
                if last_s - before_s >= NOTABLE_S:
                    self.pauses.append((name, before_s, last_s))

            try:
                self._require_same("", name, answer_to(self.server, name, on_event))
                self.completed[name] += 1
            except (BrokenError, OSError, ValueError, http.client.HTTPException) as error:
                self.wrong.append(f"{name}: {error!r}")
                self._over.wait(1)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.reports.append(report := json.loads(line))
            self.wrong += [f"{report['attack']}: {each}" for each in report.get("wrong", ())]

    def _kill(self, end_s: float, every_s: float, seed: int) -> None:
        """Kill engines and workers until the end."""
        rng = random.Random(seed)

        def chats_at_once() -> None:  # more than there are idle workers
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(partial(answer_to, self.server), ["chat with logprobs"] * 4))

        while not self._over.wait(every_s * rng.uniform(0.7, 1.3)):
            if time.monotonic() > end_s or not self.server.alive:
                return
            try:
                self.kills.append(self.server.kill_engine())
                self.worker_kills.append(self.server.kill_fork_server(chats_at_once))
            except (AssertionError, BrokenError, OSError, LookupError, ValueError) as error:
                self.wrong.append(f"while the engine or the workers were killed: {error!r}")

    def _ask_once(self, name: str) -> None:
        self._require_same("idle, ", name, answer_to(self.server, name))

    def _require_same(self, where: str, name: str, answer: Any) -> None:
        if (expected := self.expected[name]) != answer:
            self.wrong.append(f"{where}{name}: {answer!r} is not {expected!r}"[:2000])

    def _progress(self, begin_s: float) -> str:
        ended = sum(report["end_s"] is not None for report in self.reports)
        memory = ", ".join(f"{each / MIB:.0f}" for each in self.server.memory())
        return (
            f"{time.monotonic() - begin_s:6.0f} s  attacks {ended:5}  kills {len(self.kills):3}  "
            f"honest {sum(self.completed.values()):5}  wrong {len(self.wrong)}  "
            f"longest pause {''.join(self.unexcused()[:1])}  MiB {memory}"
        )


@contextmanager
def _running(work: Callable[[], Any]) -> Iterator[None]:
    """Run a function in a thread, and wait for it at the end."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
