"""Sampled tokens against the server's own log probabilities.

Each sampled token gives a number that is uniform if the token follows the distribution (the
randomised probability integral transform, Smith 1985): the probability of all likelier tokens, plus
a uniform part of its own. Pearson's test over twenty classes finds a wrong shape. A score test of
the likeliest token's hits finds drafts that are accepted too often. Either rejects a right server
once in two million looks.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from functools import partial

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import Body, CheckedChoice, NotSupportedError

CLASSES = 20
MAX_CHI_SQUARE = 65.53  # of 19 degrees of freedom, exceeded with probability 5e-7
MAX_DEVIATIONS = 5.03  # of a normal variable, exceeded in size with probability 5e-7
MAX_RATIO = 1e-3  # relative error that log probabilities may have at the edge of a filter
CONCURRENT, MAX_TOKENS, TOPS, PLAIN_TOPS = 32, 64, 20, 5
MIN_CHANCE = 0.05  # rarer tokens would have too much weight
Weights = list[tuple[str, float]]  # tokens and probabilities, the most likely first

FILTERS: dict[str, Body] = {
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 5},
    "bias": {},  # of a token whose id the server knows
}
BIAS = 1.0


class Sums:
    """Sums over the samples of a check."""

    def __init__(self) -> None:
        self.counts, self.samples = [0] * CLASSES, 0
        # Of the likeliest token's hits over their chances, for a score test of the share of tokens
        # that are the likeliest instead of sampled.
        self.excess = self.variance = 0.0

    def add(self, weights: Weights, token: str, uniform: float) -> None:
        before = 0.0
        for at, (name, chance) in enumerate(weights):
            if at == 0 and chance >= MIN_CHANCE:
                self.excess += (name == token) / chance - 1
                self.variance += 1 / chance - 1
            if name == token:
                break
            before += chance
        else:
            chance = max(1.0 - before, 0.0)
        self.counts[min(int((before + uniform * chance) * CLASSES), CLASSES - 1)] += 1
        self.samples += 1

    def problem(self) -> str | None:
        """Describe a deviation that chance does not explain."""
        expected = self.samples / CLASSES
        square = sum((n - expected) ** 2 for n in self.counts) / max(expected, 1e-9)
        deviations = self.excess / math.sqrt(self.variance) if self.variance else 0.0
        if abs(deviations) > MAX_DEVIATIONS:
            return (
                f"{self.excess / self.variance:+.2%} of {self.samples} tokens are the likeliest"
                f" instead of sampled ({deviations:+.1f} standard deviations)"
            )
        if expected >= 10 and square > MAX_CHI_SQUARE:
            return (
                f"{self.samples} samples do not follow the distribution (chi-square {square:.0f})"
            )
        return None


def filtered(top: Weights, fields: Body, seen: Counter[str], biased: str | None) -> Weights | None:
    """Return the distribution that is sampled, by the reported one; None if more than the reported
    tokens may matter."""
    tail = max(1.0 - sum(chance for _, chance in top), 0.0)
    last = top[-1][1] if top else 0.0
    if fields.get("presence_penalty"):
        presence, frequency = fields["presence_penalty"], fields["frequency_penalty"]
        top = [
            (name, p * math.exp(-presence * (seen[name] > 0) - frequency * seen[name]))
            for name, p in top
        ]
    if biased is not None:
        if biased not in dict(top):
            return None
        top = [(n, p * math.exp(BIAS * (n == biased))) for n, p in top]
    top = sorted(top, key=lambda pair: -pair[1])
    kept = len(top)
    if count := fields.get("top_k"):
        kept = count
        if len(top) <= kept or top[kept - 1][1] < last or _close(top[kept - 1][1], top[kept][1]):
            return None
    elif share := fields.get("top_p"):
        total, kept = 0.0, 0
        while total < share and kept < len(top):
            total += top[kept][1]
            kept += 1
        if total < share or _close(total, share) or _close(total - top[kept - 1][1], share):
            return None
    elif share := fields.get("min_p"):
        limit = share * top[0][1]
        kept = sum(p >= limit for _, p in top)
        if last >= limit or any(_close(p, limit) for _, p in top):
            return None
    else:
        total = sum(p for _, p in top) + tail
        return [(name, p / total) for name, p in top]
    total = sum(p for _, p in top[:kept])
    return [(name, p / total) for name, p in top[:kept]]


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= MAX_RATIO * max(one, other)


async def _sample(trial: CheckTrial, name: str) -> None:
    """Sample answers and test all samples of the check so far."""
    fields, biased, server = FILTERS[name], None, trial.server
    if name == "bias":
        biased = " the"
        if len(ids := await server.tokenize(biased)) != 1:
            raise NotSupportedError(f"/tokenize does not give {biased!r} one token")
        fields = {"logit_bias": {str(ids[0]): BIAS}}
    tops = TOPS if fields else PLAIN_TOPS
    common: Body = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "logprobs": tops} | fields
    probe: Body = {"prompt": server.prompt(trial.rng), "max_tokens": 1, "seed": 1}
    changed = await server.require(common | probe, name)
    plain = await server.require(
        probe | {"temperature": 1.0, "logprobs": tops}, "log probabilities"
    )
    if not plain.first.tops:
        raise NotSupportedError("the answer has no log probabilities")
    bodies = [
        common | {"prompt": server.prompt(trial.rng), "seed": trial.rng.randrange(2**31)}
        for _ in range(CONCURRENT)
    ]
    if not _nearly_equal(plain.first, changed.first):  # they are of the filtered distribution
        fields, biased = {}, None
    sums = trial.memory.setdefault("sums", Sums())
    answers = await asyncio.gather(*map(server.ask, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        if problem := _add(sums, answer.first, tops, fields, biased, trial.rng):
            trial.found(problem, body)
            return
    trial.seen = f"{sums.samples} samples"
    if problem := sums.problem():
        trial.found(problem)
        del trial.memory["sums"]


def _add(
    sums: Sums,
    choice: CheckedChoice,
    tops: int,
    fields: Body,
    biased: str | None,
    rng: random.Random,
) -> str | None:
    """Add the tokens of a choice. Describe a token that a filter should have removed."""
    seen: Counter[str] = Counter()
    for token, top in zip(choice.tokens, choice.tops, strict=False):
        # Some servers add the sampled token to the likeliest ones, which would bias the sums.
        names = sorted(top.items(), key=lambda pair: -pair[1])[:tops]
        weights = filtered([(n, math.exp(p)) for n, p in names], fields, seen, biased)
        seen[token] += 1
        # Different pieces of a character have the same name; the end of an answer has none.
        if weights is None or not token or any("\ufffd" in name for name in (token, *top)):
            continue
        if token not in dict(weights) and fields and biased is None:
            return f"{token!r} ({top.get(token)}) was sampled against {fields}"
        sums.add(weights, token, rng.random())
    return None


def _nearly_equal(one: CheckedChoice, other: CheckedChoice) -> bool:
    """Return whether two first positions report the same probabilities."""
    if not one.tops or not other.tops or one.tops[0].keys() != other.tops[0].keys():
        return False
    return all(abs(p - other.tops[0][name]) < 0.05 for name, p in one.tops[0].items())


CHECKS = [
    Check(
        f"samples-{name}",
        f"samples follow the reported probabilities: {name}",
        partial(_sample, name=name),
        share=20.0 if name == "plain" else 1.5,
    )
    for name in FILTERS
]
