"""What drafts in trees would win over chains, before anyone writes them: `python -m bench.trees`.

The demo target answers prompts, greedy. At each of its tokens the shipped EAGLE-3 head grows a tree
as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858): the `width` likeliest nodes of a depth are gone
on from, and of all their children the likeliest so many are verified. Of Medusa heads (`--medusa`,
a folder of `cbatch train-head --kind medusa`) it is the sparse tree of ranks that was right most
often on half of the text, counted on the other half (Cai et al. 2024, arXiv 2401.10774). Chains are
trees of width 1.

A step is priced with all requests in it at one setting: by the data sheet of an H100 for an 8B
model with a head of its size (`sim.cost`), and by what steps of the demo pair cost here, measured
as a start does. The best setting of each kind is told. What a tree costs beyond its tokens (masks,
KV to be moved) is left out, and so is what sampling loses by deterministic children: it is the most
that trees could win.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.report import print_report, rounded
from cbatch import SamplingParams
from cbatch.core.speculation.cost_profile import CostProfile
from cbatch.core.speculation.step_work import StepWork
from cbatch.demo import demo_head, demo_paths, demo_prompts
from cbatch.engine.build import load_engine
from cbatch.engine.model_files import tokenizer_of
from cbatch.engine.options import EngineOptions
from sim.cost.roofline import ModelShape, Roofline, RooflineConfig, load_gpu, load_shape
from tools.heads.eagle_net import EagleNet
from tools.heads.export import load_eagle3, load_medusa
from tools.heads.lessons import Lesson
from tools.heads.medusa_net import MedusaNet
from tools.heads.target_parts import TargetParts
from tools.heads.train_head import record

WIDTHS, DEPTH = (2, 4, 8), 6  # of EAGLE's trees
SIBLINGS = 8  # of Medusa's, at most
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # that are verified
CONTEXT_TOKENS = 512
LOADS = (1, 8, 32)


class Shape(NamedTuple):
    """A way to draft: what is verified of a row, in how many passes, of how many tokens in all. Of
    Medusa, which has none, how many heads say something."""

    kind: str
    width: int
    passes: int
    drafted: int
    nodes: int
    heads: int = 0

    def __str__(self) -> str:
        what = f"k = {self.nodes}"
        if self.width > 1:
            depth = self.passes or self.heads
            what = f"{self.nodes} of width {self.width}, depth {depth}"
        return what


# ---- acceptance -------------------------------------------------------------------------------


def answers(folder: Path, count: int, tokens: int) -> list[Lesson]:
    """Greedy ones of the demo target, with its states."""
    target = demo_paths()[0]
    encode = tokenizer_of(target).encode
    asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = [(encode(text), asked) for text in demo_prompts()[:count]]
    return list(record(target, prompts, folder, 600.0).read())


def places(lesson: Lesson) -> slice:
    """Where the answer goes on for `DEPTH` tokens and one that is known."""
    return slice(max(lesson.num_given - 2, 0), len(lesson.tokens) - 1 - DEPTH)


def _truth(tokens: Tensor, length: int) -> Tensor:
    """With what no draft is behind the end."""
    return torch.nn.functional.pad(tokens, (0, length - len(tokens)), value=-1)


@torch.inference_mode()
def eagle_trees(net: EagleNet, lesson: Lesson, width: int) -> tuple[Tensor, Tensor]:
    """Of each depth's candidates [depth, width^2, places]: the logarithm of what the head thinks of
    them, and whether they are what the target says."""
    tokens, states = lesson.tokens.long()[None], lesson.states[None]
    length = states.shape[1]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    carry, known = net.read(states), tokens[:, 1:]
    told, right = torch.zeros(1, length), torch.ones(1, length, dtype=torch.bool)
    all_told, all_right = [], []
    for depth in range(DEPTH):
        carry = net.step(known, carry, keys, values)
        chances, drafts = net.logits(carry).log_softmax(-1).topk(width, -1)  # [beams, L, width]
        truth = _truth(tokens[0, 2 + depth :], length)
        drafts = net.draft_ids[drafts]
        told = (told[:, :, None] + chances).transpose(1, 2).flatten(0, 1)
        right = (right[:, :, None] & (drafts == truth[None, :, None])).transpose(1, 2).flatten(0, 1)
        missing = width * width - len(told)
        all_told.append(torch.nn.functional.pad(told, (0, 0, 0, missing), value=-torch.inf))
        all_right.append(torch.nn.functional.pad(right, (0, 0, 0, missing)))
        told, best = told.topk(width, 0)
        right = right.gather(0, best)
        known = drafts.transpose(1, 2).flatten(0, 1).gather(0, best)
        parents, at = best // width, torch.arange(length)
        carry = carry[parents, at]
        for held in (keys, values):
            held[1:] = [each[parents, :, at].transpose(1, 2) for each in held[1:]]
    where = places(lesson)
    return torch.stack(all_told)[..., where], torch.stack(all_right)[..., where]


def eagle_shapes(net: EagleNet, lessons: Sequence[Lesson]) -> Iterator[tuple[Shape, float]]:
    """Ways to draft, and how many drafts of a step stand."""
    for width in (1, *WIDTHS):
        grown = [eagle_trees(net, lesson, width) for lesson in lessons]
        told, right = (torch.cat(each, -1) for each in zip(*grown, strict=True))
        for depth in range(1, DEPTH + 1):
            rank = (
                told[:depth]
                .flatten(0, 1)
                .argsort(dim=0, descending=True, stable=True)
                .argsort(dim=0)
            )
            path = right[:depth].flatten(0, 1)
            drafted = 1 + (depth - 1) * width
            most = width + (depth - 1) * width * width
            for nodes in (depth,) if width == 1 else [n for n in NODES if n <= most]:
                stands = (path & (rank < nodes)).sum(0).float().mean()
                yield Shape("EAGLE", width, depth, drafted, nodes), float(stands)


@torch.inference_mode()
def medusa_ranks(net: MedusaNet, lesson: Lesson) -> Tensor:
    """Of what the target says next, and after that, among what each head thinks: [heads, places].
    What is not among the first `SIBLINGS` has that rank."""
    tokens, states = lesson.tokens.long()[None], lesson.states[None]
    found = []
    for number, logits in enumerate(net.draft(tokens, states, len(net.blocks))):
        drafts = net.draft_ids[logits[0].topk(SIBLINGS, -1).indices]
        hit = drafts == _truth(tokens[0, 2 + number :], len(drafts))[:, None]
        found.append(torch.where(hit.any(-1), hit.int().argmax(-1), SIBLINGS))
    return torch.stack(found)[:, places(lesson)]


def medusa_shapes(net: MedusaNet, lessons: Sequence[Lesson]) -> Iterator[tuple[Shape, float]]:
    ranks = [medusa_ranks(net, lesson).numpy() for lesson in lessons]
    chosen, counted = (np.concatenate(ranks[half::2], axis=1) for half in (0, 1))
    often: dict[tuple[int, ...], int] = {}
    for path in chosen.T.tolist():
        for depth in range(1, len(path) + 1):
            if path[depth - 1] == SIBLINGS:
                break
            key = tuple(path[:depth])
            often[key] = often.get(key, 0) + 1
    best = sorted(often, key=lambda key: (-often[key], len(key), key))
    for depth in range(1, len(chosen) + 1):
        yield (
            Shape("Medusa", 1, 0, 0, depth, depth),
            float((counted[:depth] == 0).cumprod(0).sum(0).mean()),
        )
    for nodes in (n for n in NODES if n <= len(best)):
        tree = set(best[:nodes])
        paths = counted.T.tolist()
        stands = np.mean([sum(tuple(p[:d]) in tree for d in range(1, len(p) + 1)) for p in paths])
        heads = max(map(len, tree))
        yield Shape("Medusa", SIBLINGS, 0, 0, nodes, heads), float(stands)


# ---- prices -----------------------------------------------------------------------------------

Price = Callable[[int, Shape | None], float]  # rows, and how each drafts: seconds of a step


def by_data_sheet() -> Price:
    target = load_shape("llama-3.1-8b")
    layer = ModelShape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    config = RooflineConfig(gpu=load_gpu("H100"), shape=target, draft=layer)
    costs, head = Roofline(config), config.rates(layer)
    block_share = layer.hidden_size**2 / layer.layer_weights  # of Medusa's one to that layer

    def price(rows: int, shape: Shape | None) -> float:
        work = _work(rows, shape)
        seconds = sum(costs.step_s(work))
        if shape is not None and shape.heads:
            blocks = shape.heads * block_share * max(head.token_s * rows, head.weights_s)
            seconds += blocks + max(head.logit_s * rows * shape.heads, head.head_s) + head.fixed_s
        return seconds

    return price


def by_profile(profile: CostProfile) -> Price:
    """Of a step of what it was measured with. Medusa's heads count as passes there."""
    target_s = profile.table(max(LOADS) * (1 + max(NODES)))

    def price(rows: int, shape: Shape | None) -> float:
        work = _work(rows, shape)
        seconds = float(target_s[work.target_tokens]) + profile.logits_token_s * work.logit_tokens
        seconds += profile.row_s * rows + profile.context_token_s * work.context_tokens
        if shape is None:
            return seconds
        passes, drafts = shape.passes + shape.heads, (shape.drafted + shape.heads) * rows
        seconds += profile.verify_context_token_s * work.context_tokens + profile.draft_setup_s
        return seconds + profile.draft_pass_s * passes + profile.draft_token_s * drafts

    return price


def _work(rows: int, shape: Shape | None) -> StepWork:
    tokens = rows * (1 + (shape.nodes if shape else 0))
    return StepWork(
        rows=rows,
        target_tokens=tokens,
        logit_tokens=tokens,
        context_tokens=rows * CONTEXT_TOKENS,
        decode_rows=rows,
        decode_pairs=tokens * CONTEXT_TOKENS,
        draft_depth=shape.passes if shape else 0,
        draft_tokens=rows * shape.drafted if shape else 0,
        draft_context_tokens=rows * CONTEXT_TOKENS if shape and shape.passes else 0,
    )


def measured_profile(head: Path) -> CostProfile:
    """Of the demo target with a head, on this machine: kept from an earlier start or measured."""
    options = EngineOptions(max_slots=max(LOADS), num_blocks=2048)
    engine, _ = load_engine(demo_paths()[0], head, options)
    profile = engine.scheduler.config.cost_profile
    assert profile is not None
    return profile


def best(
    shapes: Sequence[tuple[Shape, float]], price: Price, rows: int
) -> tuple[Shape | None, float, float]:
    """The way that gives the most tokens a second, drafts that stand, and how many times the tokens
    of no drafts."""
    plain = price(rows, None)
    found: tuple[Shape | None, float, float] = (None, 0.0, 1.0)
    for shape, stands in shapes:
        gain = (1 + stands) * plain / price(rows, shape)
        if gain > found[2]:
            found = shape, stands, gain
    return found


def rows_of(
    machines: dict[str, dict[str, Price]], shapes: Sequence[tuple[Shape, float]]
) -> list[dict[str, Any]]:
    """`machines` have a price for each kind of heads."""
    rows = []
    for machine, prices in machines.items():
        for kind, price in prices.items():
            chains, trees = (
                [each for each in shapes if each[0].kind == kind and (each[0].width > 1) == tree]
                for tree in (False, True)
            )
            for load in LOADS:
                chain, tree = best(chains, price, load), best(trees, price, load)
                rows.append(
                    {
                        "machine": machine,
                        "heads": kind,
                        "in_flight": load,
                        "chain": str(chain[0] or "none"),
                        "chain_tokens": rounded(1 + chain[1]),
                        "chain_of_off": rounded(chain[2]),
                        "tree": str(tree[0] or "none"),
                        "tree_tokens": rounded(1 + tree[1]),
                        "tree_of_off": rounded(tree[2]),
                        "tree_of_chain": rounded(tree[2] / chain[2]),
                    }
                )
    return rows


def by_rank(hits: NDArray[np.int64], most: int = 4) -> list[float]:
    """Shares of what was right that was among the first 1, 2, ... guesses."""
    return [rounded(float((hits < w).mean())) for w in range(1, most + 1)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trees", description=__doc__)
    parser.add_argument("--medusa", type=Path, metavar="DIR", help="heads of the demo target")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    args = parser.parse_args(argv)
    parts = TargetParts.of(demo_paths()[0])
    with tempfile.TemporaryDirectory() as folder:
        lessons = answers(Path(folder), args.prompts, args.tokens)
    net, folders = load_eagle3(demo_head(), parts), {"EAGLE": demo_head()}
    shapes = list(eagle_shapes(net, lessons))
    counts = [places(each).stop - places(each).start for each in lessons]
    extra: dict[str, Any] = {"positions": sum(max(count, 0) for count in counts)}
    if args.medusa is not None:
        heads, folders["Medusa"] = load_medusa(args.medusa, parts), args.medusa
        shapes += medusa_shapes(heads, lessons)
        ranks = np.concatenate([medusa_ranks(heads, each).numpy() for each in lessons], axis=1)
        extra["medusa_among_first"] = [by_rank(each) for each in ranks]
    extra["stands"] = [[str(shape), shape.kind, rounded(stands)] for shape, stands in shapes]
    here = {kind: by_profile(measured_profile(folder)) for kind, folder in folders.items()}
    machines = {"8B, H100": dict.fromkeys(folders, by_data_sheet()), "demo, here": here}
    print_report("trees over chains", rows_of(machines, shapes), extra=extra)


if __name__ == "__main__":
    main()
