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
import random
import re
from collections import Counter
from functools import partial

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import AnswerChoice, Body, NotSupportedError
from bench.load.client.bodies import NO_ANSWER, tokenize

ERROR = 1e-5  # probability that a right server fails one of these checks
CLASSES, CLASS_PRIOR = 20, 100.0  # a Dirichlet prior of the classes' shares, near equal shares
BETS = (-0.02, -0.005, 0.005, 0.01, 0.03, 0.1)  # shares of tokens that the bias moves
MIN_CHANCE = 0.05  # of a token that is bet on: the worst loss is limited
SHOWN_DEVIATIONS = 7.0  # of a bias that is found almost surely
MAX_RATIO = 1e-3  # relative error that log probabilities may have at the edge of a filter
CONCURRENT, MAX_TOKENS, TOPS, PLAIN_TOPS = 32, 64, 20, 5
BIAS = 1.0
PROBE = "I think that"  # many tokens may follow, also the biased one
# Names of tokens that are left out, as samples and as possibilities: ends of answers, which some
# servers do not report, and pieces of characters, which have the same name.
UNNAMED = re.compile(r"(<\|.*\|>|</?\w+>|.*\ufffd.*|)", re.DOTALL)
Weights = list[tuple[str, float]]  # tokens and probabilities, the most likely first

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


class Bet:
    """A bet on the hits of one token a sample, with its chances."""

    def __init__(self) -> None:
        self.logs = [0.0] * len(BETS)  # capital by size of the bias
        self.excess = self.variance = 0.0

    def add(self, chance: float, is_hit: bool) -> None:
        if MIN_CHANCE <= chance < 1:
            score = is_hit / chance - 1
            self.logs = [
                log + math.log1p(b * score) for log, b in zip(self.logs, BETS, strict=True)
            ]
            self.excess += score
            self.variance += 1 / chance - 1


class Sums:
    """The samples of a check. `seed` is that of its first trial."""

    def __init__(self, seed: int) -> None:
        self.seed, self.counts = seed, [0] * CLASSES
        self.bets = {"likeliest": Bet(), "one that a lookup guesses": Bet()}

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def add(self, weights: Weights, token: str, guess: str | None, uniform: float) -> None:
        chances = dict(weights)
        for bet, name in zip(self.bets.values(), (weights[0][0], guess), strict=True):
            bet.add(chances.get(name or "", 0.0), name == token)
        before = 0.0
        for name, chance in weights:
            if name == token:
                break
            before += chance
        chance = chances.get(token, max(1.0 - before, 0.0))
        self.counts[min(int((before + uniform * chance) * CLASSES), CLASSES - 1)] += 1

    def problem(self) -> str | None:
        """Describe a deviation that chance does not explain."""
        total = CLASS_PRIOR * CLASSES
        classes = math.lgamma(total) - math.lgamma(total + self.samples)
        classes += self.samples * math.log(CLASSES)
        classes += sum(math.lgamma(CLASS_PRIOR + n) - math.lgamma(CLASS_PRIOR) for n in self.counts)
        logs = {"": classes} | {name: max(bet.logs) for name, bet in self.bets.items()}
        capitals = [classes, *(log for bet in self.bets.values() for log in bet.logs)]
        highest = max(capitals)
        mean = highest + math.log(sum(math.exp(log - highest) for log in capitals) / len(capitals))
        if mean < -math.log(ERROR):
            return None
        odds = f"a right server does this once in {math.exp(min(mean, 700)):.0e} runs"
        name = max(logs, key=lambda name: logs[name])
        if bet := self.bets.get(name):
            share = bet.excess / bet.variance
            return f"{share:+.1%} of {self.samples} tokens are the {name}, not sampled ({odds})"
        return f"{self.samples} samples do not follow the distribution ({odds})"

    def seen(self) -> str:
        shown = SHOWN_DEVIATIONS / math.sqrt(self.bets["likeliest"].variance or math.inf)
        return f"{self.samples} samples; a bias to the likeliest of {shown:.1%} would show"


def filtered(top: Weights, fields: Body, seen: Counter[str], biased: str | None) -> Weights | None:
    """Return the distribution that is sampled, by the reported one; None if more than the reported
    tokens may matter."""
    tail = max(1.0 - sum(chance for _, chance in top), 0.0)
    exponent = 1 / fields.get("temperature", 1.0)
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    last = top[-1][1] ** exponent if top else 0.0
    if biased is not None and biased not in dict(top):
        return None

    def changed(name: str, p: float) -> float:
        penalty = presence * (seen[name] > 0) + frequency * seen[name] - BIAS * (name == biased)
        return float(p**exponent * math.exp(-penalty))

    top = sorted(((name, changed(name, p)) for name, p in top), key=lambda pair: -pair[1])
    chances = [p for _, p in top]
    kept = len(top)
    if count := fields.get("top_k"):
        kept = count
        if len(top) <= kept or chances[kept - 1] < last or _close(*chances[kept - 1 : kept + 1]):
            return None
    elif share := fields.get("top_p"):
        sums = [sum(chances[: n + 1]) for n in range(len(top))]
        kept = next((n + 1 for n, total in enumerate(sums) if total >= share), 0)
        if not kept or any(_close(total, share) for total in sums):
            return None
    elif share := fields.get("min_p"):
        limit = share * chances[0]
        kept = sum(p >= limit for p in chances)
        if last >= limit or any(_close(p, limit) for p in chances):
            return None
    is_cut = fields.keys() & {"top_k", "top_p", "min_p"}
    total = sum(chances[:kept]) + (0.0 if is_cut else tail)
    return [(name, p / total) for name, p in top[:kept]]


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= MAX_RATIO * max(one, other)


async def _sample(trial: CheckTrial, name: str) -> None:
    """Sample answers and test all samples of the check so far."""
    fields, biased, server = FILTERS[name], None, trial.server
    if name == "bias":
        biased = " the"
        try:
            ids = await tokenize(server.client, server.model, biased)
        except NO_ANSWER:
            raise NotSupportedError("no /tokenize, so no token's id is known") from None
        if len(ids) != 1:
            raise NotSupportedError(f"/tokenize does not give {biased!r} one token")
        fields = {"logit_bias": {str(ids[0]): BIAS}}
    tops = TOPS if fields else PLAIN_TOPS
    common: Body = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "logprobs": tops}
    probe = common | {"prompt": PROBE, "max_tokens": 1, "seed": 1}
    plain = (await server.require(probe, "log probabilities", streamed=False)).first
    changed = (await server.require(probe | fields, name, streamed=False)).first
    if not plain.tops or not changed.tops:
        raise NotSupportedError("the answer has no log probabilities")
    bodies = [
        common | fields | {"prompt": server.prompt(trial.rng), "seed": trial.rng.getrandbits(31)}
        for _ in range(CONCURRENT)
    ]
    answers = await asyncio.gather(*(server.ask(each, streamed=False) for each in bodies))
    applied = _not_reported(fields, plain.tops[0], changed.tops[0])
    if not applied:
        biased = None
    sums: Sums = trial.memory.setdefault("sums", Sums(trial.seed))
    for body, answer in zip(bodies, answers, strict=True):
        if problem := _add(sums, answer.first, tops, applied, biased, trial.rng):
            return trial.found(problem, body)
    trial.seen = sums.seen()
    if problem := sums.problem():
        trial.found(problem, seed=sums.seed)
    return None


def _not_reported(fields: Body, plain: dict[str, float], changed: dict[str, float]) -> Body:
    """Return the fields whose effect is not in the reported log probabilities."""
    if plain.keys() == changed.keys() and all(abs(p - plain[n]) < 0.05 for n, p in changed.items()):
        return fields
    is_cut = sum(map(math.exp, changed.values())) > 1 - MAX_RATIO
    if "temperature" not in fields or is_cut:
        return {}
    return {name: value for name, value in fields.items() if name != "temperature"}


def _add(
    sums: Sums,
    choice: AnswerChoice,
    tops: int,
    fields: Body,
    biased: str | None,
    rng: random.Random,
) -> str | None:
    """Add the tokens of a choice. Describe a token that a filter should have removed."""
    seen: Counter[str] = Counter()
    followers: dict[str, str] = {}
    for at, (token, top) in enumerate(zip(choice.tokens, choice.tops, strict=False)):
        # Some servers add the sampled token to the likeliest ones, which would bias the sums.
        names = sorted(top.items(), key=lambda pair: -pair[1])[:tops]
        weights = filtered([(n, math.exp(p)) for n, p in names], fields, seen, biased)
        previous = choice.tokens[at - 1] if at else ""
        guess, followers[previous] = followers.get(previous), token
        seen[token] += 1
        if weights is None or UNNAMED.fullmatch(token):
            continue
        if token not in dict(weights) and fields and biased is None:
            return f"{token!r} ({top.get(token)}) was sampled against {fields}"
        left_out = sum(chance for name, chance in weights if UNNAMED.fullmatch(name))
        if left_out < 0.5:
            rest = [(n, p / (1 - left_out)) for n, p in weights if not UNNAMED.fullmatch(n)]
            sums.add(rest, token, guess, rng.random())
    return None


CHECKS = [
    Check(
        f"samples-{name}",
        f"samples follow the reported probabilities: {name}",
        partial(_sample, name=name),
        share=20.0 if name == "flat" else 2.0,
        max_trials=80 if name == "flat" else 10,
        max_findings=1,
    )
    for name in FILTERS
]
