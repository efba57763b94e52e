"""Compare output tokens per second of lookahead policies by load (`python -m bench.lookahead`).

The demo pair serves a constant number of requests in flight. The workloads of prompts: `fresh` is
beginnings of functions that the pair was not trained on; `edit` is a function followed by the start
of a renamed copy; `mix` alternates between both; in `useless` nine drafts of ten are replaced by
random tokens.

Requests are greedy and of given lengths, so every policy emits the same tokens. Policies take short
turns at the same part of the work, so a machine that is slow for some seconds affects them all.
Ratios are of whole cycles through all prompts, because prompts differ more than policies do. The
best fixed k, from 0 (off) to 8, is chosen after the measurement.

`--model smollm2 --drafter ngram` serves a chat model with the drafters of these names, `--draft`
with another model or a head. Workloads: `questions` of many kinds, `stories` (free text), `code`
(functions to write), `renames` (repeats code of the prompt), and `both`, which alternates between
`stories` and `renames`. `--policy off adaptive@suffix adaptive@ngram` compares drafters in one run.
A model without a chat template continues the texts. The tests' hybrid with an MTP head:

    python -m bench.lookahead --model tests/data/tiny_hybrid --tokenizer demo --drafter mtp \\
        --workload fresh stories useless --batch 1 8 32 --policy off adaptive

With `--seconds` all cells together take about this long. A cycle is then one turn of each policy,
and a cell has as many cycles as time allows. Policies still generate the same tokens, but these may
be of a part of the prompts. Cells for which no time is left are left out.

`--temperature 0.8` samples instead, each request with its own seed. `--verification` is the method
that verifies drafts: with `rejection` the texts differ between policies.

With `+FILE` after a policy its engine appends a step log to FILE. The log is written every 0.2 s,
so its cost shows in turns of seconds (`--turn-tokens`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.progress import Progress

from bench.report import Failures, print_report, rounded, student95
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.cli.parser import CommandParser
from cbatch.demo import demo_paths, demo_prompts, edit_prompts
from cbatch.engine.engine import Engine
from cbatch.engine.model_files import chat_template_of, find_model, tokenizer_of
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from cbatch.steplog.recorder import StepRecorder
from cbatch.text.outputs import Output, Speculation

WORKLOADS = ("fresh", "edit", "mix", "useless")
CHATS: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "data" / "chat_prompts.json").read_text(encoding="utf-8")
)
CHATS["both"] = [*itertools.chain(*zip(CHATS["stories"], CHATS["renames"], strict=True))]
_RANDOMISED = 0.87  # share of drafts that `useless` replaces: acceptance becomes about 0.1
FIXED = tuple(f"fixed:{k}" for k in range(1, 9))
POLICIES = ("off", *FIXED, "ema", "adaptive")
_CONSTANTS = ("off", *FIXED)  # policies among which the best fixed k is chosen
_MAX_PROMPT_TOKENS = 256  # only the end of a longer prompt is used
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_VERIFICATIONS = ("auto", "rejection", "coupled")
_TURN_STEPS = 3  # shortest turn, in decoding steps without drafts
_WARM_UP_TURNS = 4  # untimed turns of each policy
_MIN_CYCLES = 2  # of a cell of `--seconds`: an interval needs two

Prompts = list[list[int]]


class PolicyRun(msgspec.Struct):
    tokens: int
    seconds: float
    speculation: Speculation

    def add(self, other: PolicyRun) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.speculation.merge(other.speculation)


class EndlessLoop:
    """Keeps `concurrency` requests in flight: when a request ends, the next one is added.

    Outputs have 0.5 to 1.5 times `output_tokens` tokens, so that requests do not end at the same
    time. The first outputs are shorter, as if their requests were already running.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        concurrency: int,
        output_tokens: int,
        params: SamplingParams = _GREEDY,
    ) -> None:
        self.engine, self.concurrency, self._params = engine, concurrency, params
        self._seeds = itertools.count()
        self._prompts = itertools.cycle(prompts)
        self._mean_tokens, self._rng = output_tokens, np.random.default_rng(0)
        self._running: set[str] = set()
        self._surplus_tokens = 0  # tokens of the last turn beyond its `num_tokens`

    def start(self) -> None:
        for share in self._rng.random(self.concurrency).tolist():
            self._add(share)
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self._step(Speculation())}

    def run(self, num_tokens: int) -> PolicyRun:
        """Step until `num_tokens` more tokens are generated. Surplus tokens of the last step count
        for the next turn."""
        speculation, tokens = Speculation(), 0
        remaining = num_tokens - self._surplus_tokens
        started_s = time.perf_counter()
        while tokens < remaining or not tokens:  # a step may give more than a turn needs
            tokens += sum(len(output.token_ids) for output in self._step(speculation))
        self._surplus_tokens = tokens - remaining
        return PolicyRun(tokens, time.perf_counter() - started_s, speculation)

    def stop(self) -> None:
        for request_id in self._running:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()
        self._running.clear()

    def _step(self, speculation: Speculation) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            if output.finished is not None:
                speculation.merge(output.finished.speculation)
                self._running.discard(output.request_id)
                self._add()
        return outputs

    def _add(self, share: float = 1.0) -> None:
        tokens = self._rng.uniform(0.5, 1.5) * self._mean_tokens * share
        params = msgspec.structs.replace(
            self._params, max_tokens=max(2, round(tokens)), seed=next(self._seeds)
        )
        self._running.add(self.engine.add(next(self._prompts), params).request_id)


def make_prompts(workload: str, model: str | Path, tokenizer_path: str | Path = "") -> Prompts:
    """Return the token ids of a workload's prompts; a mix alternates between two kinds."""
    tokenizer = tokenizer_of(tokenizer_path or model)
    if workload in CHATS:
        template, texts = chat_template_of(model), CHATS[workload]
        if template is not None:
            texts = [template.render([{"role": "user", "content": text}]) for text in texts]
        return [list(tokenizer.encode(text)) for text in texts]
    kinds = {"fresh": demo_prompts(), "edit": edit_prompts(), "useless": demo_prompts()}
    texts = [kinds[workload]] if workload in kinds else [kinds["fresh"], kinds["edit"]]
    pools = [[list(tokenizer.encode(t))[-_MAX_PROMPT_TOKENS:] for t in part] for part in texts]
    longest = max(map(len, pools))
    return [pool[i % len(pool)] for i in range(longest) for pool in pools]


@contextlib.contextmanager
def randomised_drafts() -> Iterator[None]:
    """Replace most tokens that the draft model proposes by random ids, at the same cost."""
    propose, rng = DraftModel.propose, np.random.default_rng(0)

    def propose_mostly_random(self: DraftModel, rows: DraftRows) -> Proposal:
        proposal = propose(self, rows)
        noise = rng.integers(0, self.table.vocab_size, proposal.tokens.shape)
        is_replaced = rng.random(proposal.tokens.shape) < _RANDOMISED
        return proposal._replace(tokens=np.where(is_replaced, noise, proposal.tokens))

    DraftModel.propose = propose_mostly_random  # type: ignore[method-assign]
    try:
        yield
    finally:
        DraftModel.propose = propose  # type: ignore[method-assign]


def measure(
    engines: dict[str, Engine],
    prompts: Prompts,
    concurrency: int,
    args: argparse.Namespace,
    advance: Callable[[], None],
    seconds: float | None = None,
) -> dict[str, list[PolicyRun]]:
    """Return the runs of each policy, one per cycle. Loops keep their requests between turns. In a
    cycle all policies generate the same number of tokens, so only their times differ. With
    `seconds` the cycles are short, and there are at least two."""
    end_s = None if seconds is None else time.perf_counter() + seconds
    params = msgspec.structs.replace(
        _GREEDY, temperature=args.temperature, verification=args.verification
    )
    loops = {
        policy: EndlessLoop(engine, prompts, concurrency, args.output_tokens, params)
        for policy, engine in engines.items()
    }
    for loop in loops.values():
        loop.start()
    tokens, turns = turns_of(prompts, concurrency, args)
    gc.collect()
    for _ in range(_WARM_UP_TURNS):
        for loop in loops.values():
            loop.run(tokens)
    policies = list(engines)
    runs: dict[str, list[PolicyRun]] = {policy: [] for policy in policies}
    min_cycles = args.cycles
    if end_s is not None:
        turns, min_cycles = 1, _MIN_CYCLES
    for done in itertools.count():
        if done >= min_cycles and (end_s is None or time.perf_counter() >= end_s):
            break
        cycle = {policy: PolicyRun(0, 0.0, Speculation()) for policy in engines}
        for turn in range(turns):
            first = (done * turns + turn) % len(
                policies
            )  # so that each policy is first equally often
            for policy in (*policies[first:], *policies[:first]):
                cycle[policy].add(loops[policy].run(tokens))
            advance()
        for policy, run in cycle.items():
            runs[policy].append(run)
    for loop in loops.values():
        loop.stop()
    return runs


def turns_of(prompts: Prompts, concurrency: int, args: argparse.Namespace) -> tuple[int, int]:
    """Return the tokens of a turn, and the turns of a cycle. A cycle has the tokens of one request
    per prompt, or of `2 * concurrency` requests if these are more."""
    tokens = max(args.turn_tokens, _TURN_STEPS * concurrency)
    return tokens, -(-max(len(prompts), 2 * concurrency) * args.output_tokens // tokens)


def rows_of(workload: str, batch: int, runs: dict[str, list[PolicyRun]]) -> list[dict[str, Any]]:
    """Return a row per policy: the speed over all cycles and its ratios to other policies, with
    95 % intervals."""
    costs = {
        policy: np.array([run.seconds / run.tokens for run in policy_runs])
        for policy, policy_runs in runs.items()
    }
    constants = [policy for policy in _CONSTANTS if policy in costs]
    best = min(constants, key=lambda policy: float(costs[policy].mean()), default=None)
    rows = []
    for policy, cost in costs.items():
        total = Speculation()
        for run in runs[policy]:
            total.merge(run.speculation)
        speed, low = _ratio(np.ones_like(cost), cost)
        to_best, _ = _ratio(costs[best], cost) if best else (None, None)
        to_off, off_low = _ratio(costs["off"], cost) if "off" in costs else (None, None)
        rows.append(
            {
                "workload": workload,
                "batch": batch,
                "policy": policy,
                "output_tokens_per_s": round(speed, 1),
                "ci95": rounded(None if low is None else speed - low),
                "ratio_to_best_fixed": rounded(to_best),
                "ratio_to_off": rounded(to_off),
                "ratio_to_off_low95": rounded(off_low),
                "steps_with_drafts": rounded(total.drafting_share),
                "mean_accepted_tokens": rounded(total.mean_accepted_tokens),
                "best_fixed": best,
            }
        )
    return rows


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float | None]:
    """Return sum(numerators) / sum(denominators) of paired cycles, and the low end of its 95 %
    interval (jackknife over cycles, Student's t); None for a single cycle."""
    count = len(numerators)
    above, below = numerators.sum(), denominators.sum()
    ratio = float(above / below)
    if count < 2:
        return ratio, None
    without = (above - numerators) / (below - denominators)
    deviation = np.sqrt((count - 1) / count * np.square(without - without.mean()).sum())
    return ratio, ratio - float(student95(count - 1) * deviation)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=[*WORKLOADS, *CHATS])
    parser.add_argument("--model", help="a model with a chat template (default: the demo pair)")
    parser.add_argument("--tokenizer", help="demo: the demo pair's (default: the model's)")
    parser.add_argument("--draft", help="draft model for --model, or a head of it")
    parser.add_argument("--drafter", nargs="+", help="drafters by name (default: the draft model)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--cycles", type=int, default=4, help="measured times through all prompts")
    parser.add_argument(
        "--seconds", type=_positive, help="time for all cells, in place of --cycles"
    )
    parser.add_argument("--turn-tokens", type=int, default=24, help="minimum of a policy's turn")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", default="auto", choices=_VERIFICATIONS)
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise ValueError
    return seconds


def build(policy: str, args: argparse.Namespace) -> Engine:
    policy, _, record = policy.partition("+")
    policy, _, drafter = policy.partition("@")
    drafters = (drafter,) if drafter else args.drafter
    max_tokens = _MAX_PROMPT_TOKENS + 3 * args.output_tokens // 2
    options = EngineOptions(
        lookahead=policy,
        dtype=args.dtype,
        max_num_seqs=max(args.batch),
        max_model_len=max_tokens,
        num_blocks=max(args.batch) * -(-max_tokens // 16),
        enable_prefix_caching=False,  # every cycle has the same prompts
        # Loading a head tests it on texts, which needs the tokenizer.
        tokenizer=_tokenizer(args) if args.draft or "mtp" in (drafters or ()) else "none",
        drafter=None if drafters is None else tuple(drafters),
    )
    return load_engine(*_models(args), options, log=StepRecorder(record) if record else None)[0]


def _models(args: argparse.Namespace) -> tuple[str | Path, str | Path | None]:
    if args.model is None:
        return demo_paths()
    draft = None if args.draft is None else find_model(args.draft, "draft")
    return find_model(args.model), draft


def _tokenizer(args: argparse.Namespace) -> str:
    """Return the model whose tokenizer is used."""
    model = demo_paths()[0] if args.tokenizer == "demo" else args.tokenizer or _models(args)[0]
    return str(model)


def main() -> None:
    args = parse()
    model, _ = _models(args)
    workloads = args.workload or (CHATS if args.model else WORKLOADS)
    engines = {policy: build(policy, args) for policy in args.policy}
    failures, rows, reader = Failures(), list[dict[str, Any]](), _tokenizer(args)
    cells = [(w, b, make_prompts(w, model, reader)) for w in workloads for b in args.batch]
    with Progress() as progress:
        turns = sum(turns_of(prompts, batch, args)[1] for _, batch, prompts in cells)
        total = None if args.seconds else args.cycles * turns
        task = progress.add_task("measuring", total=total)
        started_s, left_out = time.perf_counter(), 0
        for i, (workload, batch, prompts) in enumerate(cells):
            seconds = None
            if args.seconds:  # time that a cell leaves goes to the later ones
                left_s = args.seconds - (time.perf_counter() - started_s)
                seconds = left_s / (len(cells) - i)
                if left_s <= 0:  # starts took longer than their share
                    left_out = len(cells) - i
                    break
            drafts = randomised_drafts() if workload == "useless" else contextlib.nullcontext()
            with failures.caught(f"{workload}, batch {batch}"), drafts:
                runs = measure(
                    engines, prompts, batch, args, lambda: progress.advance(task), seconds
                )
                rows += rows_of(workload, batch, runs)
            if failures.words:  # the engines still hold requests
                break
    if not rows:
        failures.end()
    print_report(
        f"lookahead policies: {args.model or 'demo pair'}, {args.output_tokens} tokens out, "
        f"temperature {args.temperature:g}, verification {args.verification}",
        rows,
        notes=(
            (
                f"{args.seconds:g} s in all"
                if args.seconds
                else f"{args.cycles} times through all prompts"
            )
            + ", policies in short turns at the same tokens"
            + (f"; no time for {left_out} cells" if left_out else ""),
        ),
    )
    failures.end()


if __name__ == "__main__":
    main()
