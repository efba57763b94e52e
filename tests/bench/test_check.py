"""`cbatch check` finds planted faults, and nothing on a server without them."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.check.command import CHECKS, FAILED_CHECK, add_parser
from bench.load.check.distribution import GUESSES, Sums, filtered
from cbatch.core.request.errors import FieldError
from tests.bench import planted_server
from tests.bench.planted_server import FAULTS, planted

# The checks that must find a fault.
FINDERS = {
    "batch": "equal-load-8",
    "biased drafts": "samples-flat",
    "logprobs of the neighbour": "equal-load-8",
    "usage": "usage",
    "stop": "stops",
    "schema": "schema-reasoning",
    "stall": "pause",
    "split": "pieces",
    "seed": "equal-load-8",
    "cancel": "cancel",
    "top-k": "samples-top-k",
    "failure": "samples-min-p",
}
assert FINDERS.keys() == FAULTS.keys()
SLOW = ["biased drafts"]  # needs some 60,000 tokens


def check(url: str, path: Path, *argv: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the command. Return its status, and the results by check."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["check", url, "--json", str(path), *map(str, argv)])
    status = args.run(args)
    return status, {each["name"]: each for each in json.loads(path.read_bytes())["results"]}


def test_a_right_server_has_no_findings(tmp_path: Path) -> None:
    with planted() as url:
        page = tmp_path / "page.html"
        path = tmp_path / "results.json"
        status, results = check(url, path, "--minutes", 0.02, "--page", page)
    assert status == 0, [each for each in results.values() if each["findings"]]
    states = {name: each["state"] for name, each in results.items()}
    unsupported = {name for name, state in states.items() if state == "not supported"}
    assert unsupported == {"equal-speculation", "equal-against"}
    assert set(states.values()) == {"passed", "not supported"} and set(states) == set(CHECKS)
    assert all(each["trials"] for name, each in results.items() if name not in unsupported)
    assert page.read_text().count("<tr class=") == len(CHECKS)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in SLOW])
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = FINDERS[fault]
    with planted(fault) as url:
        argv = ("--minutes", 0.1, "--only", name)
        status, results = check(url, tmp_path / "results.json", *argv)
        assert status == FAILED_CHECK and results[name]["state"] == "found", results
        seed = results[name]["findings"][0]["seed"]
        assert f"again: --only {name} --seed {seed}" in capsys.readouterr().out
        # The finding's seed is found in the first trial.
        if CHECKS[name].timing:
            return
        again = ("--minutes", 1e-6, "--only", name, "--seed", seed)
        _, results = check(url, tmp_path / "again.json", *again)
        assert results[name]["trials"] == 1 and results[name]["findings"]


def test_a_second_server_is_compared(tmp_path: Path) -> None:
    with planted() as url, planted("batch") as other, planted() as same:
        argv = ("--minutes", 0.01, "--only", "equal-against", "--against")
        status, results = check(url, tmp_path / "a.json", *argv, same)
        assert status == 0 and results["equal-against"]["state"] == "passed"
        # This server's answers depend on the batch, and four requests are not enough for it.
        assert check(url, tmp_path / "b.json", *argv, other)[0] == 0


@pytest.mark.statistics
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_seed_finds_every_fault(fault: str | None, seed: int, tmp_path: Path) -> None:
    """The right server is checked as long as all checks of a run of five minutes."""
    names = [*CHECKS] if fault is None else [FINDERS[fault]]
    minutes = 5 if fault is None else 2 if fault in SLOW else 0.2
    with planted(*filter(None, [fault])) as url:
        argv = ("--minutes", minutes, "--only", *names, "--seed", 1000 * seed)
        status, results = check(url, tmp_path / "results.json", *argv)
    assert status == (0 if fault is None else FAILED_CHECK), results


FIELDS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"temperature": 2.0, "top_k": 19},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 5},
    {"logit_bias": {"3": 1.0}},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_filters_are_those_of_the_server(fields: dict[str, Any]) -> None:
    rng, compared = np.random.default_rng(0), 0
    for _ in range(200):
        logits = 2.5 * rng.normal(size=40)
        output = rng.integers(40, size=3).tolist()
        sampled = planted_server.filtered(logits, fields, output)
        chances = np.exp(logits) / np.exp(logits).sum()
        top = {str(i): float(chances[i]) for i in np.argsort(-chances)[:20]}
        biased = "3" if "logit_bias" in fields else None
        weights = filtered(top, fields, Counter(map(str, output)), biased)
        if weights is not None:
            compared += 1
            assert all(
                math.isclose(p, sampled[int(name)], abs_tol=1e-9) for name, p in weights.items()
            )
            assert not fields or biased or len(weights) == (sampled > 0).sum()
    assert compared > 100


@pytest.mark.parametrize("bias", ["none", "likeliest", "one that a lookup guesses", "order"])
def test_bets_find_a_bias_and_nothing_else(bias: str) -> None:
    """A few of nine tokens are not sampled, or two tokens change places."""
    rng, sums = random.Random(1), Sums()
    chances = {name: (12 - i) / 72 for i, name in enumerate("abcdefghi")}
    names = [*chances]
    for token in rng.choices(names, [*chances.values()], k=60_000):
        guess = rng.choice(names[4:])
        if bias in GUESSES and rng.random() < 0.015:
            token = "a" if bias == "likeliest" else guess
        elif bias == "order":
            token = {"h": "c", "c": "h"}.get(token, token)
        sums.add(chances, token, guess, rng.random())
    problem = sums.problem() or "none"
    assert bias in problem or (bias == "order" and "do not follow" in problem), problem
    assert "a bias to the likeliest of 1.3% would show" in sums.seen()


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with planted() as url:
        with pytest.raises(FieldError, match="--minutes: 0 is not a time"):
            check(url, tmp_path / "results.json", "--minutes", 0)
        with pytest.raises(SystemExit):
            check(url, tmp_path / "results.json", "--only", "what")
    assert "--only: invalid choice: 'what'" in capsys.readouterr().err
