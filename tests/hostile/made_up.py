"""Random valid and invalid calls, generated from the OpenAPI document."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.failures import FailureGroup

from tests.hostile.attacker import ANSWER_S, BUSY, KEY, Attack, Target
from tests.hostile.server import HOST
from tests.server.contract import CHECKS, OPERATIONS

NUM_CALLS = 6
# Larger values would block slots that other calls need. Other attacks use larger values.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = dict.fromkeys((*LENGTHS, "min_tokens"), 16) | {"n": 4}
_one_at_a_time = threading.Lock()  # generating them takes more time than answering them


def made_up_calls(operation: Any, target: Target) -> None:
    posted = operation.method == "post"
    modes = list(schemathesis.GenerationMode)
    mode = target.rng.choice(modes) if posted else modes[0]

    @seed(target.rng.getrandbits(32))
    @settings(
        max_examples=NUM_CALLS if posted else 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        bound(case.body, operation.path)
        began_s = time.monotonic()
        try:
            url = f"http://{HOST}:{target.port}"
            response = case.call(base_url=url, headers=KEY, session=session, timeout=ANSWER_S)
        except requests.RequestException as error:
            target.note("closed", began_s, repr(error))
            return
        status = str(response.status_code)
        target.note(status, began_s, response.content)
        if status not in BUSY:
            try:
                case.validate_response(response, checks=CHECKS)
            except FailureGroup as failures:
                target.wrong.append("; ".join(map(str, failures.exceptions)))

    with _one_at_a_time, requests.Session() as session:
        run()


def bound(body: Any, path: str) -> None:
    if not isinstance(body, dict):
        return
    for name, limit in MOST.items():
        if isinstance(value := body.get(name), int) and value > limit:
            body[name] = limit
    if all(body.get(name) is None for name in LENGTHS):
        body["max_output_tokens" if path.startswith("/v1/responses") else "max_tokens"] = 16


ATTACKS = [
    Attack(
        f"made up: {operation.label}",
        partial(made_up_calls, operation),
        "200 400 401 404 405 408 413 415",
    )
    for operation in OPERATIONS
]
