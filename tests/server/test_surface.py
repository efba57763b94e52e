"""Completions, chats and what load tools, gateways and operators need, over real sockets. Scheduler
and text are real, the model is the simulator's."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar

from cbatch import SamplingParams
from cbatch.llm import complete_all
from cbatch.runtime.gpu.capture import SHAPED
from cbatch.server.serving.metrics import Metrics
from cbatch.server.serving.replies import Replies
from tests.checking.executor import Faults
from tests.engine.late import held_kernels
from tests.server.apis import APIS, CHAT, COMPLETIONS, body_of
from tests.server.engines import PROMPT
from tests.server.http_client import JSON, MODEL, Client, call, events_of, serving, wait_until
from tests.toy_engine import TOKENIZER, make_engine

BODY = {"prompt": PROMPT, "max_tokens": 20, "seed": 5}


@pytest.fixture
def client(toy_client: Client) -> Client:
    return toy_client


def expected(prompt: str = PROMPT, **params: Any) -> list[str]:
    """Return the texts that the engine gives without a server."""
    (completion,) = complete_all(make_engine(), [prompt], [SamplingParams(**params)])
    return [choice.text for choice in completion.choices]


# ---- texts ---------------------------------------------------------------------------------------


def test_prompts_as_ids_and_in_lists(client: Client) -> None:
    ids = TOKENIZER.encode(PROMPT)
    options = {"max_tokens": 8, "seed": 3, "temperature": 0}
    (single,) = expected(**options)
    assert client.post({"prompt": ids, **options})[1]["choices"][0]["text"] == single
    body = {"prompt": [PROMPT, ids, "class"], "n": 2, **options}
    status, answer, _ = client.post(body)
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["choices"][0]["text"] == answer["choices"][2]["text"] == single
    assert answer["usage"]["completion_tokens"] == 48
    texts = [""] * 6
    for event in client.stream(body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in answer["choices"]]


def test_a_drawn_seed_is_reported_and_gives_the_same_text_again(client: Client) -> None:
    for drawn in ({}, {"seed": -1}):
        first = client.post({"prompt": PROMPT, "max_tokens": 12} | drawn)[1]["choices"][0]
        again = client.post({"prompt": PROMPT, "max_tokens": 12, "seed": first["seed"]})[1]
        assert again["choices"][0]["text"] == first["text"] and first["seed"] >= 0


def test_unknown_fields_are_ignored_and_listed(client: Client) -> None:
    more = {"user": "me", "colour": 1, "a\r\nb": 2}
    status, answer, headers = client.post(BODY | more)
    assert status == 200
    assert headers["x-cbatch-ignored-fields"] == "colour, a%0D%0Ab"
    assert answer["choices"][0]["text"] == expected(max_tokens=20, seed=5)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_cut_to_its_end(client: Client, stream: bool) -> None:
    body = body_of(CHAT, seed=5, truncate_prompt_tokens=5, return_token_ids=True)
    if stream:
        first, *rest = client.stream(body, CHAT)
        parts = [event["choices"][0] for event in (first, *rest)]
        ids = [i for part in parts for i in part["token_ids"]]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert not any("prompt_token_ids" in event for event in rest)
    else:
        _, first, _ = client.post(body, CHAT)
        (choice,) = first["choices"]
        ids, text = choice["token_ids"], choice["message"]["content"]
    assert first["prompt_token_ids"] == TOKENIZER.encode("[user]Rome?")[-5:]
    assert TOKENIZER.decode(ids) == text and len(ids) == 4


def test_speculation_statistics_in_the_format_of_load_tools(client: Client) -> None:
    body = BODY | {"return_metrics": True, "max_tokens": 60}
    metrics = client.stream(body)[-1]["metrics"]
    speculation = metrics["speculative_decoding"]
    assert speculation["num_spec_tokens"] == 3 and len(speculation["acceptance_histogram"]) == 4
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"] > 5
    accepted = sum(j * count for j, count in enumerate(speculation["acceptance_histogram"]))
    assert accepted == speculation["num_accepted_draft_tokens"] > 0
    assert speculation["draft_acceptance_rate"] == accepted / speculation["num_draft_tokens"]
    assert speculation["mean_acceptance_length"] == 1 + accepted / speculation["num_spec_steps"]
    assert 0 < metrics["time_to_first_token_ms"] < 60_000
    assert client.post(body)[1]["metrics"]["speculative_decoding"] == speculation
    alone = client.post(body | {"max_lookahead": 0})[1]
    assert alone["metrics"]["speculative_decoding"] is None
    assert "metrics" not in client.post(BODY)[1]


# ---- other paths ---------------------------------------------------------------------------------


def test_the_model_and_its_limits(client: Client) -> None:
    (card,) = client.get("/v1/models")[1]["data"]
    assert card["id"] == card["root"] == MODEL and card["parent"] is None
    assert card["object"] == "model" and card["max_model_len"] == 128
    assert client.get(f"/v1/models/{MODEL}") == (200, card)
    status, answer = client.get("/v1/models/an/other")
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    for path in (*APIS[:2], "/tokenize", "/detokenize"):
        body = body_of(CHAT if path == CHAT else COMPLETIONS, tokens=[1], model="other")
        status, answer, _ = client.post(body, path)
        assert status == 404 and answer["error"]["param"] == "model"
        assert f"use '{MODEL}'" in answer["error"]["message"]


def test_texts_to_tokens_and_back(client: Client) -> None:
    ids = TOKENIZER.encode(PROMPT)
    body = {"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True}
    answer = client.post(body, "/tokenize")[1]
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == 128 and len(answer["token_strs"]) == len(ids)
    back = client.post({"model": MODEL, "tokens": [0, *ids]}, "/detokenize")[1]
    assert back == {"prompt": "<|endoftext|>" + PROMPT}
    messages = [{"role": "user", "content": "abc"}]
    tokens = client.post({"messages": messages}, "/tokenize")[1]["tokens"]
    assert tokens == TOKENIZER.encode("[user]abc")
    # Load testers send texts longer than the context.
    long = client.post({"prompt": "a" * 200_000}, "/tokenize")[1]
    assert long["count"] == len(TOKENIZER.encode("a" * 200_000)) > 128
    back = client.post({"tokens": long["tokens"]}, "/detokenize")[1]
    assert back["prompt"] == "a" * 200_000


def test_probes(client: Client) -> None:
    assert client.get("/health")[1]["status"] == "ok"
    assert client.get("/ready") == (200, {"status": "ready"})
    assert set(client.get("/version")[1]) == {"version"}


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
    ("method", "path", "status", "allow"),
    [
        ("GET", COMPLETIONS, 405, {"POST"}),
        ("DELETE", "/metrics", 405, {"GET", "HEAD"}),
        ("POST", "/v1/models", 405, {"GET"}),
        ("POST", "/v1/embeddings", 501, set()),
        ("GET", "/v2/nothing", 404, set()),
    ],
)
def test_what_is_not_there(
    client: Client, method: str, path: str, status: int, allow: set[str]
) -> None:
    got, body, headers = call(client, method, path, b'{"input": "x"}', JSON)
    kind = "not_implemented" if status == 501 else "invalid_request_error"
    assert got == status and json.loads(body)["error"]["type"] == kind
    assert allow <= set(headers.get("allow", "").split(", "))


# ---- bodies --------------------------------------------------------------------------------------


def test_bodies_that_are_long_or_deep(client: Client) -> None:
    assert client.post(b'{"prompt": "a\\ud83d\\ude00", "max_tokens": 1}')[0] == 200
    nested = json.loads("[" * 400 + "]" * 400)
    brackets = "[]{}" * 30  # within a text they do not count
    for body in (BODY | {"colour": nested}, {"prompt": brackets, "max_tokens": 1}):
        assert client.post(body)[0] == 200
    long = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    assert call(client, "POST", COMPLETIONS, long, JSON)[0] == 413
    chunked = {**JSON, "Transfer-Encoding": "chunked"}
    part = long[:9_000_000]
    parts = b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part)
    assert call(client, "POST", COMPLETIONS, parts, chunked)[0] == 413
    assert client.post(BODY)[0] == 200


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["fine", ""]}, "prompt"),
        ({"prompt": [10**7]}, "prompt"),
        ({"prompt": "a" * 5_000_000}, "prompt"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_rejected_after_parsing(client: Client, change: Any, field: str) -> None:
    status, answer, _ = client.post(BODY | change)
    assert (status, answer["error"]["param"]) == (400, field), answer


# ---- ids and errors ------------------------------------------------------------------------------


def test_request_ids(client: Client) -> None:
    raw = json.dumps(BODY).encode()
    headers = call(client, "POST", COMPLETIONS, raw, {**JSON, "X-Request-ID": "mine-1"})[2]
    assert headers["x-request-id"] == "mine-1"
    for bad in ("a" * 300, "a b", "\u00e9"):
        own = {"X-Request-ID": bad}
        request_id = call(client, "GET", "/health", headers=own)[2]["x-request-id"]
        assert request_id != bad and request_id.isalnum()
    assert "x-request-id" in call(client, "GET", "/nowhere")[2]


def test_the_id_of_a_response_is_the_request_id(client: Client) -> None:
    for path, body, prefix in (
        (COMPLETIONS, BODY | {"n": 2}, "cmpl"),
        (COMPLETIONS, BODY | {"prompt": ["a", "b"], "stream": True}, "cmpl"),
        (CHAT, body_of(CHAT, stream=True), "chatcmpl"),
    ):
        for own in ({}, {"X-Request-ID": "twice-1"}):
            _, raw, headers = call(client, "POST", path, json.dumps(body).encode(), JSON | own)
            request_id = headers["x-request-id"]
            assert request_id == "twice-1" or (not own and re.fullmatch("[0-9a-f]{32}", request_id))
            ids = set(re.findall(rb'"id":"([^"]*)"', raw))
            assert ids == {f"{prefix}-{request_id}".encode()}


def test_requests_of_one_id_run_at_the_same_time(client: Client) -> None:
    own = JSON | {"X-Request-ID": "same"}

    def text(seed: int) -> str:
        raw = json.dumps(BODY | {"seed": seed, "max_tokens": 40}).encode()
        answer = json.loads(call(client, "POST", COMPLETIONS, raw, own)[1])
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(text, range(4)))
    assert together == list(map(text, range(4))) and len(set(together)) > 1


def test_a_model_without_a_template_reports_the_remedy() -> None:
    with serving(make_engine()) as client:
        status, answer, _ = client.post(body_of(CHAT), CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")
    for remedy in ("/v1/completions", "--chat-template"):
        assert remedy in answer["error"]["message"]


def test_a_failed_request_reports_its_error_and_others_continue() -> None:
    # Set once the other requests have tokens; otherwise the failure could be the whole answer.
    emitted = threading.Event()
    emitted.set()

    class Poison(dict[str, int]):
        """Parameters by request: every second request fails at its third token."""

        def __init__(self) -> None:
            self.asked: Counter[str] = Counter()

        def get(self, key: str, default: Any = None) -> Any:
            self.asked[key] += 1
            if self.asked[key] == 3:
                assert emitted.wait(60)
            return 3 if int(key) % 2 else default

    engine = make_engine(lookahead="off", faults=Faults(non_finite_at=Poison()))
    with serving(engine) as client:
        body = {"prompt": [PROMPT, PROMPT], "max_tokens": 8}
        status, answer, _ = client.post(body)
        assert status == 500 and "not finite" in answer["error"]["message"]
        emitted.clear()
        with client.open(body | {"stream": True}) as response:
            emitted.set()
            assert "not finite" in events_of(response)[-1]["error"]["message"]
        status, answer, _ = client.post({"prompt": PROMPT, "max_tokens": 8})
        assert status == 200 and answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("owner", "name"), [(Litestar, "__call__"), (Metrics, "page"), (Replies, "usage")]
)
def test_an_internal_error_has_the_same_format_as_other_errors(
    client: Client, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """The error occurs before any route, in a route, and in a stream that has begun."""

    def broken(*_: Any) -> int:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(owner, name, broken)
    raw = json.dumps(BODY | {"stream": True, "stream_options": {"include_usage": True}})
    path, method = ("/metrics", "GET") if owner is Metrics else (COMPLETIONS, "POST")
    status, body, headers = call(client, method, path, raw.encode(), JSON)
    if owner is Replies:
        *_, event, done, rest = body.decode().split("\n\n")
        assert (status, done, rest) == (200, "data: [DONE]", "")
        body = event.removeprefix("data: ").encode()
    else:
        assert status == 500 and "x-request-id" in headers
    error = json.loads(body)["error"]
    assert error["type"] == "server_error" and "secret" not in json.dumps(error)


def test_ready_lists_the_kernels_that_are_still_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = held_kernels(tmp_path, monkeypatch)
    caplog.set_level(logging.INFO, "cbatch")
    with (
        serving(make_engine(background_kernels=late.kernels, depth=1)) as client,
        ThreadPoolExecutor() as pool,
    ):

        def compiling() -> object:
            status, state = client.get("/ready")
            assert (status, state["status"]) == (200, "ready")
            return state.get("compiling")

        shaped = pool.submit(client.post, BODY | {"logit_bias": {"5": 2}})
        for _ in range(3):
            assert client.post(BODY)[0] == 200
        assert compiling() == [SHAPED] and not shaped.done()
        late.end(status=1)
        assert shaped.result(timeout=60)[0] == 200
        wait_until(lambda: compiling() is None, limit_s=60)
    assert f"still compiling: {SHAPED}\n" in caplog.text
    assert "still compiling: nothing" in caplog.text
