"""Fields that a server refuses are left out and named, and only those."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from bench.load.client.bodies import Bodies, BodySettings, Item
from bench.load.client.http import Endpoint, HttpClient
from bench.load.client.text import PromptText
from bench.load.run.refusals import drop_rejected_fields, remedy
from cbatch.core.request.errors import FieldError
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import Exchange, answer_well, scripted

CORPUS = PromptText("words " * 100, 2.0, tuple(range(300)))
CHAT = BodySettings(
    model="m",
    chat=True,
    streamed=True,
    fields={"temperature": 0.0},
    ignore_eos=True,
    items=(Item(prompt="x"),),
)
TEXT = replace(CHAT, chat=False, items=(), corpus=CORPUS)
Refuses = Callable[[dict[str, Any]], Any]  # returns the body of a 400, or None


def settled(
    settings: BodySettings,
    refuses: Refuses,
    *,
    chosen: tuple[str, ...] = (),
    status: str = "400 No",
) -> tuple[dict[str, Any], list[str], int]:
    """Return the body of a call of the run, the fields left out, and how many calls were tried."""

    async def script(exchange: Exchange) -> None:
        refusal = refuses(exchange.body)
        if refusal is None:
            await answer_well(exchange)
        else:
            await exchange.whole(json.dumps(refusal).encode(), status)

    async def run(endpoint: Endpoint) -> tuple[BodySettings, dict[str, str]]:
        client = HttpClient(endpoint, timeout_s=20.0)
        try:
            return await drop_rejected_fields(client, settings, set(chosen))
        finally:
            client.close()

    with scripted(script) as server:
        kept, refused = asyncio.run(run(server.endpoint))
        request = TraceRequest(arrival_s=0.0, prompt_tokens=40, output_tokens=50)
        body = json.loads(Bodies(kept).prepare(0, request).body)
        return body, list(refused), len(server.bodies)


def named(field: str) -> Refuses:
    """Return a server that knows all fields but one, which it names as OpenAI does."""

    def refuses(body: dict[str, Any]) -> Any:
        options = body.get("stream_options", {})
        if field in body or field in options:
            return {"error": {"message": f"Unknown parameter: '{field}'.", "type": "invalid"}}
        return None

    return refuses


USAGE = "continuous_usage_stats"


@pytest.mark.parametrize(
    ("settings", "field", "left_out"),
    [
        (CHAT, "continuous_usage_stats", [USAGE]),
        (TEXT, "continuous_usage_stats", [USAGE]),
        (CHAT, "stream_options", [USAGE, "stream_options"]),
        (CHAT, "ignore_eos", ["ignore_eos"]),
        (TEXT, "ignore_eos", ["ignore_eos"]),
        (CHAT, "temperature", ["temperature"]),
        (CHAT, "max_tokens", ["max_tokens"]),
        (CHAT, "nothing", []),
    ],
)
def test_what_is_refused_is_left_out_and_nothing_else(
    settings: BodySettings, field: str, left_out: list[str]
) -> None:
    body, refused, calls = settled(settings, named(field))
    assert refused == left_out and calls == len(left_out) + 1
    assert field not in body and field not in body.get("stream_options", {})
    assert ("ignore_eos" in body) == ("ignore_eos" not in left_out)
    assert ("temperature" in body) == ("temperature" not in left_out)
    assert body["max_completion_tokens" if left_out == ["max_tokens"] else "max_tokens"] == 50
    if "stream_options" not in left_out:
        assert body["stream_options"]["include_usage"]


def test_a_server_that_wants_text_gets_text() -> None:
    def ids_are_refused(body: dict[str, Any]) -> Any:
        error = "json: cannot unmarshal array into Go struct field CompletionRequest.prompt"
        return {"error": {"message": error}} if isinstance(body["prompt"], list) else None

    body, refused, _ = settled(TEXT, ids_are_refused)
    assert refused == ["prompt"] and isinstance(body["prompt"], str)
    assert len(body["prompt"]) == 80


def test_a_server_that_tells_no_tokens_counts_those_of_a_prompt() -> None:
    """The prompt has 2,000 characters, which are 5 tokens by its usage."""
    unknown = replace(TEXT, corpus=PromptText("words " * 100, 4.0))
    body, _, calls = settled(unknown, lambda body: None)
    assert calls == 1 and len(body["prompt"]) == 40 * 2000 / 5


def test_several_refusals_in_the_words_of_fastapi() -> None:
    def validates(body: dict[str, Any]) -> Any:
        bad = [
            {"loc": ["body", *path], "msg": "Extra inputs are not permitted"}
            for path in (["ignore_eos"], ["stream_options", "continuous_usage_stats"])
            if path[0] in body and (len(path) == 1 or path[1] in body[path[0]])
        ]
        return {"detail": bad} if bad else None

    body, refused, _ = settled(CHAT, validates, status="422 Unprocessable")
    assert sorted(refused) == [USAGE, "ignore_eos"]
    assert body["stream_options"] == {"include_usage": True} and "temperature" in body


def test_a_refusal_that_names_nothing() -> None:
    def refuses(body: dict[str, Any]) -> Any:
        return {"error": "bad request"} if "ignore_eos" in body else None

    body, refused, _ = settled(CHAT, refuses)
    assert "ignore_eos" in refused and "stream_options" not in refused and "temperature" in body


def test_what_the_user_asked_for_is_kept() -> None:
    for field in ("temperature", "ignore_eos"):
        body, refused, _ = settled(CHAT, named(field), chosen=(field,))
        assert not refused and field in body


def test_a_call_that_is_refused_in_any_form_changes_nothing() -> None:
    body, refused, calls = settled(CHAT, lambda body: {"error": {"message": "no such prompt"}})
    assert not refused and calls > 3
    assert body["stream_options"]["continuous_usage_stats"] and body["ignore_eos"]


@pytest.mark.parametrize(
    ("status", "words"),
    [("401 Unauthorized", "--api-key"), ("404 Not Found", "--chat"), ("405 No", "--chat")],
)
def test_what_no_call_can_mend_is_said_at_once(status: str, words: str) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        settled(CHAT, lambda body: {"error": {"message": "go away"}}, status=status)
    assert "go away" in str(caught.value)


def test_a_server_that_is_busy_is_measured() -> None:
    _, refused, calls = settled(CHAT, lambda body: {"error": "later"}, status="429 Later")
    assert not refused and calls == 1


def test_remedies_name_options() -> None:
    assert "--timeout" in remedy("timeout", "600 s passed")
    assert "--rate" in remedy("status 429", "slow down")
    assert "--final-usage" in remedy("status 400", "400: continuous_usage_stats is unknown")
    assert "--prompt-tokens" in remedy("status 400", "400: more than the context of 2048 tokens")
    assert remedy("cut", "") and remedy("status 500", "")
