"""Behaviour: pauses, clients that leave or do not read, and bad input."""

from __future__ import annotations

import asyncio
import json
import statistics
import time

from bench.load.check.equality import LONG_PROMPT_TOKENS, require_equal
from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import Body, NotSupportedError

MAX_PAUSE_S, MAX_PAUSE_RATIO = 1.0, 10.0  # a longer pause is one if it exceeds both
MAX_DELAY_S = 2.0  # until requests of clients that left have ended
STORM, UNREAD_S = 16, 2.0
BAD: dict[str, object] = {
    "temperature": "hot",
    "max_tokens": -1,
    "top_p": 7,
    "prompt": {"a": 1},
    "stop": 5,
    "n": "many",
    "logit_bias": [1],
    "seed": "x",
}


async def _pause(trial: CheckTrial) -> None:
    """Read a stream while another client's long prompt is processed."""
    server = trial.server
    body: Body = {"prompt": server.prompt(trial.rng), "temperature": 0.0, "ignore_eos": True}
    alone = await server.alone(body | {"max_tokens": 64})
    if len(alone.pieces) < 16:
        raise NotSupportedError("a stream of 64 tokens has fewer than 16 events")
    usual_s = statistics.median(alone.gaps_s())
    begun = asyncio.Event()
    stream = asyncio.create_task(server.ask(body | {"max_tokens": 400}, begun=begun))
    await begun.wait()
    long: Body = {"prompt": server.prompt(trial.rng, LONG_PROMPT_TOKENS), "max_tokens": 1}
    began_s = time.monotonic()
    reading = await server.ask(long)
    answer = await stream
    if reading.error or answer.error:
        raise NotSupportedError(reading.error or answer.error)
    longest_s = max(answer.gaps_s(began_s, reading.end_s), default=0.0)
    trial.seen = f"longest pause {longest_s:.2f} s, usually {usual_s:.3f} s"
    if longest_s > max(MAX_PAUSE_S, MAX_PAUSE_RATIO * usual_s):
        trial.found(f"a stream paused for {longest_s:.2f} s (usually {usual_s:.3f} s)", body)


async def _cancel(trial: CheckTrial) -> None:
    """Leave long answers: then a short one comes as fast as a while later. A machine that is slow
    for a moment is not a finding, so both of two attempts must be late."""
    server = trial.server
    body: Body = {"prompt": server.prompt(trial.rng), "temperature": 0.0, "max_tokens": 8}
    await server.require(body, "the request")
    late_s = []
    for _ in "ab":
        await server.cancel_storm(STORM, trial.rng)
        after = await server.ask(body)
        deadline_s = after.end_s + MAX_DELAY_S
        while (running := await server.running()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.2)
        later = await server.ask(body)
        late_s.append(after.end_s - after.sent_s - (later.end_s - later.sent_s))
        if not running and late_s[-1] < MAX_DELAY_S:
            break
    trial.seen = f"{max(min(late_s), 0):.2f} s later than with no client that left"
    if running:
        trial.found(f"{running:.0f} requests run {MAX_DELAY_S:g} s after their clients left")
    elif min(late_s) > MAX_DELAY_S:
        trial.found(f"an answer came {min(late_s):.1f} s late after {STORM} clients left", body)


async def _slow_reader(trial: CheckTrial) -> None:
    """Let a client not read its stream for a while: others go on, and it gets the whole text."""
    server, endpoint = trial.server, trial.server.client.endpoint
    body: Body = {"prompt": server.prompt(trial.rng), "temperature": 0.0, "max_tokens": 48}
    before = await server.alone(body)
    if endpoint.tls:
        raise NotSupportedError("only over HTTP without TLS")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=256)
    writer.write(server.message(body | {"stream": True}))
    began_s = time.monotonic()
    other = await server.ask(body)
    await asyncio.sleep(max(UNREAD_S - (time.monotonic() - began_s), 0.0))
    raw = b""
    while b"[DONE]" not in raw and (piece := await asyncio.wait_for(reader.read(4096), 60)):
        raw += piece
    writer.close()
    require_equal(trial, [body], [before], [other])
    texts = [
        json.loads(line[6:])["choices"]
        for line in raw.decode("utf-8", "replace").splitlines()
        if line.startswith("data: {")
    ]
    text = "".join(choices[0].get("text") or "" for choices in texts if choices)
    if text != before.first.text:
        trial.found(f"a slow reader got {text[-40:]!r}, not {before.first.text[-40:]!r}", body)


async def _bad_fields(trial: CheckTrial) -> None:
    """Send a bad value in each field: the answer is a 4xx that names the field."""
    for name, value in BAD.items():
        body: Body = {"prompt": "a", "max_tokens": 1} | {name: value}
        answer = await trial.server.ask(body, streamed=False)
        shown = f"{name} = {value!r}: {answer.status}"
        if answer.status >= 500 or answer.status == 0:
            trial.found(f"{shown} {answer.error[:120]}", body)
        elif answer.status == 200:
            trial.found(f"{shown}, accepted", body)
        elif name not in answer.error:
            trial.found(f"{shown} without the field's name: {answer.error[:120]}", body)


async def _after_leaving(trial: CheckTrial) -> None:
    """Leave in the middle of requests; then answers are as before."""
    server, endpoint = trial.server, trial.server.client.endpoint
    body: Body = {"prompt": server.prompt(trial.rng), "temperature": 0.0, "max_tokens": 24}
    before = await server.alone(body)
    message = server.message(body)
    for length in (20, len(message) // 2, len(message) - 1):
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(message[:length])
        await writer.drain()
        writer.close()
    require_equal(trial, [body], [before], [await server.ask(body)])


CHECKS = [
    Check("pause", "a stream while another's long prompt is read", _pause),
    Check("cancel", "clients that left cost nothing", _cancel),
    Check("slow-reader", "a client that does not read delays only itself", _slow_reader),
    Check("bad-fields", "bad fields are refused by name", _bad_fields),
    Check("after-leaving", "answers after clients left in mid-request", _after_leaving),
]
