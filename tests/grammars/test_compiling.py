"""Which grammars are kept: the latest, and any that somebody holds."""

from __future__ import annotations

import gc
import weakref
from itertools import count

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


def test_the_latest_are_kept_and_those_that_are_held(
    compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.time, "thread_time", count(0, 0.1).__next__)  # each takes 0.1
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0.25)
    held = grammars.compiled(asked("a"))
    for text in ("b", "c", "d", "c", "b"):
        grammars.compiled(asked(text))
    assert compiled_texts == ["a", "b", "c", "d", "b"]
    assert grammars.compiled(asked("a")) is held


def test_what_took_long_is_not_kept(compiled_texts: list[str]) -> None:
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0)
    grammars.compiled(asked("a"))
    held = grammars.compiled(asked("a"))
    assert grammars.compiled(asked("a")) is held and compiled_texts == ["a", "a"]


def test_of_what_is_refused_nothing_is_left() -> None:
    """It may be gigabytes: they are not to wait for the collector."""
    seen: list[weakref.ref[set[int]]] = []

    def work() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError):
            compiling.with_stack(2**20, work)
        assert seen[0]() is None
    finally:
        gc.enable()


class Large(set[int]):
    pass
