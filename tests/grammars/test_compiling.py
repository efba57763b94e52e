"""Which grammars are kept: the latest ordinary ones, and any that somebody holds."""

from __future__ import annotations

import pytest

from cbatch.core.request.request import StructuredOutputs
from cbatch.demo import demo_paths
from cbatch.grammars import Grammars, compiling
from cbatch.text import load_tokenizer

TOKENIZER = load_tokenizer(demo_paths()[0])


def asked(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


@pytest.fixture
def compiled_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    compile_ = Grammars._compile

    def counted(self: Grammars, asked: StructuredOutputs) -> compiling.Compiled:
        found.append(str(asked.regex))
        return compile_(self, asked)

    monkeypatch.setattr(Grammars, "_compile", counted)
    return found


def test_the_latest_are_kept_and_those_that_are_held(compiled_texts: list[str]) -> None:
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), num_kept=2)
    held = grammars.compiled(asked("a"))
    for text in ("b", "c", "d", "c", "b"):
        grammars.compiled(asked(text))
    assert compiled_texts == ["a", "b", "c", "d", "b"]
    assert grammars.compiled(asked("a")) is held


def test_what_took_long_is_not_kept(
    compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_QUICK_S", 0.0)
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))
    grammars.compiled(asked("a"))
    held = grammars.compiled(asked("a"))
    assert grammars.compiled(asked("a")) is held and compiled_texts == ["a", "a"]
