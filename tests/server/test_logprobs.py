"""Log probabilities and echo over HTTP, and the texts, offsets and bytes of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from cbatch import LLM, Completion, SamplingParams
from cbatch.cli.main import main
from cbatch.server.protocol.responses import CompletionLogprobs
from cbatch.text import TextTokenizer
from cbatch.text.outputs import TokenLogprob
from tests.chained_model import byte_tokens, pieces, write_chained
from tests.server.apis import CHAT, body_of
from tests.server.engines import FIRST_CONTENT, PROMPT
from tests.server.http_client import Client, serving
from tests.test_llm import write_model


def choice_of(client: Client, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    status, answer, _ = client.post(body, path)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice


# ---- a random pair -------------------------------------------------------------------------------

BODY = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "logprobs": 2}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Completion:
    params = SamplingParams(max_tokens=12, seed=3, logprobs=2, prompt_logprobs=2)
    return llm.generate(PROMPT, params)[0]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Serve a separate engine, since only one thread may step an engine."""
    engine = make_llm(tmp_path_factory.mktemp("served")).engine
    with serving(engine, chat_template=FIRST_CONTENT) as client:
        yield client


def make_llm(folder: Path) -> LLM:
    target, draft = write_model(folder / "target"), write_model(folder / "draft", layers=1)
    options: dict[str, Any] = {"max_num_seqs": 4, "random_weights_seed": 0, "numerics": "invariant"}
    return LLM(target, draft, **options)


def test_logprobs_of_a_whole_answer(client: Client, expected: Completion) -> None:
    choice = choice_of(client, BODY)
    logprobs = choice["logprobs"]
    assert expected.logprobs is not None and choice["text"] == expected.text
    assert logprobs["token_logprobs"] == [each.logprob for each in expected.logprobs]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [
        [value for _, value in each.top] for each in expected.logprobs
    ]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("token_id:") or choice["text"][offset:].startswith(token)
    assert choice["prompt_logprobs"] is None
    assert choice_of(client, BODY | {"logprobs": False})["logprobs"] is None


def test_echo_brings_the_prompt_and_its_logprobs(client: Client, expected: Completion) -> None:
    echo = BODY | {"echo": True}
    choice = choice_of(client, echo)
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT + expected.text
    given = expected.prompt_logprobs
    assert given is not None and given[0] is None
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    prompt = [None if each is None else each.logprob for each in given]
    assert logprobs["token_logprobs"][: len(prompt)] == prompt
    assert "".join(logprobs["tokens"][: len(prompt)]) == PROMPT
    assert logprobs["text_offset"][len(prompt)] == len(PROMPT)
    ids = list(expected.prompt_token_ids)
    for prompt_of in ({}, {"prompt": ids}):
        assert choice_of(client, echo | {"logprobs": None} | prompt_of)["text"] == choice["text"]
    # Evaluation harnesses score a prompt alone.
    scored = echo | {"max_tokens": 0, "return_token_ids": True}
    (streamed,) = client.stream(scored)
    for scored_choice in (choice_of(client, scored), streamed["choices"][0]):
        assert (scored_choice["text"], scored_choice["finish_reason"]) == (PROMPT, "length")
        assert scored_choice["logprobs"]["token_logprobs"] == prompt and len(prompt) == len(ids)
        assert scored_choice["token_ids"] == []
    status, answer, _ = client.post(echo | {"n": 2})
    assert status == 400 and answer["error"]["param"] == "n"


def test_prompt_logprobs_alone(client: Client, expected: Completion) -> None:
    choice = choice_of(client, BODY | {"logprobs": None, "prompt_logprobs": 1})
    assert choice["logprobs"] is None and choice["text"] == expected.text
    entries, given = choice["prompt_logprobs"], expected.prompt_logprobs or ()
    assert entries[0] is None and len(entries) == len(given)
    for entry, want in zip(entries[1:], given[1:], strict=True):
        assert want is not None and entry[str(want.token_id)]["logprob"] == want.logprob
        assert str(want.top[0][0]) in entry


def test_a_forbidden_token_is_null(client: Client) -> None:
    raw = client.post(BODY | {"logprobs_mode": "processed", "top_k": 1, "logprobs": 3})[1]
    (logprobs,) = (choice["logprobs"] for choice in raw["choices"])
    assert logprobs["token_logprobs"] == [0.0] * 12
    assert all(list(top.values()) == [0.0, None, None] for top in logprobs["top_logprobs"])
    assert "Infinity" not in json.dumps(raw)


def test_chat_logprobs_are_listed_per_token(client: Client, expected: Completion) -> None:
    body = body_of(CHAT, PROMPT, 12, seed=3, logprobs=True, top_logprobs=2)
    choice = choice_of(client, body, CHAT)
    assert choice["message"]["content"] == expected.text
    tokens, given = choice["logprobs"]["content"], expected.logprobs
    assert given is not None and [t["logprob"] for t in tokens] == [g.logprob for g in given]
    for token, entry in zip(tokens, given, strict=True):
        assert [t["logprob"] for t in token["top_logprobs"]] == [value for _, value in entry.top]
        assert bytes(token["bytes"]).decode() == token["token"] or "token_id" in token["token"]
    assert b"".join(bytes(t["bytes"]) for t in tokens).decode() == expected.text
    chunks = [event["choices"][0] for event in client.stream(body, CHAT)]
    streamed = [t for chunk in chunks if chunk["logprobs"] for t in chunk["logprobs"]["content"]]
    assert streamed == tokens and len(chunks) > 2
    alone = choice_of(client, body | {"top_logprobs": None}, CHAT)["logprobs"]["content"]
    assert [t["logprob"] for t in alone] == [g.logprob for g in given]
    assert all(t["top_logprobs"] == [] for t in alone)
    without = choice_of(client, body | {"logprobs": False, "top_logprobs": None}, CHAT)
    assert without["logprobs"] is None


def test_the_command_line_writes_them(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, expected: Completion
) -> None:
    monkeypatch.setattr("cbatch.cli.generate.load_engine", lambda *_: (llm.engine, llm.info))
    output = tmp_path / "out.jsonl"
    flags = ["--max-tokens", "12", "--seed", "3", "--logprobs", "2", "--prompt-logprobs", "2"]
    command = ["generate", PROMPT, "--output", str(output), "--no-progress", *flags]
    command += ["--temperature", "1", "--logit-bias", "1=0"]
    assert main(command) == 0
    (choice,) = json.loads(output.read_text(encoding="utf-8"))["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]]
    assert logprobs == [each.logprob for each in expected.logprobs or ()]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"][1]["top"]) == 2
    assert main([*command, "--resume"]) == 0  # its params are read back as they were written


# ---- the texts of tokens -------------------------------------------------------------------------

# Characters of one to four bytes, no byte twice; a control token in the middle and at the end.
BYTES_TEXT, PIECES_TEXT = "qé 日<|im_end|>x😀y<|endoftext|>", "q true日b😀</s>"
CHAIN_BODY = {"prompt": "q", "max_tokens": 30, "temperature": 0, "logprobs": 5}


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
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    text = "é 日x😀y" if request.param == "bytes" else " true日b😀"
    with serving(engine.engine, chat_template=FIRST_CONTENT) as client:
        yield Served(client, llm, tokenizer, text, len(chain) - 1)


def check(choice: dict[str, Any]) -> None:
    """Check that the tokens of a choice are its text."""
    logprobs, text = choice["logprobs"], choice["text"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert all(len(top) == 5 for top in logprobs["top_logprobs"] if top is not None)


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_a_completion_are_its_text(served: Served, echo: bool) -> None:
    choice = choice_of(served.client, CHAIN_BODY | {"echo": echo})
    assert choice["text"] == "q" * echo + served.text and choice["finish_reason"] == "stop"
    check(choice)
    assert "\ufffd" not in "".join(choice["logprobs"]["tokens"])
    parts = [event["choices"][0] for event in served.client.stream(CHAIN_BODY | {"echo": echo})]
    for name, values in choice["logprobs"].items():
        assert [x for part in parts if part["logprobs"] for x in part["logprobs"][name]] == values


def test_where_an_output_is_cut_within_a_character(served: Served) -> None:
    for count in range(1, served.num_tokens + 1):
        choice = choice_of(served.client, CHAIN_BODY | {"max_tokens": count})
        assert served.text.startswith(choice["text"])
        check(choice)


def test_special_tokens_that_are_shown(served: Served) -> None:
    shown = CHAIN_BODY | {"skip_special_tokens": False, "include_stop_str_in_output": True}
    choice = choice_of(served.client, shown)
    assert choice["text"] == (BYTES_TEXT[1:] if "x" in served.text else PIECES_TEXT[1:])
    check(choice)


def test_chat_has_the_same_texts_and_their_bytes(served: Served) -> None:
    body = body_of(CHAT, "q", 30, logprobs=True, top_logprobs=5, temperature=0)
    choice = choice_of(served.client, body, CHAT)
    tokens = choice["logprobs"]["content"]
    assert choice["message"]["content"] == served.text
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == served.text
    completion = choice_of(served.client, CHAIN_BODY)["logprobs"]
    assert [each["token"] for each in tokens] == completion["tokens"]
    for entry, top in zip(tokens, completion["top_logprobs"], strict=True):
        assert len({likely["token"] for likely in entry["top_logprobs"]}) == len(top) == 5


def test_prompt_logprobs_and_those_of_python_agree(served: Served) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, logprobs=2, prompt_logprobs=2)
    prompt = served.tokenizer.encode("true 😀b")
    done = served.llm.generate([prompt], params)[0]
    assert done.logprobs and "".join(each.text or "" for each in done.logprobs) == done.text
    texts = [each.text for each in done.prompt_logprobs or () if each is not None]
    fields = CHAIN_BODY | {"prompt": prompt, "prompt_logprobs": 2, "echo": True}
    choice = choice_of(served.client, fields)
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
