"""The packages `openai` and `anthropic` as clients of all APIs, as their users use them. The model
is scripted, or it is the demo pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import openai
import pydantic
import pytest

from cbatch import LLM, SamplingParams
from cbatch.core.request.request import FinishReason
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import OverloadedError
from tests.server.agents import CALL, CUT_ERROR, Scripted, scripted_server
from tests.server.http_client import MODEL, Client, wait_until

anthropic: Any = pytest.importorskip("anthropic", reason="needs the package: pip install anthropic")
USER: Any = {"role": "user", "content": "Rome?"}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "f", "parameters": PARAMETERS}
FORMAT: Any = {"name": "x", "schema": {"const": {"a": 7}}, "strict": True}
# What calls say in each API: of chats, of responses, of messages.
TOOLS: Any = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", "strict": True, **FUNCTION}],
    "messages": [{"name": "f", "input_schema": PARAMETERS}],
}
CHOICES: Any = {
    "any": {"chat": "required", "responses": "required", "messages": {"type": "any"}},
    "f": {
        "chat": {"type": "function", "function": {"name": "f"}},
        "responses": {"type": "function", "name": "f"},
        "messages": {"type": "tool", "name": "f"},
    },
}
ONE_CALL: Any = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
SHAPE: Any = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    "responses": {"text": {"format": {"type": "json_schema", **FORMAT}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": FORMAT["schema"]}}},
}
SYSTEM: Any = {
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "responses": {"instructions": "Be brief."},
    "messages": {"system": "Be brief."},
}
APIS = pytest.mark.parametrize("api", TOOLS)
NEW = pytest.mark.parametrize("api", ["responses", "messages"])
STREAM = pytest.mark.parametrize("stream", [False, True])


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


class Seen(NamedTuple):
    """An answer as a package assembles it. `raw` is the package's object."""

    text: str
    thought: str
    calls: list[Any]  # arguments of `f`
    call_ids: list[str]
    reason: str
    raw: Any


def seen_in_chat(answer: Any) -> Seen:
    (choice,) = answer.choices
    message, calls = choice.message, choice.message.tool_calls or []
    thought = (message.model_extra or {}).get("reasoning") or ""
    arguments = [json.loads(call.function.arguments) for call in calls]
    assert {call.function.name for call in calls} <= {"f"}
    ids = [call.id for call in calls]
    return Seen(message.content or "", thought, arguments, ids, choice.finish_reason, answer)


def seen_in_response(answer: Any) -> Seen:
    calls = [item for item in answer.output if item.type == "function_call"]
    thoughts = [item.content[0].text for item in answer.output if item.type == "reasoning"]
    arguments = [json.loads(call.arguments) for call in calls]
    assert {call.name for call in calls} <= {"f"}
    ids = [call.call_id for call in calls]
    return Seen(answer.output_text, "".join(thoughts), arguments, ids, answer.status, answer)


def seen_in_message(answer: Any) -> Seen:
    def of(kind: str) -> list[Any]:
        return [block for block in answer.content if block.type == kind]

    texts, thoughts = (
        "".join(getattr(block, kind) for block in of(kind)) for kind in ("text", "thinking")
    )
    calls = [block.input for block in of("tool_use")]
    ids = [block.id for block in of("tool_use")]
    return Seen(texts, thoughts, calls, ids, answer.stop_reason, answer)


def fields_of(api: str, fields: dict[str, Any]) -> dict[str, Any]:
    if api == "responses":
        named = {"input": "Rome?", "max_output_tokens": 99}
        limit = fields.pop("max_tokens", None)
        fields |= {} if limit is None else {"max_output_tokens": limit}
    else:
        named = {"messages": [USER], "max_tokens": 99}
    return {"model": MODEL} | named | fields


def ask(sdk: Any, api: str, *, stream: bool, **fields: Any) -> Seen:
    fields = fields_of(api, fields)
    if api == "chat":
        if not stream:
            return seen_in_chat(sdk.chat.completions.create(**fields))
        with sdk.chat.completions.stream(**fields) as events:
            try:
                return seen_in_chat(events.get_final_completion())
            except openai.LengthFinishReasonError as error:
                return seen_in_chat(error.completion)
    if api == "responses":
        if not stream:
            return seen_in_response(sdk.responses.create(**fields))
        with sdk.responses.stream(**fields) as events:
            *_, last = events
            return seen_in_response(last.response)
    if not stream:
        return seen_in_message(sdk.messages.create(**fields))
    with sdk.messages.stream(**fields) as events:
        return seen_in_message(events.get_final_message())


def sdk_of(client: Client, api: str, **options: Any) -> Any:
    kind = anthropic.Anthropic if api == "messages" else openai.OpenAI
    url = f"http://127.0.0.1:{client.port}{'' if api == 'messages' else '/v1'}"
    return kind(**({"base_url": url, "api_key": "-", "max_retries": 0} | options))


@pytest.fixture(scope="module")
def served() -> Iterator[Scripted]:
    with scripted_server() as scripted:
        yield scripted


class Scene(NamedTuple):
    """The script of the model, and a package."""

    service: Any
    sdk: Any
    api: str

    def say(self, text: str, *, step_tokens: int = 2) -> None:
        self.service.text, self.service.step_tokens = text, step_tokens

    def ask(self, *, stream: bool = False, **fields: Any) -> Seen:
        return ask(self.sdk, self.api, stream=stream, **fields)


@pytest.fixture
def scene(served: Scripted, api: str) -> Iterator[Scene]:
    with sdk_of(served.client, api) as sdk:
        yield Scene(served.service, sdk, api)
    served.restore()


@pytest.fixture
def demo(demo_client: Client, api: str) -> Iterator[Any]:
    with sdk_of(demo_client, api) as sdk:
        yield sdk


@STREAM
@APIS
def test_a_text_and_its_usage(scene: Scene, stream: bool) -> None:
    scene.say("Yes, it is.")
    more = {"stream_options": {"include_usage": True}} if scene.api == "chat" and stream else {}
    seen = scene.ask(stream=stream, **SYSTEM[scene.api], **more)
    assert (seen.text, seen.thought, seen.calls) == ("Yes, it is.", "", [])
    assert seen.reason in ("stop", "completed", "end_turn") and seen.raw.model == MODEL
    assert scene.service.prompt.startswith("[system]Be brief.")
    usage = json.dumps(seen.raw.usage.model_dump())
    assert '"cached_tokens": 3' in usage or '"cache_read_input_tokens": 3' in usage


@APIS
def test_raw_events_are_known_to_the_package(scene: Scene) -> None:
    scene.say(f"<think>Hm.</think>Yes, it is.{CALL}", step_tokens=1)
    fields = fields_of(scene.api, {"tools": TOOLS[scene.api], "stream": True})
    if scene.api == "chat":
        parts = list(scene.sdk.chat.completions.create(**fields))
        texts = [part.choices[0].delta.content or "" for part in parts]
    else:
        create = getattr(scene.sdk, scene.api).create
        parts = list(create(**fields))
        for event in parts:
            assert type(event).__name__ != "BaseModel", event
            assert not {*(event.model_extra or {})} - {"name"}, event
        names = [event.type for event in parts]
        begins = ("response.output_item.added", "content_block_start")
        assert sum(name in begins for name in names) == 3
        deltas = [event.delta for event in parts if event.type.endswith("delta")]
        texts = [each if isinstance(each, str) else getattr(each, "text", "") for each in deltas]
        if scene.api == "responses":
            kind = "response.output_text.delta"
            texts = [event.delta for event in parts if event.type == kind]
    assert "".join(texts) == "Yes, it is." and len(list(filter(None, texts))) > 5


@STREAM
@APIS
def test_thoughts_and_calls_there_and_back(scene: Scene, stream: bool) -> None:
    scene.say(f"<think>Hm.</think>I look.{CALL}{CALL}")
    tools = TOOLS[scene.api]
    first = scene.ask(stream=stream, tools=tools)
    assert (first.text, first.thought, first.calls) == ("I look.", "Hm.", [{"a": 1}] * 2)
    assert first.reason in ("tool_calls", "completed", "tool_use")
    one = scene.ask(stream=stream, tools=tools, **ONE_CALL[scene.api])
    assert len(one.calls) == 1
    results: list[Any] = []
    for at, call_id in enumerate(first.call_ids):
        kind = {"chat": "tool", "responses": "function_call_output", "messages": "tool_result"}
        if scene.api == "chat":
            results.append({"role": "tool", "tool_call_id": call_id, "content": f"{at}!"})
        elif scene.api == "responses":
            made = {"type": kind["responses"], "call_id": call_id, "output": f"{at}!"}
            results.append(made)
        else:
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": f"{at}!"})
    scene.say("Done.")
    if scene.api == "chat":
        reply = first.raw.choices[0].message.model_dump(exclude_none=True)
        more = {"messages": [USER, reply, *results]}
    elif scene.api == "responses":
        said = [item.model_dump(exclude_none=True) for item in first.raw.output]
        more = {"input": [USER, *said, *results]}
    else:
        said = {"role": "assistant", "content": first.raw.content}
        more = {"messages": [USER, said, {"role": "user", "content": results}]}
    assert scene.ask(stream=stream, tools=tools, **more).text == "Done."
    prompt = scene.service.prompt
    assert prompt.count("[assistant]") == 2 and "I look.Hm." in prompt
    assert all(each in prompt and f"{at}!" in prompt for at, each in enumerate(first.call_ids))
    if scene.api == "responses":  # the same by the id of the first response
        by_id = {"input": results, "previous_response_id": first.raw.id}
        assert scene.ask(stream=stream, tools=tools, **by_id).text == "Done."
        assert scene.service.prompt == prompt


@STREAM
@APIS
@pytest.mark.parametrize("choice", CHOICES)
def test_forced_calls(demo: Any, api: str, stream: bool, choice: str) -> None:
    fields = {"tools": TOOLS[api], "tool_choice": CHOICES[choice][api], "max_tokens": 200}
    seen = ask(demo, api, stream=stream, extra_body={"seed": 3}, **fields)
    assert seen.calls and all(call["a"] in (1, 2) for call in seen.calls) and not seen.text


@STREAM
@APIS
def test_schemas_and_parsed_answers(demo: Any, api: str, stream: bool) -> None:
    seen = ask(demo, api, stream=stream, extra_body={"seed": 5}, **SHAPE[api])
    assert json.loads(seen.text) == {"a": 7}
    fields = fields_of(api, {"max_tokens": 150, "extra_body": {"seed": 3}})
    kind = {"responses": "text_format", "messages": "output_format"}.get(api, "response_format")
    fields[kind] = Place
    if stream:
        parsed = ask(demo, api, stream=True, **fields).raw
    else:
        owner = {"chat": "chat.completions", "responses": "responses", "messages": "messages"}[api]
        parse = demo
        for name in owner.split("."):
            parse = getattr(parse, name)
        parsed = parse.parse(**fields)
    value = parsed.choices[0].message.parsed if api == "chat" else None
    value = value or getattr(parsed, "output_parsed", None) or getattr(parsed, "parsed_output", 0)
    assert isinstance(value, Place)


@STREAM
@APIS
def test_a_cut_reply_and_stops(scene: Scene, stream: bool) -> None:
    scene.say("Yes, I STOP here")
    if scene.api != "responses":
        name = "stop_sequences" if scene.api == "messages" else "stop"
        stopped = scene.ask(stream=stream, **{name: ["STOP", "x"]})
        assert stopped.text.rstrip() == "Yes, I" and stopped.reason in ("stop", "stop_sequence")
        assert scene.api == "chat" or stopped.raw.stop_sequence == "STOP"
    scene.service.reason = FinishReason.LENGTH
    cut = scene.ask(stream=stream, max_tokens=3)
    assert cut.text and cut.reason in ("length", "incomplete", "max_tokens")
    if scene.api == "responses":
        assert cut.raw.incomplete_details.reason == "max_output_tokens"
        assert cut.raw.output[0].status == "incomplete"
    if scene.api == "messages":
        assert scene.ask(stream=stream).reason == "model_context_window_exceeded"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"temperature": -1}, "temperature: "),
    ("chat", {"messages": []}, "messages: is empty"),
    ("responses", {"max_tokens": 0}, "max_output_tokens: 0 is not allowed"),
    ("responses", {"tools": [*TOOLS["responses"], {"type": "search"}]}, "tools.1..type: "),
    ("responses", {"background": True}, "background: "),
    ("messages", {"max_tokens": 0}, "max_tokens: 0 is not allowed"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0..type: 'bash_"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": "T"}]}, "messages: cont"),
]


@STREAM
@pytest.mark.parametrize(("api", "fields", "words"), WRONG, ids=str)
def test_errors_of_a_request(scene: Scene, stream: bool, fields: Any, words: str) -> None:
    package = anthropic if scene.api == "messages" else openai
    with pytest.raises(package.BadRequestError, match=words):
        scene.ask(stream=stream, **fields)


@APIS
def test_other_errors(scene: Scene) -> None:
    package: Any = anthropic if scene.api == "messages" else openai
    with pytest.raises(package.NotFoundError, match="is not served"):
        scene.ask(model="other")
    scene.say("Yes, and more")
    scene.service.error = CUT_ERROR
    if scene.api == "responses":
        (*_, last) = scene.sdk.responses.create(**fields_of("responses", {"stream": True}))
        assert last.type == "response.failed" and last.response.error.message == "it broke"
    else:
        with pytest.raises(package.APIError, match="it broke"):
            scene.ask(stream=True)
    scene.service.error, scene.service.at_once = OverloadedError("full", 7), True
    with pytest.raises(package.InternalServerError, match="full"):
        scene.ask()
    with scripted_server(keys=KeyRing(["secret"])) as other:
        other.service.text = "Yes."
        stranger = sdk_of(other.client, scene.api)
        with stranger, pytest.raises(package.AuthenticationError):
            ask(stranger, scene.api, stream=False)
        with sdk_of(other.client, scene.api, api_key="secret") as friend:
            assert ask(friend, scene.api, stream=False).text == "Yes."


@NEW
def test_thoughts_without_a_store_and_hidden_ones(scene: Scene) -> None:
    scene.say("<think>Hm, well.</think>Yes.")
    if scene.api == "messages":
        hidden = {"type": "adaptive", "display": "omitted"}
        assert scene.ask(thinking=hidden).thought == ""
        beta = scene.sdk.beta.messages.create(betas=["x-2025-01-01"], **fields_of("messages", {}))
        assert beta.content[1].text == "Yes."
        return
    include = ["reasoning.encrypted_content"]
    first = scene.ask(store=False, include=include).raw
    thought = first.output[0].model_dump(include={"type", "id", "summary", "encrypted_content"})
    scene.ask(input=[USER, thought, *first.output[1:], USER])
    assert "Yes.Hm, well." in scene.service.prompt
    with pytest.raises(openai.NotFoundError):
        scene.sdk.responses.retrieve(first.id)
    kept = scene.ask().raw
    assert scene.sdk.responses.retrieve(kept.id).output_text == "Yes."
    scene.sdk.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id.*expired"):
        scene.ask(previous_response_id=kept.id)


@NEW
def test_counts_and_clients_that_leave(demo: Any, demo_client: Client, api: str) -> None:
    if api == "messages":
        counted = demo.messages.count_tokens(model=MODEL, messages=[USER], system="x").input_tokens
        usage = ask(demo, api, stream=False, system="x", max_tokens=1).raw.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    else:
        count = demo.responses.input_tokens.count(model=MODEL, input="Rome?", instructions="x")
        usage = ask(demo, api, stream=False, instructions="x", max_tokens=1).raw.usage
        assert count.input_tokens == usage.input_tokens
    kind = demo.messages if api == "messages" else demo.responses
    stream = kind.create(stream=True, extra_body={"ignore_eos": True}, **fields_of(api, {}))
    assert next(iter(stream)).type in ("message_start", "response.created")
    stream.close()
    wait_until(lambda: not demo_client.get("/health")[1]["requests"])


OPTIONS: Any = {"max_tokens": 24, "temperature": 0.8, "seed": 7}


@APIS
def test_texts_are_those_of_the_model(demo: Any, demo_llm: LLM, api: str) -> None:
    (want,) = demo_llm.generate("Rome?", SamplingParams(**OPTIONS))
    options = {"max_tokens": 24, "extra_body": {"seed": 7, "temperature": 0.8}}
    for stream in (False, True):
        assert ask(demo, api, stream=stream, **options).text == want.text


@pytest.mark.parametrize("api", ["chat"])
def test_completions_and_models(demo: openai.OpenAI, demo_llm: LLM) -> None:
    (want,) = demo_llm.generate("Rome?", SamplingParams(n=2, logprobs=2, **OPTIONS))
    options: Any = {"model": MODEL, **OPTIONS}
    whole = demo.completions.create(prompt="Rome?", n=2, logprobs=2, **options)
    assert [choice.text for choice in whole.choices] == [c.text for c in want.choices]
    assert whole.usage is not None and whole.usage.prompt_tokens == len(want.prompt_token_ids)
    chat = demo.chat.completions.create(
        messages=[USER], n=2, logprobs=True, top_logprobs=2, **options
    )
    for choice, other, expected in zip(whole.choices, chat.choices, want.choices, strict=True):
        assert choice.logprobs and other.logprobs and other.logprobs.content and expected.logprobs
        logprobs = [each.logprob for each in expected.logprobs]
        assert choice.logprobs.token_logprobs == logprobs
        assert [each.logprob for each in other.logprobs.content] == logprobs
    more: Any = {"stream_options": {"include_usage": True}, "n": 2, "stream": True}
    texts = ["", ""]
    *chunks, last = demo.completions.create(prompt="Rome?", **more, **options)
    for chunk in chunks:
        for part in chunk.choices:
            texts[part.index] += part.text
    assert texts == [choice.text for choice in want.choices] and len(chunks) > 6
    assert last.usage and last.usage.completion_tokens == sum(
        len(choice.token_ids) for choice in want.choices
    )
    extra = {"top_k": 1, "max_lookahead": 0, "colour": 1}
    raw = demo.completions.with_raw_response.create(prompt="x", extra_body=extra, **options)
    assert raw.headers["x-cbatch-ignored-fields"] == "colour"
    greedy = demo.completions.create(prompt="x", **{**options, "temperature": 0})
    assert raw.parse().choices[0].text == greedy.choices[0].text
    assert [model.id for model in demo.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        demo.models.retrieve("other")


def test_many_at_once_from_asyncio(demo_client: Client, demo_llm: LLM) -> None:
    prompts = [f"def function_{i}(x):\n" for i in range(8)]
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
    want = [completion.text for completion in demo_llm.generate(prompts, params)]
    options: Any = {"model": MODEL, "max_tokens": 16}
    options |= {"extra_body": {"seed": 3, "temperature": 0.8}}
    url = f"http://127.0.0.1:{demo_client.port}"

    async def chat(sdk: openai.AsyncOpenAI, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        create = sdk.chat.completions.create
        parts = await create(messages=messages, stream=True, **options)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def message(sdk: Any, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        async with sdk.messages.stream(messages=messages, **options) as events:
            return str(await events.get_final_text())

    async def run() -> tuple[list[str], list[str]]:
        own: Any = {"api_key": "-", "max_retries": 0}
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", **own) as one,
            anthropic.AsyncAnthropic(base_url=url, **own) as two,
        ):
            chats = asyncio.gather(*(chat(one, prompt) for prompt in prompts))
            messages = asyncio.gather(*(message(two, prompt) for prompt in prompts))
            return await chats, await messages

    assert asyncio.run(run()) == (want, want)
