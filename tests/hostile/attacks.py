"""Attacks of a hostile client: expensive calls, malformed bodies, and the table of all attacks."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from cbatch.server.protocol.openapi import document
from tests.hostile import agents, connections, holding, made_up
from tests.hostile.attacker import Attack, Target
from tests.hostile.grammars import KINDS, Outputs
from tests.hostile.server import HOSTILE_KEY

CHAT = "/v1/chat/completions"
AGENTS = (agents.RESPONSES, agents.MESSAGES)
MANY = 128  # the most choices of a call
LARGE_BYTES = 7_000_000  # of a body; beyond 8 MiB it is not read
WORD = "def f(x):\n    return x\n"


def grammar(kind: Any, target: Target) -> None:
    """Send a grammar in each field that accepts a grammar."""
    outputs: Outputs = kind(target.rng)
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": outputs}
    schema = outputs.get("json")
    if isinstance(schema, dict) and target.rng.random() < 0.4:
        message = {"role": "user", "content": "x"}
        body = {"messages": [message], "max_tokens": 4}
        function = {"name": "f", "parameters": schema}
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body |= target.rng.choice(
            [
                {"response_format": shape},
                {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
            ]
        )
        target.post(body, CHAT)
    else:
        target.post(body)


def great_number_of_choices(target: Target) -> None:
    """Request many choices. If calls that cannot be sent to the engine kept their places, the queue
    would stay full."""
    schema = {"type": "integer", "maximum": 10**30}
    fields = {"structured_outputs": {"json": schema}, "n": 100, "max_tokens": 1}
    target.post({"prompt": "x"} | fields)


def ids_for_each_choice(target: Target) -> None:
    field = target.rng.choice(["banned_token_ids", "allowed_token_ids", "stop_token_ids"])
    ids = b"1," * (LARGE_BYTES // target.rng.choice([7, 2])) + b"1"
    target.post(b'{"prompt":"x","n":%d,"max_tokens":1,"%s":[%s]}' % (MANY, field.encode(), ids))


def biases_for_each_choice(target: Target) -> None:
    n = target.rng.choice([500, 5000, 400_000])
    bias = ",".join(f'"{i}":{target.rng.choice([-1, 1, 1e30])}' for i in range(n))
    target.post(b'{"prompt":"x","n":%d,"max_tokens":1,"logit_bias":{%s}}' % (MANY, bias.encode()))


def stops(target: Target) -> None:
    rng = target.rng
    stop = [
        "ab" * rng.choice([1, 128, 5000]) + str(i) for i in range(rng.choice([32, 33, 100_000]))
    ]
    target.post({"prompt": "x", "n": 16, "max_tokens": 4, "stop": stop})


def many_choices(target: Target) -> None:
    """Request more choices than the queue has places, with all details about each token."""
    call = {"prompt": WORD, "n": 100, "max_tokens": 1, "logprobs": 20, "seed": 1}
    target.at_once([partial(target.post, call)] * 3)
    prompts = [f"{WORD}{i}" for i in range(MANY)]
    target.post({"prompt": prompts, "max_tokens": 1, "logprobs": 20, "stream": True})


def crowd(target: Target) -> None:
    """Make more concurrent calls than the key's limit."""
    call = {"prompt": WORD, "max_tokens": 12, "ignore_eos": True, "stream": True}
    target.at_once([partial(target.post, call)] * 24)


def large_prompts(target: Target) -> None:
    rng = target.rng
    text = (WORD * (LARGE_BYTES // len(WORD) + 1))[:LARGE_BYTES]
    body, path = rng.choice(
        [
            ({"prompt": text, "max_tokens": 1}, "/v1/completions"),
            ({"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 1}, "/v1/completions"),
            ({"prompt": [1] * (LARGE_BYTES // 2), "max_tokens": 1}, "/v1/completions"),
            ({"prompt": [[1]] * (LARGE_BYTES // 4), "max_tokens": 1}, "/v1/completions"),
            ({"prompt": [[1] * 50] * 40_000, "max_tokens": 1}, "/v1/completions"),
            ({"prompt": "\U0001f600" * 900, "max_tokens": 1, "echo": True}, "/v1/completions"),
            ({"messages": [{"role": "user", "content": text}]}, CHAT),
            ({"messages": [{"role": "user", "content": "a"}] * 150_000}, CHAT),
        ]
    )
    target.post(_small(body), path)


def long_texts(target: Target) -> None:
    """Tokenize long texts, which the context does not limit."""
    text = (WORD * (LARGE_BYTES // len(WORD) + 1))[:LARGE_BYTES]
    bodies: list[dict[str, Any]] = [
        {"prompt": text[:2_000_000], "return_token_strs": True},
        {"prompt": "a" * LARGE_BYTES},
        {"messages": [{"role": "user", "content": text}]},
    ]
    target.post(target.rng.choice(bodies), "/tokenize")
    target.post(_small({"tokens": [5] * (LARGE_BYTES // 2)}), "/detokenize")


def _small(body: dict[str, Any]) -> bytes:
    """Encode JSON without a space, to fit more content into as many bytes."""
    return json.dumps(body, separators=(",", ":")).encode()


def deep_bodies(target: Target) -> None:
    n = target.rng.choice([500, 5000, 1_000_000])
    field = target.rng.choice(["prompt", "logit_bias", "response_format", "nobody_knows"])
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        value = opening * n + "1" + closing * n
        target.post(f'{{"prompt":"x","max_tokens":1,"{field}":{value}}}'.encode())
    schema = '{"properties":{"a":' * n + "{}" + "}}" * n
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    call = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}],"max_tokens":1}}'
    target.post(call.encode()[:LARGE_BYTES], CHAT)


def random_bodies(target: Target) -> None:
    rng = target.rng
    body = {"prompt": WORD, "max_tokens": 2, "temperature": 0.5, "stop": ["a"]}
    right = json.dumps(body).encode()
    for _ in range(12):
        changed = bytearray(right)
        for _ in range(rng.choice([1, 2, 8])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = changed[: rng.randrange(1, len(changed) + 1)]
        noise = rng.randbytes(rng.choice([1, 100, 20_000]))
        path = rng.choice(["/v1/completions", CHAT, "/tokenize", "/detokenize", *AGENTS])
        target.post(bytes(rng.choice([changed, cut, noise, b"\xff\xfe" + right, b""])), path)


def odd_values(target: Target) -> None:
    rng = target.rng
    values: list[Any] = [None, True, -1, 0, 2**31, 2**63, 2**70, 1e308, -0.0, 1e-320, "", "\x00"]
    values += [[], {}, [[]], "a" * 70_000, ["a", 1], "\ud800", float("nan"), float("-inf")]
    written = [json.dumps(value) for value in values]
    written += ["1e999", "01", '{"a":1,"a":2}', '"\udcff"', "2e0", '"1"']
    for field in rng.sample(FIELDS, 8):
        body = f'{{"prompt":"x","max_tokens":2,"{field}":{rng.choice(written)}}}'
        target.post(body.encode("utf-8", "surrogateescape"))


FIELDS = [
    *document()["components"]["schemas"]["CompletionFields"]["properties"],
    *("cache_salt", "best_of", "suffix", "nobody_knows"),
]


def cache_salts(target: Target) -> None:
    salts: list[Any] = ["", "a", "a" * 100_000, "\x00", "é\U0001f600", 5, ["a"], {"a": 1}]
    for salt in target.rng.sample(salts, 4):
        target.post({"prompt": WORD * 4, "max_tokens": 1, "cache_salt": salt})
        messages = [{"role": "user", "content": WORD}]
        target.post({"messages": messages, "max_tokens": 1, "cache_salt": salt}, CHAT)


def content_types(target: Target) -> None:
    body = {"prompt": WORD, "max_tokens": 1}
    kinds = [
        "text/plain",
        "",
        "application/json; charset=utf-16",
        "multipart/form-data",
        "a" * 9000,
    ]
    for kind in kinds:
        target.post(body, headers={"Content-Type": kind})
    target.post(body, headers={"Content-Encoding": "gzip"})
    target.post(b"x" * (LARGE_BYTES + 2_000_000))


def paths_and_methods(target: Target) -> None:
    rng = target.rng
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


def wrong_keys(target: Target) -> None:
    for key in ("", "Bearer", "Bearer x", "Basic aG9zdGlsZQ==", "Bearer " + "k" * 20_000, "\xff"):
        target.post({"prompt": WORD}, headers={"Authorization": key})


def short_times(target: Target) -> None:
    """Make calls with a timeout before the first token, or in the middle of the output."""
    call = {"prompt": WORD, "max_tokens": 400, "ignore_eos": True, "n": 4}
    for limit_s in (0.001, 0.001, 0.02, 0.2):
        stream = target.rng.random() < 0.5
        target.post(call | {"timeout": limit_s, "stream": stream})
    target.post(call, headers={"x-envoy-expected-rq-timeout-ms": "1"})


def watchers(target: Target) -> None:
    """Watch the live page's feed with more clients than the limit."""
    raw = f"GET /live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {HOSTILE_KEY}\r\n\r\n".encode()

    def watch() -> None:
        began_s = time.monotonic()
        with target.open(raw) as connection:
            target.answered(connection, began_s)
            time.sleep(1)

    target.at_once([watch] * 40)


ATTACKS = [
    *(Attack(name, partial(grammar, kind), "200 400") for name, kind in KINDS.items()),
    Attack("great number of choices", great_number_of_choices, "200 400", large=True),
    Attack("ids for each choice", ids_for_each_choice, "200 400", large=True),
    Attack("biases for each choice", biases_for_each_choice, "200 400", large=True),
    Attack("stops", stops, "200 400 413", large=True),
    Attack("many choices", many_choices, "200", large=True),
    Attack("crowd", crowd, "200", large=True),
    Attack("large prompts", large_prompts, "200 400"),
    Attack("long texts", long_texts, "200 400 413"),
    Attack("deep bodies", deep_bodies, "200 400 413 closed"),
    Attack("random bodies", random_bodies, "200 400 404"),
    Attack("odd values", odd_values, "200 400 404 408"),
    Attack("cache salts", cache_salts, "200 400"),
    Attack("content types", content_types, "200 400 413 415 closed"),
    Attack("paths and methods", paths_and_methods, "200 204 400 404 405 415 501"),
    Attack("wrong keys", wrong_keys, "401"),
    Attack("short times", short_times, "200 408"),
    Attack("watchers", watchers, "200 503"),
    *agents.ATTACKS,
    *connections.ATTACKS,
    *holding.ATTACKS,
    *made_up.ATTACKS,
]
NAMES = [attack.name for attack in ATTACKS]
