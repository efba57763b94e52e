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
import urllib.request
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

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        calls.clear()
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
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


def post(url: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a streamed call."""
    head = {"content-type": "application/json", "x-api-key": "x", "anthropic-beta": "tools-1"}
    request = urllib.request.Request(url, json.dumps(body | {"stream": True}).encode(), head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def test_a_history_like_codex(url: str) -> None:
    """Instructions and a developer's item, reasoning of another provider, results in another
    order, tools that only OpenAI has."""
    call: Any = {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}'}
    body: Any = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [_input("Sandbox: read-only.")]},
            {"type": "message", "role": "user", "content": [_input("# AGENTS.md"), _input("Go.")]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABo4"},
            call | {"call_id": "call_a"},
            call | {"call_id": "call_b"},
            {"type": "function_call_output", "call_id": "call_b", "output": "b.txt"},
            {"type": "function_call_output", "call_id": "call_a", "output": [_input("a.txt")]},
            {"type": "message", "role": "assistant", "content": [_output("Two files.")]},
            {"type": "message", "role": "user", "content": [_input("Go on.")]},
        ],
        "tools": [
            {"type": "function", "strict": False, "name": "shell", "parameters": SHELL},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-session",
        "max_output_tokens": 12,
    }
    events = post(f"{url}/v1/responses", body)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    again = post(f"{url}/v1/responses", body)[-1]["response"]["usage"]
    assert again["input_tokens_details"]["cached_tokens"] > 0.8 * again["input_tokens"]


SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
}


def _input(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def _output(text: str) -> dict[str, str]:
    return {"type": "output_text", "text": text}


def test_a_history_like_claude_code(url: str) -> None:
    """A first block that changes with every call, cache marks, thoughts, and parallel results with
    a reminder after them."""
    name = "mcp__plugin_a-long-name-of-a-server_a-long-name-of-a-server__and_a_tool_of_it"
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks: Any = [
        {"type": "thinking", "thinking": "Two files.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "EsoBCkYI"},
        {"type": "tool_use", "id": "toolu_a", "name": name, "input": {"path": "a"}},
        {"type": "tool_use", "id": "toolu_b", "name": name, "input": {"path": "b"}},
    ]
    result: Any = {"type": "tool_result", "content": [{"type": "text", "text": "text"}]}
    results: Any = [
        result | {"tool_use_id": "toolu_b"},
        result | {"tool_use_id": "toolu_a"} | mark,
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
    ]

    def body(changing: str) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.0; cch={changing};"
        long = {"type": "text", "text": "You are an agent. " * 40} | mark
        return {
            "model": MODEL,
            "system": [{"type": "text", "text": billing}, long],
            "messages": [
                {"role": "user", "content": "Read both."},
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": results},
            ],
            "tools": [{"name": name, "description": "d", "input_schema": {"type": "object"}}],
            "metadata": {"user_id": "a"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 1100,
            "stop_sequences": ["e"],
        }

    events = post(f"{url}/v1/messages?beta=true", body("a1b2c"))
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    events = post(f"{url}/v1/messages?beta=true", body("d3e4f"))
    usage = next(event["usage"] for event in events if event["type"] == "message_delta")
    usage = events[0]["message"]["usage"] | usage
    assert usage["cache_read_input_tokens"] > 4 * usage["input_tokens"]
