"""Replicas on Ray Serve under load: a process that prints a JSON object for each scenario, or with
`command` for `cbatch serve --ray`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from cbatch.cli.ray_serve import ENVIRONMENT, NAME, build
from tests.server.engines import ROOT
from tests.server.raw_calls import decoded, post

PORT = 8123
NUM_STREAMS = 200
NUM_LATE = 40  # calls that come right after a replica has died
NUM_TOKENS, ENDLESS_TOKENS = 160, 900
NUM_ROUNDS = 4
WITHIN_S = 0.8  # after the beginning of the long streams: in the middle of them
OPTIONS: dict[str, Any] = {"max_num_seqs": 128, "threads": 1, "grace": 60}


class Stream(NamedTuple):
    """A stream as received so far. `whole` is true after its end."""

    status: int
    token_ids: list[int]
    errors: list[str]
    whole: bool


async def stream(port: int, number: int, num_tokens: int) -> Stream:
    body = {"prompt": f"def f{number}(a, b):", "max_tokens": num_tokens, "stream": True}
    body |= {"ignore_eos": True, "seed": number, "return_token_ids": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b""
    with suppress(ConnectionError):
        writer.write(post(body, b"connection: close"))
        while got := await reader.read(2**16):
            raw += got
    writer.close()
    status, _, content = decoded(raw) if b"\r\n\r\n" in raw else (0, {}, b"")
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n")[:-1]]
    messages = [json.loads(line) for line in lines if line != b"[DONE]"]
    return Stream(
        status,
        [i for each in messages for choice in each.get("choices", ()) for i in choice["token_ids"]],
        [each["error"]["message"] for each in messages if "error" in each],
        whole=lines[-1:] == [b"[DONE]"],
    )


async def streams(ports: Sequence[int], num: int, num_tokens: int) -> list[Stream]:
    calls = (stream(ports[i % len(ports)], i, num_tokens) for i in range(num))
    return await asyncio.gather(*calls)


async def tokens_per_s(ports: Sequence[int]) -> float:
    begin_s = time.monotonic()
    got = await streams(ports, NUM_STREAMS, NUM_TOKENS)
    assert all(each.whole and len(each.token_ids) == NUM_TOKENS for each in got)
    return NUM_STREAMS * NUM_TOKENS / (time.monotonic() - begin_s)


def ends(got: Sequence[Stream], expected: Sequence[Stream]) -> Counter[str]:
    """Count how streams ended; `wrong` are those whose tokens differ from an undisturbed one's."""
    return Counter(_end(each, right) for each, right in zip(got, expected, strict=False))


def _end(got: Stream, right: Stream) -> str:
    if got.token_ids != right.token_ids[: len(got.token_ids)]:
        return "wrong"
    if got.errors:
        return "error"
    if got.whole:
        return "whole" if got.token_ids == right.token_ids else "wrong"
    return "cut" if got.status == 200 else f"status {got.status}"


@contextmanager
def plain_servers() -> Iterator[list[int]]:
    """Yield the ports of two servers without a proxy."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", "--port=0", *flags]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(i)) for i in range(2)]
        servers = []
        for log in logs:
            with log.open("w") as file:
                servers.append(subprocess.Popen(command, cwd=ROOT, stderr=file))
        try:
            yield [_port(log) for log in logs]
        finally:
            for server in servers:
                server.terminate()
                server.wait()


def _port(log: Path) -> int:
    while (address := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
        time.sleep(0.1)
    return int(address[1])


def by_replica(name: str) -> dict[str, int]:
    """Return a series by replica, as Prometheus reads it."""
    with urlopen(f"http://127.0.0.1:{PORT}/metrics") as answer:
        page = answer.read().decode()
    values = re.findall(rf'^{name}{{.*replica="(\w+)"}} (\S+)$', page, flags=re.MULTILINE)
    return {replica: int(float(value)) for replica, value in values}


def open_calls() -> dict[str, int]:
    return by_replica("cbatch:open_calls")


async def until_replicas(num: int) -> None:
    while len(await asyncio.to_thread(open_calls)) != num:
        await asyncio.sleep(0.5)


async def until_both_answer() -> None:
    """Wait until both replicas answer: the proxy learns of them some time after they run."""
    await until_replicas(2)
    begun = await asyncio.to_thread(by_replica, "vllm:generation_tokens_total")
    now = begun
    while any(now[name] == begun[name] for name in begun):
        await streams([PORT], 4, 2)
        now = await asyncio.to_thread(by_replica, "vllm:generation_tokens_total")


async def kill_one(expected: Sequence[Stream]) -> dict[str, Any]:
    """Kill one replica during `expected` streams; more calls arrive before Serve has noticed."""
    import ray

    running = asyncio.create_task(streams([PORT], NUM_STREAMS, NUM_TOKENS))
    await asyncio.sleep(WITHIN_S)
    before = await asyncio.to_thread(open_calls)
    name = f"SERVE_REPLICA::{NAME}#{NAME}#{min(before)}"
    ray.kill(ray.get_actor(name, namespace="serve"))
    late = await streams([PORT], NUM_LATE, NUM_TOKENS)
    return {
        "open_on_it": before[min(before)],
        "ends": ends(await running, expected),
        "late": ends(late, expected),
    }


async def scale_down(expected: Sequence[Stream]) -> dict[str, Any]:
    """Scale down to one replica in the middle of streams."""
    from ray import serve

    running = asyncio.create_task(streams([PORT], NUM_STREAMS, NUM_TOKENS))
    await asyncio.sleep(WITHIN_S)
    before = await asyncio.to_thread(open_calls)
    await asyncio.to_thread(serve.run, build(OPTIONS | {"min_replicas": 1}), name=NAME)
    ended = ends(await running, expected)
    await until_replicas(1)
    return {"open": before, "ends": ended, "left": list(await asyncio.to_thread(open_calls))}


async def end_within_grace() -> dict[str, Any]:
    """End the application while streams run that take longer than the grace time."""
    from ray import serve

    await asyncio.to_thread(serve.run, build(OPTIONS | {"grace": 1}), name=NAME)
    await until_replicas(1)
    running = asyncio.create_task(streams([PORT], NUM_LATE, ENDLESS_TOKENS))
    await asyncio.sleep(WITHIN_S)
    await asyncio.to_thread(serve.delete, NAME)
    got = await running
    return {"whole": sum(not each.errors for each in got), "errors": [*{*got[0].errors}]}


async def run() -> None:
    from ray import serve

    with plain_servers() as ports:
        rates: dict[str, list[float]] = {"alone": [], "fleet": []}
        expected = await streams(ports, NUM_STREAMS, NUM_TOKENS)
        await asyncio.to_thread(serve.run, build(OPTIONS | {"min_replicas": 2}), name=NAME)
        await until_both_answer()
        await tokens_per_s([PORT])  # the plain servers are warm already
        for _ in range(NUM_ROUNDS):
            rates["alone"].append(await tokens_per_s(ports))
            rates["fleet"].append(await tokens_per_s([PORT]))
    print_result("rates", rates)
    print_result("kill", await kill_one(expected))
    await until_both_answer()
    print_result("scale", await scale_down(expected))
    print_result("end", await end_within_grace())


def print_result(scenario: str, result: dict[str, Any]) -> None:
    print(json.dumps({scenario: result}), flush=True)


# ---- the command ---------------------------------------------------------------------------------

HEADER = "x-session-id"
FLAGS = ("--ray", "--min-replicas=2", f"--port={PORT}", "--grace=1", f"--session-header={HEADER}")
NUM_SESSIONS = 16


def new_calls(sessions: Sequence[str]) -> list[int]:
    """Make a call of each session. Return how many each replica got, in ascending order."""
    name = "vllm:request_prompt_tokens_count"
    before = by_replica(name)
    body = json.dumps({"prompt": "def", "max_tokens": 1}).encode()
    for session in sessions:
        headers = {"content-type": "application/json", HEADER: session}
        request = Request(f"http://127.0.0.1:{PORT}/v1/completions", body, headers)
        with urlopen(request) as answer:
            answer.read()
    after = by_replica(name)
    return sorted(after[replica] - before[replica] for replica in after)


async def look(command: subprocess.Popen[bytes]) -> dict[str, Any]:
    await until_both_answer()
    same = new_calls(["one"] * NUM_SESSIONS)
    others = new_calls([f"session {number}" for number in range(NUM_SESSIONS)])
    running = asyncio.create_task(streams([PORT], 20, ENDLESS_TOKENS))
    await asyncio.sleep(0.5)
    command.send_signal(signal.SIGTERM)
    errors = {message for each in await running for message in each.errors}
    status = await asyncio.to_thread(command.wait)
    return {"same": same, "others": others, "errors": sorted(errors), "status": status}


def run_command() -> None:
    """Run `cbatch serve --ray` as an operator does, and print observations."""
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", *FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=os.environ)
        try:
            while "serving replicas" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
            print(json.dumps(asyncio.run(look(process))), flush=True)
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    if sys.argv[1:] == ["command"]:
        run_command()
        return
    os.environ.update(ENVIRONMENT)
    import ray
    from ray import serve

    ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        asyncio.run(run())
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
