"""The `anthropic` package's client of the Messages API, as its users use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import pydantic
import pytest

from cbatch.core.request.request import FinishReason
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import OverloadedError
from tests.server.agent_servers import CALL, CUT_ERROR, Scripted, scripted_server
from tests.server.http_client import MODEL, Client, wait_until

anthropic: Any = pytest.importorskip("anthropic", reason="needs the package: pip install anthropic")
TOOL: Any = {
    "name": "f",
    "description": "a function",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
USER: Any = {"role": "user", "content": "Rome?"}
STREAM = pytest.mark.parametrize("stream", [False, True])


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


class Scene(NamedTuple):
    """The script of the model, and a client."""

    service: Any
    client: Client
    sdk: Any

    def say(self, text: str, *, step_tokens: int = 2) -> None:
        self.service.text, self.service.step_tokens = text, step_tokens


def sdk_of(client: Client, **options: Any) -> Any:
    url = f"http://127.0.0.1:{client.port}"
    return anthropic.Anthropic(**({"base_url": url, "api_key": "-", "max_retries": 0} | options))


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Scripted, Any]]:
    with scripted_server() as scripted, sdk_of(scripted.client) as sdk:
        yield scripted, sdk


@pytest.fixture
def scene(server: tuple[Scripted, Any]) -> Iterator[Scene]:
    scripted, sdk = server
    yield Scene(scripted.service, scripted.client, sdk)
    scripted.restore()


@pytest.fixture(scope="module")
def demo(demo_client: Client) -> Iterator[Any]:
    with sdk_of(demo_client) as sdk:
        yield sdk


def create(sdk: Any, *, stream: bool, **fields: Any) -> Any:
    """Return the message, as the package assembles it."""
    fields = {"model": MODEL, "messages": [USER], "max_tokens": 99} | fields
    if not stream:
        return sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as events:
        return events.get_final_message()


@STREAM
def test_text(scene: Scene, stream: bool) -> None:
    scene.say("Yes, it is.")
    message = create(scene.sdk, stream=stream, system="Be brief.")
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", "Yes, it is.", "end_turn")
    assert scene.service.prompt.startswith("[system]Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 5


def test_deltas_add_up(scene: Scene) -> None:
    scene.say("Yes, it is.", step_tokens=1)
    with scene.sdk.messages.stream(model=MODEL, messages=[USER], max_tokens=9) as events:
        texts = list(events.text_stream)
        assert events.get_final_text() == "".join(texts) == "Yes, it is."
    assert len(texts) > 5


def test_raw_events_are_known_to_the_package(scene: Scene) -> None:
    scene.say(f"<think>Hm.</think>Yes.{CALL}")
    fields: Any = {"model": MODEL, "messages": [USER], "max_tokens": 9, "tools": [TOOL]}
    names = []
    for event in scene.sdk.messages.create(stream=True, **fields):
        names.append(event.type)
        assert type(event).__name__ != "BaseModel" and not event.model_extra, event
    assert (names[0], *names[-2:]) == ("message_start", "message_delta", "message_stop")
    assert names.count("content_block_start") == names.count("content_block_stop") == 3


def test_events_of_the_helper(scene: Scene) -> None:
    scene.say(f"<think>Hm.</think>Yes.{CALL}", step_tokens=1)
    fields: Any = {"model": MODEL, "messages": [USER], "max_tokens": 9, "tools": [TOOL]}
    with scene.sdk.messages.stream(**fields) as events:
        kinds = [event.type for event in events]
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)


@STREAM
def test_messages_in(scene: Scene, stream: bool) -> None:
    scene.say("Yes.")
    hint = {"type": "ephemeral"}
    system = [{"type": "text", "text": "A", "cache_control": hint}]
    turns: Any = [
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": [{"type": "text", "text": "C"}]},
        {"role": "user", "content": [{"type": "text", "text": "D", "cache_control": hint}]},
    ]
    create(scene.sdk, stream=stream, system=system, messages=turns)
    assert (
        scene.service.prompt.replace("None", "") == "[system]A[user]B[assistant]C[user]D[assistant]"
    )


@STREAM
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_out(scene: Scene, stream: bool, calls: int) -> None:
    scene.say(CALL * calls)
    message = create(scene.sdk, stream=stream, tools=[TOOL])
    assert message.stop_reason == "tool_use"
    assert [(b.type, b.name, b.input) for b in message.content] == [
        ("tool_use", "f", {"a": 1})
    ] * calls
    assert len({block.id for block in message.content}) == calls


@STREAM
def test_one_call_if_parallel_calls_are_off(scene: Scene, stream: bool) -> None:
    scene.say(CALL * 2)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = create(scene.sdk, stream=stream, tools=[TOOL], tool_choice=choice)
    assert len(message.content) == 1


@STREAM
def test_results_in(scene: Scene, stream: bool) -> None:
    scene.say(f"<think>Hm.</think>I look.{CALL}{CALL}")
    first = create(scene.sdk, stream=stream, tools=[TOOL])
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "0!"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "1!"}],
            "is_error": True,
        },
    ]
    scene.say("Done.")
    turns = [USER, {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": results})
    message = create(scene.sdk, stream=stream, messages=turns, tools=[TOOL])
    prompt = scene.service.prompt
    assert message.content[0].text == "Done." and prompt.count("[assistant]") == 2
    assert "I look.Hm." in prompt
    assert all(call.id in prompt and f"{at}!" in prompt for at, call in enumerate(calls))


@STREAM
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}], ids=str)
def test_forced_calls(demo: Any, stream: bool, choice: Any) -> None:
    fields = {"max_tokens": 200, "extra_body": {"seed": 3}}
    message = create(demo, stream=stream, tools=[TOOL], tool_choice=choice, **fields)
    assert {block.type for block in message.content} == {"tool_use"}
    assert all(block.input["a"] in (1, 2) for block in message.content)


def test_no_call_if_tools_are_off(scene: Scene) -> None:
    scene.say(CALL)
    message = create(scene.sdk, stream=False, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


@STREAM
def test_a_parsed_answer(demo: Any, stream: bool) -> None:
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a place: "}]}
    fields |= {"output_format": Place, "max_tokens": 150, "extra_body": {"seed": 3}}
    if stream:
        with demo.messages.stream(**fields) as events:
            message = events.get_final_message()
    else:
        message = demo.messages.parse(**fields)
    assert isinstance(message.parsed_output, Place)


@STREAM
def test_a_schema(demo: Any, stream: bool) -> None:
    shape = {"type": "json_schema", "schema": {"const": {"a": 7}}}
    message = create(demo, stream=stream, output_config={"format": shape})
    assert json.loads(message.content[0].text) == {"a": 7}


@STREAM
def test_thinking(scene: Scene, stream: bool) -> None:
    scene.say("<think>Hm, well.</think>Yes.", step_tokens=1)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = create(scene.sdk, stream=stream, thinking=thinking, max_tokens=2000)
    thought, text = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm, well.") and thought.signature
    assert text.text == "Yes." and message.usage.output_tokens_details.thinking_tokens > 3
    turns = [USER, {"role": "assistant", "content": message.content}, USER]
    create(scene.sdk, stream=stream, messages=turns)
    assert "Yes.Hm, well." in scene.service.prompt


@STREAM
def test_thinking_can_be_hidden_and_off(scene: Scene, stream: bool) -> None:
    scene.say("<think>Hm, well.</think>Yes.")
    hidden = {"type": "adaptive", "display": "omitted"}
    message = create(scene.sdk, stream=stream, thinking=hidden)
    assert [block.type for block in message.content] == ["text"]
    create(scene.sdk, stream=stream, thinking={"type": "disabled"})


@STREAM
def test_stops(scene: Scene, stream: bool) -> None:
    scene.say("Yes, I STOP here")
    message = create(scene.sdk, stream=stream, stop_sequences=["STOP", "x"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text.rstrip() == "Yes, I"
    scene.service.reason = FinishReason.LENGTH
    message = create(scene.sdk, stream=stream, max_tokens=3)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    message = create(scene.sdk, stream=stream, max_tokens=99)
    assert message.stop_reason == "model_context_window_exceeded"


def test_a_count(demo: Any) -> None:
    turns = [{"role": "user", "content": "def f("}]
    counted = demo.messages.count_tokens(
        model=MODEL, messages=turns, system="x", tools=[TOOL], tool_choice={"type": "any"}
    )
    message = create(demo, stream=False, messages=turns, system="x", max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_beta_client(scene: Scene) -> None:
    scene.say("<think>Hm.</think>Yes.")
    fields: Any = {"model": MODEL, "messages": [USER], "max_tokens": 99, "betas": ["x-2025-01-01"]}
    assert scene.sdk.beta.messages.create(**fields).content[1].text == "Yes."
    with scene.sdk.beta.messages.stream(**fields) as events:
        assert events.get_final_message().content[1].text == "Yes."


@STREAM
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is not allowed"),
        ({"extra_body": {"temperature": -1}}, "temperature: "),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0..type: 'web_",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0..type: 'bash_"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages: continuing"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "http://x"}}
                        ],
                    }
                ]
            },
            r"messages.0..content.0..type: 'image'",
        ),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences: "),
    ],
    ids=str,
)
def test_errors(scene: Scene, stream: bool, fields: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        create(scene.sdk, stream=stream, **fields)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@STREAM
def test_other_errors(scene: Scene, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served"):
        create(scene.sdk, stream=stream, model="other")
    scene.service.error, scene.service.at_once = OverloadedError("full", 7), True
    kind = anthropic.APIStatusError if stream else anthropic.InternalServerError
    with pytest.raises(kind) as caught:
        create(scene.sdk, stream=stream)
    assert caught.value.status_code == (200 if stream else 503)
    assert caught.value.body["error"] == {"type": "overloaded_error", "message": "full"}


def test_keys() -> None:
    with (
        scripted_server(keys=KeyRing(["secret"])) as other,
        sdk_of(other.client) as stranger,
        sdk_of(other.client, api_key="secret") as friend,
        sdk_of(other.client, api_key=None, auth_token="secret") as bearer,
    ):
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            create(stranger, stream=False)
        assert create(friend, stream=False) and create(bearer, stream=True)
        assert friend.messages.count_tokens


def test_a_stream_that_fails(scene: Scene) -> None:
    scene.say("Yes, and more")
    scene.service.error = CUT_ERROR
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        create(scene.sdk, stream=True)


def test_a_client_that_leaves(demo: Any, demo_client: Client) -> None:
    fields: Any = {"model": MODEL, "messages": [USER], "max_tokens": 400}
    for _ in range(2):
        with demo.messages.stream(extra_body={"ignore_eos": True}, **fields) as events:
            assert next(iter(events)).type == "message_start"
    wait_until(lambda: not demo_client.get("/health")[1]["requests"])


def test_texts_are_those_of_chats(demo: Any, demo_client: Client) -> None:
    turns = [{"role": "user", "content": "def f("}]
    for seed in (1, 2):
        body = {"messages": turns, "max_tokens": 20, "seed": seed}
        _, chat, _ = demo_client.post(body, "/v1/chat/completions")
        for stream in (False, True):
            fields: Any = {"messages": turns, "max_tokens": 20, "extra_body": {"seed": seed}}
            message = create(demo, stream=stream, **fields)
            assert message.content[0].text == chat["choices"][0]["message"]["content"]


def test_many_at_once(demo_client: Client) -> None:
    async def run() -> list[str]:
        url = f"http://127.0.0.1:{demo_client.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as sdk:

            async def one(at: int) -> str:
                turns: Any = [{"role": "user", "content": f"def f{at}(x):"}]
                fields: Any = {"model": MODEL, "messages": turns, "max_tokens": 16}
                async with sdk.messages.stream(extra_body={"seed": at}, **fields) as events:
                    return str(await events.get_final_text())

            return await asyncio.gather(*map(one, range(8)))

    assert len(asyncio.run(run())) == 8
