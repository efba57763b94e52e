"""Attacks of a hostile client: expensive calls, malformed bodies, and calls that are made up from
the OpenAPI document. Importing this module fills `ATTACKS` with all attacks."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.failures import FailureGroup

from cbatch.server.protocol.openapi import document
from tests.hostile import connections, grammars  # noqa: F401 - their attacks
from tests.hostile.agents import CHAT, MESSAGES, RESPONSES, WORD
from tests.hostile.attacker import (
    ANSWER_S,
    ATTACKS,
    BUSY,
    HOST,
    HOSTILE_KEY,
    KEY,
    Attack,
    Target,
    attack,
)
from tests.server.contract import CHECKS, OPERATIONS

MANY = 128  # the most choices of a call
LARGE_BYTES = 7_000_000  # of a body; beyond 8 MiB it is not read


@attack("200 400", large=True)
def great_number_of_choices(target: Target) -> None:
    """Request many choices. If calls that cannot be sent to the engine kept their places, the queue
    would stay full."""
    schema = {"type": "integer", "maximum": 10**30}
    fields = {"structured_outputs": {"json": schema}, "n": 100, "max_tokens": 1}
    target.post({"prompt": "x"} | fields)


@attack("200 400", large=True)
def ids_for_each_choice(target: Target) -> None:
    field = target.rng.choice(["banned_token_ids", "allowed_token_ids", "stop_token_ids"])
    ids = b"1," * (LARGE_BYTES // target.rng.choice([7, 2])) + b"1"
    target.post(b'{"prompt":"x","n":%d,"max_tokens":1,"%s":[%s]}' % (MANY, field.encode(), ids))


@attack("200 400", large=True)
def biases_for_each_choice(target: Target) -> None:
    n = target.rng.choice([500, 5000, 400_000])
    bias = ",".join(f'"{i}":{target.rng.choice([-1, 1, 1e30])}' for i in range(n))
    target.post(b'{"prompt":"x","n":%d,"max_tokens":1,"logit_bias":{%s}}' % (MANY, bias.encode()))


@attack("200 400 413", large=True)
def stops(target: Target) -> None:
    rng = target.rng
    count = rng.choice([32, 33, 100_000])
    stop = ["ab" * rng.choice([1, 128, 5000]) + str(i) for i in range(count)]
    target.post({"prompt": "x", "n": 16, "max_tokens": 4, "stop": stop})


@attack("200", large=True)
def many_choices(target: Target) -> None:
    """Request more choices than the queue has places, with all details about each token."""
    call = {"prompt": WORD, "n": 100, "max_tokens": 1, "logprobs": 20, "seed": 1}
    target.at_once([partial(target.post, call)] * 3)
    prompts = [f"{WORD}{i}" for i in range(MANY)]
    target.post({"prompt": prompts, "max_tokens": 1, "logprobs": 20, "stream": True})


@attack("200", large=True)
def crowd(target: Target) -> None:
    """Make more concurrent calls than the key's limit."""
    call = {"prompt": WORD, "max_tokens": 12, "ignore_eos": True, "stream": True}
    target.at_once([partial(target.post, call)] * 24)


@attack("200 400")
def large_prompts(target: Target) -> None:
    text = (WORD * (LARGE_BYTES // len(WORD) + 1))[:LARGE_BYTES]
    path, body = target.rng.choice(
        [
            ("/v1/completions", {"prompt": text, "max_tokens": 1}),
            ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 1}),
            ("/v1/completions", {"prompt": [1] * (LARGE_BYTES // 2), "max_tokens": 1}),
            ("/v1/completions", {"prompt": [[1]] * (LARGE_BYTES // 4), "max_tokens": 1}),
            ("/v1/completions", {"prompt": [[1] * 50] * 40_000, "max_tokens": 1}),
            ("/v1/completions", {"prompt": "\U0001f600" * 900, "max_tokens": 1, "echo": True}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}] * 150_000}),
        ]
    )
    target.post(_small(body), path)


@attack("200 400 413")
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


@attack("200 400 413 closed")
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


@attack("200 400 404")
def random_bodies(target: Target) -> None:
    rng = target.rng
    body = {"prompt": WORD, "max_tokens": 2, "temperature": 0.5, "stop": ["a"]}
    right = json.dumps(body).encode()
    paths = ["/v1/completions", CHAT, "/tokenize", "/detokenize", RESPONSES, MESSAGES]
    for _ in range(12):
        changed = bytearray(right)
        for _ in range(rng.choice([1, 2, 8])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = changed[: rng.randrange(1, len(changed) + 1)]
        noise = rng.randbytes(rng.choice([1, 100, 20_000]))
        sent = bytes(rng.choice([changed, cut, noise, b"\xff\xfe" + right, b""]))
        target.post(sent, rng.choice(paths))


@attack("200 400 404 408")
def odd_values(target: Target) -> None:
    rng = target.rng
    values: list[Any] = [None, True, -1, 0, 2**31, 2**63, 2**70, 1e308, -0.0, 1e-320, "", "\x00"]
    values += [[], {}, [[]], "a" * 70_000, ["a", 1], "\ud800", float("nan"), float("-inf")]
    written = [json.dumps(value) for value in values]
    written += ["1e999", "01", '{"a":1,"a":2}', '"\udcff"', "2e0", '"1"']
    fields = [*document()["components"]["schemas"]["CompletionFields"]["properties"]]
    fields += ["cache_salt", "best_of", "suffix", "nobody_knows"]
    for field in rng.sample(fields, 8):
        body = f'{{"prompt":"x","max_tokens":2,"{field}":{rng.choice(written)}}}'
        target.post(body.encode("utf-8", "surrogateescape"))


@attack("200 400")
def cache_salts(target: Target) -> None:
    salts: list[Any] = ["", "a", "a" * 100_000, "\x00", "é\U0001f600", 5, ["a"], {"a": 1}]
    for salt in target.rng.sample(salts, 4):
        target.post({"prompt": WORD * 4, "max_tokens": 1, "cache_salt": salt})
        messages = [{"role": "user", "content": WORD}]
        target.post({"messages": messages, "max_tokens": 1, "cache_salt": salt}, CHAT)


@attack("200 400 413 415 closed")
def content_types(target: Target) -> None:
    body = {"prompt": WORD, "max_tokens": 1}
    plain = ("text/plain", "", "application/json; charset=utf-16", "multipart/form-data")
    for kind in (*plain, "a" * 9000):
        target.post(body, headers={"Content-Type": kind})
    target.post(body, headers={"Content-Encoding": "gzip"})
    target.post(b"x" * (LARGE_BYTES + 2_000_000))


@attack("200 204 400 404 405 415 501")
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


@attack("401")
def wrong_keys(target: Target) -> None:
    for key in ("", "Bearer", "Bearer x", "Basic aG9zdGlsZQ==", "Bearer " + "k" * 20_000, "\xff"):
        target.post({"prompt": WORD}, headers={"Authorization": key})


@attack("200 408")
def short_times(target: Target) -> None:
    """Make calls with a timeout before the first token, or in the middle of the output."""
    call = {"prompt": WORD, "max_tokens": 400, "ignore_eos": True, "n": 4}
    for limit_s in (0.001, 0.001, 0.02, 0.2):
        target.post(call | {"timeout": limit_s, "stream": target.rng.random() < 0.5})
    target.post(call, headers={"x-envoy-expected-rq-timeout-ms": "1"})


@attack("200 503")
def watchers(target: Target) -> None:
    """Watch the live page's feed with more clients than the limit."""
    raw = f"GET /live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {HOSTILE_KEY}\r\n\r\n".encode()

    def watch() -> None:
        began_s = time.monotonic()
        with target.open(raw) as connection:
            target.answered(connection, began_s)
            time.sleep(1)

    target.at_once([watch] * 40)


# -- calls that are made up

NUM_CALLS = 6
# Larger values would block slots that other calls need. Other attacks use larger values.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LIMITS = dict.fromkeys((*LENGTHS, "min_tokens"), 16) | {"n": 4}
_one_at_a_time = threading.Lock()  # generating them takes more time than answering them


def made_up_calls(operation: Any, target: Target) -> None:
    """Send random valid and invalid calls of an operation."""
    posted = operation.method == "post"
    modes = list(schemathesis.GenerationMode)

    @seed(target.rng.getrandbits(32))
    @settings(
        max_examples=NUM_CALLS if posted else 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=target.rng.choice(modes) if posted else modes[0])
    )
    def run(case: schemathesis.Case) -> None:
        bound(case.body, operation.path)
        began_s, url = time.monotonic(), f"http://{HOST}:{target.port}"
        try:
            response = case.call(base_url=url, headers=KEY, session=session, timeout=ANSWER_S)
        except requests.RequestException as error:
            target.note("closed", began_s, repr(error))
            return
        target.note(response.status_code, began_s, response.content)
        if str(response.status_code) not in BUSY:
            try:
                case.validate_response(response, checks=CHECKS)
            except FailureGroup as failures:
                target.wrong.append("; ".join(map(str, failures.exceptions)))

    with _one_at_a_time, requests.Session() as session:
        run()


def bound(body: Any, path: str) -> None:
    """Limit the lengths in a body, in place."""
    if not isinstance(body, dict):
        return
    for name, limit in LIMITS.items():
        if isinstance(value := body.get(name), int) and value > limit:
            body[name] = limit
    if all(body.get(name) is None for name in LENGTHS):
        body["max_output_tokens" if path.startswith("/v1/responses") else "max_tokens"] = 16


for _each in OPERATIONS:
    ATTACKS[f"made up: {_each.label}"] = Attack(
        partial(made_up_calls, _each), "200 400 401 404 405 408 413 415", large=False
    )
