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
from tests.server.contract import CHECKS, OPERATIONS
from tests.server.engines import FIRST_CONTENT
from tests.server.http_client import Client, serving
from tests.test_llm import write_model

# Random cases of chats take the longest to generate.
NUM_CASES = {"/v1/completions": 6, "/tokenize": 4, "/detokenize": 4}
VALID = schemathesis.GenerationMode.POSITIVE
LIMIT_S = 20.0  # a call that takes longer hangs


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Serve with a real executor, since the simulator's executor has no log probabilities."""
    model = write_model(tmp_path_factory.mktemp("models") / "model")
    options: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 48, "random_weights_seed": 0}
    engine = LLM(model, drafter=("ngram", "suffix"), lookahead="fixed:3", **options).engine
    with serving(engine, chat_template=FIRST_CONTENT) as client:
        yield client


def strategies() -> Iterator[tuple[Any, int]]:
    """Yield strategies of valid and of invalid calls, with their numbers of cases."""
    for operation in OPERATIONS:
        modes = schemathesis.GenerationMode if operation.method == "post" else [VALID]
        for mode in modes:
            strategy = operation.as_strategy(generation_mode=mode)
            yield strategy, NUM_CASES.get(operation.path, 1)


def test_random_calls(client: Client) -> None:
    statuses: Counter[int] = Counter()
    url, session = f"http://127.0.0.1:{client.port}", requests.Session()

    def call(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, session=session, timeout=LIMIT_S)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    with session:
        for strategy, num_cases in strategies():
            # The first failure is enough.
            options: Any = {"max_examples": num_cases, "phases": [Phase.generate]}
            options["suppress_health_check"] = list(HealthCheck)
            settings(**options)(given(case=strategy)(call))()
    assert statuses[200] > 4 and statuses[400] > 10, statuses
