"""Stop strings, also those that are or contain special tokens, and special tokens in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch import SamplingParams
from cbatch.text import StopMatcher, TextStream, TextTokenizer
from tests.chained_model import CONTROLS, byte_tokens, pieces
from tests.text.toy_tokenizers import word_pieces

TEXT = st.text(alphabet="ab\n", max_size=30)


SHORT_STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def searched(stops: list[str], text: str) -> tuple[str, bool]:
    """Search character by character for the first completed stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@given(SHORT_STOPS, TEXT, st.data())
def test_any_split_gives_the_same_text(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert run(stops, pieces) == searched(stops, text)


def test_before_min_tokens_a_stop_string_is_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_stop=False) == ("xab", False)
    assert matcher.push("a", may_stop=False) == ("", False), "a stop string may be completed later"
    assert matcher.push("b") == ("", True)


def test_without_stop_strings_no_text_is_held_back() -> None:
    assert StopMatcher([]).push("anything") == ("anything", False)


BYTES = TextTokenizer(byte_tokens(), "bytes")


PIECES = TextTokenizer(pieces(), "pieces")


WORDS = TextTokenizer(word_pieces(), "words")


END = CONTROLS[2]


A, B, START_ID, END_ID = (BYTES.encode(text)[0] for text in ("a", "b", CONTROLS[1], END))


def read(
    tokenizer: TextTokenizer, ids: Sequence[int], steps: Sequence[int] = (), **options: Any
) -> tuple[str, int | None]:
    """Return the shown text, and the number of kept tokens. `steps` are the ends of pushes."""
    stream, text = TextStream(tokenizer, SamplingParams(**options)), ""
    for start, end in zip((0, *steps), (*steps, len(ids)), strict=False):
        shown, kept = stream.push(ids[start:end])
        text += shown
        if kept is not None:
            return text, kept
    return text + stream.finish(), None


def reference(
    ids: Sequence[int], stops: Sequence[str], *, skips: bool, includes: bool
) -> tuple[str, int | None]:
    """Return the same, by a search over a list of characters and special tokens."""
    named = [CONTROLS[i - START_ID + 1] for i in (START_ID, END_ID)]
    named = [name for name in named if skips and any(name in stop for stop in stops)]

    def things(stop: str) -> list[str]:
        for name in named:
            stop = stop.replace(name, name.replace("<|", "\0").replace("|>", "\1"))
        out: list[str] = []
        for part in stop.split("\0"):
            name, mark, rest = part.partition("\1")
            out += [f"<|{name}|>", *rest] if mark else part
        return out

    seen: list[str] = []
    for at, token in enumerate(ids):
        text = BYTES.added.get(token, BYTES.decode([token]))
        hidden = skips and token in BYTES.special_ids
        seen += [text] if text in named else [] if hidden else text
        ends = [
            (len(form), stop)
            for stop in stops
            for form in (things(stop), list(stop))
            if seen[-len(form) :] == form
        ]
        if ends:
            size, stop = max(ends)
            shown = "".join(each for each in seen[:-size] if each not in named)
            return shown + (stop if includes else ""), at + 1
    return "".join(each for each in seen if each not in named), None


PARTS = st.sampled_from(["a", "b", CONTROLS[1], END])


STOPS = st.lists(st.lists(PARTS, min_size=1, max_size=3).map("".join), max_size=3, unique=True)


@given(
    st.lists(st.sampled_from([A, B, START_ID, END_ID]), max_size=12),
    STOPS,
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_stop_strings_over_special_tokens(
    ids: list[int], stops: list[str], skips: bool, includes: bool, data: st.DataObject
) -> None:
    steps = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    options = {"stop": stops, "skip_special_tokens": skips, "include_stop_str_in_output": includes}
    if not skips and any(CONTROLS[1] in stop or END in stop for stop in stops):
        return  # one token has several characters: see below
    got = read(BYTES, ids, steps, **options)
    assert got == reference(ids, stops, skips=skips, includes=includes)


@pytest.mark.parametrize("spelt", [False, True], ids=["token", "spelt"])
@pytest.mark.parametrize(
    ("stop", "shown", "included"),
    [
        ("<|im_end|>", "hi", "hi<|im_end|>"),
        ("i<|im_end|>", "h", "hi<|im_end|>"),
        ("<|im_end|>\n", "hi", "hi<|im_end|>\n"),
        ("hi<|im_end|>\n<|im_start|>x", "", "hi<|im_end|>\n<|im_start|>x"),
    ],
)
def test_a_stop_string_with_a_special_token(
    stop: str, shown: str, included: str, spelt: bool
) -> None:
    """It may be written as the token, or as the characters of the token."""
    text = "hi<|im_end|>\n<|im_start|>xy"
    ids = [t for c in text for t in BYTES.encode(c)] if spelt else BYTES.encode(text)
    if not spelt:
        assert END_ID in ids
        alone = read(
            BYTES, ids, stop=[stop], include_stop_str_in_output=True, skip_special_tokens=False
        )
        assert alone[0] == included
    text, kept = read(BYTES, ids, range(1, len(ids)), stop=[stop])
    assert (text, kept) == (shown, len(ids) - 1 if "x" in stop else kept) and kept is not None
    assert read(BYTES, ids, stop=[stop], include_stop_str_in_output=True)[0].endswith(included)


@pytest.mark.parametrize(
    ("tokenizer", "text", "stop"),
    [(BYTES, f"ab{END}c", END), (PIECES, "ab</s>c", "</s>"), (WORDS, "a b [SEP] c", "[SEP]")],
    ids=["bytes", "pieces", "words"],
)
def test_special_tokens_shown_and_hidden(tokenizer: TextTokenizer, text: str, stop: str) -> None:
    ids = tokenizer.encode(text)
    assert read(tokenizer, ids)[0] == tokenizer.decode(ids)
    shown = read(tokenizer, ids, skip_special_tokens=False)[0]
    assert stop in shown and shown == tokenizer.decode(ids, skip_special_tokens=False)
    for skips in (True, False):
        cut, kept = read(tokenizer, ids, stop=[stop], skip_special_tokens=skips)
        assert cut.strip() == tokenizer.decode(ids).strip()[:-1].strip()
        assert kept == [tokenizer.added.get(i) for i in ids].index(stop) + 1


def test_before_min_tokens_a_special_token_does_not_stop() -> None:
    ids = [A, END_ID, B, END_ID, A]
    assert read(BYTES, ids, stop=[END], min_tokens=3) == ("ab", 4)


def test_spaces_between_special_tokens() -> None:
    """The decoder puts spaces between special tokens; vLLM leaves out those between added
    tokens."""
    (sep,) = [i for i, text in WORDS.added.items() if text == "[SEP]"]
    (hello,) = WORDS.encode("hello")
    ids, shown = [hello, sep, sep, hello], {"skip_special_tokens": False}
    assert read(WORDS, ids, **shown)[0] == "hello [SEP] [SEP] hello"
    without = read(WORDS, ids, spaces_between_special_tokens=False, **shown)[0]
    assert without == "hello [SEP][SEP] hello"
    assert read(WORDS, ids, spaces_between_special_tokens=False)[0] == "hello hello"


def test_an_added_token_that_is_not_special_is_text() -> None:
    ids = BYTES.encode("a<think>b")
    assert len(ids) == 3 and read(BYTES, ids) == ("a<think>b", None)
    assert read(BYTES, ids, stop=["<think>"]) == ("a", 2)
