"""Attacks on the Responses API, its store, and the Messages API, and attacks that hold memory,
workers or grammars, so that others would have to wait."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tests.hostile.attacker import Target, attack, whole
from tests.hostile.connections import leave_unread

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
WORD = "def f(x):\n    return x\n"
MANY_PARTS = 120_000  # of a body of less than 8 MiB
LARGE_BYTES = 7_500_000
HOLD_S = 3.0
# Parts that a chat template takes long to render.
PARTS = b'{"role":"developer","content":""},{"role":"function","content":""},'
USER: dict[str, Any] = {"role": "user", "content": WORD}


@attack("200 400 404 405 408")
def conversations(target: Target) -> None:
    """Store responses of many sizes, continue and delete them, and name those of others."""
    rng = target.rng
    tools = [{"type": "function", "name": "f", "description": "d" * rng.choice([1, 1_000_000])}]
    body: dict[str, Any] = {"max_output_tokens": 2, "user": "u" * 10_000, "stream": False}
    body |= {"tools": tools, "tool_choice": "none"}
    body |= {"metadata": {str(i): "m" * 500 for i in range(16)}}
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


@attack("200 400 413")
def many_parts(target: Target) -> None:
    """Send conversations of many parts, of which each costs something to translate."""
    part, block = {"type": "input_text", "text": ""}, {"type": "text", "text": ""}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    system = [block | {"x": 1}] * MANY_PARTS

    def user(content: list[Any]) -> list[Any]:
        return [{"role": "user", "content": content}]

    bodies: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": [USER] * MANY_PARTS}),
        (RESPONSES, {"input": user([part] * MANY_PARTS)}),
        (RESPONSES, {"input": [call] * (MANY_PARTS // 2)}),
        (RESPONSES, {"input": [{"a": 1}] * MANY_PARTS}),
        (MESSAGES, {"messages": [USER] * MANY_PARTS}),
        (MESSAGES, {"messages": user([block] * MANY_PARTS)}),
        (MESSAGES, {"messages": user([result] * (MANY_PARTS // 3))}),
        (MESSAGES, {"messages": [USER], "system": system}),
    ]
    path, body = target.rng.choice(bodies)
    counted = f"{path}/{'input_tokens' if path == RESPONSES else 'count_tokens'}"
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    content = json.dumps(body | length, separators=(",", ":"))
    target.post(content.encode(), target.rng.choice([path, counted]))


@attack("200 400 413")
def deep_parts(target: Target) -> None:
    """Nest results of tools, schemas and arguments."""
    n = target.rng.choice([100, 1000, 200_000])
    nested = '{"type":"tool_result","content":[' * n + "]}" * n
    inner = '{"a":' * n + "1" + "}" * n
    call = {"type": "function_call", "name": "f", "call_id": "1", "arguments": inner}
    turn = '"messages":[{"role":"user","content":%s}]'
    for body in (
        f'{{"max_tokens":1,{turn % f"[{nested}]"}}}',
        f'{{"max_tokens":1,{turn % "1"},"tools":[{{"name":"f","input_schema":{inner}}}]}}',
        f'{{"max_tokens":1,"messages":{inner}}}',
    ):
        target.post(body.encode(), MESSAGES)
    shape = f'{{"format":{{"type":"json_schema","schema":{inner}}}}}'
    for body in (
        f'{{"max_output_tokens":1,"input":"x","text":{shape}}}',
        f'{{"input":[{inner}],"metadata":{inner}}}',
        json.dumps({"input": [call], "max_output_tokens": 1}),
    ):
        target.post(body.encode(), RESPONSES)


@attack("200 400")
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
        fields = rng.sample(["system", "tools", "tool_choice", "thinking", "output_config"], 2)
        body: dict[str, Any] = {"messages": rng.choice([[turn, USER], content]), "max_tokens": 1}
        target.post(body | dict.fromkeys(fields, content), MESSAGES)
        fields = rng.sample(["instructions", "tools", "text", "reasoning", "include"], 2)
        body = {"input": rng.choice([[turn], content]), "max_output_tokens": 1}
        target.post(body | dict.fromkeys(fields, content), RESPONSES)


@attack("200 408")
def half_streams(target: Target) -> None:
    """Leave streams in the middle, and let their time end."""
    ends = {"ignore_eos": True, "stream": True}
    for path, call in (
        (RESPONSES, {"input": WORD, "max_output_tokens": 400}),
        (MESSAGES, {"messages": [USER], "max_tokens": 400}),
    ):
        for limit_s in (0.001, 0.05, 0.3):
            target.post(call | ends | {"timeout": limit_s}, path)


@attack("200 400 404")
def long_conversations(target: Target) -> None:
    """Continue a long stored conversation with many short calls."""
    call = {"type": "function_call", "call_id": "c" * 3_000_000, "name": "f", "arguments": "{}"}
    answer = target.post({"input": [call, USER], "max_output_tokens": 1}, RESPONSES)
    try:
        short = {"input": "y", "previous_response_id": json.loads(answer)["id"]}
    except (ValueError, KeyError):
        return
    calls = [partial(target.post, short, f"{RESPONSES}/input_tokens")] * 6
    target.at_once(
        [*calls, *[partial(target.post, short | {"max_output_tokens": 1}, RESPONSES)] * 6]
    )


@attack("left closed")
def echoes(target: Target) -> None:
    """Do not read responses that repeat megabytes of their request."""
    body = {"input": "x", "max_output_tokens": 2, "user": "u" * LARGE_BYTES}
    streams = [target.rng.random() < 0.7 for _ in range(4)]
    leave_unread(target, [whole(body | {"stream": on}, RESPONSES) for on in streams], HOLD_S)


@attack("200 408", large=True)
def bodies_of_open_calls(target: Target) -> None:
    """Let calls run long whose bodies have megabytes that do not matter."""
    body: dict[str, Any] = {"stream": True, "ignore_eos": True, "timeout": HOLD_S}
    body |= {"junk": "j" * (LARGE_BYTES // 2)}
    paths = [
        (CHAT, {"messages": [USER], "max_tokens": 300}),
        (RESPONSES, {"input": "x", "max_output_tokens": 300, "store": False}),
        (MESSAGES, {"messages": [USER], "max_tokens": 300}),
    ]
    path, call = target.rng.choice(paths)
    target.at_once([partial(target.post, body | call, path)] * 6)


@attack("200 400")
def unknown_members(target: Target) -> None:
    names = b",".join(b'"a%d":1' % i for i in range(target.rng.choice([4000, 640_000])))
    chat = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,%b}' % names
    target.post(chat, CHAT)
    target.post(chat, MESSAGES)
    target.post(b'{"input":"x","max_output_tokens":1,%b}' % names, RESPONSES)


@attack("200 400 408")
def slow_prompts(target: Target) -> None:
    """Send many conversations that take seconds to render, and let the time of some end."""
    count = target.rng.choice([20_000, 80_000])
    begin = b'{"max_tokens":1,"timeout":%g,"messages":[' % target.rng.choice([0.5, 60])
    heavy = begin + PARTS * count + b'{"role":"user","content":"a"}]}'
    target.at_once([partial(target.post, heavy, CHAT)] * 5)


@attack("200 400 408", large=True)
def grammars_of_its_own(target: Target) -> None:
    """Run a grammar of its own in each call."""

    def call(number: int) -> None:
        regex = f"[a-z ]{{200,400}}{target.rng.getrandbits(30)}{number}"
        body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"regex": regex}}
        target.post(body | {"stream": True, "timeout": 20})

    target.at_once([partial(call, number) for number in range(12)])


@attack("200")
def short_targets(target: Target) -> None:
    """Ask for gaps that no step, or few, can keep."""
    headers = {"x-slo-itl-ms": target.rng.choice(["1", "5", "17"])}
    call = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    target.at_once([partial(target.post, call, headers=headers)] * 3)
