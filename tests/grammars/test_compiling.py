"""The cache of grammars keeps the latest, and all with a reference."""

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


def outputs_of(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


@pytest.fixture
def compiled_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled: list[str] = []
    compile_ = Grammars.compile_spec

    def counted(self: Grammars, outputs: StructuredOutputs) -> compiling.Compiled:
        compiled.append(str(outputs.regex))
        return compile_(self, outputs)

    monkeypatch.setattr(Grammars, "compile_spec", counted)
    return compiled


def test_the_latest_are_kept_and_those_with_a_reference(
    compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.time, "thread_time", count(0, 0.1).__next__)  # each takes 0.1
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0.25)
    grammar = grammars.compiled(outputs_of("a"))
    for text in ("b", "c", "d", "c", "b"):
        grammars.compiled(outputs_of(text))
    assert compiled_texts == ["a", "b", "c", "d", "b"]
    assert grammars.compiled(outputs_of("a")) is grammar


def test_what_took_long_is_not_kept(compiled_texts: list[str]) -> None:
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0)
    grammars.compiled(outputs_of("a"))
    grammar = grammars.compiled(outputs_of("a"))
    assert grammars.compiled(outputs_of("a")) is grammar and compiled_texts == ["a", "a"]


def test_of_what_is_refused_nothing_is_left() -> None:
    """It may be gigabytes, which must not wait for the collector."""
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
