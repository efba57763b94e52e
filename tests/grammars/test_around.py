"""Text before and after a structured output."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch import LLM, FieldError, SamplingParams, StructuredOutputs
from cbatch.core.request.request import FinishReason
from cbatch.demo import demo_paths
from cbatch.grammars import Grammars
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
