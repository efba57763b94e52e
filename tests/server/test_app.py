"""Through real sockets: the scheduler and text side are real, the model is the simulator's."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cbatch import FinishReason, SamplingParams
from cbatch.core.plan import StepPlan, StepResult
from cbatch.llm import complete_all
from cbatch.stepwise import Engine
from sim.executor import Faults, SimExecutor
from tests.server.http_client import MODEL, Client, events_of, serving, wait_until
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
ROOMY = {"num_blocks": 4096, "max_model_tokens": 8192, "block_size_tokens": 4}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(make_engine()) as client:
        yield client


def expected(**params: Any) -> list[str]:
    """The texts that the engine gives without a server."""
    (completion,) = complete_all(make_engine(), [PROMPT], [SamplingParams(**params)])
    return [choice.text for choice in completion.choices]


class SlowEngine:
    """An engine whose steps take a while, so that a client can leave in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> None:
        run = SimExecutor.run

        def slow(executor: SimExecutor, plan: StepPlan) -> StepResult:
            time.sleep(0.003)
            return run(executor, plan)

        monkeypatch.setattr(SimExecutor, "run", slow)
        self.engine: Engine = make_engine(**(ROOMY | overrides))


def test_a_whole_completion(client: Client) -> None:
    status, answer, headers = client.post({"prompt": PROMPT, "max_tokens": 12, "seed": 5, "n": 2})
    assert status == 200
    assert answer["object"] == "text_completion" and answer["model"] == MODEL
    assert [c["text"] for c in answer["choices"]] == expected(max_tokens=12, seed=5, n=2)
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    prompt_tokens = len(TOKENIZER.encode(PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 24,
        "total_tokens": prompt_tokens + 24,
    }
    assert "x-cbatch-ignored-fields" not in headers


def test_a_stream_adds_up_to_the_whole(client: Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 5, "n": 3}
    events = client.stream(body | {"stream_options": {"include_usage": True}})
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 60
    texts = ["", "", ""]
    reasons: dict[int, str] = {}
    for event in events:
        (choice,) = event["choices"]
        assert event["usage"] is None and event["id"] == usage["id"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == expected(max_tokens=20, seed=5, n=3)
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert len(events) > 6, "it did not stream"


def test_a_stop_string_is_never_shown_nor_billed(client: Client) -> None:
    (whole,) = expected(max_tokens=40, seed=9)
    stop = whole[15:18]
    events = client.stream(
        {
            "prompt": PROMPT,
            "max_tokens": 40,
            "seed": 9,
            "stop": stop,
            "stream_options": {"include_usage": True},
        }
    )
    text = "".join(c["text"] for e in events for c in e["choices"])
    assert text == whole[: whole.index(stop)]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    billed = events[-1]["usage"]["completion_tokens"]
    (completion,) = complete_all(
        make_engine(), [PROMPT], [SamplingParams(max_tokens=40, seed=9, stop=(stop,))]
    )
    assert billed == len(completion.token_ids) < 40


def test_prompts_as_ids_and_in_lists(client: Client) -> None:
    ids = TOKENIZER.encode(PROMPT)
    options = {"max_tokens": 8, "seed": 3, "temperature": 0}
    single = client.post({"prompt": PROMPT, **options})[1]["choices"][0]["text"]
    assert client.post({"prompt": ids, **options})[1]["choices"][0]["text"] == single
    status, answer, _ = client.post({"prompt": [PROMPT, ids, "class"], "n": 2, **options})
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["choices"][0]["text"] == answer["choices"][2]["text"] == single
    assert answer["usage"]["completion_tokens"] == 48
    streamed = client.stream({"prompt": [PROMPT, ids, "class"], "n": 2, **options})
    texts = [""] * 6
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in answer["choices"]]


def test_a_drawn_seed_is_told_and_gives_the_same_text_again(client: Client) -> None:
    first = client.post({"prompt": PROMPT, "max_tokens": 12})[1]["choices"][0]
    again = client.post({"prompt": PROMPT, "max_tokens": 12, "seed": first["seed"]})[1]
    assert again["choices"][0]["text"] == first["text"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [10**7]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": ["fine", ""]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids"),
        ({"echo": 2}, "echo"),
        ({"logprobs": 30}, "logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"banned_token_ids": [10**6]}, "banned_token_ids"),
    ],
)
def test_bad_values_are_refused_by_name(client: Client, change: dict[str, Any], field: str) -> None:
    for stream in ({}, {"stream": True}) if "stream" not in change else ({},):
        status, answer, _ = client.post({"prompt": PROMPT, **stream, **change})
        assert status == 400
        assert answer["error"]["param"] == field
        assert answer["error"]["message"].startswith(field)
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"temperature": NaN}'])
def test_a_body_that_is_no_object_is_refused(client: Client, body: bytes) -> None:
    status, answer, _ = client.post(body)
    assert (status, answer["error"]["param"]) == (400, "body")


def test_unknown_fields_are_ignored_and_told(client: Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "user": "me", "colour": 1, "a\r\nb": 2}
    status, answer, headers = client.post(body)
    assert status == 200
    assert headers["x-cbatch-ignored-fields"] == "colour, a%0D%0Ab"
    assert answer["choices"][0]["text"] == expected(max_tokens=4, seed=1)[0]


def test_models_and_health(client: Client) -> None:
    status, answer = client.get("/v1/models")
    assert status == 200 and [m["id"] for m in answer["data"]] == [MODEL]
    assert client.get("/health")[0] == 200


def test_embeddings_are_refused_by_name(client: Client) -> None:
    with client.open({"input": "x"}, "/v1/embeddings") as response:
        assert response.status == 501
        assert "embeddings are not supported yet" in response.read().decode()


def test_many_clients_at_once_get_their_own_text(client: Client) -> None:
    texts: dict[int, str] = {}

    def call(seed: int) -> None:
        events = client.stream({"prompt": PROMPT, "max_tokens": 25, "seed": seed})
        texts[seed] = "".join(c["text"] for e in events for c in e["choices"])

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: expected(max_tokens=25, seed=seed)[0] for seed in range(24)}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlowEngine(monkeypatch).engine
    scheduler = engine.scheduler
    with serving(engine) as client:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8000, "n": 3, "stream": stream})
        connection = socket.create_connection(("127.0.0.1", client.port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_until(lambda: scheduler.num_running == 3)
        if stream:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.close()
        wait_until(lambda: not scheduler.has_work and not scheduler.num_in_flight)
        assert scheduler.stats.emitted_tokens < 3 * 8000, "it was completed instead"
        status, answer, _ = client.post({"prompt": PROMPT, "max_tokens": 5})
        assert status == 200 and answer["usage"]["completion_tokens"] == 5


def test_a_request_that_fails_says_so_and_the_others_go_on() -> None:
    told = threading.Event()  # what it emitted before; else the failure may be all there is to tell
    told.set()

    class Poison(dict[str, int]):
        """Every second request that the engine is given fails at its third token."""

        def __init__(self) -> None:
            self.asked: Counter[str] = Counter()

        def get(self, key: str, default: Any = None) -> Any:
            self.asked[key] += 1
            if self.asked[key] == 3:
                assert told.wait(60)
            return 3 if int(key) % 2 else default

    engine = make_engine(lookahead="off", faults=Faults(non_finite_at=Poison()))
    with serving(engine) as client:
        status, answer, _ = client.post({"prompt": [PROMPT, PROMPT], "max_tokens": 8})
        assert status == 500 and "not finite" in answer["error"]["message"]
        told.clear()
        body = {"prompt": [PROMPT, PROMPT], "max_tokens": 8, "stream": True}
        with client.open(body) as response:
            told.set()
            assert "not finite" in events_of(response)[-1]["error"]["message"]
        status, answer, _ = client.post({"prompt": PROMPT, "max_tokens": 8})
        assert status == 200 and answer["usage"]["completion_tokens"] == 8


def test_an_engine_that_dies_answers_everyone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SlowEngine(monkeypatch).engine
    monkeypatch.setattr("cbatch.engine.client._LONGEST_PAUSE_S", 0.01)
    with serving(engine) as client:
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.append(
                client.post({"prompt": PROMPT, "max_tokens": 8000, "n": 2})
            )
        )
        thread.start()
        wait_until(lambda: engine.scheduler.num_running == 2)

        def broken() -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(engine.loop, "step", broken)
        thread.join(timeout=30)
        assert results[0][0] == 503
        assert client.post({"prompt": PROMPT})[0] == 503
        assert client.get("/health")[0] == 503
    assert "broken on purpose" in caplog.text and "keeper failed" not in caplog.text


def test_shutdown_ends_open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine(monkeypatch).engine
    body = {"prompt": PROMPT, "max_tokens": 30, "stream": True, "seed": 1}
    with ExitStack() as open_stream:
        with serving(engine) as client:
            response = open_stream.enter_context(client.open(body))
            wait_until(lambda: engine.scheduler.num_running == 1)
        events = response.read().decode()
    assert events.endswith("data: [DONE]\n\n"), "a stop signal lets open streams finish"
    assert FinishReason.LENGTH.value in events
