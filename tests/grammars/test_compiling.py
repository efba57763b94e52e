"""The cache of grammars keeps recent grammars, and grammars with a reference."""

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


def test_recent_grammars_and_grammars_in_use_are_cached(
    compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.time, "thread_time", count(0, 0.1).__next__)  # 0.1 s each
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0.25)
    grammar = grammars.compiled(outputs_of("a"))
    for text in ("b", "c", "d", "c", "b"):
        grammars.compiled(outputs_of(text))
    assert compiled_texts == ["a", "b", "c", "d", "b"]
    assert grammars.compiled(outputs_of("a")) is grammar


def test_grammars_that_compiled_slowly_are_not_kept(compiled_texts: list[str]) -> None:
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0)
    grammars.compiled(outputs_of("a"))
    grammar = grammars.compiled(outputs_of("a"))
    assert grammars.compiled(outputs_of("a")) is grammar and compiled_texts == ["a", "a"]


def test_a_rejected_grammar_is_freed_at_once() -> None:
    """It may need gigabytes, which must not wait for garbage collection."""
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
