"""The `openai` package's client of the Responses API, as its users use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import openai
import pydantic
import pytest

from cbatch.core.request.request import FinishReason
from cbatch.server.http.keys import KeyRing
from tests.server.agent_servers import CALL, CUT_ERROR, Scripted, scripted_server
from tests.server.http_client import MODEL, Client, wait_until

TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}
STREAM = pytest.mark.parametrize("stream", [False, True])


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


class Scene(NamedTuple):
    """The script of the model, and a client."""

    service: Any
    client: Client
    sdk: openai.OpenAI

    def say(self, text: str, *, step_tokens: int = 2) -> None:
        self.service.text, self.service.step_tokens = text, step_tokens


def sdk_of(client: Client, **options: Any) -> Any:
    url = f"http://127.0.0.1:{client.port}/v1"
    return openai.OpenAI(**({"base_url": url, "api_key": "-", "max_retries": 0} | options))


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
def demo(demo_client: Client) -> Iterator[openai.OpenAI]:
    with sdk_of(demo_client) as sdk:
        yield sdk


def create(sdk: openai.OpenAI, *, stream: bool, **fields: Any) -> Any:
    """Return the response, as the package assembles it."""
    fields = {"model": MODEL, "input": "Rome?"} | fields
    if not stream:
        return sdk.responses.create(**fields)
    with sdk.responses.stream(**fields) as events:
        return events.get_final_response()


@STREAM
def test_text(scene: Scene, stream: bool) -> None:
    scene.say("Yes, it is.")
    response = create(scene.sdk, stream=stream, instructions="Be brief.")
    assert (response.output_text, response.status) == ("Yes, it is.", "completed")
    assert scene.service.prompt.startswith("[system]Be brief.")
    assert (response.object, response.model, response.error) == ("response", MODEL, None)
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > usage.input_tokens
    assert usage.input_tokens_details.cached_tokens == 3


def test_deltas_add_up(scene: Scene) -> None:
    scene.say("Yes, it is.", step_tokens=1)
    deltas, snapshots, done = [], [], []
    with scene.sdk.responses.stream(model=MODEL, input="Rome?") as events:
        for event in events:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
                snapshots.append(event.snapshot)
            elif event.type == "response.output_text.done":
                done.append(event.text)
    assert len(deltas) > 5 and "".join(deltas) == snapshots[-1] == done[0] == "Yes, it is."


def test_raw_events_are_known_to_the_package(scene: Scene) -> None:
    scene.say(f"<think>Hm.</think>Yes.{CALL}")
    stream = scene.sdk.responses.create(model=MODEL, input="Rome?", tools=[TOOL], stream=True)
    names = []
    for event in stream:
        names.append(event.type)
        assert type(event).__name__ != "BaseModel", event
        assert not {*(event.model_extra or {})} - {"name"}, event
    assert (names[0], names[1], names[-1]) == (
        "response.created",
        "response.in_progress",
        "response.completed",
    )
    assert names.count("response.output_item.added") == 3


@STREAM
def test_messages_in(scene: Scene, stream: bool) -> None:
    scene.say("Yes.")
    turns: Any = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "E"}]},
    ]
    create(scene.sdk, stream=stream, input=turns)
    text = scene.service.prompt.replace("None", "")
    assert text == "[system]A[system]B[user]C[assistant]D[user]E[assistant]"


@STREAM
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_out(scene: Scene, stream: bool, calls: int) -> None:
    scene.say(CALL * calls)
    response = create(scene.sdk, stream=stream, tools=[TOOL])
    assert [item.type for item in response.output] == ["function_call"] * calls
    assert [item.name for item in response.output] == ["f"] * calls
    assert [json.loads(item.arguments) for item in response.output] == [{"a": 1}] * calls
    assert len({item.call_id for item in response.output}) == calls


@STREAM
def test_one_call_if_parallel_calls_are_off(scene: Scene, stream: bool) -> None:
    scene.say(CALL * 2)
    response = create(scene.sdk, stream=stream, tools=[TOOL], parallel_tool_calls=False)
    assert len(response.output) == 1 and response.parallel_tool_calls is False


@STREAM
def test_results_in(scene: Scene, stream: bool) -> None:
    scene.say(f"<think>Hm.</think>{CALL}{CALL}")
    first = create(scene.sdk, stream=stream, tools=[TOOL])
    items = [{"role": "user", "content": "Rome?"}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{at}!"}
        for at, call in enumerate(calls)
    ]
    scene.say("Done.")
    assert create(scene.sdk, stream=stream, input=items, tools=[TOOL]).output_text == "Done."
    prompt = scene.service.prompt
    assert prompt.count("[assistant]") == 2 and "Hm." in prompt
    assert all(call.call_id in prompt and f"{at}!" in prompt for at, call in enumerate(calls))
    # The same by the id of the first response.
    last = create(
        scene.sdk, stream=stream, input=items[-2:], tools=[TOOL], previous_response_id=first.id
    )
    assert last.output_text == "Done." and scene.service.prompt == prompt


def test_deltas_of_arguments(scene: Scene) -> None:
    scene.say(CALL)
    with scene.sdk.responses.stream(model=MODEL, input="x", tools=[TOOL]) as events:
        arguments = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads(arguments[-1].snapshot) == {"a": 1}


@STREAM
def test_a_tool_of_the_package(scene: Scene, stream: bool) -> None:
    class f(pydantic.BaseModel):  # noqa: N801
        a: int

    scene.say(CALL)
    tools: Any = [openai.pydantic_function_tool(f)]
    if stream:
        with scene.sdk.responses.stream(model=MODEL, input="x", tools=tools) as events:
            response: Any = events.get_final_response()
    else:
        response = scene.sdk.responses.parse(model=MODEL, input="x", tools=tools)
    assert response.output[0].parsed_arguments == f(a=1)


@STREAM
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=str)
def test_forced_calls(demo: openai.OpenAI, stream: bool, choice: Any) -> None:
    fields = {"max_output_tokens": 200, "extra_body": {"seed": 3}}
    response = create(demo, stream=stream, tools=[TOOL], tool_choice=choice, **fields)
    assert {item.type for item in response.output} == {"function_call"}
    assert all(json.loads(item.arguments)["a"] in (1, 2) for item in response.output)


@STREAM
def test_a_parsed_answer(demo: openai.OpenAI, stream: bool) -> None:
    fields: Any = {"model": MODEL, "input": "a place: ", "extra_body": {"seed": 3}}
    fields |= {"text_format": Place, "max_output_tokens": 150}
    if stream:
        with demo.responses.stream(**fields) as events:
            response: Any = events.get_final_response()
    else:
        response = demo.responses.parse(**fields)
    assert isinstance(response.output_parsed, Place)


@STREAM
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_json(demo: openai.OpenAI, stream: bool, kind: str) -> None:
    shape: Any = {"type": kind}
    if kind == "json_schema":
        shape |= {"name": "x", "schema": {"const": {"a": 7}}, "strict": True}
    response = create(
        demo, stream=stream, input="x = ", text={"format": shape}, extra_body={"seed": 5}
    )
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)
    assert response.text.format.type == kind


@STREAM
def test_reasoning(scene: Scene, stream: bool) -> None:
    scene.say("<think>Hm, well.</think>Yes.", step_tokens=1)
    response = create(scene.sdk, stream=stream, reasoning={"effort": "low"})
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm, well.")
    assert message.content[0].text == response.output_text == "Yes."
    assert response.usage.output_tokens_details.reasoning_tokens > 3
    assert response.reasoning.effort == "low"


def test_deltas_of_reasoning(scene: Scene) -> None:
    scene.say("<think>Hm, well.</think>Yes.", step_tokens=1)
    with scene.sdk.responses.stream(model=MODEL, input="x") as events:
        deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == "Hm, well."


@STREAM
def test_reasoning_without_a_store(scene: Scene, stream: bool) -> None:
    scene.say("<think>Hm, well.</think>Yes.")
    include = ["reasoning.encrypted_content"]
    first = create(scene.sdk, stream=stream, store=False, include=include)
    thought = first.output[0].model_dump(include={"type", "id", "summary", "encrypted_content"})
    turn = {"role": "user", "content": "x"}
    create(scene.sdk, stream=stream, input=[turn, thought, *first.output[1:], turn])
    assert "Yes.Hm, well." in scene.service.prompt
    with pytest.raises(openai.NotFoundError):
        scene.sdk.responses.retrieve(first.id)


@STREAM
def test_stored_responses(scene: Scene, stream: bool) -> None:
    scene.say("Yes.")
    first = create(scene.sdk, stream=stream)
    again = scene.sdk.responses.retrieve(first.id)
    assert again.output_text == "Yes." and again.usage == first.usage
    scene.say("No.")
    second = create(scene.sdk, stream=stream, input="Sure?", previous_response_id=first.id)
    assert scene.service.prompt.replace("None", "").startswith("[user]Rome?[assistant]Yes.[user]")
    assert second.previous_response_id == first.id
    scene.sdk.responses.delete(first.id)
    for call in (scene.sdk.responses.retrieve, scene.sdk.responses.delete):
        with pytest.raises(openai.NotFoundError, match="expired"):
            call(first.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id.*expired"):
        create(scene.sdk, stream=stream, previous_response_id=first.id)
    create(scene.sdk, stream=stream, previous_response_id=second.id)


@STREAM
def test_a_cut_reply(scene: Scene, stream: bool) -> None:
    scene.say("Yes, and")
    scene.service.reason = FinishReason.LENGTH
    if stream:
        (*_, last) = scene.sdk.responses.create(model=MODEL, input="x", stream=True)
        assert last.type == "response.incomplete"
        response: Any = last.response
    else:
        response = create(scene.sdk, stream=False)
    assert response.status == "incomplete" and response.output_text == "Yes, and"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_a_stream_that_fails(scene: Scene) -> None:
    scene.say("Yes, and more")
    scene.service.error = CUT_ERROR
    (*_, last) = scene.sdk.responses.create(model=MODEL, input="x", stream=True)
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "it broke"


@STREAM
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [TOOL, {"type": "search"}]}, "tools[1].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
    ],
    ids=str,
)
def test_errors(scene: Scene, stream: bool, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        scene.sdk.responses.create(**({"model": MODEL, "input": "x", "stream": stream} | fields))
    assert caught.value.param == param and param in caught.value.message


def test_other_errors(scene: Scene) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served"):
        scene.sdk.responses.create(model="other", input="x")
    with (
        scripted_server(keys=KeyRing(["secret"])) as other,
        sdk_of(other.client) as stranger,
        sdk_of(other.client, api_key="secret") as friend,
    ):
        with pytest.raises(openai.AuthenticationError):
            create(stranger, stream=False)
        mine = create(friend, stream=False)
        assert friend.responses.retrieve(mine.id).id == mine.id


def test_a_client_that_leaves(demo: openai.OpenAI, demo_client: Client) -> None:
    fields: Any = {"extra_body": {"ignore_eos": True, "max_output_tokens": 400}}
    for _ in range(2):
        stream = demo.responses.create(model=MODEL, input="def f(", stream=True, **fields)
        assert next(iter(stream)).type == "response.created"
        stream.close()
    wait_until(lambda: not demo_client.get("/health")[1]["requests"])


def test_a_count(demo: openai.OpenAI) -> None:
    counted = demo.responses.input_tokens.count(model=MODEL, input="def f(", instructions="x")
    response = create(demo, stream=False, input="def f(", instructions="x", max_output_tokens=1)
    assert counted.input_tokens == response.usage.input_tokens


def test_texts_are_those_of_chats(demo: openai.OpenAI) -> None:
    for seed in (1, 2):
        extra = {"seed": seed}
        chat = demo.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "def f("}], max_tokens=20, **extra
        )
        for stream in (False, True):
            response = (
                create(demo, stream=stream, input="def f(", max_output_tokens=20, extra_body=extra)
                if not stream
                else _streamed(demo, extra)
            )
            assert response.output_text == chat.choices[0].message.content


def _streamed(sdk: openai.OpenAI, extra: Any) -> Any:
    """Return the last response of a stream, which may be cut."""
    fields: Any = {"model": MODEL, "input": "def f(", "max_output_tokens": 20}
    (*_, last) = sdk.responses.create(stream=True, extra_body=extra, **fields)
    return last.response


def test_many_at_once(demo_client: Client) -> None:
    async def run() -> list[str]:
        url = f"http://127.0.0.1:{demo_client.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as sdk:

            async def one(at: int) -> str:
                options: Any = {"model": MODEL, "extra_body": {"seed": at, "stop": ["\n"]}}
                async with sdk.responses.stream(input=f"def f{at}(x):", **options) as events:
                    return (await events.get_final_response()).output_text

            return await asyncio.gather(*map(one, range(8)))

    assert len(asyncio.run(run())) == 8
