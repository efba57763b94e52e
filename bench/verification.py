"""Tokens a step by way of verification, on the demo pair: `python -m bench.verification`.

The same prompts are sampled with drafts judged one by one (`rejection`), as blocks (`block`) and by
shared noise (`coupled`); every step drafts k tokens. What varies is the text, so a choice of all
prompts is one observation; the interval is Student's, over the choices.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report import print_report, student95
from cbatch import LLM, Completion, SamplingParams
from cbatch.demo import demo_paths, demo_prompts
from cbatch.text.outputs import Speculation

WAYS = ("rejection", "block", "coupled")


def tokens_a_step(completions: Sequence[Completion]) -> list[float]:
    """Of each choice, over all prompts."""
    found = []
    for index in range(len(completions[0].choices)):
        total = Speculation()
        for completion in completions:
            total.merge(completion.choices[index].speculation)
        found.append(1 + total.accepted_tokens / total.steps)
    return found


def row_of(way: str, k: int, temperature: float, found: Sequence[float]) -> dict[str, Any]:
    values = np.array(found)
    half = student95(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return {
        "verification": way,
        "temperature": temperature,
        "k": k,
        "tokens a step": round(float(values.mean()), 3),
        "+- 95 %": round(half, 3),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.verification", description=__doc__)
    parser.add_argument("--verification", nargs="+", default=["rejection", "block"], choices=WAYS)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.8, 1.0])
    parser.add_argument("--lookahead", nargs="+", type=int, default=[4, 8], help="k")
    parser.add_argument("--choices", type=int, default=16, help="of each prompt, at least 2")
    parser.add_argument("--prompts", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    prompts, rows = demo_prompts()[: args.prompts], []
    for k in args.lookahead:
        llm = LLM(*demo_paths(), lookahead=f"fixed:{k}", max_slots=64)
        for temperature, way in itertools.product(args.temperature, args.verification):
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=args.max_tokens,
                    ignore_eos=True,
                    n=args.choices,
                    seed=args.seed + i,
                    verification=way,
                )
                for i in range(len(prompts))
            ]
            found = tokens_a_step(llm.generate(prompts, params))
            rows.append(row_of(way, k, temperature, found))
    print_report("Tokens a step", rows, extra={"seed": args.seed, "prompts": len(prompts)})


if __name__ == "__main__":
    main()
