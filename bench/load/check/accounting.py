"""Accounting: usage, finish reasons, stop strings, and texts in pieces."""

from __future__ import annotations

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import Answer, Body, NotSupportedError

MAX_TOKENS = 40
EMOJI = "\U0001f600\U0001f389\U0001f680\u2615\U0001f44d\U0001f3fd\u00e9\u6f22\u5b57"


def _body(trial: CheckTrial, **fields: object) -> Body:
    """Return a greedy request of plain text."""
    common = {"prompt": trial.server.prompt(trial.rng), "temperature": 0.0}
    return common | {"max_tokens": MAX_TOKENS} | fields


async def _usage(trial: CheckTrial) -> None:
    """Compare the usage with the tokens of the answer, and `max_tokens` with both."""
    body = _body(trial, logprobs=1, max_tokens=trial.rng.randrange(2, MAX_TOKENS))
    whole = await trial.server.require(body, "log probabilities", streamed=False)
    streamed = await trial.server.ask(body)
    prompt_tokens = {each.usage.get("prompt_tokens") for each in (whole, streamed)}
    if len(prompt_tokens) > 1:
        trial.found(f"prompt tokens are {prompt_tokens} for one prompt", body)
    for way, answer in (("whole", whole), ("streamed", streamed)):
        counted = answer.usage.get("completion_tokens")
        if counted is None:
            raise NotSupportedError("the answer has no usage")
        tokens = len(answer.first.tokens)
        ended = answer.first.finish_reason
        # The token that ends an answer may be counted without being shown.
        if tokens and counted - tokens not in ((0,) if ended == "length" else (0, 1)):
            trial.found(f"{way}: usage {counted}, but {tokens} tokens came ({ended})", body)
        if ended == "length" and counted != body["max_tokens"]:
            problem = f"{way}: cut at {counted} tokens of {body['max_tokens']}"
            trial.found(problem, body)
        elif ended not in ("length", "stop"):
            trial.found(f"{way}: finish reason {ended!r}", body)


async def _single_token(trial: CheckTrial) -> None:
    body = _body(trial, max_tokens=1)
    for streamed in (False, True):
        answer = await trial.server.require(body, "max_tokens 1", streamed=streamed)
        if answer.usage.get("completion_tokens", 1) != 1:
            trial.found(f"{answer.usage['completion_tokens']} tokens for max_tokens 1", body)


async def _choices(trial: CheckTrial) -> None:
    """Ask for three choices: each is whole, and usage counts all."""
    body = _body(trial, n=3, temperature=0.8, seed=trial.seed, logprobs=1)
    answer = await trial.server.require(body, "n = 3")
    if len(answer.choices) != 3 or not all(each.finish_reason for each in answer.choices):
        reasons = [each.finish_reason for each in answer.choices]
        trial.found(f"n = 3 gave choices with finish reasons {reasons}", body)
    tokens = sum(len(each.tokens) for each in answer.choices)
    counted = answer.usage.get("completion_tokens", tokens)
    if tokens and not 0 <= counted - tokens <= 3:
        trial.found(f"usage {counted}, but three choices have {tokens} tokens", body)


async def _stops(trial: CheckTrial) -> None:
    """Stop at a piece of the answer that crosses the border of two events."""
    plain = _body(trial)
    before = await trial.server.alone(plain)
    text, pieces = before.first.text, [piece for _, piece in before.pieces]
    borders = [sum(map(len, pieces[:i])) for i in range(2, len(pieces))]
    if not borders:
        return
    border = trial.rng.choice(borders)
    stop = text[border - trial.rng.randint(1, 3) : border + trial.rng.randint(1, 3)]
    if not stop.strip():
        return
    body, expected = plain | {"stop": [stop]}, text[: text.find(stop)]
    for way, streamed in (("whole", False), ("streamed", True)):
        answer = await trial.server.require(body, "stop", streamed=streamed)
        got = answer.first.text
        if stop in got or (got.startswith(expected) and got != expected):
            trial.found(f"{way}: {got[len(expected) :][:40]!r} came after the stop {stop!r}", body)
        elif expected.startswith(got) and got != expected:
            trial.found(f"{way}: {expected[len(got) :][:40]!r} is missing before {stop!r}", body)
        elif got == expected and answer.first.finish_reason != "stop":
            trial.found(f"{way}: finish reason {answer.first.finish_reason!r} at a stop", body)


async def _logprobs(trial: CheckTrial) -> None:
    """Check that tokens join to the text, and that the sampled one is among the likeliest."""
    body = _body(trial, logprobs=3)
    answer = await trial.server.require(body, "log probabilities", streamed=False)
    choice = answer.first
    if not choice.tokens:
        raise NotSupportedError("the answer has no log probabilities")
    joined = "".join(choice.tokens)
    if "\ufffd" not in joined and not joined.startswith(choice.text.rstrip("\ufffd")):
        trial.found(f"the tokens join to {joined[:60]!r}, the text is {choice.text[:60]!r}", body)
    for at, (logprob, top) in enumerate(zip(choice.logprobs, choice.tops, strict=False)):
        if top and logprob < max(top.values()) - 1e-3:
            problem = f"greedy token {at} has {logprob:.3f}, the likeliest {max(top.values()):.3f}"
            trial.found(problem, body)
            return


async def _pieces(trial: CheckTrial) -> None:
    """Compare the streamed text with the whole; characters of several tokens must not be split."""
    chat: Body = {"messages": [{"role": "user", "content": f"Repeat: {EMOJI} {EMOJI}"}]}
    chat |= {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    prompt = _body(trial, prompt=f"{EMOJI} " * 3 + EMOJI[: trial.rng.randrange(4)])
    sampled = _body(trial, temperature=1.0, seed=trial.rng.randrange(2**31))
    for body in (sampled, prompt, chat):
        whole = await trial.server.ask(body, streamed=False)
        if body is chat and whole.status in (400, 404, 422):
            continue
        _compare_pieces(trial, body, whole, await trial.server.ask(body))


def _compare_pieces(trial: CheckTrial, body: Body, whole: Answer, streamed: Answer) -> None:
    text = whole.first.text + whole.first.reasoning
    joined = "".join(piece for _, piece in streamed.pieces)
    if not streamed.is_utf8 or any("\udc00" > c >= "\ud800" for c in joined):
        trial.found("an event is not UTF-8", body)
    elif joined.count("\ufffd") > text.count("\ufffd"):
        at = joined.index("\ufffd")
        trial.found(f"a character was split: {joined[max(at - 8, 0) : at + 4]!r}", body)
    elif joined != streamed.first.text + streamed.first.reasoning:
        return  # reasoning and text alternate
    elif joined != text and (joined.startswith(text) or text.startswith(joined)):
        shared = min(len(joined), len(text))
        trial.found(f"streamed text ends {joined[shared:]!r}, whole {text[shared:]!r}", body)


CHECKS = [
    Check("usage", "usage, `max_tokens` and finish reason agree with the tokens", _usage),
    Check("single-token", "`max_tokens` 1", _single_token),
    Check("choices", "three choices", _choices),
    Check("stops", "stop strings across events", _stops),
    Check("logprobs", "log probabilities belong to the text", _logprobs),
    Check("pieces", "streamed text equals whole text, and no character is split", _pieces),
]
