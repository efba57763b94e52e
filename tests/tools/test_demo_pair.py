"""The recipe of the demo pair: its data, its growth, its restarts, and a whole tiny run."""

from __future__ import annotations

import inspect
import json

import pytest
from tokenizers import Tokenizer

from cbatch import LLM, SamplingParams
from tools.demo_pair import train as recipe

FUNCTION = '''
def mean(values):
    """Average of the values."""
    total = 0
    for value in values:
        total += value
    count = len(values)
    return total / count
'''


@pytest.mark.slow
def test_a_tiny_run_makes_a_pair_that_the_engine_loads(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "heapq.py").write_text(FUNCTION)
    (text / "other.py").write_text(inspect.getsource(recipe))
    sizes = {
        "CONTEXT_TOKENS": 32,
        "LESSON_ROWS": 2,
        "LESSON_PROMPT_TOKENS": 16,
        "CONTINUED_TOKENS": 8,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(recipe, name, value)
    out, work = tmp_path / "out", tmp_path / "work"
    recipe.main(
        [f"--work={work}", f"--out={out}", f"--text={text}", "--steps=2", "--draft-minutes=0.1"]
    )
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["heapq"]["nats"] > 0 and 0 <= figures["heapq"]["acceptance"] <= 1
    assert json.loads((out / "prompts.json").read_text())["functions"]
    ids = Tokenizer.from_file(str(out / "target/tokenizer.json")).encode("def f").ids
    llm = LLM(out / "target", out / "draft", lookahead="fixed:2")
    completion = llm.generate([ids], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[
        0
    ]
    assert len(completion.token_ids) == 6
