"""The packages `openai` and `anthropic` as clients of all APIs, as their users use them. The model
is scripted, or it is the demo pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import openai
import pydantic
import pytest

from cbatch import LLM, SamplingParams
from cbatch.core.request.request import FinishReason
from cbatch.server.protocol.errors import OverloadedError, ServiceError
from tests.server.apis import CHAT, CHATS, MESSAGES, RESPONSES, TOOLS, USER, Reply, reply_of
from tests.server.http_client import MODEL, Client, wait_until
from tests.server.scripted import CALL, Scripted

anthropic: Any = pytest.importorskip("anthropic", reason="needs the package: pip install anthropic")
FORMAT: Any = {"name": "x", "schema": {"const": {"a": 7}}, "strict": True}
# What calls say in each API.
CHOICES: Any = {
    "any": {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}},
    "f": {
        CHAT: {"type": "function", "function": {"name": "f"}},
        RESPONSES: {"type": "function", "name": "f"},
        MESSAGES: {"type": "tool", "name": "f"},
    },
}
ONE_CALL: Any = {
    CHAT: {"parallel_tool_calls": False},
    RESPONSES: {"parallel_tool_calls": False},
    MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
SHAPE: Any = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    RESPONSES: {"text": {"format": {"type": "json_schema", **FORMAT}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": FORMAT["schema"]}}},
}
SYSTEM: Any = {
    CHAT: {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    RESPONSES: {"instructions": "Be brief."},
    MESSAGES: {"system": "Be brief."},
}
EACH_API = pytest.mark.parametrize("path", CHATS, ids=["chat", "responses", "messages"])
STREAM = pytest.mark.parametrize("stream", [False, True])


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


def fields_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    if path == RESPONSES:
        limit = fields.pop("max_tokens", 99)
        return {"model": MODEL, "input": "Rome?", "max_output_tokens": limit} | fields
    return {"model": MODEL, "messages": [USER], "max_tokens": 99} | fields


def owner_of(sdk: Any, path: str) -> Any:
    """Return the part of a package that calls an API."""
    return {CHAT: lambda: sdk.chat.completions, RESPONSES: lambda: sdk.responses}.get(
        path, lambda: sdk.messages
    )()


def answer_of(sdk: Any, path: str, *, stream: bool = False, **fields: Any) -> Any:
    """Return the answer as the package assembles it."""
    owner, fields = owner_of(sdk, path), fields_of(path, fields)
    if not stream:
        return owner.create(**fields)
    with owner.stream(**fields) as events:
        if path == MESSAGES:
            return events.get_final_message()
        if path == RESPONSES:
            *_, last = events
            return last.response
        try:
            return events.get_final_completion()
        except openai.LengthFinishReasonError as error:
            return error.completion


def read(path: str, answer: Any) -> Reply:
    return reply_of(path, answer.model_dump())


def sdk_of(client: Client, path: str, **options: Any) -> Any:
    kind = anthropic.Anthropic if path == MESSAGES else openai.OpenAI
    url = f"http://127.0.0.1:{client.port}{'' if path == MESSAGES else '/v1'}"
    return kind(**({"base_url": url, "api_key": "-", "max_retries": 0} | options))


class Scene(NamedTuple):
    """The script of the model, and a package."""

    service: Any
    sdk: Any
    path: str

    def say(self, text: str, *, step_tokens: int = 2) -> None:
        self.service.text, self.service.step_tokens = text, step_tokens

    def answer(self, **fields: Any) -> Any:
        return answer_of(self.sdk, self.path, **fields)

    def ask(self, **fields: Any) -> Reply:
        return read(self.path, self.answer(**fields))


@pytest.fixture
def scene(scripted: Scripted, path: str) -> Iterator[Scene]:
    with sdk_of(scripted.client, path) as sdk:
        yield Scene(scripted.service, sdk, path)


@pytest.fixture
def demo(demo_client: Client, path: str) -> Iterator[Any]:
    with sdk_of(demo_client, path) as sdk:
        yield sdk


@STREAM
@EACH_API
def test_a_text_and_its_usage(scene: Scene, stream: bool) -> None:
    scene.say("Yes, it is.")
    more = {"stream_options": {"include_usage": True}} if scene.path == CHAT and stream else {}
    reply = scene.ask(stream=stream, **SYSTEM[scene.path], **more)
    assert [(block.kind, block.text) for block in reply.blocks] == [("text", "Yes, it is.")]
    assert reply.reason in ("stop", "completed", "end_turn") and reply.body["model"] == MODEL
    assert scene.service.prompt.startswith("[system]Be brief.")
    usage = json.dumps(reply.body["usage"])
    assert '"cached_tokens": 3' in usage or '"cache_read_input_tokens": 3' in usage


@EACH_API
def test_raw_events_are_known_to_the_package(scene: Scene) -> None:
    scene.say(f"<think>Hm.</think>Yes, it is.{CALL}", step_tokens=1)
    fields = fields_of(scene.path, {"tools": TOOLS[scene.path], "stream": True})
    parts = list(owner_of(scene.sdk, scene.path).create(**fields))
    if scene.path == CHAT:
        texts = [part.choices[0].delta.content or "" for part in parts]
    else:
        for event in parts:
            assert type(event).__name__ != "BaseModel", event
            assert not {*(event.model_extra or {})} - {"name"}, event
        begins = ("response.output_item.added", "content_block_start")
        assert sum(event.type in begins for event in parts) == 3
        deltas = [event for event in parts if event.type.endswith("delta")]
        texts = [getattr(event.delta, "text", "") for event in deltas]
        if scene.path == RESPONSES:
            texts = [e.delta for e in deltas if e.type == "response.output_text.delta"]
    assert "".join(texts) == "Yes, it is." and len(list(filter(None, texts))) > 5


@STREAM
@EACH_API
def test_thoughts_and_calls_there_and_back(scene: Scene, stream: bool) -> None:
    path, tools = scene.path, TOOLS[scene.path]
    scene.say(f"<think>Hm.</think>I look.{CALL}{CALL}")
    answer = scene.answer(stream=stream, tools=tools)
    first = read(path, answer)
    assert (first.text, first.of("thought")) == ("I look.", ["Hm."])
    assert [json.loads(text) for text in first.of("call")] == [{"a": 1}] * 2
    assert first.reason in ("tool_calls", "completed", "tool_use")
    one = scene.ask(stream=stream, tools=tools, **ONE_CALL[path])
    assert len(one.of("call")) == 1
    scene.say("Done.")
    more: dict[str, Any]
    if path == CHAT:
        reply = answer.choices[0].message.model_dump(exclude_none=True)
        ids = [call.id for call in answer.choices[0].message.tool_calls]
        made = [{"role": "tool", "tool_call_id": i, "content": f"{i}!"} for i in ids]
        more = {"messages": [USER, reply, *made]}
    elif path == RESPONSES:
        said = [item.model_dump(exclude_none=True) for item in answer.output]
        ids = [item["call_id"] for item in said if "call_id" in item]
        made = [{"type": "function_call_output", "call_id": i, "output": f"{i}!"} for i in ids]
        more = {"input": [USER, *said, *made]}
    else:
        ids = [block.id for block in answer.content if block.type == "tool_use"]
        made = [{"type": "tool_result", "tool_use_id": i, "content": f"{i}!"} for i in ids]
        said = {"role": "assistant", "content": answer.content}
        more = {"messages": [USER, said, {"role": "user", "content": made}]}
    assert scene.ask(stream=stream, tools=tools, **more).text == "Done."
    prompt = scene.service.prompt
    assert prompt.count("[assistant]") == 2 and "I look.Hm." in prompt
    assert len(ids) == 2 and all(each in prompt and f"{each}!" in prompt for each in ids)
    if path == RESPONSES:  # the same by the id of the first response
        by_id = {"input": made, "previous_response_id": answer.id}
        assert scene.ask(stream=stream, tools=tools, **by_id).text == "Done."
        assert scene.service.prompt == prompt


@STREAM
@EACH_API
def test_forced_calls(demo: Any, path: str, stream: bool) -> None:
    for choice in CHOICES.values():
        fields = {"tools": TOOLS[path], "tool_choice": choice[path], "max_tokens": 60}
        answer = answer_of(demo, path, stream=stream, extra_body={"seed": 3}, **fields)
        reply = read(path, answer)
        assert reply.of("call") and not reply.text
        assert all(json.loads(text)["a"] == 1 for text in reply.of("call")[:1])


@STREAM
@EACH_API
def test_schemas_and_parsed_answers(demo: Any, path: str, stream: bool) -> None:
    fields = {"extra_body": {"seed": 3}, "max_tokens": 150}
    answer = answer_of(demo, path, stream=stream, **fields, **SHAPE[path])
    assert json.loads(read(path, answer).text) == {"a": 7}
    kind = {RESPONSES: "text_format", MESSAGES: "output_format"}.get(path, "response_format")
    if stream:
        parsed = answer_of(demo, path, stream=True, **fields, **{kind: Place})
    else:
        parsed = owner_of(demo, path).parse(**fields_of(path, fields | {kind: Place}))
    value = parsed.choices[0].message.parsed if path == CHAT else None
    value = value or getattr(parsed, "output_parsed", None) or getattr(parsed, "parsed_output", 0)
    assert isinstance(value, Place)


@STREAM
@EACH_API
def test_a_cut_reply_and_stops(scene: Scene, stream: bool) -> None:
    scene.say("Yes, I STOP here")
    if scene.path != RESPONSES:
        name = "stop_sequences" if scene.path == MESSAGES else "stop"
        stopped = scene.ask(stream=stream, **{name: ["STOP", "x"]})
        assert stopped.text.rstrip() == "Yes, I" and stopped.reason in ("stop", "stop_sequence")
        assert scene.path == CHAT or stopped.body["stop_sequence"] == "STOP"
    scene.service.reason = FinishReason.LENGTH
    cut = scene.ask(stream=stream, max_tokens=3)
    assert cut.text
    assert cut.reason in ("length", "incomplete max_output_tokens", "max_tokens")
    if scene.path == RESPONSES:
        assert cut.body["output"][0]["status"] == "incomplete"
    if scene.path == MESSAGES:
        assert scene.ask(stream=stream).reason == "model_context_window_exceeded"


@STREAM
@EACH_API
def test_errors(scene: Scene, stream: bool) -> None:
    package: Any = anthropic if scene.path == MESSAGES else openai
    with pytest.raises(package.BadRequestError, match="tokens: 0 is not allowed"):
        scene.ask(stream=stream, max_tokens=0)
    with pytest.raises(package.NotFoundError, match="is not served"):
        scene.ask(stream=stream, model="other")
    scene.service.error, scene.service.at_once = OverloadedError("full", 7), True
    if not stream:
        with pytest.raises(package.InternalServerError, match="full"):
            scene.ask()
        return
    scene.say("Yes, and more")
    scene.service.error, scene.service.at_once = ServiceError("it broke"), False
    if scene.path == RESPONSES:
        (*_, last) = scene.sdk.responses.create(**fields_of(RESPONSES, {"stream": True}))
        assert last.type == "response.failed" and last.response.error.message == "it broke"
    else:
        with pytest.raises(package.APIError, match="it broke"):
            scene.ask(stream=True)


@EACH_API
def test_thoughts_without_a_store_and_hidden_ones(scene: Scene) -> None:
    scene.say("<think>Hm, well.</think>Yes.")
    if scene.path == MESSAGES:
        hidden = {"type": "adaptive", "display": "omitted"}
        assert not scene.ask(thinking=hidden).of("thought")
        beta = scene.sdk.beta.messages.create(betas=["x-2025-01-01"], **fields_of(MESSAGES, {}))
        assert beta.content[1].text == "Yes."
    if scene.path != RESPONSES:
        return
    first = scene.answer(store=False, include=["reasoning.encrypted_content"])
    thought = first.output[0].model_dump(include={"type", "id", "summary", "encrypted_content"})
    scene.ask(input=[USER, thought, *first.output[1:], USER])
    assert "Yes.Hm, well." in scene.service.prompt
    with pytest.raises(openai.NotFoundError):
        scene.sdk.responses.retrieve(first.id)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_counts_and_clients_that_leave(demo: Any, demo_client: Client, path: str) -> None:
    if path == MESSAGES:
        counted = demo.messages.count_tokens(model=MODEL, messages=[USER], system="x").input_tokens
        usage = answer_of(demo, path, system="x", max_tokens=1).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    else:
        count = demo.responses.input_tokens.count(model=MODEL, input="Rome?", instructions="x")
        usage = answer_of(demo, path, instructions="x", max_tokens=1).usage
        assert count.input_tokens == usage.input_tokens
    create = owner_of(demo, path).create
    stream = create(stream=True, extra_body={"ignore_eos": True}, **fields_of(path, {}))
    assert next(iter(stream)).type in ("message_start", "response.created")
    stream.close()
    wait_until(lambda: not demo_client.get("/health")[1]["requests"])


OPTIONS: Any = {"max_tokens": 24, "temperature": 0.8, "seed": 7}


@EACH_API
def test_texts_are_those_of_the_model(demo: Any, demo_llm: LLM, path: str) -> None:
    (want,) = demo_llm.generate("Rome?", SamplingParams(**OPTIONS))
    options = {"max_tokens": 24, "extra_body": {"seed": 7, "temperature": 0.8}}
    for stream in (False, True):
        answer = answer_of(demo, path, stream=stream, **options)
        assert read(path, answer).text == want.text


@pytest.mark.parametrize("path", [CHAT])
def test_completions_and_models(demo: openai.OpenAI, demo_llm: LLM) -> None:
    (want,) = demo_llm.generate("Rome?", SamplingParams(n=2, logprobs=2, **OPTIONS))
    options: Any = {"model": MODEL, "prompt": "Rome?", "n": 2, **OPTIONS}
    whole = demo.completions.create(logprobs=2, **options)
    assert [choice.text for choice in whole.choices] == [c.text for c in want.choices]
    for choice, expected in zip(whole.choices, want.choices, strict=True):
        assert choice.logprobs and expected.logprobs
        assert choice.logprobs.token_logprobs == [each.logprob for each in expected.logprobs]
    texts = ["", ""]
    for chunk in demo.completions.create(stream=True, **options):
        for part in chunk.choices:
            texts[part.index] += part.text
    assert texts == [choice.text for choice in want.choices]
    raw = demo.completions.with_raw_response.create(extra_body={"colour": 1}, **options)
    assert raw.headers["x-cbatch-ignored-fields"] == "colour"
    assert [model.id for model in demo.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        demo.models.retrieve("other")
