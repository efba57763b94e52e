"""Attacks of a hostile client: expensive calls, malformed bodies, and attacks that hold memory,
workers or grammars, so that others would have to wait. Calls that are made up from the OpenAPI
document are in `tests/server/test_fuzz`. Importing this module fills `ATTACKS`."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from cbatch.server.protocol.openapi import document
from tests.hostile import connections, grammars  # noqa: F401 - their attacks
from tests.hostile.attacker import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STREAM,
    WORD,
    Target,
    attack,
    head,
    leave_unread,
    whole,
)

MANY = 128  # the most choices of a call
LARGE_BYTES = 7_000_000  # of a body; beyond 8 MiB it is not read
MANY_PARTS = 120_000  # of a body of less than 8 MiB
HOLD_S = 3.0
PATHS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize", RESPONSES, MESSAGES)
USER: dict[str, Any] = {"role": "user", "content": WORD}
# Parts that a chat template takes long to render.
SLOW = b'{"role":"developer","content":""},{"role":"function","content":""},'


def _dense(body: dict[str, Any]) -> bytes:
    """Encode JSON without a space, to fit more content into as many bytes."""
    return json.dumps(body, separators=(",", ":")).encode()


# -- values that are large, deep or odd


@attack("200 400 413", large=True)
def lists_for_each_choice(target: Target) -> None:
    """Request many choices with lists. If calls that cannot be sent to the engine kept their
    places, the queue would stay full."""
    rng = target.rng
    base = {"prompt": "x", "n": rng.choice([16, MANY]), "max_tokens": 1}
    field = rng.choice(["banned_token_ids", "allowed_token_ids", "stop_token_ids"])
    stop = [
        "ab" * rng.choice([1, 128, 5000]) + str(i) for i in range(rng.choice([32, 33, 100_000]))
    ]
    bias = {str(i): rng.choice([-1, 1, 1e30]) for i in range(rng.choice([500, 5000, 400_000]))}
    schema = {"json": {"type": "integer", "maximum": 10**30}}
    lists = [{field: [1] * (LARGE_BYTES // rng.choice([7, 2]))}, {"logit_bias": bias}]
    lists += [{"stop": stop}, {"structured_outputs": schema}]
    target.post(_dense(base | rng.choice(lists)))


@attack("200 400 413")
def large_bodies(target: Target) -> None:
    """Send long texts, lists of ids, and conversations of parts that each cost a translation."""
    rng, text = target.rng, (WORD * (LARGE_BYTES // len(WORD) + 1))[:LARGE_BYTES]
    part, block = {"type": "input_text", "text": ""}, {"type": "text", "text": ""}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    one, short = [{"role": "user", "content": text}], {"max_tokens": 1}
    several = [*[[1]] * (LARGE_BYTES // 4)]
    names = {f"a{i}": 1 for i in range(rng.choice([4000, 400_000]))}  # unknown members
    bodies: list[tuple[str, dict[str, Any]]] = [
        *((COMPLETIONS, {"prompt": each} | short) for each in (text, [1] * 3_500_000, several)),
        (COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 8} | short),
        (COMPLETIONS, {"prompt": "\U0001f600" * 900, "echo": True} | short),
        ("/tokenize", {"prompt": text[:2_000_000], "return_token_strs": True}),
        ("/tokenize", {"prompt": "a" * LARGE_BYTES}),
        ("/detokenize", {"tokens": [5] * (LARGE_BYTES // 2)}),
        *((path, {"messages": one} | short) for path in ("/tokenize", CHAT)),
        *((path, {"messages": [USER], "input": "x"} | short | names) for path in PATHS[1::2]),
        *((RESPONSES, {"input": [each] * MANY_PARTS}) for each in (USER, {"a": 1})),
        (RESPONSES, {"input": [USER | {"content": [part] * MANY_PARTS}]}),
        (RESPONSES, {"input": [call] * (MANY_PARTS // 2)}),
        *((path, {"messages": [USER] * MANY_PARTS} | short) for path in (CHAT, MESSAGES)),
        (MESSAGES, {"messages": [USER | {"content": [result] * (MANY_PARTS // 3)}]} | short),
        (MESSAGES, {"messages": [USER], "system": [block | {"x": 1}] * MANY_PARTS} | short),
    ]
    for path, body in rng.sample(bodies, 2):
        counted = {RESPONSES: f"{path}/input_tokens", MESSAGES: f"{path}/count_tokens"}
        target.post(_dense(body), rng.choice([path, counted.get(path, path)]))


@attack("200 400 413 closed")
def deep_bodies(target: Target) -> None:
    """Nest fields, schemas, results of tools and arguments."""
    n = target.rng.choice([100, 5000, 200_000])
    inner, lists = '{"a":' * n + "1" + "}" * n, "[" * n + "1" + "]" * n
    schema = '{"properties":{"a":' * n + "{}" + "}}" * n
    results = '[{"type":"tool_result","content":' * n + "1" + "}]" * n
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    turn = '"max_tokens":1,"messages":[{"role":"user","content":%s}]'
    field = target.rng.choice(["prompt", "logit_bias", "response_format", "no_such"])
    plain = f'"prompt":"x","max_tokens":1,"{field}":'
    shape = f'{{"format":{{"type":"json_schema","schema":{inner}}}}}'
    for path, body in (
        *((COMPLETIONS, plain + each) for each in (inner, lists)),
        (CHAT, turn % '"x"' + f',"tools":[{tool}]'),
        (MESSAGES, turn % results),
        (MESSAGES, turn % "1" + f',"tools":[{{"name":"f","input_schema":{inner}}}]'),
        (RESPONSES, f'"max_output_tokens":1,"input":"x","text":{shape}'),
        (RESPONSES, f'"input":[{inner}],"metadata":{inner}'),
    ):
        target.post(f"{{{body}}}".encode()[:LARGE_BYTES], path)


@attack("200 400 404")
def random_bodies(target: Target) -> None:
    rng = target.rng
    right = json.dumps({"prompt": WORD, "max_tokens": 2, "stop": ["a"]}).encode()
    for _ in range(12):
        changed = bytearray(right)
        for _ in range(rng.choice([1, 2, 8])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = changed[: rng.randrange(1, len(changed) + 1)]
        noise = rng.randbytes(rng.choice([1, 100, 20_000]))
        sent = bytes(rng.choice([changed, cut, noise, b"\xff\xfe" + right, b""]))
        target.post(sent, rng.choice(PATHS))


@attack("200 400 404 408")
def odd_values(target: Target) -> None:
    """Send values of wrong types in fields, and in every place where a block or item may be."""
    rng = target.rng
    values: list[Any] = [None, True, -1, 0, 2**31, 2**63, 2**70, 1e308, -0.0, 1e-320, "", "\x00"]
    values += [[], {}, [[]], "a" * 70_000, ["a", 1], "\ud800", float("nan"), float("-inf")]
    values += [{"type": name} for name in (None, "text", "tool_use", "reasoning", "image")]
    values += [{"type": "thinking", "thinking": 3}, {"type": "tool_result", "content": [[]]}]
    written = [*map(json.dumps, values), "1e999", "01", '{"a":1,"a":2}', '"\udcff"', "2e0"]
    fields = [*document()["components"]["schemas"]["CompletionFields"]["properties"]]
    for field in rng.sample([*fields, "cache_salt", "best_of", "suffix", "no_such"], 6):
        body = f'{{"prompt":"x","max_tokens":2,"{field}":{rng.choice(written)}}}'
        target.post(body.encode("utf-8", "surrogateescape"))
    for path, places in (
        (MESSAGES, ("system", "tools", "tool_choice", "thinking", "output_config")),
        (RESPONSES, ("instructions", "tools", "text", "reasoning", "include")),
    ):
        content = rng.choice(values)
        content = rng.choice([content, [content], [[content]]])
        turn = {"role": rng.choice(["user", "assistant", "tool", None]), "content": content}
        body = {"max_tokens": 1, "messages": [turn, USER], "input": rng.choice([[turn], content])}
        target.post(body | dict.fromkeys(rng.sample(places, 2), content), path)


@attack("200 204 400 401 404 405 413 415 501 closed")
def odd_heads(target: Target) -> None:
    """Send odd paths, methods, content types and keys."""
    rng, body = target.rng, {"prompt": WORD, "max_tokens": 1}
    paths = [
        "/",
        "/v1",
        "/v1/models/none",
        "/../../etc/passwd",
        "/%00",
        "/%ff%fe",
        "/" + "a" * 9000,
    ]
    paths += ["/v1/completions/", "/metrics?a=b", "/v1/embeddings", "/openapi.json", "/v1/%2e%2e"]
    for path in rng.sample(paths, 5):
        method = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"])
        target.post(b"{}", path, method=method)
    for kind in ("text/plain", "", "application/json; charset=utf-16", "a" * 9000):
        target.post(body, headers={"Content-Type": kind})
    target.post(body, headers={"Content-Encoding": "gzip"})
    target.post(b"x" * (LARGE_BYTES + 2_000_000))
    for key in ("", "Bearer", "Bearer x", "Basic aG9zdGlsZQ==", "Bearer " + "k" * 20_000, "\xff"):
        target.post(body, headers={"Authorization": key})


# -- calls that hold places, memory, workers or grammars


@attack("200 400 404 405 408")
def conversations(target: Target) -> None:
    """Store responses of many sizes, continue and delete them, and name those of others. A long one
    is continued by many short calls at once."""
    rng, last = target.rng, None
    tools = [{"type": "function", "name": "f", "description": "d" * rng.choice([1, 1_000_000])}]
    body: dict[str, Any] = {"max_output_tokens": 2, "user": "u" * 10_000, "stream": False}
    body |= {"tools": tools, "tool_choice": "none"}
    body |= {"metadata": {str(i): "m" * 500 for i in range(16)}}
    call = {"type": "function_call", "call_id": "c" * 3_000_000, "name": "f", "arguments": "{}"}
    for content in (*[WORD] * 6, [call, USER]):
        previous = {} if last is None else {"previous_response_id": last}
        answer = target.post(body | previous | {"input": content}, RESPONSES)
        try:
            last = json.loads(answer)["id"]
        except (ValueError, KeyError):
            break
    short = {"input": "y", "previous_response_id": last, "max_output_tokens": 1}
    target.at_once([partial(target.post, short, RESPONSES)] * 8)
    for name in (last, "resp_none", "..%2f", "a" * 9000, "%00"):
        target.post(body | {"input": "x", "previous_response_id": name}, RESPONSES)
        for method in ("GET", "DELETE", "DELETE"):
            target.post(b"", f"{RESPONSES}/{name}", method=method)


@attack("200", large=True)
def many_choices(target: Target) -> None:
    """Request more choices than the queue has places, with all details about each token."""
    call = {"prompt": WORD, "n": 100, "max_tokens": 1, "logprobs": 20, "seed": 1}
    target.at_once([partial(target.post, call)] * 3)
    prompts = [f"{WORD}{i}" for i in range(MANY)]
    target.post({"prompt": prompts, "max_tokens": 1, "logprobs": 20, "stream": True})


@attack("200", large=True)
def crowd(target: Target) -> None:
    """Make more calls at once than the key's limit, with gaps that no step, or few, can keep."""
    headers = {"x-slo-itl-ms": target.rng.choice(["1", "5", "17"])}
    call = STREAM | {"max_tokens": 12}
    target.at_once([partial(target.post, call, headers=headers)] * 24)


@attack("200 408")
def short_times(target: Target) -> None:
    """Make calls whose time ends before the first token, or in the middle of the output."""
    ends = {"ignore_eos": True, "n": 4}
    for path, call in (
        (COMPLETIONS, ends | {"prompt": WORD, "max_tokens": 400}),
        (RESPONSES, {"ignore_eos": True, "input": WORD, "max_output_tokens": 400}),
        (MESSAGES, {"ignore_eos": True, "messages": [USER], "max_tokens": 400}),
    ):
        for limit_s in (0.001, 0.02, 0.3):
            target.post(call | {"timeout": limit_s, "stream": target.rng.random() < 0.5}, path)
    call = ends | {"prompt": WORD, "max_tokens": 400}
    target.post(call, headers={"x-envoy-expected-rq-timeout-ms": "1"})


@attack("200 503")
def watchers(target: Target) -> None:
    """Watch the live page's feed with more clients than the limit."""
    raw = head(path="/live").replace(b"POST", b"GET", 1)

    def watch() -> None:
        began_s = time.monotonic()
        with target.open(raw) as connection:
            target.answered(connection, began_s)
            time.sleep(1)

    target.at_once([watch] * 40)


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
    body["junk"] = "j" * (LARGE_BYTES // 2)
    path = target.rng.choice([CHAT, RESPONSES, MESSAGES])
    call: dict[str, Any] = {"messages": [USER], "max_tokens": 300}
    if path == RESPONSES:
        call = {"input": "x", "store": False, "max_output_tokens": 300}
    target.at_once([partial(target.post, body | call, path)] * 6)


@attack("200 400 408")
def slow_prompts(target: Target) -> None:
    """Send many conversations that take seconds to render, and let the time of some end."""
    count = target.rng.choice([20_000, 80_000])
    begin = b'{"max_tokens":1,"timeout":%g,"messages":[' % target.rng.choice([0.5, 60])
    heavy = begin + SLOW * count + b'{"role":"user","content":"a"}]}'
    target.at_once([partial(target.post, heavy, CHAT)] * 5)


@attack("200 400 408", large=True)
def grammars_of_its_own(target: Target) -> None:
    """Run a grammar of its own in each call."""

    def call(number: int) -> None:
        regex = f"[a-z ]{{200,400}}{target.rng.getrandbits(30)}{number}"
        body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"regex": regex}}
        target.post(body | {"stream": True, "timeout": 20})

    target.at_once([partial(call, number) for number in range(12)])
