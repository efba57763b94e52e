"""Text of models, files and servers cannot control the terminal, and no text ends a chat."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from cbatch import SamplingParams
from cbatch.cli import chat
from cbatch.cli.chat import ChatSession
from cbatch.cli.console import TextConsole
from cbatch.cli.jobs import ResultStream
from cbatch.engine.engine import Engine
from cbatch.system.terminal import escaped, shown
from cbatch.text.reply_reader import Thought
from tests.cli.conftest import INFO, Run
from tests.cli.test_chat import FORMAT
from tests.toy_engine import make_engine

ROOT = Path(__file__).parents[2]
Command = Callable[..., Run]
# Texts that clear the screen, write the clipboard, set a title, and that hide or reorder others.
HOSTILE = (
    "\x1b[2J",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x9d0;evil\x9c",
    "\x9b2J",
    "rm -rf /\rls",
    "rm\x08\x08ls\x7f",
    "\u202etxt.exe\u2066\u2069\u200f",
    "a\u2028b\u2029c\x0bd\x0ce\x85f",
)
TEXT = "".join(HOSTILE)
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def unstyled(screen: Screen) -> str:
    """Return what was written, without the colours of our own."""
    return re.sub("\x1b\\[[0-9;]*m", "", screen.getvalue())


def test_control_characters_are_shown_on_a_terminal_alone() -> None:
    assert not FORBIDDEN.search(shown(TEXT, Screen()))
    assert shown(TEXT, io.StringIO()) == TEXT
    assert "".join(escaped(each) for each in TEXT) == escaped(TEXT), "split over chunks"
    assert escaped("naïve\ttext\n漢字 👩‍👩‍👧") == "naïve\ttext\n漢字 👩‍👩‍👧"


@pytest.mark.parametrize("drafts", [False, True])
def test_answers_and_thoughts_of_a_chat_are_shown(
    monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    """Each character comes as a piece of its own."""
    text = TEXT
    pieces = [*((Thought(each), drafts) for each in text), *((each, drafts) for each in text)]
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(chat, "read_reply", lambda output, reader: pieces)
    params = SamplingParams(max_tokens=1)
    session = ChatSession(make_engine(), FORMAT, params, TextConsole(stderr=True), None, drafts)
    session.say("hello")
    answer = session.messages[-1]
    assert answer["content"] == answer["reasoning"] == text, "the conversation has the text itself"
    seen = unstyled(screen)
    assert not FORBIDDEN.search(seen)
    assert seen.split() == f"{escaped(text)}\n{escaped(text)}".split()


def test_errors_and_the_models_name_are_shown(
    cbatch: Command, monkeypatch: pytest.MonkeyPatch, engines: list[Engine]
) -> None:
    screen, text = Screen(), TEXT
    info = replace(INFO, model=f"models/{text}")
    monkeypatch.setattr("cbatch.cli.chat.load_engine", lambda *_: (make_engine(), info))
    lines = f"/{text}\n/set {text} 1\n/save /nowhere/{text}\n/system {text}\n/set\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    monkeypatch.setattr(sys, "stderr", screen)
    assert cbatch("chat", "--stop", f"a{text}").status == 2
    said = unstyled(screen)
    assert not FORBIDDEN.search(said)
    assert f"models/{escaped(text)}" in said and "/nowhere/" in said


def test_results_on_a_terminal_are_the_same_json() -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    piped, screen = io.BytesIO(), Terminal()
    for out in (piped, screen):
        ResultStream(out).write({"text": TEXT, "more": "é"})
    for out in (piped, screen):
        assert json.loads(out.getvalue()) == {"text": TEXT, "more": "é"}
    assert not FORBIDDEN.search(screen.getvalue().decode())


# --- nothing ends a chat --------------------------------------------------------------------------

LINES = (
    "/save a\0b",
    "/save ~nosuchuser/x",
    "/save /dev/full",
    "/set temperature 1e999",
    "/set structured_outputs " + "[" * 5000,
    '/set structured_outputs {"regex": "\\ud800"}',
)


def test_a_chat_goes_on_after_a_bad_line(cbatch: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"def f(\n{line}\n" for line in LINES) + "class A\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    run = cbatch("chat", "--max-tokens", 3, "--seed", 1)
    assert run.status == 2 and len(run.out.splitlines()) >= len(LINES) + 1
    assert len([each for each in run.err.splitlines() if "; " in each]) >= len(LINES), run.err


@pytest.mark.slow
def test_a_chat_takes_any_streams() -> None:
    """Standard output takes only ASCII, and standard error is closed."""
    options = ["--temperature", "0", "--kv-cache-memory-bytes", "50M"]
    grammar = json.dumps({"regex": "\u00e9{3}"})  # in ASCII
    words = [sys.executable, "-m", "cbatch.cli.main", "chat", *options]
    run = subprocess.run(
        ["bash", "-c", 'exec 2>&-; exec "$@"', "bash", *words],
        input=f"/set structured_outputs {grammar}\nhello\n".encode(),
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=600,
    )
    assert run.returncode == 0 and run.stdout == b"\\xe9\\xe9\\xe9\n"
