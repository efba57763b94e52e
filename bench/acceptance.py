"""How often drafts are accepted in either mode of verification: `python -m bench.acceptance`.

The demo pair answers two workloads of prompts (`fresh`, `edit`) at one temperature. *Exact* figures
come from the laws p and q that both models give behind every prefix of those answers: rejection
accepts with probability 1 - TV(p, q), a coupled draft with sum_i 1 / sum_j max(p_j/p_i, q_j/q_i)
(Daliri et al. 2024). *Engine* figures are counts of the engine itself, accepted over tried, and for
rejection also what it reports as expected. No timing: a busy machine does no harm.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from bench.lookahead import Prompts, make_prompts
from bench.report import print_report, rounded
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.core.plan import StepResult
from cbatch.core.sequence import Commit
from cbatch.demo import demo_paths
from cbatch.demo.checkpoint import load_pretrained
from cbatch.demo.nets import Llama
from cbatch.outputs import Speculation
from cbatch.stepwise import Engine

WORKLOADS = ("fresh", "edit")
LOOKAHEAD = "fixed:4"


def rejection_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """1 - TV by row, float64 [N], of laws float64 [N, V]."""
    return torch.minimum(p, q).sum(dim=-1)


def coupled_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that one race picks the same token under p and q, by row: float64 [N] of laws [N, V].

    In the order of falling p / q the maximum over j is p_j / p_i up to i, and q_j / q_i after it:
    the sum over j needs two cumulative sums instead of all pairs.
    """
    order = (p.log() - q.log()).nan_to_num(nan=0.0).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    before, after = p.cumsum(dim=-1), q.flip(-1).cumsum(dim=-1).flip(-1) - q
    both = (p > 0) & (q > 0)
    sums = before / p.where(both, p.new_ones(())) + after / q.where(both, q.new_ones(()))
    return torch.where(both, 1 / sums, 0.0).sum(dim=-1)


class Answers(msgspec.Struct):
    """Tokens of each answer, by number of the request, and how speculation went."""

    tokens: list[list[int]]
    speculation: Speculation
    expected: float | None  # accepted tokens, as the engine reports it


class _Expected:
    """Adds up what a scheduler is told of expected acceptance."""

    def __init__(self, engine: Engine) -> None:
        self.total = 0.0
        self._commit = engine.scheduler.commit
        engine.scheduler.commit = self._take  # type: ignore[method-assign]

    def _take(self, result: StepResult, now_s: float) -> Commit:
        if result.expected_accepted is not None:
            self.total += float(result.expected_accepted.sum())
        return self._commit(result, now_s)


def answer(prompts: Prompts, mode: str, args: argparse.Namespace) -> Answers:
    """An answer to each prompt, request i with seed i."""
    options = EngineOptions(
        lookahead=LOOKAHEAD, dtype="float32", max_slots=args.batch, tokenizer="none"
    )
    engine = load_engine(*demo_paths(), options)[0]
    expected = _Expected(engine)
    numbers = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.output_tokens, seed=i, verification=mode
        )
        numbers[engine.add(prompt, params).request_id] = i
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            tokens[numbers[output.request_id]] += output.token_ids
    return Answers(tokens, engine.stats.speculation, expected.total)


@torch.inference_mode()
def laws(
    nets: tuple[Llama, Llama], prompt: list[int], tokens: list[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """p and q of each of `tokens` behind the prompt, float64 [tokens, V]."""
    ids = torch.tensor([prompt + tokens[:-1]])
    p, q = (net(ids)[0, len(prompt) - 1 :].double() / temperature for net in nets)
    return p.softmax(dim=-1), q.softmax(dim=-1)


def measure(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mode; the exact figures are over the answers of rejection."""
    count = -(-args.positions // args.output_tokens)
    cycle = itertools.cycle(make_prompts(workload, demo_paths()[0]))
    prompts = list(itertools.islice(cycle, count))
    answers = {mode: answer(prompts, mode, args) for mode in ("rejection", "coupled")}
    nets = load_pretrained(demo_paths()[0]), load_pretrained(demo_paths()[1])
    exact = {"rejection": 0.0, "coupled": 0.0}
    positions = 0
    for prompt, tokens in zip(prompts, answers["rejection"].tokens, strict=True):
        p, q = laws(nets, prompt, tokens, args.temperature)
        exact["rejection"] += float(rejection_acceptance(p, q).sum())
        exact["coupled"] += float(coupled_acceptance(p, q).sum())
        positions += len(tokens)
    counted = {mode: found.speculation.acceptance or 0.0 for mode, found in answers.items()}
    return [
        {
            "workload": workload,
            "mode": mode,
            "positions": positions,
            "exact": rounded(exact[mode] / positions),
            "ratio_exact": rounded(exact[mode] / exact["rejection"]),
            "tried": _tried(found.speculation),
            "counted": rounded(counted[mode]),
            "ratio_counted": rounded(counted[mode] / counted["rejection"]),
            "reported": rounded(found.expected / _tried(found.speculation)),
        }
        for mode, found in answers.items()
    ]


def _tried(speculation: Speculation) -> int:
    return speculation.accepted_tokens + speculation.rejections


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--positions", type=int, default=32_000, help="most answer tokens")
    parser.add_argument("--output-tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--batch", type=int, default=32)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    rows = [row for workload in args.workload for row in measure(workload, args)]
    print_report(
        f"acceptance at temperature {args.temperature}: demo pair, {LOOKAHEAD}",
        rows,
        notes=(
            "exact: mean over all positions of the answers; counted: accepted over tried",
            "reported: what the engine expected of the tried positions (rejection)",
        ),
    )


if __name__ == "__main__":
    main()
