"""Requirements of load tools, gateways and operators on a server, apart from the generated text."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from litestar import Litestar

from cbatch import SamplingParams
from cbatch.server.serving.metrics import Metrics
from cbatch.server.serving.replies import Replies
from tests.server.http_client import CHAT, COMPLETIONS, JSON, MODEL, Client, call, serving
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
BODY = {"prompt": PROMPT, "max_tokens": 20, "seed": 5}


@pytest.fixture
def client(toy_client: Client) -> Client:
    return toy_client


def test_the_model_and_its_limits(client: Client) -> None:
    (card,) = client.get("/v1/models")[1]["data"]
    assert card["id"] == card["root"] == MODEL and card["parent"] is None
    assert card["object"] == "model" and card["max_model_len"] == 128
    assert client.get(f"/v1/models/{MODEL}") == (200, card)
    status, answer = client.get("/v1/models/an/other")
    assert status == 404 and answer["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/tokenize", "/detokenize"])
def test_another_model_is_not_found(client: Client, path: str) -> None:
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    if path == "/tokenize":
        del body["messages"]
    status, answer, _ = client.post(body | {"tokens": [1]}, path)
    assert status == 404 and answer["error"]["param"] == "model"
    assert f"use '{MODEL}'" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("words", [200, 100_000])
def test_clients_know_a_prompt_that_is_too_long_by_its_code(
    client: Client, path: str, words: int
) -> None:
    text = "abc " * words
    body = {"prompt": text} if path != CHAT else {"messages": [{"role": "user", "content": text}]}
    status, answer, _ = client.post(body, path)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_texts_to_tokens_and_back(client: Client) -> None:
    ids = TOKENIZER.encode(PROMPT)
    body = {"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True}
    answer = client.post(body, "/tokenize")[1]
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == 128 and len(answer["token_strs"]) == len(ids)
    back = client.post({"model": MODEL, "tokens": [0, *ids]}, "/detokenize")[1]
    assert back == {"prompt": "<|endoftext|>" + PROMPT}
    messages = [{"role": "user", "content": "abc"}]
    assert client.post({"messages": messages}, "/tokenize")[1]["tokens"] == TOKENIZER.encode(
        "[user]abc"
    )
    for path, wrong, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ):
        status, reply, _ = client.post(wrong, path)
        assert (status, reply["error"]["param"]) == (400, field)


def test_texts_longer_than_the_context_can_be_tokenized_up_to_a_limit(client: Client) -> None:
    """Load testers send texts longer than the context; far longer texts are rejected."""
    some = client.post({"prompt": "a" * 200_000}, "/tokenize")[1]
    assert some["count"] == len(TOKENIZER.encode("a" * 200_000)) > 128
    assert client.post({"tokens": some["tokens"]}, "/detokenize")[1]["prompt"] == "a" * 200_000
    for body, path, field in (
        ({"prompt": "a" * 300_000}, "/tokenize", "prompt"),
        ({"tokens": some["tokens"] * 3}, "/detokenize", "tokens"),
    ):
        status, answer, _ = client.post(body, path)
        assert (status, answer["error"]["param"]) == (400, field), answer


def test_probes(client: Client) -> None:
    assert client.get("/health")[1]["status"] == "ok"
    assert client.get("/ready") == (200, {"status": "ready"})
    assert set(client.get("/version")[1]) == {"version"}
    for path in ("/health", "/ready", "/metrics"):
        status, body, headers = call(client, "HEAD", path)
        assert (status, body) == (200, b"") and int(headers["content-length"]) > 0


def test_the_document_names_every_path_and_field(client: Client) -> None:
    status, document = client.get("/openapi.json")
    assert status == 200 and document["openapi"].startswith("3.1")
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) <= set(document["components"]["schemas"]) and len(references) > 20
    for path, methods in document["paths"].items():
        for method in set(methods) - {"parameters"}:
            status, body, _ = call(client, method.upper(), path.replace("{name}", MODEL))
            assert status != 404 or b"previous_response_not_found" in body
    bodies = document["components"]["schemas"]
    for name in ("CompletionFields", "ChatFields"):
        assert set(SamplingParams.__struct_fields__) <= set(bodies[name]["properties"])


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/metrics", "GET, HEAD"),
        ("POST", "/v1/models", "GET"),
    ],
)
def test_another_method_gets_the_allowed_ones(
    client: Client, method: str, path: str, allow: str
) -> None:
    status, body, headers = call(client, method, path, b"{}", JSON)
    assert status == 405
    assert set(allow.split(", ")) <= set(headers["allow"].split(", "))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_an_unknown_path_is_404(client: Client) -> None:
    status, body, _ = call(client, "GET", "/v2/nothing")
    assert status == 404 and "error" in json.loads(body)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff"}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b"null",
        b'{"prompt": "a"',
    ],
    ids=["utf-8", "lists", "objects", "nan", "huge", "null", "cut"],
)
def test_a_body_that_is_not_json_is_rejected(client: Client, path: str, body: bytes) -> None:
    status, answer, _ = client.post(body, path)
    assert (status, answer["error"]["param"]) == (400, "body")


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/completions", b'{"prompt": "a\\ud800"}', "prompt"),
        ("/v1/completions", b'{"prompt": ["a", "\\udc00b"]}', "prompt[1]"),
        ("/v1/completions", b'{"prompt": "\xed\xa0\x80"}', "prompt"),
        ("/v1/completions", b'{"prompt": "a", "stop": "\\ud83d"}', "stop"),
        ("/v1/completions", b'{"prompt": "a", "stop": ["x", "\\ud83d"]}', "stop[1]"),
        (
            "/v1/completions",
            b'{"prompt": "a", "structured_outputs": {"json": {"const": "\\ud800"}}}',
            "structured_outputs.json.const",
        ),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (CHAT, b'{"messages": [{"role": "user", "\\ud800": "a"}]}', "messages[0]"),
        (CHAT, b'{"colour": "\\ud800", "messages": []}', "colour"),
        (CHAT, b'{"\\ud800": 1}', "body"),
        ("/tokenize", b'{"prompt": "\\ude00\\ud83d"}', "prompt"),
    ],
)
def test_a_lone_surrogate_is_named_by_its_place(
    client: Client, path: str, body: bytes, place: str
) -> None:
    status, answer, _ = client.post(body, path)
    assert (status, answer["error"]["param"]) == (400, place)
    assert "half of a surrogate" in answer["error"]["message"]


def test_a_surrogate_pair_is_text(client: Client) -> None:
    assert client.post(b'{"prompt": "a\\ud83d\\ude00", "max_tokens": 1}')[0] == 200


def test_a_body_with_too_many_lists_is_rejected_unparsed(client: Client) -> None:
    few, many = (b'{"prompt":"a","max_tokens":1,"x":[' + b"[]," * n + b"1]}" for n in (9, 300_000))
    assert client.post(few)[0] == 200
    status, answer, _ = client.post(many)
    assert (status, answer["error"]["param"]) == (400, "body"), answer
    brackets = {"prompt": "[]{}" * 30, "max_tokens": 1}
    assert client.post(brackets)[0] == 200, "brackets within a text do not count"


def test_deep_but_readable_json(client: Client) -> None:
    nested = json.loads("[" * 400 + "]" * 400)
    message = {"role": "user", "content": "a", "extra": nested}
    assert client.post({"messages": [message]}, CHAT)[0] in (200, 400)
    assert client.post({"prompt": nested})[0] == 400
    assert client.post(BODY | {"colour": nested})[0] == 200


def test_long_bodies(client: Client) -> None:
    long = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    assert call(client, "POST", "/v1/completions", long, JSON)[0] == 413
    chunked = {**JSON, "Transfer-Encoding": "chunked"}
    parts = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (long[:9_000_000],)) + b"0\r\n\r\n"
    assert call(client, "POST", "/v1/completions", parts, chunked)[0] == 413
    million = {"prompt": [1] * 1_000_000, "max_tokens": 1}
    status, answer, _ = client.post(million)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer, _ = client.post({"prompt": "a" * 5_000_000})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert client.post(BODY)[0] == 200


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**7]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": ["fine", ""]}, "prompt"),
        ({"temperature": True}, "temperature"),
        ({"n": 10**6}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_tokens": 3.0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"top_k": 10**12}, "top_k"),
        ({"stream": 0}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"priority": 2**40}, "priority"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [[1], [[2]]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"model": 3}, "model"),
        *(
            ({name: [5] * 100_000}, name)
            for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
        ),
        ({"logit_bias": dict.fromkeys(range(100_000), 1)}, "logit_bias"),
    ],
)
def test_types_are_strict(client: Client, change: dict[str, Any], field: str) -> None:
    status, answer, _ = client.post(BODY | change)
    assert (status, answer["error"]["param"]) == (400, field), answer


def test_nulls_and_default_values_of_clients_are_accepted(client: Client) -> None:
    plain = client.post(BODY)[1]["choices"][0]["text"]
    nulls = dict.fromkeys(["stop", "logprobs", "suffix", "temperature", "stream_options", "n"])
    answer = client.post(BODY | nulls | {"best_of": 1, "model": MODEL})
    assert answer[0] == 200 and answer[1]["choices"][0]["text"] == plain


def test_usage_with_every_chunk(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.stream(BODY | {"n": 2, "stream_options": options, "return_token_ids": True})
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 40
    num_tokens = 0
    for event in events:
        num_tokens += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == num_tokens
    assert num_tokens == 40
    plain = client.stream(BODY)
    assert all("usage" not in event for event in plain) and plain[-1]["choices"]


def test_speculation_statistics_in_the_format_of_load_tools(client: Client) -> None:
    events = client.stream(BODY | {"return_metrics": True, "max_tokens": 60})
    metrics = events[-1]["metrics"]
    speculation = metrics["speculative_decoding"]
    assert speculation["num_spec_tokens"] == 3 and len(speculation["acceptance_histogram"]) == 4
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"] > 5
    accepted = sum(j * count for j, count in enumerate(speculation["acceptance_histogram"]))
    assert accepted == speculation["num_accepted_draft_tokens"] > 0
    assert speculation["draft_acceptance_rate"] == accepted / speculation["num_draft_tokens"]
    assert speculation["mean_acceptance_length"] == 1 + accepted / speculation["num_spec_steps"]
    assert 0 < metrics["time_to_first_token_ms"] < 60_000
    whole = client.post(BODY | {"return_metrics": True, "max_tokens": 60})[1]
    assert whole["metrics"]["speculative_decoding"] == speculation
    alone = client.post(BODY | {"return_metrics": True, "max_lookahead": 0})[1]
    assert alone["metrics"]["speculative_decoding"] is None
    assert "metrics" not in client.post(BODY)[1]


def test_request_ids(client: Client) -> None:
    raw = json.dumps(BODY).encode()
    headers = call(client, "POST", "/v1/completions", raw, {**JSON, "X-Request-ID": "mine-1"})[2]
    assert headers["x-request-id"] == "mine-1"
    for bad in ("a" * 300, "a b", "\u00e9"):
        request_id = call(client, "GET", "/health", headers={"X-Request-ID": bad})[2][
            "x-request-id"
        ]
        assert request_id != bad and request_id.isalnum()
    assert "x-request-id" in call(client, "GET", "/nowhere")[2]


def test_the_id_of_a_response_is_the_request_id(client: Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for path, body, prefix in (
        (COMPLETIONS, BODY | {"n": 2}, "cmpl"),
        (COMPLETIONS, BODY | {"prompt": ["a", "b"], "stream": True}, "cmpl"),
        (CHAT, chat | {"stream": True}, "chatcmpl"),
    ):
        for own in ({}, {"X-Request-ID": "twice-1"}):
            _, raw, headers = call(client, "POST", path, json.dumps(body).encode(), JSON | own)
            request_id = headers["x-request-id"]
            assert request_id == "twice-1" or (not own and re.fullmatch("[0-9a-f]{32}", request_id))
            ids = set(re.findall(rb'"id":"([^"]*)"', raw))
            assert ids == {f"{prefix}-{request_id}".encode()}


def test_requests_of_one_id_run_at_the_same_time(client: Client) -> None:
    own = JSON | {"X-Request-ID": "same"}
    bodies = [json.dumps(BODY | {"seed": seed, "max_tokens": 40}).encode() for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda raw: call(client, "POST", COMPLETIONS, raw, own), bodies))
    alone = [call(client, "POST", COMPLETIONS, raw, own) for raw in bodies]
    texts = [
        [json.loads(raw)["choices"][0]["text"] for _, raw, _ in answers]
        for answers in (together, alone)
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


@pytest.mark.parametrize(
    ("owner", "name"), [(Litestar, "__call__"), (Metrics, "page"), (Replies, "usage")]
)
def test_an_internal_error_has_the_same_format_as_other_errors(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """The error occurs before any route, in a route, and in a stream that has begun."""

    def broken(*_: Any) -> int:
        raise ZeroDivisionError("a secret")

    with serving(make_engine()) as client:
        monkeypatch.setattr(owner, name, broken)
        raw = json.dumps(BODY | {"stream": True, "stream_options": {"include_usage": True}})
        path = "/metrics" if owner is Metrics else COMPLETIONS
        method = "GET" if owner is Metrics else "POST"
        status, body, headers = call(client, method, path, raw.encode(), JSON)
    if owner is Replies:
        *_, event, done, rest = body.decode().split("\n\n")
        assert (status, done, rest) == (200, "data: [DONE]", "")
        body = event.removeprefix("data: ").encode()
    else:
        assert status == 500 and "x-request-id" in headers
    error = json.loads(body)["error"]
    assert error["type"] == "server_error" and "secret" not in json.dumps(error)
