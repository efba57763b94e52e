"""`cbatch chat` over an engine without a model, by a pipe and in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from cbatch import LLM, SamplingParams
from cbatch.cli.chat import ChatSession
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.llm import complete_all
from cbatch.text import ChatTemplate, load_chat_template
from cbatch.text.chat_format import ChatFormat
from tests.cli.conftest import INFO, Run
from tests.test_llm import write_model
from tests.toy_engine import TOKENIZER, make_engine

ROOT = Path(__file__).parent.parent.parent
OPTIONS = ("--max-tokens", "12", "--seed", "3")
FORMAT = ChatFormat(
    "demo",
    max_model_len=INFO.max_model_len,
    tokenizer=TOKENIZER,
    chat_template=load_chat_template(demo_paths()[0]),
)
Chat = Callable[..., Run]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def expected(*messages: dict[str, str], **params: Any) -> str:
    """Return the answer to a conversation by an engine without the command."""
    ids = FORMAT.prompt_ids([*messages])
    sampling = SamplingParams(**{"max_tokens": 12, "seed": 3, **params})
    (done,) = complete_all(make_engine(num_blocks=512, max_model_len=600), [ids], [sampling])
    assert done.error is None
    return done.text


@pytest.fixture
def chat(cbatch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return a function that runs `cbatch chat` with lines of standard input."""

    def run(*lines: str, options: tuple[str, ...] = OPTIONS) -> Run:
        text = "".join(line + "\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return cbatch("chat", *options)

    return run


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(chat: Chat) -> None:
    run = chat("def f(", "", "  class A  ")
    first = expected(user("def f("))
    second = expected(user("def f("), assistant(first), user("class A"))
    assert run.out == f"{first}\n{second}\n" and run.status == 0
    assert "batch_invariant: yes" in run.err and "> " not in run.out + run.err


def test_sampling_is_set_by_flags_and_in_the_conversation(chat: Chat) -> None:
    run = chat("/set max_tokens 3", "/set temperature 0", "def f(", "/set")
    assert run.out == expected(user("def f("), max_tokens=3, temperature=0) + "\n"
    assert all(f"{each}\n" in run.err for each in ("max_tokens 3", "temperature 0.0", "top_p 0.9"))
    by_flag = chat("def f(", options=("--max-tokens", "3", "--temperature", "0", "--seed", "3"))
    assert by_flag.out == run.out
    stopped = chat("/set --stop " + run.out[1], "/set top-k 5", "/set seed null", "/set")
    assert f"stop ('{run.out[1]}',)" in stopped.err and stopped.status == 0
    assert "top_k 5\n" in stopped.err and "seed None\n" in stopped.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temprature 1", "did you mean temperature?; use max_tokens, min_tokens"),
        ("/set n 2", "n: is not a sampling parameter"),
        ("/set top_k", "top_k: has no value; write /set top_k VALUE"),
        ("/sett", "/sett: is not a command; did you mean set?; type /help"),
        ("/save", "/save: '' is not allowed; write /save FILE"),
        ("/save /", "/save: / cannot be written (Is a directory)"),
        ("x" * 9999, "maximum context length is 128 tokens. However"),
    ],
)
def test_a_bad_line_is_named_and_changes_nothing(chat: Chat, line: str, message: str) -> None:
    run = chat("def f(", line, "class A")
    assert message in run.err and run.status == 2
    first = expected(user("def f("))
    second = expected(user("def f("), assistant(first), user("class A"))
    assert run.out == f"{first}\n{second}\n"


def test_a_saved_conversation_is_continued_elsewhere(chat: Chat, tmp_path: Path) -> None:
    lines, whole = tmp_path / "chat.jsonl", tmp_path / "chat.json"
    run = chat(
        "/system be nice", "def f(é", f"/save {lines}", f"/save {whole}", "/clear", "/system", "x"
    )
    messages = json.loads(whole.read_text(encoding="utf-8"))
    assert [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] == messages
    first = expected({"role": "system", "content": "be nice"}, user("def f(é"))
    assert messages == [
        {"role": "system", "content": "be nice"},
        user("def f(é"),
        assistant(first),
    ]
    assert run.out == f"{first}\n{expected(user('x'))}\n"
    again = chat("def f(é", "class A", options=(*OPTIONS, "--system", "be nice"))
    assert again.out == f"{first}\n{expected(*messages, user('class A'))}\n"


def test_accepted_drafts_are_coloured(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    run = chat("def f(", options=(*OPTIONS, "--show-drafts", "--stop", "zz"))
    coloured = re.findall("\x1b\\[38;2;77;187;170m(.*?)\x1b\\[0m", run.out)
    accepted, tokens = map(int, re.findall(r"(\d+) of (\d+) tokens are accepted", run.err)[0])
    assert 0 < len(coloured) == accepted < tokens == 12
    plain = re.sub("\x1b\\[.*?m", "", run.out)
    assert plain == expected(user("def f(")) + "\n"
    assert "\x1b" not in chat("def f(").out, "only on request"


def test_drafts_cannot_be_shown_if_nothing_drafts(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = (make_engine(lookahead="off"), replace(INFO, drafter=()))
    monkeypatch.setattr("cbatch.cli.chat.load_engine", lambda *_: loaded)
    run = chat("def f(", options=("--show-drafts",))
    assert run.status == 2 and "--show-drafts: has nothing to show" in run.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokenizer", "none"), "--tokenizer: 'none' cannot read or write text"),
        (("--chat-template", "nowhere.jinja"), "nowhere.jinja cannot be read"),
    ],
)
def test_options_are_checked_before_the_model_is_loaded(
    chat: Chat, engines: list[Engine], options: tuple[str, ...], message: str
) -> None:
    run = chat("def f(", options=options)
    assert run.status == 2 and message in run.err and not run.out and not engines


def test_a_model_without_a_template_cannot_chat(chat: Chat, tmp_path: Path) -> None:
    run = chat("x", options=(str(write_model(tmp_path / "plain")),))
    assert run.status == 2 and "has no chat template; give --chat-template" in run.err


def test_a_thought_is_no_part_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(write_model(tmp_path / "model"), random_weights_seed=0, max_num_seqs=1)
    template = ChatTemplate("{{ messages[-1].content }}", {}, "the test")
    chat_format = ChatFormat(
        "toy",
        max_model_len=128,
        tokenizer=llm.engine.tokenizer,
        chat_template=template,
        reasoning_parser="qwen3",
    )
    grammar = {"regex": "xy", "around": 'start: "<think>ab</think>" @answer'}
    params = SamplingParams(max_tokens=60, structured_outputs=grammar)  # type: ignore[arg-type]
    session = ChatSession(llm.engine, chat_format, params, Console(stderr=True))
    session.say("hello")
    answer = {"role": "assistant", "content": "xy", "reasoning": "ab"}
    assert session.messages == [user("hello"), answer]
    assert capsys.readouterr().out == "ab\n\nxy\n"


# --- in a terminal --------------------------------------------------------------------------------

# `cbatch chat` over an engine without a model, with steps so slow that a test sees its stream.
SLOW_CHAT = """
import signal, sys, time
from cbatch.cli import chat
from cbatch.cli.main import main
from tests.checking.executor import SimExecutor
from tests.cli.conftest import INFO
from tests.toy_engine import make_engine

run = SimExecutor.run
def slow(executor, plan):
    time.sleep(0.05)
    return run(executor, plan)

SimExecutor.run = slow
sizes = {"num_blocks": 512, "max_model_len": 600, "block_size": 8, "lookahead": "off"}
chat.load_engine = lambda model, draft, options: (make_engine(**sizes), INFO)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """The other end of a program's terminal. `seen` is everything that it has shown."""

    def __init__(self, process: int, end: int) -> None:
        self.process, self._end, self.seen = process, end, ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self, pattern: str, since: int) -> int:
        """Press Ctrl-C, and wait as `wait_for` does. Press it again after five seconds: Python's
        `input` does not see a signal that comes just before it begins to wait, until the next."""
        for _ in range(60):
            self.type("\x03")
            with suppress(AssertionError):
                return self.wait_for(pattern, since, limit_s=5)
        raise AssertionError(self.seen)

    def wait_for(self, pattern: str, since: int = 0, limit_s: float = 300) -> int:
        """Read until the text after index `since` matches. Returns the end of the match."""
        deadline_s = time.monotonic() + limit_s
        while not (match := re.search(pattern, self.seen[since:])):
            assert time.monotonic() < deadline_s, self.seen
            if select.select([self._end], [], [], 0.1)[0]:
                self.seen += os.read(self._end, 4096).decode(errors="replace")
        return since + match.end()

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@contextmanager
def running(code: str, *arguments: str) -> Iterator[Terminal]:
    """Run Python code in a terminal."""
    process, end = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        environment = os.environ | {"TERM": "dumb", "PYTHONPATH": str(ROOT)}
        os.execve(sys.executable, [sys.executable, "-c", code, *arguments], environment)
    try:
        yield Terminal(process, end)
    finally:
        try:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(end)


def terminal(*options: str) -> AbstractContextManager[Terminal]:
    return running(SLOW_CHAT, "chat", "--seed", "3", *options)


def test_ctrl_c_stops_an_answer_and_not_the_program(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with terminal("--max-tokens", "400") as tty:
        at = tty.wait_for("> $")
        tty.type("def f(\n")
        begin = tty.wait_for(r"def f\(\r\n", at)
        at = tty.wait_for(r"..", begin)  # it streams: the answer takes 20 s, and is not over
        tty.type("\x03")
        at = tty.wait_for("stopped\r\n(.|\n)*> $", at)
        at = tty.interrupt("Ctrl-D or /exit leaves\r\n(.|\n)*> $", at)  # at the prompt: a hint
        tty.type("/set max_tokens 5\n")
        at = tty.wait_for("> $", tty.wait_for("max_tokens 5", at))
        tty.type("class A\n")
        at = tty.wait_for("max_tokens or the context allows(.|\n)*> $", at)
        tty.type(f"/save {saved}\n")
        at = tty.wait_for("> $", tty.wait_for("chat.json", at))
        tty.type("\x04")
        assert tty.status() == 0
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    whole = expected(user("def f("), max_tokens=400)
    stopped, second = messages[1]["content"], messages[3]["content"]
    assert whole.startswith(stopped) and 2 <= len(stopped) < len(whole) // 2
    assert second == expected(*messages[:3], max_tokens=5)
