"""The app through real sockets. Scheduler and text are real, the model is the simulator's."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from cbatch import SamplingParams
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.engine.engine import Engine
from cbatch.llm import complete_all
from tests.checking.executor import Faults, SimExecutor
from tests.server.http_client import Client, events_of, serving
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
ROOMY = {"num_blocks": 4096, "max_model_len": 8192, "block_size": 4}


@pytest.fixture
def client(toy_client: Client) -> Client:
    return toy_client


def expected(**params: Any) -> list[str]:
    """Return the texts that the engine gives without a server."""
    (completion,) = complete_all(make_engine(), [PROMPT], [SamplingParams(**params)])
    return [choice.text for choice in completion.choices]


class SlowEngine:
    """An engine with slow steps, so that a client can leave in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> None:
        run = SimExecutor.run

        def slow(executor: SimExecutor, plan: StepPlan) -> StepResult:
            time.sleep(0.003)
            return run(executor, plan)

        monkeypatch.setattr(SimExecutor, "run", slow)
        self.engine: Engine = make_engine(**(ROOMY | overrides))


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


def test_a_drawn_seed_is_reported_and_gives_the_same_text_again(client: Client) -> None:
    first = client.post({"prompt": PROMPT, "max_tokens": 12})[1]["choices"][0]
    again = client.post({"prompt": PROMPT, "max_tokens": 12, "seed": first["seed"]})[1]
    assert again["choices"][0]["text"] == first["text"]


def test_unknown_fields_are_ignored_and_listed(client: Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "user": "me", "colour": 1, "a\r\nb": 2}
    status, answer, headers = client.post(body)
    assert status == 200
    assert headers["x-cbatch-ignored-fields"] == "colour, a%0D%0Ab"
    assert answer["choices"][0]["text"] == expected(max_tokens=4, seed=1)[0]


def test_embeddings_are_rejected_by_name(client: Client) -> None:
    with client.open({"input": "x"}, "/v1/embeddings") as response:
        assert response.status == 501
        assert "embeddings are not supported yet" in response.read().decode()


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
        status, answer, _ = client.post({"prompt": [PROMPT, PROMPT], "max_tokens": 8})
        assert status == 500 and "not finite" in answer["error"]["message"]
        emitted.clear()
        body = {"prompt": [PROMPT, PROMPT], "max_tokens": 8, "stream": True}
        with client.open(body) as response:
            emitted.set()
            assert "not finite" in events_of(response)[-1]["error"]["message"]
        status, answer, _ = client.post({"prompt": PROMPT, "max_tokens": 8})
        assert status == 200 and answer["usage"]["completion_tokens"] == 8
