"""A server under attack: honest streams, attacks and kills in parallel, and the state at the
end."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.hostile.account import Account
from tests.hostile.attacker import ANSWER_S, Report, Settings, Target
from tests.hostile.honest import ASKS, COMPLETIONS, Ask, BrokenError, Crowd, answer_to, difference
from tests.hostile.server import CALLS_PER_KEY, ROOT, Memory, Server, wait_until

REST_S = 6.0  # time without a call, in which server and engine return unused memory
NOTABLE_S = 0.2  # shorter pauses are not kept
LOOK_S, TELL_S = 2.0, 10.0
DRAIN_S = 15.0
# Message of uvloop about a response to a client that has disconnected.
LEFT = "the handler is closed"
MORE_FILES = 8  # additional files that may be open at the end
_VOCABULARY = range(3, 400)


def references(server: Server) -> dict[str, Any]:
    """Return the answers of an idle server to the calls."""
    return {name: answer_to(server.port, ask) for name, ask in ASKS.items()}


def ask_alone(server: Server, expected: dict[str, Any], account: Account) -> None:
    """Make each call while no other runs."""
    for name, ask in ASKS.items():
        if (answer := answer_to(server.port, ask)) != expected[name]:
            account.wrong.append(f"alone, {name}: {difference(expected[name], answer)}")


def warm_up(server: Server, expected: dict[str, Any], account: Account, rest_s: float) -> Memory:
    """Use all slots, all blocks and every kind of call, so that memory that is kept for good is
    counted before the run."""
    rng = random.Random(0)
    for _ in range(5):
        prompts = [rng.choices(_VOCABULARY, k=1000) for _ in range(8)]
        answer_to(server.port, Ask(COMPLETIONS, {"prompt": prompts, "max_tokens": 1}))
    answer_to(
        server.port, Ask(COMPLETIONS, {"prompt": "x", "n": 32, "max_tokens": 8, "logprobs": 20})
    )
    ask_alone(server, expected, account)
    time.sleep(rest_s)
    return server.memory()


def disturb(
    server: Server,
    expected: dict[str, Any],
    account: Account,
    *,
    seconds: float,
    seed: int,
    names: list[str],
    kill_every_s: float,
) -> None:
    """Disturb the server until the time is over or the server has ended."""
    account.files_before = server.metrics()["process_open_fds"]
    account.begin_s = time.monotonic()
    settings = Settings(server.port, seed, seconds, names)
    with Crowd(server.port, expected, NOTABLE_S) as crowd, attacking(settings, account) as attacks:
        with killing(server, account, random.Random(seed), seconds, kill_every_s):
            next_s, limit_s = 0.0, seconds + 60 + 2 * ANSWER_S
            while attacks.poll() is None and server.alive:
                passed_s = time.monotonic() - account.begin_s
                if passed_s > limit_s:
                    account.wrong.append("the attacks do not end")
                    break
                memory = server.memory()
                account.peak = max(account.peak, memory, key=lambda measured: measured.total)
                if passed_s >= next_s:
                    print(_progress(passed_s, account, crowd, memory), flush=True)
                    next_s += TELL_S
                time.sleep(LOOK_S)
        if not server.alive:
            crowd.give_up()
    account.pauses, account.completed = crowd.pauses, crowd.completed
    account.wrong += crowd.wrong


def look_after(server: Server, expected: dict[str, Any], account: Account, rest_s: float) -> None:
    """Check the resources that the server uses after the last call."""
    wrong = account.wrong
    try:
        wait_until(lambda: not server.held(), DRAIN_S, "")
    except AssertionError:
        wrong.append(f"still held: {server.held()}")
    metrics = server.metrics()
    if (count := metrics["cbatch:engine_restarts_total"]) != len(account.kills):
        wrong.append(f"{count} restarts of an engine that was killed {len(account.kills)} times")
    if (count := metrics["process_open_fds"]) > account.files_before + MORE_FILES:
        wrong.append(f"{count} open files, {account.files_before} before")
    if metrics["cbatch:lookahead_tokens_count"] == metrics["cbatch:lookahead_tokens_bucket/1.0"]:
        wrong.append("nobody drafted two tokens")
    probe = Target(server.port, "200", "")
    probe.at_once([lambda: probe.post({"prompt": "x", "max_tokens": 64})] * CALLS_PER_KEY)
    if set(probe.outcomes) != {"200"}:
        wrong.append(f"calls of a key that has none open: {probe.outcomes}")
    account.after = warm_up(server, expected, account, rest_s)
    server.kill_engine()
    deaths = [line for line in server.log() if "open_requests" in line]
    if deaths[-1]["open_requests"]:
        wrong.append(f"transcripts of nobody: {deaths[-1]}")
    ask_alone(server, expected, account)
    if (status := server.stop()) != 0:
        wrong.append(f"told to stop, it ended with {status}")
    errors = [line for line in server.log() if line["level"] in ("error", "critical")]
    errors = [line for line in errors if LEFT not in line.get("exception", "")]
    wrong += [f"the log: {line}"[:2000] for line in errors[:3]]


def _progress(passed_s: float, account: Account, crowd: Crowd, memory: Memory) -> str:
    account.pauses = list(crowd.pauses)
    longest = account.unexcused()[:1]
    return (
        f"{passed_s:6.0f} s  attacks {len(account.ended):5}  kills {len(account.kills):3}  "
        f"honest {sum(crowd.completed.values()):5}, {len(crowd.wrong)} wrong, longest pause "
        f"{longest[0].lasted_s if longest else 0:.2f} s  {memory}"
    )


@contextmanager
def attacking(settings: Settings, account: Account) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.hostile.attacker", msgspec.json.encode(settings)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                report = msgspec.json.decode(line, type=Report)
                account.reports.append(report)
                account.wrong += [f"{report.attack}: {each}" for each in report.wrong]

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield process
        finally:
            if status := process.poll():
                account.wrong.append(f"the attacker ended with status {status}")
            process.kill()
            listener.join()


@contextmanager
def killing(
    server: Server, account: Account, rng: random.Random, seconds: float, every_s: float
) -> Iterator[None]:
    over = threading.Event()

    def chats_at_once() -> None:
        """Make more chats than there are idle workers."""
        with ThreadPoolExecutor(4) as pool:
            asks = [ASKS["chat with logprobs"]] * 4
            list(pool.map(lambda ask: answer_to(server.port, ask), asks))

    def kill() -> None:
        while not over.wait(every_s * rng.uniform(0.7, 1.3)):
            if time.monotonic() > account.begin_s + seconds or not server.alive:
                return
            try:
                account.kills.append(server.kill_engine())
                account.worker_kills.append(server.kill_fork_server(chats_at_once))
            except (AssertionError, OSError, KeyError, ValueError, BrokenError) as error:
                account.wrong.append(f"while the engine or the workers were killed: {error!r}")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()
