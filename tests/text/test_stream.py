from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.text import TextStream, TextTokenizer
from tests.text.toy_tokenizers import byte_fallback, byte_level

BYTES = TextTokenizer(byte_level(), "byte level")
FALLBACK = TextTokenizer(byte_fallback(), "byte fallback")
IDS = st.lists(st.integers(0, 299), max_size=40)


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push([i]).text for i in ids] + [stream.finish()]


@given(IDS)
def test_streamed_text_is_the_decoded_output(ids: list[int]) -> None:
    assert "".join(pieces_of(TextStream(BYTES), ids)) == BYTES.decode(ids)


@given(st.text(alphabet="abc hélo日", max_size=20))
def test_the_same_for_byte_fallback_after_a_prompt(text: str) -> None:
    prompt = [1, 259, 259]
    # The normaliser prepends a word border: the text that follows a prompt begins with a space.
    pieces = pieces_of(TextStream(FALLBACK, prompt), FALLBACK.encode(text))
    assert "".join(pieces) == (" " + text if text else "")
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=30))
def test_bytes_that_are_no_text_never_end_a_stream(ids: list[int]) -> None:
    stream = TextStream(FALLBACK, ids[:3])
    shown = stream.push([*ids, 259]).text + stream.finish()
    assert shown.endswith("hello")


def test_the_first_space_of_an_output_is_kept() -> None:
    hello, world = 259, 260
    assert FALLBACK.decode([world]) == "world", "this decoder drops a leading space"
    assert TextStream(FALLBACK, [hello]).push([world]).text == " world"


@given(st.text(max_size=20))
def test_valid_text_never_flashes_a_replacement_character(text: str) -> None:
    stream = TextStream(BYTES)
    pieces = pieces_of(stream, BYTES.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_over_several_tokens_is_shown_whole() -> None:
    ids = BYTES.encode("🦊")
    assert len(ids) > 1, "the test needs a character of several tokens"
    assert pieces_of(TextStream(BYTES), ids) == [""] * (len(ids) - 1) + ["🦊", ""]


def test_keep_tokens_counts_to_the_token_that_completes_the_stop_string() -> None:
    text = "a = 1\n\ndef more"
    ids = BYTES.encode(text)
    for run in (1, 2, 3, len(ids)):  # accepted runs of any length
        stream, shown, keep = TextStream(BYTES, stop=["\n\nd"]), "", None
        for at in range(0, len(ids), run):
            delta = stream.push(ids[at : at + run])
            shown += delta.text
            if delta.keep_tokens is not None:
                keep = delta.keep_tokens
                break
        assert shown == "a = 1"
        assert keep is not None
        assert "\n\nd" in BYTES.decode(ids[:keep])
        assert "\n\nd" not in BYTES.decode(ids[: keep - 1])
        assert stream.finish() == ""
        with pytest.raises(RuntimeError):
            stream.push([1])


@given(
    st.text(alphabet="ab \n(é", max_size=25), st.text(alphabet="ab \n(é", min_size=1, max_size=4)
)
def test_a_stop_string_is_found_however_tokens_fall(text: str, stop: str) -> None:
    stream, shown = TextStream(BYTES, stop=[stop]), ""
    for token_id in BYTES.encode(text):
        delta = stream.push([token_id])
        shown += delta.text
        if delta.keep_tokens is not None:
            break
    shown += stream.finish()
    assert shown == text.split(stop)[0]


def test_min_tokens_holds_stop_strings_off() -> None:
    ids = BYTES.encode("x.x.x.x.")
    stream = TextStream(BYTES, stop=["."], min_tokens=len(ids))
    delta = stream.push(ids)
    assert delta == ("x.x.x.x", len(ids))
