"""Log probabilities and echo over HTTP, from a real (tiny) engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, Completion, SamplingParams
from cbatch.text import ChatTemplate
from tests.server.http_client import CHAT, Client, serving
from tests.test_llm import write_model

PROMPT = "def add(a, b):"


def make_llm(folder: Path) -> LLM:
    target, draft = write_model(folder / "target"), write_model(folder / "draft", layers=1)
    options: dict[str, Any] = {"max_num_seqs": 4, "random_weights_seed": 0, "numerics": "invariant"}
    return LLM(target, draft, **options)


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
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    engine = make_llm(tmp_path_factory.mktemp("served")).engine
    with serving(engine, chat_template=template) as client:
        yield client


BODY = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "logprobs": 2}


def whole(client: Client, **change: Any) -> dict[str, Any]:
    status, answer, _ = client.post(BODY | change)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def test_logprobs_of_a_whole_answer(client: Client, expected: Completion) -> None:
    choice = whole(client)
    logprobs = choice["logprobs"]
    assert expected.logprobs is not None and choice["text"] == expected.text
    assert logprobs["token_logprobs"] == [each.logprob for each in expected.logprobs]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [
        [value for _, value in each.top] for each in expected.logprobs
    ]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("token_id:") or choice["text"][offset:].startswith(token)
    assert choice["prompt_logprobs"] is None
    assert whole(client, logprobs=False)["logprobs"] is None


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_adds_up_to_the_whole(client: Client, echo: bool) -> None:
    parts = [event["choices"][0] for event in client.stream(BODY | {"echo": echo})]
    want = whole(client, echo=echo)
    assert "".join(part["text"] for part in parts) == want["text"]
    for name, values in want["logprobs"].items():
        joined = [x for part in parts if part["logprobs"] for x in part["logprobs"][name]]
        assert joined == values, name
    assert len(parts) > 2


def test_echo_brings_the_prompt_and_its_logprobs(client: Client, expected: Completion) -> None:
    choice = whole(client, echo=True)
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT + expected.text
    given = expected.prompt_logprobs
    assert given is not None and given[0] is None
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    prompt = [None if each is None else each.logprob for each in given]
    assert logprobs["token_logprobs"][: len(prompt)] == prompt
    assert "".join(logprobs["tokens"][: len(prompt)]) == PROMPT
    assert logprobs["text_offset"][len(prompt)] == len(PROMPT)
    assert whole(client, echo=True, logprobs=None)["text"] == choice["text"]
    ids = list(expected.prompt_token_ids)
    assert whole(client, echo=True, logprobs=None, prompt=ids)["text"] == choice["text"]


def test_prompt_logprobs_alone(client: Client, expected: Completion) -> None:
    choice = whole(client, logprobs=None, prompt_logprobs=1)
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


def test_unsupported_combinations_are_rejected_by_name(client: Client) -> None:
    status, answer, _ = client.post(BODY | {"echo": True, "n": 2})
    assert status == 400 and answer["error"]["param"] == "n"


def test_chat_logprobs_are_listed_per_token(client: Client, expected: Completion) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 3}
    body |= {"logprobs": True, "top_logprobs": 2}
    answer = client.post(body, CHAT)[1]
    (choice,) = answer["choices"]
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
    alone = client.post(body | {"top_logprobs": None}, CHAT)[1]["choices"][0]["logprobs"]["content"]
    assert [t["logprob"] for t in alone] == [g.logprob for g in given]
    assert all(t["top_logprobs"] == [] for t in alone)
    without = client.post(body | {"logprobs": False, "top_logprobs": None}, CHAT)[1]
    assert without["choices"][0]["logprobs"] is None


def test_the_command_line_writes_them(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, expected: Completion
) -> None:
    from cbatch.cli.main import main

    monkeypatch.setattr("cbatch.cli.generate.load_engine", lambda *_: (llm.engine, llm.info))
    output = tmp_path / "out.jsonl"
    flags = ["--max-tokens", "12", "--seed", "3", "--logprobs", "2", "--prompt-logprobs", "2"]
    flags += ["--temperature", "1", "--logit-bias", "1=0", "--no-progress"]
    command = ["generate", PROMPT, "--output", str(output), *flags]
    assert main(command) == 0
    line = json.loads(output.read_text(encoding="utf-8"))
    (choice,) = line["choices"]
    assert [each["logprob"] for each in choice["logprobs"]] == [
        each.logprob for each in expected.logprobs or ()
    ]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"][1]["top"]) == 2
    assert main([*command, "--resume"]) == 0  # its params are read back as they were written


def test_a_prompt_alone_is_scored_without_a_new_token(client: Client, expected: Completion) -> None:
    """`max_tokens` 0 with `echo` is how evaluation harnesses call."""
    ids = list(expected.prompt_token_ids)
    assert expected.prompt_logprobs is not None
    scores = [each and each.logprob for each in expected.prompt_logprobs]
    (streamed,) = client.stream(BODY | {"echo": True, "max_tokens": 0, "return_token_ids": True})
    for choice in (whole(client, echo=True, max_tokens=0), streamed["choices"][0]):
        assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == scores and len(scores) == len(ids)
    assert streamed["choices"][0]["token_ids"] == []
