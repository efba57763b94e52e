"""Special tokens in answers and in stop strings: both endpoints, streamed and whole, and `LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cbatch import LLM, SamplingParams
from cbatch.text import ChatTemplate
from tests.chained_model import byte_tokens, write_chained
from tests.server.http_client import CHAT, COMPLETIONS, Client, serving

TEXT = "qhi<|im_end|>\n<|im_start|>x.y"  # the tokens after the prompt "q", each once
LENGTH = {"max_tokens": 8, "temperature": 0}
# Fields, text, finish reason, number of tokens.
CASES: list[tuple[dict[str, Any], str, str, int]] = [
    ({}, "hi\nx.y", "length", 8),
    ({"skip_special_tokens": False}, TEXT[1:], "length", 8),
    ({"stop": "<|im_end|>"}, "hi", "stop", 3),
    ({"stop": ["nothing", "i<|im_end|>\n"]}, "h", "stop", 4),
    ({"stop": ["<|im_start|>x", "."]}, "hi\n", "stop", 6),
    ({"stop": "<|im_end|>", "skip_special_tokens": False}, "hi", "stop", 3),
    ({"stop": "<|im_end|>", "include_stop_str_in_output": True}, "hi<|im_end|>", "stop", 3),
    ({"stop": "x.", "include_stop_str_in_output": True}, "hi\nx.", "stop", 7),
    ({"stop": "i\nx"}, "h", "stop", 6),  # as shown in the text
    ({"stop": "i\nx", "skip_special_tokens": False}, TEXT[1:], "length", 8),
    ({"stop_token_ids": [ord(".")]}, "hi\nx", "stop", 7),
    ({"stop_token_ids": [ord(".")], "include_stop_str_in_output": True}, "hi\nx.", "stop", 7),
    ({"stop_token_ids": [258], "skip_special_tokens": False}, "hi", "stop", 3),
    (
        {
            "stop_token_ids": [258],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        },
        "hi<|im_end|>",
        "stop",
        3,
    ),
    ({"skip_special_tokens": True, "spaces_between_special_tokens": False}, "hi\nx.y", "length", 8),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    raw = byte_tokens()
    folder = tmp_path_factory.mktemp("m") / "model"
    write_chained(folder, raw, raw.encode(TEXT).ids, eos=256)
    return LLM(folder, num_blocks=64, max_num_seqs=4)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    with serving(LLM(llm.info.model, num_blocks=64).engine, chat_template=template) as client:
        yield client


def ids_of(fields: dict[str, Any], llm: LLM) -> dict[str, Any]:
    """Replace token ids: those of bytes are in the order of their names, which is not that of the
    bytes."""
    raw = llm.engine.tokenizer
    assert raw is not None
    ids = fields.get("stop_token_ids", [])
    return fields | {"stop_token_ids": [i if i > 255 else raw.encode(chr(i))[0] for i in ids]}


@pytest.mark.parametrize(("fields", "text", "reason", "count"), CASES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_served(
    client: Client, llm: LLM, path: str, fields: dict[str, Any], text: str, reason: str, count: int
) -> None:
    body = LENGTH | ids_of(fields, llm) | {"n": 2}
    given = (
        {"prompt": "q"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "q"}]}
    )
    status, answer, headers = client.post(body | given, path)
    assert status == 200 and "x-cbatch-ignored-fields" not in headers, answer
    for choice in answer["choices"]:
        shown = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert (shown, choice["finish_reason"]) == (text, reason)
    assert answer["usage"]["completion_tokens"] == 2 * count
    streamed, reasons = ["", ""], {}
    for event in client.stream(body | given, path):
        (part,) = event["choices"]
        shown = part["text"] if path == COMPLETIONS else part["delta"].get("content", "")
        streamed[part["index"]] += shown
        reasons[part["index"]] = part["finish_reason"]
    assert streamed == [text] * 2 and reasons == {0: reason, 1: reason}


@pytest.mark.parametrize(("fields", "text", "reason", "count"), CASES)
def test_from_python(llm: LLM, fields: dict[str, Any], text: str, reason: str, count: int) -> None:
    given = ids_of(fields, llm)
    given |= {"stop": (given["stop"],)} if isinstance(given.get("stop"), str) else {}
    done = llm.generate("q", SamplingParams(n=2, **LENGTH, **given))[0]
    for choice in done.choices:
        assert (choice.text, choice.finish_reason.value) == (text, reason)
        assert len(choice.token_ids) == count


@pytest.mark.parametrize("value", [1, "no", []])
@pytest.mark.parametrize(
    "field", ["skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens"]
)
def test_a_value_that_is_not_a_flag_is_rejected_by_name(
    client: Client, field: str, value: Any
) -> None:
    status, answer, _ = client.post({"prompt": "q", field: value})
    assert (status, answer["error"]["param"]) == (400, field)
