"""Agent frameworks as clients of `cbatch serve smollm2` (make test-sdks).

SmolLM2 is too small to choose a tool, so calls are required and answers follow a schema. What the
frameworks send back between turns is their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytestmark = [pytest.mark.sdks, pytest.mark.filterwarnings("ignore")]
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
MODEL = "smollm2"
ASK = "What is the weather in Paris?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}
ANSWER = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["degrees"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("sdks") / "serve.log"
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", MODEL, "--port", "0"]
    command += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, stdout=file) as server:
        try:
            yield _address(server, log)
        finally:
            server.terminate()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(600):
        if match := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return match[0]
        assert server.poll() is None, log.read_text()
        asyncio.run(asyncio.sleep(0.1))
    raise AssertionError(log.read_text())


def tool_rounds(create: Any) -> Any:
    """Call a tool, send its result back, and return the last message, which follows a schema."""
    messages: list[Any] = [{"role": "user", "content": ASK}]
    tools = [{"type": "function", "function": FUNCTION}]
    one: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    first = create(messages=messages, tools=tools, **one).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert set(json.loads(call.function.arguments)) == {"city"}
    messages += [first.message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    return create(messages=messages, tools=tools, response_format=schema).choices[0].message


def answered(text: str) -> bool:
    return set(json.loads(text)) == {"degrees"}


def test_openai_chat(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)

    def create(**body: Any) -> Any:
        return client.chat.completions.create(model=MODEL, max_tokens=60, temperature=0, **body)

    last = tool_rounds(create)
    assert last.tool_calls or answered(last.content)
    body: Any = {"model": MODEL, "max_tokens": 30, "temperature": 0}
    messages: Any = [{"role": "user", "content": "Count to five."}]
    whole = client.chat.completions.create(messages=messages, **body)
    parts = client.chat.completions.create(messages=messages, stream=True, **body)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == whole.choices[0].message.content


def test_openai_responses(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    tool: Any = {"type": "function", "strict": True} | FUNCTION
    body: Any = {"model": MODEL, "max_output_tokens": 60, "temperature": 0, "tools": [tool]}
    first = client.responses.create(
        input=ASK, tool_choice="required", parallel_tool_calls=False, **body
    )
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": ANSWER, "strict": True}}
    last = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", text=text, **body
    )
    assert answered(last.output_text)
    reference: Any = [{"type": "item_reference", "id": last.output[-1].id}]
    again = client.responses.create(
        input=[*reference, {"role": "user", "content": "Again."}],
        **body | {"tools": [], "max_output_tokens": 4},
    )
    assert again.status == "incomplete" and again.incomplete_details.reason == "max_output_tokens"


def test_agents_sdk_with_tools_and_an_output_type(url: str) -> None:
    agents = pytest.importorskip("agents")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", degrees=(int, pydantic.Field(ge=0, le=99)))
    calls = []

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Weather of a city"""
        calls.append(city)
        return "21 degrees"

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        calls.clear()
        agent = agents.Agent(
            name="weather",
            instructions="Answer with the tool.",
            model=kind(model=MODEL, openai_client=client),
            tools=[agents.function_tool(get_weather)],
            output_type=answer,
            model_settings=agents.ModelSettings(
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=60,
                temperature=0,
            ),
        )
        result = asyncio.run(agents.Runner.run(agent, ASK, max_turns=6))
        assert calls, kind
        assert 0 <= result.final_output.degrees <= 99


def test_anthropic_tools_and_thinking(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    tool: Any = {"name": "get_weather", "description": "Weather", "input_schema": WEATHER}
    body: Any = {"model": MODEL, "max_tokens": 60, "tools": [tool]}
    body |= {"extra_body": {"temperature": 0}}
    turn: Any = {"role": "user", "content": ASK}
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(messages=[turn], tool_choice=one, **body)
    assert first.stop_reason == "tool_use"
    call = next(block for block in first.content if block.type == "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    thought: Any = {"type": "thinking", "thinking": "I need a tool.", "signature": "c2ln"}
    redacted: Any = {"type": "redacted_thinking", "data": "EsoBCkYI"}
    history: Any = [
        turn,
        {"role": "assistant", "content": [thought, redacted, *first.content]},
        {"role": "user", "content": [result]},
    ]
    whole = client.messages.create(messages=history, **body)
    with client.messages.stream(messages=history, **body) as stream:
        streamed = stream.get_final_message()
    assert [b.model_dump() for b in whole.content] == [b.model_dump() for b in streamed.content]


def test_langchain(url: str) -> None:
    chat_models = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    tools = pytest.importorskip("langchain_core.tools")

    @tools.tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Weather of a city"""
        return "21 degrees"

    for responses in (False, True):
        model = chat_models.ChatOpenAI(
            model=MODEL, base_url=f"{url}/v1", api_key="x", max_tokens=60, temperature=0,
            max_retries=0, use_responses_api=responses,
        )  # fmt: skip
        history = [messages.HumanMessage(ASK)]
        one = {"tool_choice": "required", "parallel_tool_calls": False, "strict": True}
        called = model.bind_tools([get_weather], **one).invoke(history)
        assert [call["name"] for call in called.tool_calls] == ["get_weather"], called
        history += [called, get_weather.invoke(called.tool_calls[0])]
        schema = {"title": "Answer", "description": "a"} | ANSWER
        structured = model.with_structured_output(schema, method="json_schema")
        assert set(structured.invoke(history)) == {"degrees"}


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")

    def create(**body: Any) -> Any:
        return litellm.completion(
            model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="x", max_tokens=60,
            temperature=0, **body,
        )  # fmt: skip

    last = tool_rounds(create)
    assert last.tool_calls or answered(last.content)
