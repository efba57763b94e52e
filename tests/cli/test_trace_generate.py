"""`cbatch trace generate` writes the requests of `sim.workload.generate` in a format that readers
accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.workload.arrivals import gamma, poisson
from sim.workload.generate import Conversations, converse, generate
from sim.workload.lengths import fixed, lognormal, uniform
from sim.workload.traces.reader import Trace
from tests.cli.conftest import Run

Command = Callable[..., Run]
LAWS = ("--arrivals", "gamma:5,2", "--prompt", "lognormal:90,0.5,400", "--output", "uniform:2,9")
CERTAIN = ("--arrivals", "constant:5", "--prompt", "fixed:9", "--output", "fixed:2")


def test_requests_are_made_written_and_served(cbatch: Command, tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")]
    for out, seed in zip(outs, (3, 3, 4), strict=True):
        run = cbatch("trace", "generate", out, *LAWS, "--requests", 50, "--seed", seed)
        assert run.status == 0 and run.lines[-1]["requests"] == 50
    assert outs[0].read_bytes() == outs[1].read_bytes()
    lengths = lognormal(90, 0.5, high=400), uniform(2, 9)
    made = generate(lambda rng: gamma(5, 2, rng), *lengths, requests=50, seed=3)
    assert list(Trace(outs[0])) == list(made) != list(Trace(outs[2]))
    small = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)
    assert cbatch("sim", outs[2], *small).lines[-1]["requests"] == 50


def test_sessions_share_what_they_should(cbatch: Command, tmp_path: Path) -> None:
    out = tmp_path / "sessions.jsonl"
    run = cbatch(
        "trace", "generate", out, "--sessions", 6, "--turns", "uniform:1,4", "--arrivals",
        "poisson:2", "--prompt", "fixed:20", "--output", "fixed:8", "--system-prompt", 64,
        "--system-prompts", 2, "--think", 0.5, "--seed", 5,
    )  # fmt: skip
    assert run.status == 0, run.err
    made = Conversations(
        turns=uniform(1, 4),
        messages=fixed(20),
        outputs=fixed(8),
        system_prompts=2,
        system_prompt_tokens=64,
        think_s=0.5,
    )
    requests = list(converse(lambda rng: poisson(2, rng), made, sessions=6, seed=5))
    assert list(Trace(out)) == requests and len(requests) > 6
    small = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)
    assert cbatch("sim", out, *small).lines[-1]["prefix_hit_tokens"] >= 4 * 64


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((*LAWS,), "--requests: or --sessions is needed, not both"),
        (
            (*LAWS, "--requests", 5, "--sessions", 5),
            "--requests: or --sessions is needed, not both",
        ),
        ((*LAWS, "--requests", 0), "requests: 0 is not allowed"),
        ((*LAWS, "--requests", 5, "--turns", "fixed:2"), "--turns: would be ignored"),
        ((*LAWS, "--sessions", 5, "--system-prompts", 2), "--system-prompts: would be ignored"),
        ((*LAWS, "--sessions", 5, "--think", -1), "think_s: -1.0 is not allowed"),
        ((*CERTAIN, "--requests", 5, "--seed", 1), "--seed: is not used here"),
        ((*CERTAIN, "--sessions", 5, "--think", 0, "--seed", 1), "--seed: is not used here"),
        ((*CERTAIN, "--requests", 5, "--output", "zipf:1"), "--output: 'zipf:1' is not known"),
    ],
)
def test_errors_about_bad_options(
    cbatch: Command, tmp_path: Path, argv: tuple[Any, ...], words: str
) -> None:
    run = cbatch("trace", "generate", tmp_path / "out.jsonl", *argv)
    assert run.status == 2 and words in run.err, run.err
    assert not list(tmp_path.iterdir())
