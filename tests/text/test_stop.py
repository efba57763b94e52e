from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbatch.text import StopMatcher

TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """Search character by character for the first completed stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@given(STOPS, TEXT, st.data())
def test_any_split_gives_the_same_text(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert run(stops, pieces) == reference(stops, text)


def test_before_min_tokens_a_stop_string_is_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_stop=False) == ("xab", False)
    assert matcher.push("a", may_stop=False) == ("", False), "a stop string may be completed later"
    assert matcher.push("b") == ("", True)


def test_without_stop_strings_no_text_is_held_back() -> None:
    assert StopMatcher([]).push("anything") == ("anything", False)
