"""Run `cbatch serve --ray` as an operator does, and print a JSON object of observations."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.server.processes import ROOT
from tests.server.ray_fleet import ENDLESS_TOKENS, PORT, by_replica, streams, until_both_answer

HEADER = "x-session-id"
FLAGS = ("--ray", "--min-replicas=2", f"--port={PORT}", "--grace=1", f"--session-header={HEADER}")
NUM_SESSIONS = 16


def call(session: str) -> None:
    body = json.dumps({"prompt": "def", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json", HEADER: session}
    request = Request(f"http://127.0.0.1:{PORT}/v1/completions", body, headers)
    with urlopen(request) as answer:
        answer.read()


def calls_by_replica() -> dict[str, int]:
    return by_replica("vllm:request_prompt_tokens_count")


def new_calls(before: dict[str, int]) -> list[int]:
    after = calls_by_replica()
    return sorted(after[name] - before[name] for name in after)


async def look(command: subprocess.Popen[bytes]) -> dict[str, Any]:
    await until_both_answer()
    before = calls_by_replica()
    for _ in range(NUM_SESSIONS):
        call("one")
    same = new_calls(before)
    before = calls_by_replica()
    for number in range(NUM_SESSIONS):
        call(f"session {number}")
    running = asyncio.create_task(streams([PORT], 20, ENDLESS_TOKENS))
    await asyncio.sleep(0.5)
    others = new_calls(before)
    command.send_signal(signal.SIGTERM)
    errors = {message for each in await running for message in each.errors}
    status = await asyncio.to_thread(command.wait)
    return {"same": same, "others": others, "errors": sorted(errors), "status": status}


def main() -> None:
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


if __name__ == "__main__":
    main()
