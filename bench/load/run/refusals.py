"""Trial calls before a run that find fields which the server rejects, and remedies for failures.

Fields that the load tester adds to a body are left out if the server rejects them. So strict
servers and gateways can be measured. Fields that the user gave are always sent.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec.structs import replace

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import Bodies, BodySettings
from bench.load.client.call import CallError, Failure, LiveTally, TimedCall
from bench.load.client.http import HttpClient
from cbatch.core.request.errors import FieldError
from sim.workload.traces.request import TraceRequest

TRIAL_INDEX = 10**9 - 1  # prompts depend on the index; no run or warm-up has this index.
TRIAL_TOKENS = 16  # length of a trial's prompt, and maximum length of its output.
CALIBRATION_TOKENS = 500  # rough length of a prompt that measures the characters per token

# Parts of a body that can be left out: the name, then other words for the part in errors. If an
# error names no part, the first remaining part is left out. `max_tokens` is then sent as
# `max_completion_tokens`, and `prompt` as text instead of token ids.
PARTS = (
    *("continuous_usage_stats|stream_options", "ignore_eos", "temperature", "max_tokens"),
    *("prompt", "stream_options|include_usage"),
)
_FATAL = (401, 403, 404, 405)  # statuses that all calls would get
_REMEDIES = {  # by label of the failure
    "not connected": "start the server, or fix the URL",
    "status 401|status 403": "give --api-key, or set CBATCH_API_KEY",
    "status 404|status 405": "fix the URL or --model, or choose the endpoint (--chat)",
    "status 429|status 503": "lower --concurrency or --rate",
    "timeout": "raise --timeout, or lower --concurrency or --rate",
    "client": "lower --concurrency, or raise the limit of open files (ulimit -n)",
    "no usage": "leave out --no-stream, so that chunks can be counted",
    "malformed": "give --no-stream, or fix the URL",
}
_CHANGES = {  # by word in the server's message
    "continuous_usage_stats": "give --final-usage",
    "ignore_eos": "give --no-ignore-eos",
    "temperature": "change --temperature",
    "messages": "give --chat",
    "context|max_tokens": "lower --prompt-tokens or --output-tokens",
}


async def drop_rejected_fields(
    client: HttpClient, settings: BodySettings, user_fields: set[str]
) -> tuple[BodySettings, dict[str, str]]:
    """Return the settings without the parts that the server refuses, and the reason for each part.
    `user_fields`, which the user gave, are kept. If the server refuses every form of the call,
    nothing is left out, and the run reports why. Raises `FieldError` if no call can succeed."""
    reduced, refused = settings, dict[str, str]()
    while True:
        call, sent = await _try(client, reduced)
        error = call.error
        if error is not None and (error.failure is Failure.CONNECT or error.status in _FATAL):
            raise FieldError("URL", str(error), remedy(error.label, error.detail))
        if error is None or error.failure not in (Failure.STATUS, Failure.REPORTED):
            break  # it was accepted
        remaining = {
            words: part for words in PARTS if (part := words.split("|")[0]) in sent - user_fields
        }
        if error.status not in (None, 400, 422) or not remaining:
            return settings, {}
        named = [part for words, part in remaining.items() if _has_word(error.detail, words)]
        refused[[*named, *remaining.values()][0]] = error.detail
        reduced = replace(reduced, left_out=tuple(refused))
    if (corpus := reduced.corpus) is not None and corpus.ids is None and call.prompt_tokens:
        chars = corpus.chars_per_token * CALIBRATION_TOKENS / call.prompt_tokens
        reduced = replace(reduced, corpus=replace(corpus, chars_per_token=chars))
    return reduced, refused


def remedy(label: str, detail: str) -> str:
    """Return the remedy for calls that fail with this label and message."""
    remedies = [text for labels, text in _REMEDIES.items() if label in labels.split("|")]
    if label.startswith("status 4"):
        remedies += [text for words, text in _CHANGES.items() if _has_word(detail, words)]
    return remedies[0] if remedies else "see the server's log"


async def _try(client: HttpClient, settings: BodySettings) -> tuple[TimedCall, set[str]]:
    """Send a short call. Returns the call and the names of the parts of its body."""
    bodies, corpus = Bodies(settings), settings.corpus
    tokens = CALIBRATION_TOKENS if corpus is not None and corpus.ids is None else TRIAL_TOKENS
    request = TraceRequest(arrival_s=0.0, prompt_tokens=tokens, output_tokens=TRIAL_TOKENS)
    prepared = bodies.prepare(TRIAL_INDEX, request)
    call, body = prepared.call, msgspec.json.decode(prepared.body, type=dict[str, Any])
    for name in {"max_tokens", "max_completion_tokens"} & body.keys():
        body[name] = min(body[name], TRIAL_TOKENS)
    sent = {*body, *body.get("stream_options", ())}
    sent -= set() if settings.chat else {"max_tokens"}
    sent -= set() if isinstance(body.get("prompt"), list) else {"prompt"}
    reader = AnswerReader(call, LiveTally(), streamed=settings.streamed)
    try:
        await client.call("POST", bodies.path, msgspec.json.encode(body), reader)
    except CallError as error:
        call.error = error
    return call, sent


def _has_word(detail: str, words: str) -> bool:
    return re.search(rf"\b({words})\b", detail) is not None
