"""The shipped demo pair, its prompts and its card, and a tiny run of its recipe."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from tokenizers import Tokenizer

from cbatch import LLM, SamplingParams
from cbatch.demo import demo_paths, demo_prompts
from tools.demo_pair import train as recipe
from tools.demo_pair.text import HELD_OUT_MODULES
from tools.demo_pair.train import agreements, load_pretrained

TARGET_FOLDER, DRAFT_FOLDER = demo_paths()


@pytest.fixture(scope="module")
def pair():
    return load_pretrained(TARGET_FOLDER), load_pretrained(DRAFT_FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))


def test_sizes(pair):
    target, draft = (sum(p.numel() for p in net.parameters()) for net in pair)
    assert 5_000_000 <= target <= 10_000_000
    assert draft < 1_000_000
    files = [file for folder in (TARGET_FOLDER, DRAFT_FOLDER) for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 16_000_000


def test_the_draft_is_accepted_on_held_out_prompts(pair, tokenizer):
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(demo_prompts()[::2])]
    hits = [hit for row in agreements(*pair, prompts) for hit in row]
    assert len(hits) > 500
    assert sum(hits) / len(hits) >= 0.55


def test_the_card_names_the_held_out_modules_and_the_figures():
    card = (TARGET_FOLDER.parent / "README.md").read_text()
    assert all(f"`{name}`" in card for name in HELD_OUT_MODULES)
    total = next(line for line in card.splitlines() if line.startswith("| **total** |"))
    acceptance = float(total.split("|")[6])
    assert acceptance >= 0.6
    assert 0 < float(total.split("|")[7]) < acceptance + 0.1
    assert re.search(r"c =\s[0-9.]+", card)


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
