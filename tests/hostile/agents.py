"""Attacks on the Responses API, its store, and the Messages API."""

from __future__ import annotations

import json
from typing import Any

from tests.hostile.attacker import Attack, Target

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
WORD = "def f(x):\n    return x\n"
MANY_PARTS = 120_000  # of a body of less than 8 MiB
USER: dict[str, Any] = {"role": "user", "content": WORD}


def conversations(target: Target) -> None:
    """Store responses of many sizes, continue and delete them, and name those of others."""
    rng = target.rng
    metadata = {str(i): "m" * 500 for i in range(16)}
    tools = [{"type": "function", "name": "f", "description": "d" * rng.choice([1, 1_000_000])}]
    body: dict[str, Any] = {"max_output_tokens": 2, "metadata": metadata, "user": "u" * 10_000}
    body |= {"tools": tools, "tool_choice": "none", "stream": False}
    last: str | None = None
    for _ in range(8):
        previous = {} if last is None else {"previous_response_id": last}
        answer = target.post(body | previous | {"input": WORD * rng.choice([1, 8])}, RESPONSES)
        try:
            last = json.loads(answer)["id"]
        except (ValueError, KeyError):
            break
    for name in (last, "resp_none", "..%2f", "a" * 9000, "%00"):
        target.post(body | {"input": "x", "previous_response_id": name}, RESPONSES)
        for method in ("GET", "DELETE", "DELETE"):
            target.post(b"", f"{RESPONSES}/{name}", method=method)


def many_parts(target: Target) -> None:
    """Send conversations of many parts, of which each costs something to translate."""
    part, block = {"type": "input_text", "text": ""}, {"type": "text", "text": ""}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": [USER] * MANY_PARTS}),
        (RESPONSES, {"input": [{"role": "user", "content": [part] * MANY_PARTS}]}),
        (RESPONSES, {"input": [call] * (MANY_PARTS // 2)}),
        (RESPONSES, {"input": [{"a": 1}] * MANY_PARTS}),
        (MESSAGES, {"messages": [USER] * MANY_PARTS}),
        (MESSAGES, {"messages": [{"role": "user", "content": [block] * MANY_PARTS}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [result] * (MANY_PARTS // 3)}]}),
        (MESSAGES, {"messages": [USER], "system": [block | {"x": 1}] * MANY_PARTS}),
    ]
    path, body = target.rng.choice(bodies)
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    content = json.dumps(body | length, separators=(",", ":"))
    target.post(content.encode(), target.rng.choice([path, _count(path)]))


def _count(path: str) -> str:
    return f"{path}/{'input_tokens' if path == RESPONSES else 'count_tokens'}"


def deep_parts(target: Target) -> None:
    """Nest results of tools, schemas and arguments."""
    n = target.rng.choice([100, 1000, 200_000])
    nested = '{"type":"tool_result","content":[' * n + "]}" * n
    inner = '{"a":' * n + "1" + "}" * n
    call = {"type": "function_call", "name": "f", "call_id": "1"}
    message = '{"max_tokens":1,"messages":[{"role":"user","content":[%s]}]}'
    target.post((message % nested).encode(), MESSAGES)
    for body in (
        '{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f",'
        f'"input_schema":{inner}}}]}}',
        f'{{"max_tokens":1,"messages":{inner}}}',
    ):
        target.post(body.encode(), MESSAGES)
    for body in (
        f'{{"max_output_tokens":1,"input":"x","text":{{"format":{{"type":"json_schema","schema":{inner}}}}}}}',
        f'{{"input":[{inner}],"metadata":{inner}}}',
        json.dumps({"input": [call | {"arguments": inner}], "max_output_tokens": 1}),
    ):
        target.post(body.encode(), RESPONSES)


def odd_blocks(target: Target) -> None:
    """Send blocks and items of wrong types, in every place where a block may be."""
    rng = target.rng
    values: list[Any] = [None, 1, "", [], {}, [[]], [None], {"type": None}, {"type": "text"}]
    values += [{"type": "image", "source": {}}, {"type": "tool_use"}, {"type": "reasoning"}]
    values += [{"type": "thinking", "thinking": 3}, {"type": "tool_result", "content": [[]]}]
    for _ in range(8):
        value = rng.choice(values)
        content = rng.choice([value, [value], [[value]]])
        role = rng.choice(["user", "assistant", "system", "tool", None])
        turn = {"role": role, "content": content}
        body: dict[str, Any] = {"messages": rng.choice([[turn, USER], content]), "max_tokens": 1}
        for field in rng.sample(["system", "tools", "tool_choice", "thinking", "output_config"], 2):
            body[field] = content
        target.post(body, MESSAGES)
        body = {"input": rng.choice([[turn], content]), "max_output_tokens": 1}
        for field in rng.sample(["instructions", "tools", "text", "reasoning", "include"], 2):
            body[field] = content
        target.post(body, RESPONSES)


def half_streams(target: Target) -> None:
    """Leave streams in the middle, and let their time end."""
    for path, length in ((RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens")):
        content = {"input": WORD} if path == RESPONSES else {"messages": [USER]}
        call = content | {length: 400, "ignore_eos": True, "stream": True}
        for limit_s in (0.001, 0.05, 0.3):
            target.post(call | {"timeout": limit_s}, path)


ATTACKS = [
    Attack("conversations", conversations, "200 400 404 405 408"),
    Attack("many parts", many_parts, "200 400 413"),
    Attack("deep parts", deep_parts, "200 400 413"),
    Attack("odd blocks", odd_blocks, "200 400"),
    Attack("half streams", half_streams, "200 408"),
]
