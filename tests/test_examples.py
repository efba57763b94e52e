"""Every script of `examples/` runs on the demo models, as a user would run it."""

from __future__ import annotations

import runpy
from collections.abc import Iterator

import pytest

from cbatch import LLM
from cbatch.demo import demo_paths
from cbatch.text import load_chat_template
from tests.documents import ROOT
from tests.server.http_client import Client, serving

MAX_LINES = 40
# By script: its output, and whether it needs a server.
PRINTS = {
    "client": ("24 tokens", True),
    "load_test": ("4 clients: ", True),
    "offline_batch": ("class Stack:", False),
    "simulate_policy": ("adaptive", False),
    "streaming": ("mean: length", False),
    "structured_output": ("stop\n", False),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    engine = LLM(*demo_paths(), lookahead="ema:4").engine
    with serving(engine, chat_template=load_chat_template(demo_paths()[0])) as client:
        yield client


def test_these_are_all() -> None:
    scripts = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == PRINTS.keys()
    for path in scripts.values():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, asks = PRINTS[name]
    path, arguments = ROOT / "examples" / f"{name}.py", ()
    if asks:
        arguments = (f"http://127.0.0.1:{request.getfixturevalue('server').port}",)
    runpy.run_path(str(path))["main"](*arguments)
    assert printed in capsys.readouterr().out
