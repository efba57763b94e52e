"""Characters in GBNF: escapes, classes and the dot, as llama.cpp reads them."""

from __future__ import annotations

import pytest

from cbatch import FieldError, StructuredOutputs
from cbatch.demo import demo_paths
from cbatch.grammars import Grammars
from cbatch.text import load_tokenizer

TOKENIZER = load_tokenizer(demo_paths()[0])
GRAMMARS = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))


def follows(grammar: str, text: str) -> bool:
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
    assert follows(grammar, right)
    assert not follows(grammar, wrong)


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
        follows(f"root ::= {body}", "")
