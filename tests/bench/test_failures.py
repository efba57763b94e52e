"""A benchmark of several systems reports those that work, and prompts have the length asked for."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import lookahead
from bench.engine.systems import EngineRun, Prompts, System, make_prompts, measure
from bench.failures import Failures
from bench.lookahead import PolicyRun
from bench.peers import __main__ as peers
from bench.peers.agree import agreement
from bench.peers.figures import OUTPUT, rows_of
from bench.peers.files import ModelFormats
from bench.peers.systems import Entrant, started
from bench.server.raw_client import read_tokens
from cbatch.demo import demo_paths
from cbatch.text.outputs import Speculation


@pytest.mark.parametrize("tokens", [1, 24, 64, 300, 1024])
def test_prompts_have_the_length_asked_for(tokens: int) -> None:
    for real in (True, False):
        prompts = make_prompts(demo_paths()[0], tokens, 20, real)
        assert [len(prompt) for prompt in prompts] == [tokens] * 20
        assert tokens < 24 or len({tuple(prompt) for prompt in prompts}) == 20


def _fails_at(number: int, words: str = "out of memory") -> System:
    calls = iter(range(10**6))

    def run(prompts: Prompts, output_tokens: int) -> EngineRun:
        if next(calls) == number:
            raise RuntimeError(words)
        return EngineRun(1.0, [[7] * output_tokens for _ in prompts])

    return System(f"fails at {number}", "off", run)


def test_a_system_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """It fails in the warm-up, in the first repeat, in the last, or never."""
    args = argparse.Namespace(prompts=2, prompt_tokens=5, output_tokens=3, repeats=3)
    systems, failures = [_fails_at(number) for number in (0, 1, 3, 99)], Failures()
    for batch in (2, 2):
        runs = measure(systems, Path("none"), batch, args, failures, real=False)
        assert [(system.name, len(each)) for system, each in runs] == [("fails at 99", 3)]
    assert list(failures.words) == ["fails at 0", "fails at 1", "fails at 3"]
    assert capsys.readouterr().err.count("failed: out of memory") == 3
    with pytest.raises(SystemExit, match="fails at 0, fails at 1, fails at 3"):
        failures.end()


def test_a_system_that_does_not_start_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    absent = Entrant("gone", "off", "gone", sys.executable, 1, {})
    no_model = Entrant("cbatch", "off", "cbatch", sys.executable, 1, {"model": "/no/model"})
    failures = Failures()
    with started([absent, no_model], failures) as systems:
        assert systems == []
    assert "gone_worker" in failures.words["gone"] and "Error" in failures.words["cbatch"]
    rows = agreement("m", [_fails_at(0), _fails_at(9)], [[1]], 2, lambda ids: None, failures)  # type: ignore[arg-type, return-value]
    assert rows == [] and "fails at 0" in failures


def test_peers_print_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_systems(model: ModelFormats, args: Any, failures: Failures) -> list[dict[str, Any]]:
        if model.name == "demo":
            raise ValueError("the demo cannot be converted")
        with failures.caught("vllm"):
            raise RuntimeError("no such device")
        system = System("cbatch", "off", lambda *_: pytest.fail("nothing is run"))
        return rows_of(model.name, OUTPUT, 1, [system], [[2.0]])

    monkeypatch.setattr(peers, "time_systems", time_systems)
    with pytest.raises(SystemExit, match="llama-1m, vllm, demo"):
        peers.main(["--model", "llama-1m", "demo", "--peer", "--skip-agreement"])
    out, err = capsys.readouterr()
    assert [row["model"] for row in json.loads(out.splitlines()[-1])["results"]] == ["llama-1m"]
    assert "vllm failed: no such device" in err and "demo failed: the demo cannot be" in err


def test_lookahead_prints_the_cells_before_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(
        engines: dict[str, Any], prompts: Any, concurrency: int, *_: Any
    ) -> dict[str, list[PolicyRun]]:
        if concurrency == 2:
            raise RuntimeError("out of memory")
        return {policy: [PolicyRun(10, 1.0, Speculation())] for policy in engines}

    monkeypatch.setattr(lookahead, "build", lambda *_: None)
    monkeypatch.setattr(lookahead, "measure", measure)
    plot = str(tmp_path / "a.png")
    command = ["x", "--workload", "fresh", "--batch", "1", "2", "4", "--policy", "off"]
    monkeypatch.setattr("sys.argv", [*command, "--plot", plot])
    with pytest.raises(SystemExit, match="fresh, batch 2"):
        lookahead.main()
    out, err = capsys.readouterr()
    assert [row["batch"] for row in json.loads(out.splitlines()[-1])["results"]] == [1]
    assert "fresh, batch 2 failed: out of memory" in err


def test_the_raw_client_shows_what_the_server_said() -> None:
    class Refusing(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "prompt: too long"}}')

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(RuntimeError, match="0 tokens instead of 8.*prompt: too long"):
            read_tokens(server.server_port, [[1], [2]], 4)
        server.shutdown()
