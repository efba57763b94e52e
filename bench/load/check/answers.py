"""Answers: usage, finish reasons, stop strings, texts in pieces, schemas, and bad fields."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import Answer, AnswerChoice, Body, FindingError, NotSupportedError
from bench.load.client.http import COMPLETIONS

EMOJI = "\U0001f600\U0001f389\U0001f680\u2615\U0001f44d\U0001f3fd\u00e9\u6f22\u5b57"
MAX_TOKENS = 400  # of an answer under a schema
BAD = {"temperature": "hot", "max_tokens": -1, "top_p": 7, "prompt": {"a": 1}}
BAD |= {"stop": 5, "n": "many", "logit_bias": [1], "seed": "x"}


async def _both(trial: CheckTrial, body: Body) -> list[tuple[str, Answer]]:
    """Ask for a whole and for a streamed answer."""
    whole = await trial.server.ask(body, streamed=False)
    return [("whole", whole), ("streamed", await trial.server.ask(body))]


async def _usage(trial: CheckTrial) -> str | None:
    base, prompts, seen = trial.body(logprobs=1), set[object](), None
    for limit in (1, trial.rng.randrange(2, 40)):
        body = base | {"max_tokens": limit}
        for way, answer in await _both(trial, body):
            if not answer.usage:
                seen = f"{way} answers have no usage"
                continue
            prompts.add(answer.usage.get("prompt_tokens"))
            if problem := _miscounted(answer, limit):
                raise FindingError(f"{way}: {problem}", body)
    if not prompts:
        raise NotSupportedError("answers have no usage")
    if len(prompts) > 1:
        raise FindingError(f"prompt tokens are {prompts} for one prompt", base)
    return seen


def _miscounted(answer: Answer, limit: int) -> str | None:
    """Describe what does not agree in an answer of at most `limit` tokens."""
    counted = answer.usage.get("completion_tokens", 0)
    tokens, ended = len(answer.tokens), answer.finish_reason
    # The token that ends an answer may be counted without being shown.
    if tokens and counted - tokens not in ((0,) if ended == "length" else (0, 1)):
        return f"usage {counted}, but {tokens} tokens came ({ended})"
    if (
        counted > limit
        or ended not in ("length", "stop")
        or (ended == "length" and counted < limit)
    ):
        return f"{counted} tokens of {limit}, finish reason {ended!r}"
    return None


async def _choices(trial: CheckTrial) -> None:
    body = trial.body(n=3, temperature=0.8, seed=trial.rng.getrandbits(31), logprobs=1)
    answer = await trial.server.ask(body)
    choices = [answer, *answer.others]
    reasons = [each.finish_reason for each in choices]
    if len(reasons) != 3 or not all(reasons):
        raise FindingError(f"n = 3 gave choices with finish reasons {reasons}", body)
    tokens = sum(len(each.tokens) for each in choices)
    counted = answer.usage.get("completion_tokens", tokens)
    if tokens and not 0 <= counted - tokens <= 3:
        raise FindingError(f"usage {counted}, but three choices have {tokens} tokens", body)


async def _stops(trial: CheckTrial) -> None:
    """Stop at a piece of the answer that crosses the border of two events."""
    plain, rng = trial.body(), trial.rng
    before = await trial.server.alone(plain)
    text, pieces = before.text, before.pieces
    border = sum(map(len, pieces[: rng.randrange(2, len(pieces))])) if len(pieces) > 2 else 0
    stop = text[border - rng.randint(1, 3) : border + rng.randint(1, 3)] if border else ""
    if not stop.strip():
        return
    body, expected = plain | {"stop": [stop]}, text[: text.find(stop)]
    for way, answer in await _both(trial, body):
        got, problem = answer.text, None
        if stop in got or (got.startswith(expected) and got != expected):
            problem = f"{got[len(expected) :][:40]!r} came after the stop {stop!r}"
        elif expected.startswith(got) and got != expected:
            problem = f"{expected[len(got) :][:40]!r} is missing before {stop!r}"
        elif got == expected and answer.finish_reason != "stop":
            problem = f"finish reason {answer.finish_reason!r} at a stop"
        if problem:
            raise FindingError(f"{way}: {problem}", body)


async def _logprobs(trial: CheckTrial) -> None:
    """Check that tokens join to the text, and that the sampled one is among the likeliest."""
    body = trial.body(logprobs=3)
    answer = await trial.server.ask(body, streamed=False)
    if not answer.tokens:
        raise NotSupportedError("the answer has no log probabilities")
    text, joined = answer.text, "".join(answer.tokens)
    if "\ufffd" not in joined and not joined.startswith(text.rstrip("\ufffd")):
        raise FindingError(f"the tokens join to {joined[:60]!r}, the text is {text[:60]!r}", body)
    for at, (logprob, top) in enumerate(zip(answer.logprobs, answer.tops, strict=False)):
        if logprob < (highest := max(top.values(), default=logprob)) - 1e-3:
            problem = f"greedy token {at} has {logprob:.3f}, the likeliest {highest:.3f}"
            raise FindingError(problem, body)


async def _pieces(trial: CheckTrial) -> None:
    """Compare the streamed text with the whole; characters of several tokens must not be split."""
    sampled = trial.body(temperature=1.0, seed=trial.rng.getrandbits(31))
    prompt = trial.body(prompt=f"{EMOJI} " * 3 + EMOJI[: trial.rng.randrange(4)])
    chat: Body = {"messages": [{"role": "user", "content": f"Repeat: {EMOJI} {EMOJI}"}]}
    for body in (sampled, prompt, chat | {"temperature": 0.0, "max_tokens": 40}):
        try:
            (_, whole), (_, streamed) = await _both(trial, body)
        except NotSupportedError:
            if "prompt" in body:
                raise
            return  # no chats
        text, joined = whole.text + whole.reasoning, "".join(streamed.pieces)
        known, end = text.count("\ufffd"), min(len(text), len(joined))
        broken = [at for at, c in enumerate(joined) if c == "\ufffd" or "\ud800" <= c < "\ue000"]
        if len(broken) > known:
            at = broken[0]
            raise FindingError(f"a character was split: {joined[max(at - 8, 0) : at + 4]!r}", body)
        if joined != text and joined[:end] == text[:end]:
            raise FindingError(f"streamed text ends {joined[end:]!r}, whole {text[end:]!r}", body)


async def _bad_fields(trial: CheckTrial) -> None:
    for name, value in BAD.items():
        body = {"model": trial.server.model, "prompt": "a", "max_tokens": 1} | {name: value}
        data = json.dumps(body).encode()
        status, raw = await trial.server.client.request("POST", COMPLETIONS, data)
        if not 400 <= status < 500 or name.encode() not in raw:
            problem = "the field is not named" if 400 <= status < 500 else "not refused"
            answer = raw[:120].decode("utf-8", "replace")
            raise FindingError(f"{name} = {value!r}: {problem}: {status} {answer}", body)


class SizedThing(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=20)]
    size: int


class Sign(msgspec.Struct, forbid_unknown_fields=True):
    sign: Literal["\u00e9\u2603", "\U0001f600", 'a"\\b']


SHAPES: list[Any] = [
    SizedThing,
    Sign,
    Annotated[list[bool], msgspec.Meta(min_length=1, max_length=3)],
]


def _schema(shape: Any) -> dict[str, Any]:
    (schema,), parts = msgspec.json.schema_components([shape])
    return dict(parts.get(getattr(shape, "__name__", ""), schema))


# Without `strict`, a server need not keep calls that the model chose to the tool's schema.
FUNCTION = {"name": "measure", "parameters": _schema(SizedThing), "strict": True}
TOOLS: Body = {"tools": [{"type": "function", "function": FUNCTION | {"description": "Measure."}}]}
REASONING: Body = {"chat_template_kwargs": {"enable_thinking": True}}
KINDS: dict[str, tuple[str, Body]] = {
    "schema": ("answers of a schema", {}),
    "schema-tools": ("answers of a schema, with tools", TOOLS),
    "schema-reasoning": ("answers of a schema, with reasoning", REASONING),
    "schema-both": ("answers of a schema, with reasoning and tools", TOOLS | REASONING),
    "required": ("required calls", TOOLS | {"tool_choice": "required"}),
}


async def _structure(trial: CheckTrial, kind: str) -> str | None:
    server, shape, seen = trial.server, trial.rng.choice(SHAPES), None
    text = f"Describe a thing as JSON.\n{server.prompt(trial.rng, 40)}"
    body: Body = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0.8, "seed": trial.rng.getrandbits(31)} | KINDS[kind][1]
    if kind != "required":
        form = {"name": "thing", "schema": _schema(shape), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    whole = await server.ask(body, streamed=False)
    streams = server.ask(body), server.ask(body | {"temperature": 0.0})
    for answer in (whole, *await asyncio.gather(*streams)):
        if answer.finish_reason == "length":
            seen = "some answers were cut at max_tokens"
        elif problem := _malformed(answer, shape, kind):
            raise FindingError(problem, body)
    return seen


def _malformed(choice: AnswerChoice, shape: Any, kind: str) -> str | None:
    for call in choice.calls.values():
        if call["name"] != "measure" or not _holds(call["arguments"], SizedThing):
            return f"the call {call} is not one of the tool"
    if kind == "required" and not choice.calls:
        return f"no call, though one is required: {choice.text[:80]!r}"
    if not choice.calls and not _holds(choice.text, shape):
        return f"not of the schema: {choice.text[:120]!r}"
    return None


def _holds(text: str, shape: Any) -> bool:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        msgspec.convert(value, shape)
    except ValueError:  # msgspec's errors are ValueErrors
        return False
    return True


CHECKS = [
    *(Check(kind, what, partial(_structure, kind=kind)) for kind, (what, _) in KINDS.items()),
    Check("usage", "usage, `max_tokens` and finish reason agree with the tokens", _usage),
    Check("choices", "three choices", _choices),
    Check("stops", "stop strings across events", _stops),
    Check("logprobs", "log probabilities belong to the text", _logprobs),
    Check("pieces", "streamed text equals whole text, and no character is split", _pieces),
    Check("bad-fields", "bad fields are refused by name", _bad_fields, max_trials=1),
]
