"""What a server refuses: a call before the run finds it out, and a remedy is named.

Fields that the load tester sends of its own accord are left out where a server refuses them, so
that servers and gateways that check what they are sent can be measured. The user's own fields stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec.structs import replace

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import MAX_COMPLETION_TOKENS, MAX_TOKENS, Bodies, BodySettings
from bench.load.client.call import CallError, Failure, LiveTally
from bench.load.client.http import HttpClient
from cbatch.core.request.errors import FieldError
from sim.traces.request import TraceRequest

TRIAL_INDEX = 10**9 - 1  # its prompt is in no run and in no warm-up
TRIAL_TOKENS = 16  # of its prompt, and of its answer at most
_CERTAIN = (401, 403, 404, 405)  # every other call would be answered with this, too
# By the label of a failure, or by a word of a refusal.
_REMEDIES = {
    "not connected": "start the server, or mend the URL",
    "status 401|status 403": "give --api-key, or set CBATCH_API_KEY",
    "status 404|status 405|messages": "mend the URL or --model, or choose the endpoint (--chat)",
    "status 429|status 503": "lower --concurrency or --rate",
    "timeout": "raise --timeout, or lower --concurrency or --rate",
    "client": "lower --concurrency, or raise the limit of open files (ulimit -n)",
    "no usage": "leave out --no-stream, so that chunks can be counted",
    "malformed": "name the URL of a server of the OpenAI API",
    "continuous_usage_stats": "give --final-usage",
    "ignore_eos": "give --no-ignore-eos",
    "temperature": "change --temperature",
    "context|max_tokens": "lower --prompt-tokens or --output-tokens",
}
# What can be left out, words by which refusals name it, and whether it is sent: in the order in
# which it is tried where a refusal names nothing.
Concession = tuple[str, str, bool, dict[str, Any]]


def concessions(settings: BodySettings, chosen: Collection[str]) -> list[Concession]:
    """`chosen` are the fields of a body that the user gave."""
    streamed, corpus, usage = settings.streamed, settings.corpus, "stream_options"
    fields = {name: v for name, v in settings.fields.items() if name != "temperature"}
    has_ids = corpus is not None and corpus.ids is not None and not settings.chat
    text = {"corpus": corpus and replace(corpus, ids=None)}
    no_usage = {"chunk_usage": False, "final_usage": False}
    per_chunk = f"{usage}.continuous_usage_stats"
    ends = settings.ignore_eos and "ignore_eos" not in chosen
    warm = len(fields) < len(settings.fields) and "temperature" not in chosen
    found: list[Concession] = [
        (per_chunk, usage, streamed and settings.chunk_usage, {"chunk_usage": False}),
        ("ignore_eos", "ignore_eos", ends, {"ignore_eos": False}),
        ("temperature", "temperature", warm, {"fields": fields}),
        (MAX_TOKENS, MAX_TOKENS, settings.chat, {"length_field": MAX_COMPLETION_TOKENS}),
        ("prompts as token ids", "prompt", has_ids, text),
        (usage, f"{usage}|include_usage", streamed, no_usage),
    ]
    return [concession for concession in found if concession[2]]


async def settle(
    client: HttpClient, settings: BodySettings, chosen: Collection[str]
) -> tuple[BodySettings, dict[str, str]]:
    """The settings without what the server refuses, and what that is with the reason. If it refuses
    the call whatever is left out, nothing is: the run says why. Raises `FieldError` where it is
    certain that no call can succeed."""
    left, settled = concessions(settings, chosen), settings
    refused: dict[str, str] = {}
    while (error := await _try(client, settled)) is not None:
        if error.failure is Failure.CONNECT or error.status in _CERTAIN:
            raise FieldError("URL", str(error), remedy(error.label, error.detail))
        if error.failure not in (Failure.STATUS, Failure.REPORTED):
            break  # it was accepted
        if error.status not in (None, 400, 422) or not left:
            return settings, {}
        one = next((c for c in left if _has_word(error.detail, c[1])), left[0])
        left.remove(one)
        settled = replace(settled, **one[3])
        refused[one[0]] = error.detail
    return settled, refused


def remedy(label: str, detail: str) -> str:
    """What helps against calls that fail so."""
    found = [r for words, r in _REMEDIES.items() if label in words.split("|")]
    if not found and label.startswith("status 4"):
        found = [r for words, r in _REMEDIES.items() if _has_word(detail, words)]
    return found[0] if found else "look into the server's log"


async def _try(client: HttpClient, settings: BodySettings) -> CallError | None:
    bodies = Bodies(settings)
    tokens = TRIAL_TOKENS
    request = TraceRequest(arrival_s=0.0, prompt_tokens=tokens, output_tokens=tokens)
    prepared = bodies.prepare(TRIAL_INDEX, request)
    body = msgspec.json.decode(prepared.body)
    length = MAX_COMPLETION_TOKENS if MAX_COMPLETION_TOKENS in body else MAX_TOKENS
    body[length] = min(prepared.call.max_tokens, tokens)
    reader = AnswerReader(prepared.call, LiveTally(), streamed=settings.streamed)
    try:
        await client.call("POST", bodies.path, msgspec.json.encode(body), reader)
    except CallError as error:
        return error
    return None


def _has_word(detail: str, words: str) -> bool:
    return re.search(rf"\b({words})\b", detail) is not None
