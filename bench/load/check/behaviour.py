"""Behaviour: pauses, clients that leave or do not read, and bad input."""

from __future__ import annotations

import asyncio
import json
import time

from bench.load.check.equality import require_equal
from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import NotSupportedError
from bench.load.client.http import COMPLETIONS, CallError

MAX_PAUSE_S, MAX_PAUSE_RATIO = 1.0, 4.0  # a longer pause is one if it exceeds both
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
    """Read a stream while another client's long prompt is processed, after one without."""
    server, body = trial.server, trial.body(ignore_eos=True)
    alone = await server.require(body | {"max_tokens": 64}, "the request")
    if len(alone.pieces) < 16:
        raise NotSupportedError("a stream of 64 tokens has fewer than 16 events")
    prompt = server.prompt(trial.rng, await server.long_tokens())
    begun = asyncio.Event()
    stream = asyncio.create_task(server.ask(body | {"max_tokens": 400}, begun=begun))
    await begun.wait()
    reading = await server.ask(trial.body(prompt=prompt, max_tokens=1))
    answer = await stream
    if reading.error or answer.error:
        raise NotSupportedError(reading.error or answer.error)
    longest_s = answer.longest_gap_s(reading.sent_s, reading.end_s)
    usual_s = alone.longest_gap_s()
    trial.seen = f"longest pause {longest_s:.2f} s, alone {usual_s:.2f} s"
    if longest_s > max(MAX_PAUSE_S, MAX_PAUSE_RATIO * usual_s):
        trial.found(f"a stream paused for {longest_s:.2f} s (alone {usual_s:.2f} s)", body)


async def _cancel(trial: CheckTrial) -> None:
    """Leave long answers: then a short one comes as fast as a while later."""
    server, body = trial.server, trial.body(max_tokens=8)
    await server.require(body, "the request")
    await server.cancel_storm(STORM, trial.rng)
    after = await server.ask(body)
    running = await server.rest(MAX_DELAY_S)
    later = await server.ask(body)
    late_s = after.end_s - after.sent_s - (later.end_s - later.sent_s)
    trial.seen = f"{max(late_s, 0):.2f} s later than with no client that left"
    if running:
        trial.found(f"{running:.0f} requests run {MAX_DELAY_S:g} s after their clients left")
    elif late_s > MAX_DELAY_S:
        trial.found(f"an answer came {late_s:.1f} s late after {STORM} clients left", body)


async def _slow_reader(trial: CheckTrial) -> None:
    """Let a client not read its stream for a while: others go on, and it gets the whole text."""
    server, endpoint = trial.server, trial.server.client.endpoint
    if endpoint.tls:
        raise NotSupportedError("only over HTTP without TLS")
    body = trial.body(max_tokens=48)
    before = await server.alone(body)
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
    lines = raw.decode("utf-8", "replace").splitlines()
    events = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    text = "".join(choices[0].get("text") or "" for choices in events if choices)
    if text != before.first.text:
        trial.found(f"a slow reader got {text[-40:]!r}, not {before.first.text[-40:]!r}", body)


async def _bad_fields(trial: CheckTrial) -> None:
    """Send a bad value in each field: the answer is a 4xx that names the field."""
    for name, value in BAD.items():
        body = {"model": trial.server.model, "prompt": "a", "max_tokens": 1} | {name: value}
        try:
            status, raw = await trial.server.client.request(
                "POST", COMPLETIONS, json.dumps(body).encode()
            )
        except CallError as error:
            status, raw = 0, str(error).encode()
        shown = f"{name} = {value!r}: {status} {raw[:120].decode('utf-8', 'replace')}"
        if not 400 <= status < 500:
            trial.found(shown, body)
        elif name.encode() not in raw:
            trial.found(f"the field is not named: {shown}", body)


async def _after_leaving(trial: CheckTrial) -> None:
    """Leave in the middle of requests; then answers are as before."""
    server, endpoint, body = trial.server, trial.server.client.endpoint, trial.body(max_tokens=24)
    before, message = await server.alone(body), server.message(body)
    for length in (20, len(message) // 2, len(message) - 1):
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(message[:length])
        await writer.drain()
        writer.close()
    require_equal(trial, [body], [before], [await server.ask(body)])


CHECKS = [
    Check(
        "pause", "a stream while another's long prompt is read", _pause, max_findings=1, timing=True
    ),
    Check("cancel", "clients that left cost nothing", _cancel, max_findings=1, timing=True),
    Check("slow-reader", "a client that does not read delays only itself", _slow_reader),
    Check("bad-fields", "bad fields are refused by name", _bad_fields, max_trials=1),
    Check("after-leaving", "answers after clients left in mid-request", _after_leaving),
]
