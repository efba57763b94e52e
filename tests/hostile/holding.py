"""Attacks that hold memory, workers or grammars, so that others would have to wait."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from tests.hostile.attacker import Attack, Target, whole

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
LARGE_BYTES = 7_500_000
HOLD_S = 3.0
# Parts that a chat template takes long to render.
PARTS = b'{"role":"developer","content":""},{"role":"function","content":""},'
USER = [{"role": "user", "content": "x"}]


def long_conversations(target: Target) -> None:
    """Continue a long stored conversation with many short calls."""
    call = {"type": "function_call", "call_id": "c" * 3_000_000, "name": "f", "arguments": "{}"}
    answer = target.post({"input": [call, *USER], "max_output_tokens": 1}, RESPONSES)
    try:
        short = {"input": "y", "previous_response_id": json.loads(answer)["id"]}
    except (ValueError, KeyError):
        return
    calls = [partial(target.post, short, f"{RESPONSES}/input_tokens")] * 6
    target.at_once(
        [*calls, *[partial(target.post, short | {"max_output_tokens": 1}, RESPONSES)] * 6]
    )


def echoes(target: Target) -> None:
    """Do not read responses that repeat megabytes of their request."""
    body = {"input": "x", "max_output_tokens": 2, "user": "u" * LARGE_BYTES}
    with ExitStack() as stack:
        for _ in range(4):
            began_s = time.monotonic()
            stream = target.rng.random() < 0.7
            connection = stack.enter_context(
                target.open(whole(body | {"stream": stream}, RESPONSES))
            )
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            target.note("left", began_s)
        time.sleep(HOLD_S)


def bodies_of_open_calls(target: Target) -> None:
    """Let calls run long whose bodies have megabytes that do not matter."""
    junk, rng = "j" * (LARGE_BYTES // 2), target.rng
    body: dict[str, Any] = {"stream": True, "ignore_eos": True, "timeout": HOLD_S, "junk": junk}
    paths = [
        (CHAT, {"messages": USER, "max_tokens": 300}),
        (RESPONSES, {"input": "x", "max_output_tokens": 300, "store": False}),
        (MESSAGES, {"messages": USER, "max_tokens": 300}),
    ]
    path, call = rng.choice(paths)
    target.at_once([partial(target.post, body | call, path)] * 6)


def unknown_members(target: Target) -> None:
    names = b",".join(b'"a%d":1' % i for i in range(target.rng.choice([4000, 640_000])))
    chat = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
    for path, begin in (
        (CHAT, chat),
        (MESSAGES, chat),
        (RESPONSES, b'{"input":"x","max_output_tokens":1,'),
    ):
        target.post(begin + names + b"}", path)


def slow_prompts(target: Target) -> None:
    """Send many conversations that take seconds to render, and let the time of some end."""
    count = target.rng.choice([20_000, 80_000])
    begin = b'{"max_tokens":1,"timeout":%g,"messages":[' % target.rng.choice([0.5, 60])
    heavy = begin + PARTS * count + b'{"role":"user","content":"a"}]}'
    target.at_once([partial(target.post, heavy, CHAT)] * 5)


def own_grammars(target: Target) -> None:
    """Run a grammar of its own in each call."""

    def call(number: int) -> None:
        regex = f"[a-z ]{{200,400}}{target.rng.getrandbits(30)}{number}"
        body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"regex": regex}}
        target.post(body | {"stream": True, "timeout": 20})

    target.at_once([partial(call, number) for number in range(12)])


def short_targets(target: Target) -> None:
    """Ask for gaps that no step, or few, can keep."""
    headers = {"x-slo-itl-ms": target.rng.choice(["1", "5", "17"])}
    call = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    target.at_once([partial(target.post, call, headers=headers)] * 3)


ATTACKS = [
    Attack("long conversations", long_conversations, "200 400 404"),
    Attack("echoes", echoes, "left closed"),
    Attack("bodies of open calls", bodies_of_open_calls, "200 408", large=True),
    Attack("unknown members", unknown_members, "200 400"),
    Attack("slow prompts", slow_prompts, "200 400 408"),
    Attack("grammars of its own", own_grammars, "200 400 408", large=True),
    Attack("short targets", short_targets, "200"),
]
