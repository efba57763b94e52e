"""`python -m bench.stalls` with servers that refuse or fail: their words are shown at once, and the
figures of the other systems are kept."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench import stalls

WORDS = "max_tokens: 6000 is too large for the context"
SMALL = [
    "--streams",
    "2",
    "--prompts",
    "2",
    "--prompt-tokens",
    "7",
    "--every",
    "0",
    "--repeats",
    "2",
]
LIMIT_S = 60.0  # only a hang takes longer; the servers answer at once


class Fake(BaseHTTPRequestHandler):
    """A server whose URL says what it does wrong, if anything."""

    prompts: list[object] = []

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._send(401 if self.server.wrong == "key" else 200, {"data": [{"id": "m"}]})  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        wrong, is_prompt = self.server.wrong, isinstance(body["prompt"], list)  # type: ignore[attr-defined]
        if wrong == "streams" or (wrong == "prompts" and is_prompt):
            return self._send(400, {"error": {"message": WORDS}})
        if is_prompt:
            self.prompts.append(body["prompt"])
        self.send_response(200)
        self.end_headers()
        try:
            for number in range(body["max_tokens"]):
                if wrong == "event" and number == 60:
                    self.wfile.write(b'data: {"error": {"message": "%b"}}\n\n' % WORDS.encode())
                    return None
                if wrong == "short" and number == 60:
                    break
                self.wfile.write(b'data: {"choices": [{"text": "a"}], "error": null}\n\n')
                time.sleep(0.001)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass
        return None

    def _send(self, status: int, content: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    running = {}
    for wrong in ("", "key", "streams", "prompts", "event", "short"):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.wrong = wrong  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running[wrong] = server
    yield {wrong: f"http://127.0.0.1:{each.server_port}" for wrong, each in running.items()}
    for server in running.values():
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("key", "/v1/models: 401"),
        ("streams", WORDS),
        ("prompts", WORDS),
        ("event", WORDS),
        ("short", "a stream ended after 60 tokens"),
        ("gone", "Connect call failed"),
        ("command", "No such file"),
        ("dies", "no model today"),
    ],
)
def test_a_server_that_refuses_is_left_out(
    wrong: str, words: str, servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    dies = f"""{sys.executable} -c 'raise SystemExit("no model today")'"""
    other = {"gone": "http://127.0.0.1:9", "command": "/no/such {port}", "dies": dies}
    began_s = time.monotonic()
    with pytest.raises(SystemExit, match="bad"):
        stalls.main([f"bad={(servers | other)[wrong]}", f"good={servers['']}", *SMALL])
    assert time.monotonic() - began_s < LIMIT_S
    out, err = capsys.readouterr()
    assert err.count("bad failed") == 1 and words in err and "Traceback" not in err
    (row,) = json.loads(out.splitlines()[-1])["results"]
    assert row["system"] == "good" and row["prompts_s"] > 0 and row["longest_to_first"] == 1


def test_prompts_have_the_length_asked_for(servers: dict[str, str]) -> None:
    Fake.prompts.clear()
    stalls.main([f"good={servers['']}", *SMALL])
    assert [len(prompt) for prompt in Fake.prompts] == [7] * 4  # type: ignore[arg-type]


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
