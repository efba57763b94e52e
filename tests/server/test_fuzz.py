"""Random valid and invalid calls, generated from the OpenAPI document: no 5xx, and no hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from cbatch import LLM
from cbatch.text import ChatTemplate
from tests.server.contract import CHECKS, OPERATIONS
from tests.server.http_client import Client, serving
from tests.test_llm import write_model

TEMPLATE = ChatTemplate("{{ messages[0].content }}", {}, "the test")
MODES = list(schemathesis.GenerationMode)
# Random cases of chat take the longest to generate.
NUM_CASES = {"/v1/completions": 12, "/v1/chat/completions": 5, "/tokenize": 12, "/detokenize": 19}
NUM_CASES |= {"/v1/responses": 5, "/v1/messages": 5}
LIMIT_S = 20.0  # a call that takes longer hangs


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Serve with a real executor, since the simulator's executor has no log probabilities."""
    model = write_model(tmp_path_factory.mktemp("models") / "model")
    options: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 48, "random_weights_seed": 0}
    engine = LLM(model, drafter=("ngram", "suffix"), lookahead="fixed:3", **options).engine
    with serving(engine, chat_template=TEMPLATE) as client:
        yield client


def fuzz(
    client: Client, session: requests.Session, operation: Any, mode: Any, num_cases: int
) -> Counter[int]:
    """Run random cases; return how often each status was answered."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],  # the first failure is enough
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        url = f"http://127.0.0.1:{client.port}"
        response = case.call(base_url=url, session=session, timeout=LIMIT_S)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    run()
    return statuses


def fuzz_all(client: Client, session: requests.Session, times: int = 1) -> Counter[int]:
    """Run about fifty valid and fifty invalid calls, `times` times."""
    statuses: Counter[int] = Counter()
    for operation in OPERATIONS:
        for mode in MODES if operation.method == "post" else MODES[:1]:
            num_cases = times * NUM_CASES.get(operation.path, 1)
            statuses += fuzz(client, session, operation, mode, num_cases)
    return statuses


def test_a_hundred_calls(client: Client, session: requests.Session) -> None:
    statuses = fuzz_all(client, session)
    assert sum(statuses.values()) >= 95
    assert statuses[200] > 15 and statuses[400] > 30, statuses


@pytest.mark.statistics
def test_two_thousand_calls(client: Client, session: requests.Session) -> None:
    statuses = fuzz_all(client, session, times=21)
    assert sum(statuses.values()) >= 2000
    assert statuses[200] > 150 and statuses[400] > 600, statuses
    assert client.get("/health")[0] == 200
