"""Incremental text of one sequence, and the outputs of a choice."""

from __future__ import annotations

import codecs
import gc
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cbatch import SamplingParams
from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request
from cbatch.text import TextStream, TextTokenizer
from cbatch.text.output_processor import LiveChoice, token_texts
from cbatch.text.outputs import Output, TokenLogprob
from tests.chained_model import byte_tokens, pieces
from tests.text.toy_tokenizers import byte_fallback, byte_level, word_ends, word_pieces
from tests.toy_engine import TOKENIZER


def _name_of(tokenizer: TextTokenizer) -> str:
    return tokenizer.source


PLAIN = SamplingParams()


BYTES = TextTokenizer(byte_level(), "byte level")


FALLBACK = TextTokenizer(byte_fallback(), "byte fallback")


PIECES = TextTokenizer(word_pieces(), "word pieces")


ENDS = TextTokenizer(word_ends(), "word ends")


TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK, PIECES, ENDS], ids=_name_of)


TEXTS = st.text(alphabet="ab hello.é日本語😀🦀\ufffd") | st.text()


IDS = st.lists(st.integers(0, 299), max_size=40)


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push([i]).text for i in ids] + [stream.finish()]


@given(IDS)
def test_streamed_text_is_the_decoded_output(ids: list[int]) -> None:
    """Only a character that is incomplete at the end is missing."""
    raw = b"".join(map(BYTES.token_bytes, ids))
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    assert "".join(pieces_of(TextStream(BYTES, PLAIN), ids)) == whole
    assert BYTES.decode(ids) in (whole, f"{whole}\ufffd")


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=_name_of)
@pytest.mark.parametrize("text", ["a😀", "é", "日本🦀"])
def test_an_incomplete_last_character_is_not_shown(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    start = len(ids) - 1
    while tokenizer.continues(ids[start]):
        start -= 1
    for end in range(start + 1, len(ids)):
        shown = "".join(pieces_of(TextStream(tokenizer, PLAIN), ids[:end]))
        assert shown == tokenizer.decode(ids[:start])
    assert "".join(pieces_of(TextStream(tokenizer, PLAIN), ids)) == text


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@TOKENIZERS
@given(data=st.data(), text=TEXTS, num_controls=st.integers(0, 9), joins=st.booleans())
def test_output_is_decoded_as_if_together_with_the_prompt(
    tokenizer: TextTokenizer, data: st.DataObject, text: str, num_controls: int, joins: bool
) -> None:
    """The prompt may end between any two characters, with or without control tokens after it."""
    ids = tokenizer.encode(text)
    pieces = [tokenizer.token_bytes(i) for i in ids]
    ends = [at for at in range(len(ids) + 1) if is_text(b"".join(pieces[:at]))]
    at = data.draw(st.sampled_from(ends))
    control = max(tokenizer.special_ids)
    prompt, output = ids[:at] + [control] * num_controls, ids[at:]
    stream = TextStream(tokenizer, PLAIN, prompt)
    shown = stream.push(output).text if joins else "".join(stream.push([i]).text for i in output)
    assert shown + stream.finish() == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=_name_of)
@pytest.mark.parametrize("num_missing", [1, 2])
def test_a_character_that_begins_in_the_prompt(tokenizer: TextTokenizer, num_missing: int) -> None:
    """It is shown as a whole if the output completes it, otherwise not at all."""
    ids = tokenizer.encode("a😀🦀")
    prompt, rest = ids[:-num_missing], ids[-num_missing:]
    assert not is_text(b"".join(map(tokenizer.token_bytes, prompt)))
    (more,) = tokenizer.encode("ab")[-1:]
    assert "".join(pieces_of(TextStream(tokenizer, PLAIN, prompt), [*rest, more])) == "🦀b"
    assert "".join(pieces_of(TextStream(tokenizer, PLAIN, prompt), [more])) == "b"
    assert pieces_of(TextStream(tokenizer, PLAIN, prompt), []) == [""]


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=_name_of)
def test_pending_tokens_without_text_are_limited(tokenizer: TextTokenizer) -> None:
    """Otherwise each new token would be decoded together with all earlier tokens."""
    (broken,) = [i for i in tokenizer.encode("é") if tokenizer.token_bytes(i) == b"\xa9"]
    stream = TextStream(tokenizer, PLAIN)
    shown = stream.push([broken] * 500).text
    assert len(shown) > 400
    assert shown + stream.finish() == "\ufffd" * 500


def test_control_tokens_are_not_decoded_again_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []

    class Recorded:
        def __init__(self, **settings: Any) -> None:
            self._stream = DecodeStream(**settings)

        def step(self, tokenizer: Tokenizer, token_id: int) -> str | None:
            steps.append(token_id)
            return self._stream.step(tokenizer, token_id)

    monkeypatch.setattr("cbatch.text.detokenizer.DecodeStream", Recorded)
    (x,) = BYTES.encode("x")
    assert TextStream(BYTES, PLAIN, [x, 0, 0]).push([*[0] * 500, x]).text == "x"
    assert steps == [x, x]


@given(st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=30))
def test_invalid_bytes_do_not_end_a_stream(ids: list[int]) -> None:
    stream = TextStream(FALLBACK, PLAIN, ids[:3])
    shown = stream.push([*ids, 259]).text + stream.finish()
    assert shown.endswith("hello")


def test_the_first_space_of_an_output_is_kept() -> None:
    hello, world = 259, 260
    assert FALLBACK.decode([world]) == "world", "this decoder drops a leading space"
    assert TextStream(FALLBACK, PLAIN, [hello]).push([world]).text == " world"


@given(st.text(max_size=20))
def test_valid_text_never_flashes_a_replacement_character(text: str) -> None:
    stream = TextStream(BYTES, PLAIN)
    pieces = pieces_of(stream, BYTES.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_keep_tokens_counts_to_the_token_that_completes_the_stop_string() -> None:
    text = "a = 1\n\ndef more"
    ids = BYTES.encode(text)
    for run in (1, 2, 3, len(ids)):  # accepted drafts of any number
        stream, shown, keep = TextStream(BYTES, SamplingParams(stop=("\n\nd",))), "", None
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


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    ids = BYTES.encode("x.x.x.x.")
    stream = TextStream(BYTES, SamplingParams(stop=(".",), min_tokens=len(ids)))
    delta = stream.push(ids)
    assert delta == ("x.x.x.x", len(ids))


TEXT = "def add(a, b): return a + b"


NUM_TOP = 3


def logprobs(first: int, count: int) -> TokenLogprobs:
    columns = np.zeros((count, NUM_TOP), np.float32)
    ids = np.tile(np.arange(NUM_TOP, dtype=np.int32), (count, 1))
    return TokenLogprobs(0, first, columns[:, 0], ids, columns)


def run(*, whole: bool) -> tuple[LiveChoice, list[Output]]:
    """Return a choice after all its tokens, and its outputs. Tokens and prompt have log
    probabilities."""
    prompt = tuple(TOKENIZER.encode("x = "))
    params = SamplingParams(max_tokens=99, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    request = Request(request_id="r", prompt=prompt, params=params, seed=0)
    live = LiveChoice(request, "r", TOKENIZER, accumulate=whole)
    live.on_logprobs(logprobs(1, len(prompt) - 1))
    outputs = []
    for at, token in enumerate(TOKENIZER.encode(TEXT), start=len(prompt)):
        live.on_logprobs(logprobs(at, 1))
        outputs.append(live.extend(OutputRow("r", [token], 0, 0)))
    return live, outputs


def reachable(root: Any, kind: type) -> list[Any]:
    """Return the instances of `kind` that are reachable from an object, except through the
    program's code."""
    seen, instances, ahead = set(), [], [vars(root)]
    while ahead:
        value = ahead.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            instances.append(value)
        ahead += gc.get_referents(value)
    return instances


def test_an_accumulated_choice_joins_its_outputs() -> None:
    live, outputs = run(whole=True)
    assert len(reachable(live, TokenLogprob)) > len(outputs)
    choice = live.extend(OutputRow("r", finish_reason=FinishReason.LENGTH)).finished
    assert choice is not None and choice.text == TEXT
    assert list(choice.token_ids) == TOKENIZER.encode(TEXT)
    assert choice.logprobs == tuple(o.logprobs[0] for o in outputs if o.logprobs)
    assert choice.prompt_logprobs is not None
    assert choice.prompt_logprobs == outputs[0].prompt_logprobs


def test_a_streamed_choice_keeps_no_earlier_outputs() -> None:
    live, outputs = run(whole=False)
    assert not reachable(live, TokenLogprob)
    text = "".join(output.text for output in outputs)
    assert all(len(output.logprobs or ()) == 1 for output in outputs)
    assert outputs[0].prompt_logprobs is not None
    last = live.extend(OutputRow("r", finish_reason=FinishReason.LENGTH))
    choice = last.finished
    assert choice is not None and text + last.text == TEXT
    assert (choice.text, choice.token_ids, choice.logprobs) == ("", (), None)
    assert choice.prompt_logprobs is None and live.num_tokens == len(outputs)


KINDS = [byte_level(), byte_fallback(), word_pieces(), word_ends(), byte_tokens(), pieces()]


WORDS = ["hello", "true", "b", " ", "  ", "é日", "😀", "<s>", "</s>", "[SEP]", "<|im_end|>", "?"]


@given(st.sampled_from(KINDS), st.lists(st.sampled_from(WORDS), max_size=8), st.booleans())
def test_the_texts_of_a_prompts_tokens_join_to_the_prompt(
    raw: Any, words: list[str], skips: bool
) -> None:
    """This holds for unknown words too, and if the tokenizer adds tokens before and after a
    text."""
    tokenizer, text = TextTokenizer(raw, "toy"), "".join(words)
    ids = tokenizer.encode(text)
    texts = token_texts(ids, SamplingParams(skip_special_tokens=skips), tokenizer, text)
    assert len(texts) == len(ids) and (not ids or "".join(map(str, texts)) == text)
    if "hello" in words and tokenizer.encode("hello") == [tokenizer.raw.token_to_id("hello")]:
        assert any("hello" in str(each) for each in texts)


def test_the_part_of_each_token_of_a_prompt() -> None:
    def cut(raw: Any, text: str) -> list[str | None]:
        tokenizer = TextTokenizer(raw, "toy")
        return token_texts(tokenizer.encode(text), SamplingParams(), tokenizer, text)

    assert cut(byte_tokens(), "é<|im_end|>a") == ["", "é", "<|im_end|>", "a"]
    assert cut(pieces(), "true true</s>b") == ["true", " true", "</s>", "b"]
    assert cut(word_pieces(), "hello, 🦀 lo") == ["hello", ",", " 🦀", " l", "o"]
