from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from cbatch import SamplingParams
from cbatch.cli import demo
from cbatch.demo import demo_paths, demo_prompts
from cbatch.engine.engine import Engine
from tests.cli.conftest import Run
from tests.toy_engine import make_engine


def test_the_demo_without_a_terminal(
    cbatch: Callable[..., Run], engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.cli.demo.chat", lambda *_: [])
    run = cbatch("demo", "--prompts", 5, "--max-tokens", 24, "--max-num-seqs", 3)
    assert run.status == 0
    assert "\x1b" not in run.out, "no colours without a terminal"
    for prompt in demo_prompts()[:5]:
        assert prompt.splitlines()[0] in run.out
    assert run.out.count("│ ") >= 5 and "batch_invariant: yes" in run.out
    (report,) = run.lines
    shown, *many, without, with_lookahead = report["results"]
    speculation = engines[0].stats.speculation
    assert f"│ mean accepted length │ {shown['mean_accepted_tokens']:.2f}" in re.sub(
        r" +", " ", run.out
    ), "the table and the JSON line differ"
    assert speculation.mean_accepted_tokens != shown["mean_accepted_tokens"], "ran before"
    assert shown["batch"] == 3 and shown["output_tokens_per_s"] > 0
    assert without["lookahead"] == "off" and without["mean_accepted_tokens"] == 1
    assert with_lookahead["batch"] == 1 and with_lookahead["mean_accepted_tokens"] > 1
    assert [each["lookahead"] for each in many] == ["off", with_lookahead["lookahead"]]
    assert [each["batch"] for each in many] == [3, 3]
    output = re.sub(r"(?<=\d),(?=\d)", "", re.sub(r" +", " ", run.out))
    for at_once, pair in ((3, many), (1, (without, with_lookahead))):
        rates = [each["output_tokens_per_s"] for each in pair]
        row = re.search(rf"│ {at_once} │ (\d+) │ (\d+) │ (\d+\.\d\d)x │ yes │", output)
        assert row is not None, output
        assert [float(rate) for rate in row.groups()[:2]] == pytest.approx(rates, abs=0.6)
        assert float(row[3]) == pytest.approx(rates[1] / rates[0], abs=0.01)
    first = run.out.index("What speculation gains")
    assert first < run.out.index("Summary"), "the summary comes first"
    assert run.out.rstrip().splitlines()[-1].startswith('{"results"')
    assert engines[0].scheduler.stats.steps > 10


def test_a_chat_continues_with_the_earlier_turns(
    cbatch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_model", lambda name: demo_paths()[0])
    run = cbatch("demo", "--prompts", 1, "--max-tokens", 4)
    chat = run.out.partition("a chat with smollm2")[2]
    for question in demo.QUESTIONS:
        assert question in chat
    assert chat.count(demo.FOLLOW_UP) == len(demo.QUESTIONS)
    assert chat.count("│ ") >= 2 * len(demo.QUESTIONS)
    assert re.search(r"\d+% of the prompt tokens were found in the prefix cache", chat)
    *_, result = run.lines[0]["results"]
    assert result["batch"] == len(demo.QUESTIONS) and result["output_tokens_per_s"] > 0


def lanes_after(engine: Engine, steps: int) -> str:
    names = {}
    for at in range(4):
        accepted = engine.add(
            f"def function_{at}(", SamplingParams(max_tokens=30 + 10 * at, seed=at)
        )
        names[accepted.request_id] = f"function_{at}"
    lanes = demo.Lanes(2, names)
    for _ in range(steps):
        if engine.has_work:
            lanes.update(engine.step())
    console = Console(width=100, file=io.StringIO())
    console.print(lanes.render(engine, 1.0, console.width))
    return console.file.getvalue()


def test_lanes_show_each_sequence_with_its_own_lookahead() -> None:
    early = lanes_after(make_engine(max_num_seqs=2, lookahead="fixed:3"), 4)
    assert "function_0" in early and "function_1" in early and "function_2" not in early
    assert "2 running" in early and "2 waiting" in early
    assert "3 ●" in early or "3 ○" in early, "k and accepted drafts"
    late = lanes_after(make_engine(max_num_seqs=2, lookahead="fixed:3"), 500)
    assert "done" in late and "0 running" in late
    assert "function_3" in late, "a finished sequence frees its lane"
    assert all(len(line) <= 100 for line in late.splitlines())
