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
    """Return the targets of systems by what they do wrong; "" does nothing wrong."""
    running = {}
    for wrong in ("", "key", "streams", "prompts", "event", "short"):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.wrong = wrong  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running[wrong] = server
    urls = {wrong: f"http://127.0.0.1:{each.server_port}" for wrong, each in running.items()}
    yield urls | {"gone": "http://127.0.0.1:9", "command": "/no/such {port}", "dies": DIES}
    for server in running.values():
        server.shutdown()
        server.server_close()


def test_servers_that_refuse_are_left_out(
    servers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Fake.prompts.clear()
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
    lengths = {len(prompt) for prompt in Fake.prompts}  # type: ignore[arg-type]
    assert lengths == {7}, "as asked for"


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
