"""How often drafts are accepted in either mode of verification: `python -m bench.acceptance`.

The demo pair answers two workloads of prompts (`fresh`, `edit`) at one temperature, in either mode.
`exact_*` come from the laws p and q that both models give behind every prefix of those answers:
rejection accepts with probability 1 - TV(p, q), a coupled draft with sum_i 1 / sum_j max(p_j/p_i,
q_j/q_i) (Daliri et al. 2024). They are for the same positions, so `ratio` has hardly any noise.
`counted` is what the engine accepted of the drafts that it tried, `foreseen` the exact figure of
the mode at those positions, and `reported` (rejection) what the engine says it expected there: all
three agree, or something is wrong. No timing: a busy machine does no harm.
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


MODES = {"rejection": rejection_acceptance, "coupled": coupled_acceptance}


class Answers(msgspec.Struct):
    """By number of the request: tokens, and which of them were tried as drafts."""

    tokens: list[list[int]]
    tried: list[list[bool]]
    accepted: int
    expected: float  # to be accepted, as the engine reports it


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
    found = Answers([[] for _ in prompts], [[] for _ in prompts], 0, 0.0)
    while engine.has_work:
        for output in engine.step():
            number, count = numbers[output.request_id], len(output.token_ids)
            tried = min(output.num_accepted + 1, output.num_drafted)
            found.tokens[number] += output.token_ids
            found.tried[number] += [place < tried for place in range(count)]
            found.accepted += min(output.num_accepted, count)
    found.expected = expected.total
    return found


@torch.inference_mode()
def laws(
    nets: tuple[Llama, Llama], prompt: list[int], tokens: list[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """p and q of each of `tokens` behind the prompt, float64 [tokens, V]."""
    ids = torch.tensor([prompt + tokens[:-1]])
    p, q = (net(ids)[0, len(prompt) - 1 :].double() / temperature for net in nets)
    return p.softmax(dim=-1), q.softmax(dim=-1)


def measure(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the answers in each mode."""
    count = -(-args.positions // args.output_tokens)
    cycle = itertools.cycle(make_prompts(workload, demo_paths()[0]))
    prompts = list(itertools.islice(cycle, count))
    nets = load_pretrained(demo_paths()[0]), load_pretrained(demo_paths()[1])
    rows = []
    for mode in MODES:
        answers = answer(prompts, mode, args)
        exact: dict[str, list[Tensor]] = {mode: [] for mode in MODES}
        for prompt, tokens in zip(prompts, answers.tokens, strict=True):
            p, q = laws(nets, prompt, tokens, args.temperature)
            for other, acceptance in MODES.items():
                exact[other].append(acceptance(p, q))
        chances = {other: torch.cat(parts) for other, parts in exact.items()}
        tried = torch.tensor([mark for marks in answers.tried for mark in marks])
        means = {other: float(chances[other].mean()) for other in MODES}
        rows.append(
            {
                "workload": workload,
                "mode": mode,
                "positions": len(tried),
                "exact_rejection": rounded(means["rejection"]),
                "exact_coupled": rounded(means["coupled"]),
                "ratio": rounded(means["coupled"] / means["rejection"]),
                "tried": int(tried.sum()),
                "counted": rounded(answers.accepted / int(tried.sum())),
                "foreseen": rounded(float(chances[mode][tried].mean())),
                "reported": rounded(answers.expected / int(tried.sum()))
                if mode == "rejection"
                else None,
            }
        )
    return rows


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
    )


if __name__ == "__main__":
    main()
