"""Sampled tokens against the server's own log probabilities.

Bets are placed against the distribution that the server reports. If it samples from that, the
capital of each bet is a martingale. The mean of all then exceeds 1 / ERROR with probability ERROR
at most, however often it is looked at (Ville's inequality). Bets of several sizes win if
the likeliest token comes too often, or the token that a lookup would guess: the one that followed
the last token before. A further bet wins if a number that is uniform for a right server (the
randomised probability integral transform, Smith 1985) prefers some of twenty classes.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import BUSY, Answer, Body, FindingError, NotSupportedError
from bench.load.client.bodies import NO_ANSWER, tokenize

ERROR = 1e-5  # probability that a right server fails one of these checks
CLASSES, CLASS_PRIOR = 20, 100.0  # a Dirichlet prior of the classes' shares, near equal shares
GUESSES = ("likeliest", "one that a lookup guesses")
BETS = np.array([-0.02, -0.005, 0.005, 0.01, 0.03, 0.1])  # shares of tokens that the bias moves
MIN_CHANCE = 0.05  # of a token that is bet on: the worst loss is limited
SHOWN_DEVIATIONS = 7.0  # of a bias that is found almost surely
MAX_RATIO = 1e-3  # relative error that log probabilities may have at the edge of a filter
CONCURRENT, MAX_TOKENS, TOPS, PLAIN_TOPS = 32, 64, 20, 5
BIAS, BIASED = 1.0, " the"
PROBE = "I think that"  # many tokens may follow, also the biased one
# Names of tokens that are left out, as samples and as possibilities: ends of answers, which some
# servers do not report, and pieces of characters, which have the same name.
UNNAMED = re.compile(r"(<\|.*\|>|</?\w+>|.*\ufffd.*|)", re.DOTALL)
Chances = dict[str, float]  # probabilities of tokens, the most likely first

FILTERS: dict[str, Body] = {
    "plain": {},
    # Nearly equal chances show a bias in a tenth of the tokens.
    "flat": {"temperature": 2.0, "top_k": 19},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 5},
    "bias": {},  # of a token whose id the server knows
}


class Sums:
    """The samples of a check: how many are in each class, and the logarithm of each bet's
    capital."""

    def __init__(self) -> None:
        self.counts, self.logs = np.zeros(CLASSES), np.zeros((len(GUESSES), len(BETS)))
        self.excess, self.variance = np.zeros((2, len(GUESSES)))

    def add(self, chances: Chances, token: str, guess: str | None, uniform: float) -> None:
        for row, name in enumerate((next(iter(chances)), guess)):
            chance = chances.get(name or "", 0.0)
            if MIN_CHANCE <= chance < 1:
                score = (name == token) / chance - 1
                self.logs[row] += np.log1p(BETS * score)
                self.excess[row] += score
                self.variance[row] += 1 / chance - 1
        before = 0.0
        for name, chance in chances.items():
            if name == token:
                break
            before += chance
        chance = chances.get(token, max(1.0 - before, 0.0))
        self.counts[min(int((before + uniform * chance) * CLASSES), CLASSES - 1)] += 1

    def problem(self) -> str | None:
        """Describe a deviation that chance does not explain."""
        samples, total = int(self.counts.sum()), CLASS_PRIOR * CLASSES
        ratios = [math.lgamma(CLASS_PRIOR + n) - math.lgamma(CLASS_PRIOR) for n in self.counts]
        ratios += [math.lgamma(total) - math.lgamma(total + samples), samples * math.log(CLASSES)]
        classes = sum(ratios)
        capitals = [classes, *self.logs.flat]
        log_odds = np.logaddexp.reduce(capitals) - math.log(len(capitals))
        if log_odds < -math.log(ERROR):
            return None
        odds = f"a right server does this once in {math.exp(min(log_odds, 700)):.0e} runs"
        row = int(self.logs.max(axis=1).argmax())
        if classes > self.logs.max():
            return f"{samples} samples do not follow the distribution ({odds})"
        share = self.excess[row] / self.variance[row]
        return f"{share:+.1%} of {samples} tokens are the {GUESSES[row]}, not sampled ({odds})"

    def seen(self) -> str:
        shown = SHOWN_DEVIATIONS / math.sqrt(self.variance[0] or math.inf)
        return f"{self.counts.sum():.0f} samples; a bias to the likeliest of {shown:.1%} would show"


def filtered(top: Chances, fields: Body, seen: Counter[str], biased: str | None) -> Chances | None:
    """Return the distribution that is sampled, by the reported one; None if more than the reported
    tokens may matter."""
    if not top or (biased is not None and biased not in top):
        return None
    exponent, tail = 1 / fields.get("temperature", 1.0), max(1.0 - sum(top.values()), 0.0)
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    changed = {
        name: p**exponent
        * math.exp(BIAS * (name == biased) - presence * (seen[name] > 0) - frequency * seen[name])
        for name, p in top.items()
    }
    names = sorted(changed, key=lambda name: -changed[name])
    chances = np.array([changed[name] for name in names])
    last = min(top.values()) ** exponent  # the highest that a token of the tail can have
    kept, values, edge = len(names), chances[:0], 0.0
    if count := fields.get("top_k"):
        if len(names) <= count or chances[count - 1] < last:
            return None
        kept, values, edge = count, chances[count : count + 1], chances[count - 1]
    elif share := fields.get("top_p"):
        values, edge = np.cumsum(chances), share
        kept = int(np.searchsorted(values, share)) + 1
        if kept > len(names):
            return None
    elif share := fields.get("min_p"):
        values, edge = chances, share * chances[0]
        kept = int((values >= edge).sum())
        if last >= edge:
            return None
    if (abs(values - edge) <= MAX_RATIO * edge).any():
        return None
    total = chances[:kept].sum() + (0.0 if len(values) else tail)
    return dict(zip(names, (chances[:kept] / total).tolist(), strict=False))


async def _sample(trial: CheckTrial, name: str) -> str:
    """Sample answers and test all samples of the check so far."""
    server, fields, biased = trial.server, FILTERS[name], None
    if name == "bias":
        try:
            (token_id,) = await tokenize(server.client, server.model, BIASED)
        except NO_ANSWER:
            raise NotSupportedError(f"no /tokenize that gives one id for {BIASED!r}") from None
        fields, biased = {"logit_bias": {str(token_id): BIAS}}, BIASED
    tops = TOPS if fields else PLAIN_TOPS
    common: Body = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "logprobs": tops}
    probe = common | {"prompt": PROBE, "max_tokens": 1, "seed": 1}
    plain, changed = [(await server.alone(probe | each)).tops for each in ({}, fields)]
    if not (plain and changed):
        raise NotSupportedError("the answer has no log probabilities")
    applied = _not_reported(fields, plain[0], changed[0])
    bodies = [
        common | fields | {"prompt": server.prompt(trial.rng), "seed": trial.rng.getrandbits(31)}
        for _ in range(CONCURRENT)
    ]
    answers = await asyncio.gather(
        *(server.ask(each, streamed=False, needed=False) for each in bodies)
    )
    sums: Sums = trial.memory.setdefault("sums", Sums())
    for body, answer in zip(bodies, answers, strict=True):
        if answer.error and answer.status not in BUSY:
            raise FindingError(answer.error, body)
        for token, guess, chances in _samples(answer, tops, applied, biased if applied else None):
            if token not in chances and applied and biased is None:
                raise FindingError(f"{token!r} was sampled against {applied}", body)
            sums.add(chances, token, guess, trial.rng.random())
    if not sums.counts.any():
        raise NotSupportedError("no token whose probabilities are known")
    if problem := sums.problem():
        raise FindingError(problem)
    return sums.seen()


def _not_reported(fields: Body, plain: Chances, changed: Chances) -> Body:
    """Return the fields whose effect is not in the reported log probabilities."""
    if plain.keys() == changed.keys() and all(abs(p - plain[n]) < 0.05 for n, p in changed.items()):
        return fields
    is_cut = sum(map(math.exp, changed.values())) > 1 - MAX_RATIO
    if "temperature" not in fields or is_cut:
        return {}
    return {name: value for name, value in fields.items() if name != "temperature"}


def _samples(
    answer: Answer, tops: int, fields: Body, biased: str | None
) -> Iterator[tuple[str, str | None, Chances]]:
    """Give the tokens of an answer with what a lookup would guess, and with the chances."""
    seen: Counter[str] = Counter()
    followers: dict[str, str] = {}
    for at, (token, top) in enumerate(zip(answer.tokens, answer.tops, strict=False)):
        # Some servers add the sampled token to the likeliest ones, which would bias the sums.
        names = sorted(top, key=lambda name: -top[name])[:tops]
        reported = {name: math.exp(top[name]) for name in names}
        chances = filtered(reported, fields, seen, biased) or {}
        previous = answer.tokens[at - 1] if at else ""
        guess, followers[previous] = followers.get(previous), token
        seen[token] += 1
        named = {name: p for name, p in chances.items() if not UNNAMED.fullmatch(name)}
        left = 1.0 - sum(chances.values()) + sum(named.values())
        if named and left > 0.5 and not UNNAMED.fullmatch(token):
            yield token, guess, {name: p / left for name, p in named.items()}


CHECKS = [
    Check(
        f"samples-{name}",
        f"samples follow the reported probabilities: {name}",
        partial(_sample, name=name),
        share=20.0 if name == "flat" else 2.0,
        max_trials=80 if name == "flat" else 10,
        max_findings=1,
        adds=True,
    )
    for name in FILTERS
]
