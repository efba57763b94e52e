"""`python -m bench.stalls` with servers that refuse or fail: their words are shown at once, and the
figures of the other systems are kept."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from bench import stalls
from tests.bench.load.scripted import DONE, Exchange, scripted

WORDS = "max_tokens: 6000 is too large for the context"
SMALL = ["--streams=2", "--prompts=2", "--prompt-tokens=7", "--every=0", "--repeats=2"]
DIES = f"""{sys.executable} -c 'raise SystemExit("no model today")'"""
WRONG = {  # by what a system does wrong: its words
    "key": "/v1/models: 401",
    "streams": WORDS,
    "prompts": WORDS,
    "event": WORDS,
    "short": "a stream ended after 60 tokens",
    "gone": "Connect call failed",
    "command": "No such file",
    "dies": "no model today",
}


LENGTHS: set[int] = set()  # of the prompts that a server got


async def script(wrong: str, exchange: Exchange) -> None:
    """Answer as a server that does something wrong, if `wrong` is not empty."""
    body = exchange.body
    if not body:
        status = "401 Unauthorized" if wrong == "key" else "200 OK"
        return await exchange.whole(b'{"data": [{"id": "m"}]}', status)
    if wrong == "streams" or (wrong == "prompts" and isinstance(body["prompt"], list)):
        refusal = json.dumps({"error": {"message": WORDS}}).encode()
        return await exchange.whole(refusal, "400 Bad Request")
    if isinstance(body["prompt"], list):
        LENGTHS.add(len(body["prompt"]))
    await exchange.begin()
    for _ in range(60 if wrong in ("event", "short") else body["max_tokens"]):
        await exchange.event(b'data: {"choices": [{"text": "a"}], "error": null}\n\n')
        await asyncio.sleep(0.001)
    if wrong == "event":
        await exchange.event(b'data: {"error": {"message": "%b"}}\n\n' % WORDS.encode())
    await exchange.event(DONE)
    return await exchange.event(b"")


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    """Return the targets of systems by what they do wrong; "" does nothing wrong."""
    with ExitStack() as stack:
        urls = {
            wrong: stack.enter_context(scripted(partial(script, wrong))).endpoint.url
            for wrong in ("", "key", "streams", "prompts", "event", "short")
        }
        yield urls | {"gone": "http://127.0.0.1:9", "command": "/no/such {port}", "dies": DIES}


def test_servers_that_refuse_are_left_out(
    servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [f"{wrong}={servers[wrong]}" for wrong in WRONG]
    with pytest.raises(SystemExit, match=", ".join(WRONG) + "$"):
        stalls.main([*bad, f"good={servers['']}", *SMALL])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    for wrong, words in WRONG.items():
        (line,) = [each for each in err.splitlines() if each.startswith(f"{wrong} failed")]
        assert words in line or words in err[err.index(line) :]
    (line,) = [each for each in out.splitlines() if each.startswith("{")]
    (row,) = json.loads(line)["results"]
    assert row["system"] == "good" and row["prompts_s"] > 0 and row["longest_to_first"] == 1
    assert {7} == LENGTHS, "as asked for"


def test_what_was_measured_before_a_failure_counts(
    servers: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = stalls.measure

    async def fail_later(server: stalls.Server, load: stalls.Load, seed: int) -> dict[str, float]:
        if seed:
            raise RuntimeError(WORDS)
        return await measure(server, load, seed)

    monkeypatch.setattr(stalls, "measure", fail_later)
    with pytest.raises(SystemExit, match="a, b"):
        stalls.main([f"a={servers['']}", f"b={servers['']}", *SMALL])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["system"] for row in rows] == ["a", "b"]
