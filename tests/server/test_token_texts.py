"""Texts, offsets and bytes of tokens with log probabilities, for two kinds of tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from cbatch import LLM, SamplingParams
from cbatch.server.protocol.logprobs import CompletionLogprobs
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.text.outputs import TokenLogprob
from tests.chained_model import byte_tokens, pieces, write_chained
from tests.server.http_client import CHAT, Client, serving

# Characters of one to four bytes, no byte twice; a control token in the middle and at the end.
BYTES_TEXT = "qé 日<|im_end|>x😀y<|endoftext|>"
PIECES_TEXT = "q true日b😀</s>"


class Served(NamedTuple):
    client: Client
    llm: LLM
    tokenizer: TextTokenizer
    text: str  # of the output
    num_tokens: int


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    raw: Tokenizer = byte_tokens() if request.param == "bytes" else pieces()
    chain = raw.encode(BYTES_TEXT if request.param == "bytes" else PIECES_TEXT).ids
    chain = chain[1 if request.param == "pieces" else 0 :]  # without the space before the first
    folder = tmp_path_factory.mktemp(request.param) / "model"
    path = write_chained(folder, raw, chain, eos=chain[-1])
    llm, engine = (LLM(path, num_blocks=64, max_num_seqs=4) for _ in range(2))
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    text = "é 日x😀y" if request.param == "bytes" else " true日b😀"
    with serving(engine.engine, chat_template=template) as client:
        yield Served(client, llm, tokenizer, text, len(chain) - 1)


BODY = {"prompt": "q", "max_tokens": 30, "temperature": 0, "logprobs": 5}


def check(logprobs: dict[str, Any], text: str) -> None:
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert all(len(top) == 5 for top in logprobs["top_logprobs"] if top is not None)


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_a_completion_are_its_text(served: Served, echo: bool) -> None:
    choice = served.client.post(BODY | {"echo": echo})[1]["choices"][0]
    assert choice["text"] == "q" * echo + served.text and choice["finish_reason"] == "stop"
    check(choice["logprobs"], choice["text"])
    assert "\ufffd" not in "".join(choice["logprobs"]["tokens"])
    parts = [event["choices"][0] for event in served.client.stream(BODY | {"echo": echo})]
    for name, values in choice["logprobs"].items():
        assert [x for part in parts if part["logprobs"] for x in part["logprobs"][name]] == values


def test_where_an_output_is_cut_within_a_character(served: Served) -> None:
    for count in range(1, served.num_tokens + 1):
        choice = served.client.post(BODY | {"max_tokens": count})[1]["choices"][0]
        assert served.text.startswith(choice["text"])
        check(choice["logprobs"], choice["text"])


def test_special_tokens_that_are_shown(served: Served) -> None:
    shown = BODY | {"skip_special_tokens": False, "include_stop_str_in_output": True}
    choice = served.client.post(shown)[1]["choices"][0]
    assert choice["text"] == (BYTES_TEXT[1:] if "x" in served.text else PIECES_TEXT[1:])
    check(choice["logprobs"], choice["text"])


@pytest.mark.parametrize(
    "prompt", ["true true", " 😀é b", "<s>b</s>", "a<|im_end|>q", "日<|im_end|>"]
)
def test_an_echoed_prompt(served: Served, prompt: str) -> None:
    """The prompt is echoed as given; a prompt of token ids is echoed as decoded."""
    fields = BODY | {"echo": True, "max_tokens": 1}
    choice = served.client.post(fields | {"prompt": prompt})[1]["choices"][0]
    assert choice["text"].startswith(prompt)
    check(choice["logprobs"], choice["text"])
    ids = served.tokenizer.encode(prompt)
    for end in range(1, len(ids) + 1):  # also within a character
        choice = served.client.post(fields | {"prompt": ids[:end]})[1]["choices"][0]
        check(choice["logprobs"], choice["text"])


def test_chat_has_the_same_texts_and_their_bytes(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "logprobs": True, "top_logprobs": 5}
    (choice,) = served.client.post(body | {"temperature": 0}, CHAT)[1]["choices"]
    tokens = choice["logprobs"]["content"]
    assert choice["message"]["content"] == served.text
    assert "".join(each["token"] for each in tokens) == served.text
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == served.text
    completion = served.client.post(BODY)[1]["choices"][0]["logprobs"]
    assert [each["token"] for each in tokens] == completion["tokens"]
    for entry, top in zip(tokens, completion["top_logprobs"], strict=True):
        assert len({likely["token"] for likely in entry["top_logprobs"]}) == len(top) == 5


def test_prompt_logprobs_and_those_of_python_agree(served: Served) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, logprobs=2, prompt_logprobs=2)
    prompt = served.tokenizer.encode("true 😀b")
    done = served.llm.generate([prompt], params)[0]
    assert done.logprobs and "".join(each.text or "" for each in done.logprobs) == done.text
    texts = [each.text for each in done.prompt_logprobs or () if each is not None]
    fields = BODY | {"prompt": prompt, "prompt_logprobs": 2, "echo": True}
    choice = served.client.post(fields)[1]["choices"][0]
    assert choice["logprobs"]["tokens"][1 : len(prompt)] == texts
    for token, text, entry in zip(prompt[1:], texts, choice["prompt_logprobs"][1:], strict=True):
        assert text in ("", entry[str(token)]["decoded_token"])


def test_no_two_candidates_have_the_same_name() -> None:
    """The candidates are a letter, the byte of that letter, and bytes that are no letter."""
    tokenizer = TextTokenizer(pieces(), "pieces")
    raw = tokenizer.raw
    names = ["b", "<0x62>", "▁b", "<0xF0>", "<0x9F>", "<s>", "▁"]
    ids = [raw.token_to_id(name) for name in names]
    logprob = TokenLogprob(ids[0], -1.0, tuple((i, -float(i)) for i in ids), "b")
    (top,) = CompletionLogprobs.of([logprob], ids[:1], tokenizer.decode, 0).top_logprobs
    bytes_ = [f"token_id:{i}" for i in (ids[1], ids[3], ids[4])]
    assert top is not None
    assert list(top) == ["b", bytes_[0], " b", *bytes_[1:], "<s>", " "]
    assert list(top.values()) == [-float(i) for i in ids]
