"""Accounting: usage, finish reasons, stop strings, and texts in pieces."""

from __future__ import annotations

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import Answer, Body, NotSupportedError

EMOJI = "\U0001f600\U0001f389\U0001f680\u2615\U0001f44d\U0001f3fd\u00e9\u6f22\u5b57"


async def _usage(trial: CheckTrial) -> None:
    """Compare the usage with the tokens of the answer, and `max_tokens` with both."""
    base, prompts = trial.body(logprobs=1), set[object]()
    for limit in (1, trial.rng.randrange(2, 40)):
        body = base | {"max_tokens": limit}
        for way, answer in await trial.both(body, "log probabilities"):
            if not answer.usage:
                trial.seen = f"{way} answers have no usage"
                continue
            prompts.add(answer.usage.get("prompt_tokens"))
            if problem := _miscounted(answer, limit):
                trial.found(f"{way}: {problem}", body)
    if not prompts:
        raise NotSupportedError("answers have no usage")
    if len(prompts) > 1:
        trial.found(f"prompt tokens are {prompts} for one prompt", base)


def _miscounted(answer: Answer, limit: int) -> str | None:
    """Describe what does not agree in an answer of at most `limit` tokens."""
    counted = answer.usage.get("completion_tokens", 0)
    tokens, ended = len(answer.first.tokens), answer.first.finish_reason
    # The token that ends an answer may be counted without being shown.
    if tokens and counted - tokens not in ((0,) if ended == "length" else (0, 1)):
        return f"usage {counted}, but {tokens} tokens came ({ended})"
    if ended == "length" and counted != limit:
        return f"cut at {counted} tokens of {limit}"
    if counted > limit or ended not in ("length", "stop"):
        return f"{counted} tokens of {limit}, finish reason {ended!r}"
    return None


async def _choices(trial: CheckTrial) -> None:
    """Ask for three choices: each is whole, and usage counts all."""
    body = trial.body(n=3, temperature=0.8, seed=trial.seed, logprobs=1)
    answer = await trial.server.require(body, "n = 3")
    reasons = [each.finish_reason for each in answer.choices]
    if len(reasons) != 3 or not all(reasons):
        trial.found(f"n = 3 gave choices with finish reasons {reasons}", body)
    tokens = sum(len(each.tokens) for each in answer.choices)
    counted = answer.usage.get("completion_tokens", tokens)
    if tokens and not 0 <= counted - tokens <= 3:
        trial.found(f"usage {counted}, but three choices have {tokens} tokens", body)


async def _stops(trial: CheckTrial) -> None:
    """Stop at a piece of the answer that crosses the border of two events."""
    plain, rng = trial.body(), trial.rng
    before = await trial.server.alone(plain)
    text, pieces = before.first.text, [piece for _, piece in before.pieces]
    borders = [sum(map(len, pieces[:i])) for i in range(2, len(pieces))]
    if not borders:
        return
    border = rng.choice(borders)
    stop = text[border - rng.randint(1, 3) : border + rng.randint(1, 3)]
    if not stop.strip():
        return
    body, expected = plain | {"stop": [stop]}, text[: text.find(stop)]
    for way, answer in await trial.both(body, "stop"):
        got = answer.first.text
        if stop in got or (got.startswith(expected) and got != expected):
            trial.found(f"{way}: {got[len(expected) :][:40]!r} came after the stop {stop!r}", body)
        elif expected.startswith(got) and got != expected:
            trial.found(f"{way}: {expected[len(got) :][:40]!r} is missing before {stop!r}", body)
        elif got == expected and answer.first.finish_reason != "stop":
            trial.found(f"{way}: finish reason {answer.first.finish_reason!r} at a stop", body)


async def _logprobs(trial: CheckTrial) -> None:
    """Check that tokens join to the text, and that the sampled one is among the likeliest."""
    body = trial.body(logprobs=3)
    choice = (await trial.server.require(body, "log probabilities", streamed=False)).first
    if not choice.tokens:
        raise NotSupportedError("the answer has no log probabilities")
    joined = "".join(choice.tokens)
    if "\ufffd" not in joined and not joined.startswith(choice.text.rstrip("\ufffd")):
        trial.found(f"the tokens join to {joined[:60]!r}, the text is {choice.text[:60]!r}", body)
    best = [
        max(top.values(), default=p) for top, p in zip(choice.tops, choice.logprobs, strict=False)
    ]
    for at, (logprob, highest) in enumerate(zip(choice.logprobs, best, strict=False)):
        if logprob < highest - 1e-3:
            problem = f"greedy token {at} has {logprob:.3f}, the likeliest {highest:.3f}"
            return trial.found(problem, body)
    return None


async def _pieces(trial: CheckTrial) -> None:
    """Compare the streamed text with the whole; characters of several tokens must not be split."""
    sampled = trial.body(temperature=1.0, seed=trial.rng.getrandbits(31))
    prompt = trial.body(prompt=f"{EMOJI} " * 3 + EMOJI[: trial.rng.randrange(4)])
    chat: Body = {"messages": [{"role": "user", "content": f"Repeat: {EMOJI} {EMOJI}"}]}
    for body in (sampled, prompt, chat | {"temperature": 0.0, "max_tokens": 40}):
        try:
            (_, whole), (_, streamed) = await trial.both(body)
        except NotSupportedError:
            if body is sampled:
                raise
            continue
        text = whole.first.text + whole.first.reasoning
        joined = "".join(piece for _, piece in streamed.pieces)
        known, end = text.count("\ufffd"), min(len(text), len(joined))
        broken = [at for at, c in enumerate(joined) if c == "\ufffd" or "\ud800" <= c < "\ue000"]
        if len(broken) > known:
            at = broken[0]
            trial.found(f"a character was split: {joined[max(at - 8, 0) : at + 4]!r}", body)
        elif joined != text and joined[:end] == text[:end]:
            trial.found(f"streamed text ends {joined[end:]!r}, whole {text[end:]!r}", body)


CHECKS = [
    Check("usage", "usage, `max_tokens` and finish reason agree with the tokens", _usage),
    Check("choices", "three choices", _choices),
    Check("stops", "stop strings across events", _stops),
    Check("logprobs", "log probabilities belong to the text", _logprobs),
    Check("pieces", "streamed text equals whole text, and no character is split", _pieces),
]
