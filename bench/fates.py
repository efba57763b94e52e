"""Which drafts for real texts are right, written down for the simulator: `python -m bench.fates`.

A model answers the prompts of a workload of `bench.lookahead`, greedy, with drafts of 8 tokens
throughout. So nearly every token of an answer is seen to be drafted rightly or wrongly given those
before it; behind 8 right ones the next is taken to be, too. What a lookup has no guess for counts
as wrong. The file is what `--acceptance recorded:FILE` of `cbatch sim` and `--fates FILE` of
`bench.ablation` read: for each request a list of 0 and 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.lookahead import CHATS, WORKLOADS, build, make_prompts
from bench.lookahead import parse as lookahead_arguments
from bench.report import print_report, rounded
from cbatch import SamplingParams
from cbatch.demo import demo_paths
from cbatch.text.outputs import Output

DEPTH = 8
IN_FLIGHT = 8


def fates_of(outputs: Iterable[Output]) -> list[int]:
    """Of one request's tokens, by what each of its steps drafted and accepted. The first token
    comes with the prompt's last chunk, for which nobody drafts: it is left out."""
    fates: list[int] = []
    for output in outputs:
        all_right = 0 < output.num_drafted == output.num_accepted
        fates += [1] * min(output.num_accepted, len(output.token_ids))
        fates += [int(all_right)] * (len(output.token_ids) - output.num_accepted)
    return fates[1:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fates", description=__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS[:-1], *CHATS], default="fresh")
    parser.add_argument("--model", help="with a chat template (default: the demo pair)")
    parser.add_argument("--draft", help="that guesses for --model: another, or a head of it")
    parser.add_argument("--drafter", nargs="+", help="by name (default: the draft model)")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON to write")
    args = parser.parse_args(argv)
    settings = lookahead_arguments(
        ["--batch", str(IN_FLIGHT), "--output-tokens", str(args.output_tokens)]
    )
    settings.model, settings.draft, settings.drafter = args.model, args.draft, args.drafter
    engine = build(f"fixed:{DEPTH}", settings)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.output_tokens)
    prompts = make_prompts(args.workload, args.model or demo_paths()[0])
    seen: dict[str, list[Output]] = {engine.add(p, params).request_id: [] for p in prompts}
    while engine.has_work:
        for output in engine.step():
            seen[output.request_id].append(output)
    found = [fates_of(outputs) for outputs in seen.values()]
    args.out.write_text(json.dumps(found))
    right = [float(np.mean(each)) for each in found]
    row = {
        "workload": args.workload,
        "requests": len(found),
        "tokens": sum(map(len, found)),
        "right": rounded(float(np.mean(right))),
        "least": rounded(min(right)),
        "most": rounded(max(right)),
    }
    print_report("fates of drafts", [row], notes=(f"written: {args.out}",))


if __name__ == "__main__":
    main()
