"""Grammars over a vocabulary: text around an output, characters in GBNF, and the cache."""

from __future__ import annotations

import gc
import weakref
from itertools import count
from typing import Any

import pytest

from cbatch import LLM, FieldError, SamplingParams, StructuredOutputs
from cbatch.core.request.request import FinishReason
from cbatch.demo import demo_paths
from cbatch.grammars import Grammars, compiling
from cbatch.grammars.compiling import read
from cbatch.text import load_tokenizer

TOKENIZER = load_tokenizer(demo_paths()[0])


AROUND = 'start: before @answer "!"?\nbefore[lazy]: /(?s:.*)::/'


WAYS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"type": "integer"}}, "12", "x"),
    ({"json_object": True}, '{"a": 1}', "12"),
    ({"regex": "[ab]+"}, "abba", "c"),
    ({"choice": ("yes", "no")}, "no", "maybe"),
    ({"grammar": 'start: "ja" | w\nw: /n+/'}, "nn", "jn"),
    ({"grammar": 'root ::= "ja" | "nein"'}, "nein", "nee"),
]


def follows(outputs: StructuredOutputs, text: str) -> bool:
    """Return True if the grammar accepts the whole text."""
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))
    matcher, ids = grammars.matcher(outputs), TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("way, right, wrong", WAYS, ids=lambda way: str(way)[:30])
def test_the_grammar_applies_after_free_text(way: Any, right: str, wrong: str) -> None:
    outputs = StructuredOutputs(**way, around=AROUND)
    assert follows(StructuredOutputs(**way), right) and not follows(outputs, right)
    for before in ("::", "hm {[:] ::", f"{wrong}, or {right}? ::"):
        assert follows(outputs, before + right) and follows(outputs, f"{before}{right}!")
        assert not follows(outputs, before + wrong) and not follows(outputs, before)
    assert read(outputs).around == AROUND


def test_surrounding_text_works_with_drafts_and_is_compiled_once() -> None:
    llm = LLM(*demo_paths(), numerics="invariant", lookahead="fixed:4", num_blocks=128)
    outputs = StructuredOutputs(regex="[0-9]{3}", around='start: "def " /[a-z_]{1,9}/ "(" @answer')
    params = SamplingParams(max_tokens=40, temperature=0, structured_outputs=outputs)
    (done,) = llm.generate(["x = 1\n"], params)
    assert done.finish_reason is FinishReason.STOP and done.speculation.drafted_tokens
    name, _, digits = done.text.removeprefix("def ").partition("(")
    assert name and digits.isdigit() and len(digits) == 3


def test_a_bad_surrounding_grammar_is_rejected() -> None:
    with pytest.raises(FieldError, match="give one of json, json_object, regex, choice, grammar"):
        StructuredOutputs(around=AROUND)
    grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))
    for around in ("start: @other", "start: (", "start: " + '"x" ' * 20_000):
        with pytest.raises(FieldError, match="structured_outputs: "):
            grammars.check(StructuredOutputs(regex="a", around=around))
    for grammar in ("{", "{}", '{"grammars": []}'):
        with pytest.raises(FieldError, match="structured_outputs: "):
            grammars.check(StructuredOutputs(grammar=grammar, around=AROUND))


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


GRAMMARS = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))


def follows_gbnf(grammar: str, text: str) -> bool:
    """Return True if the grammar accepts the whole text."""
    matcher = GRAMMARS.matcher(StructuredOutputs(grammar=grammar))
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        # characters by their numbers, in strings
        (r'"Sj\u00f6fart"', "Sjöfart", "Sj\uf6fart"),
        (r'"caf\u00e9 a"', "café a", "cafe a"),
        (r'"\u0041b"', "Ab", "b"),
        (r'"\u4e2d"', "中", "文"),
        (r'"\U0001F600\U00000041"', "😀A", "A"),
        (r'"\ud83d\ude00"', "😀", "A"),
        (r'"a\x41\xe9"', "aAé", "aA"),
        (r'"\u0022\u005c\u000a\x22"', '"\\\n"', '"\\n"'),
        (r'"\\u00f6\\\u00f6"', r"\u00f6\ö", "ö"),
        # in classes, with ranges and negation
        (r"[\u00e4-\u00fc]+", "öü", "ä-"),
        (r"[\U0001F600-\U0001F64Fa]+", "a😀", "-"),
        (r"[^\u00e9\u4e2d]+", "abc", "aé"),
        (r"[^\x00-\x1f\u0022\\]+", "é b", "a\n"),
        (r"[\u005d\u002d\x5e\u005b]+", "]-^[", "a"),
        # texts that are operators of regular expressions
        ("[a&&b]+", "a&b", "c"),
        ("[~~a]+", "~a", "b"),
        ("[+--]+", "+,-", "."),
        ("[--/]+", "-./", "+"),
        ("[a-]+", "a-", "b"),
        ("[^-a]+", "b", "-"),
        ("[a/b.]+", "a/.", "c"),
        # line breaks
        (". [^a]", "\n\n", "ba"),
        ('"a\n\tb"', "a\n\tb", "ab"),
        (r'"x"  # a comment with [ " . \u000a' + "\n", "x", "y"),
    ],
)
def test_characters_are_those_of_the_grammar(body: str, right: str, wrong: str) -> None:
    grammar = f"root ::= {body}"
    assert follows_gbnf(grammar, right)
    assert not follows_gbnf(grammar, wrong)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (r'"\ud83d"', "surrogates not allowed"),
        (r'"\U00110000"', "not in range"),
        (r'"\q"', r"Invalid escape sequence \\q"),
        (r'"\u00e"', "escape"),
        (r"[\xg0]", "escape"),
        ('"a', "end of input"),
        ("[a", "end of input"),
    ],
)
def test_broken_characters_are_refused(body: str, words: str) -> None:
    with pytest.raises(FieldError, match=f"structured_outputs: cannot be read .*{words}"):
        follows_gbnf(f"root ::= {body}", "")
