"""`cbatch demo`: watch the pair that is shipped complete Python functions."""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
import time

import msgspec
from rich.console import Console
from rich.live import Live
from rich.syntax import Syntax
from rich.text import Text

from cbatch.assembly import EngineOptions, load_engine
from cbatch.cli.lanes import Lanes
from cbatch.cli.options import add_drafter_option, drafter_chain
from cbatch.cli.summary import Run, print_json, print_summary
from cbatch.core.request import SamplingParams
from cbatch.info import EngineInfo
from cbatch.llm import Collector, complete_all
from cbatch.outputs import Completion
from cbatch.stepwise import Engine, EngineStats

STEPS_PER_S = 12.0  # as fast as an eye can follow; the figures count the steps alone
STOPS = ("\ndef ", "\nclass ", "\n@", "\nif __name__", "\n# ")  # where a function is over
FREQUENCY_PENALTY = 0.4  # so small a model falls into loops without
RACE_PROMPTS = 6


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="watch the shipped models complete Python functions",
        description="Many sequences in every step, each slot speculating with its own k.",
    )
    parser.add_argument(
        "--lookahead", default="goodput", metavar="POLICY", help="off, ema, goodput, fixed:K"
    )
    add_drafter_option(parser)
    parser.add_argument("--max-slots", type=int, default=12, help="sequences that run at once")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16")
    parser.add_argument("--numerics", default="invariant", choices=["auto", "invariant", "fast"])
    parser.add_argument("--prompts", type=int, default=24, help="how many of the prompts")
    parser.add_argument(
        "--steps-per-s", type=float, default=STEPS_PER_S, help="pace on a terminal; 0: full speed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cbatch.demo import demo_paths, demo_prompts

    console = Console()
    target, draft = demo_paths()
    options = EngineOptions(
        lookahead=args.lookahead,
        drafter=drafter_chain(args),
        max_slots=args.max_slots,
        dtype=args.dtype,
        numerics=args.numerics,
        seed=0,
    )
    engine, info = load_engine(target, draft, options)
    for line in info.lines():
        console.print(line, highlight=False, soft_wrap=True)
    prompts = demo_prompts()[: args.prompts]
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        frequency_penalty=FREQUENCY_PENALTY,
        stop=STOPS,
    )
    collector, texts = Collector(), {}
    for prompt in prompts:
        accepted = engine.add(prompt, params)
        collector.expect(accepted)
        texts[accepted.request_id] = prompt
    at_once = min(args.max_slots, len(prompts))
    console.print(f"completing {len(prompts)} functions, {at_once} at a time", highlight=False)
    pace_s = 1 / args.steps_per_s if console.is_terminal and args.steps_per_s > 0 else 0.0
    elapsed_s = _watch(engine, collector, texts, console, args.max_slots, pace_s)
    for request_id, prompt in texts.items():
        _print_function(console, prompt, collector.done[request_id])
    shown = Run(
        info=info,
        stats=copy.deepcopy(engine.stats),  # what follows is counted apart
        batch=at_once,
        num_requests=len(prompts),
        num_errors=sum(c.error is not None for c in collector.done.values()),
        elapsed_s=elapsed_s,
    )
    print_summary(shown, console)
    print_json([shown, *_race(engine, info, console, prompts[:RACE_PROMPTS], params)], console)
    return 0


def _watch(
    engine: Engine,
    collector: Collector,
    texts: dict[str, str],
    console: Console,
    num_lanes: int,
    pace_s: float,
) -> float:
    """Steps until all is done; returns the seconds spent in steps. Without a terminal there is
    nothing to watch, and nothing is drawn."""
    lanes = Lanes(min(num_lanes, len(texts)), {r: _title(t) for r, t in texts.items()})
    live = Live(console=console, refresh_per_second=20) if console.is_terminal else None
    elapsed_s = 0.0
    with live or contextlib.nullcontext():
        while collector.waiting:
            started_s = time.perf_counter()
            outputs = engine.step()
            step_s = time.perf_counter() - started_s
            elapsed_s += step_s
            collector.take(outputs)
            if live is not None:
                lanes.update(outputs)
                live.update(lanes.render(engine, elapsed_s, console.width))
                time.sleep(max(pace_s - step_s, 0.0))
    return elapsed_s


def _title(prompt: str) -> str:
    names = re.findall(r"(?:def|class)\s+(\w+)", prompt)
    return names[-1] if names else prompt.strip()[:18]


def _print_function(console: Console, prompt: str, completion: Completion) -> None:
    """The prompt, and what the model wrote behind a bar in the margin."""
    console.rule(_title(prompt), align="left", style="dim")
    console.print(Text(prompt.rstrip("\n"), style="dim"), soft_wrap=True)
    code = Syntax("", "python", background_color="default").highlight(completion.text.strip("\n"))
    for line in code.split("\n"):
        console.print(Text("│ ", style="green") + line, soft_wrap=True)


def _race(
    engine: Engine, info: EngineInfo, console: Console, prompts: list[str], params: SamplingParams
) -> list[Run]:
    """One sequence at a time, without lookahead and with it, at full speed. Every prompt is known
    to the prefix cache by now, so this times decoding."""
    console.print("\none sequence at a time, at full speed:")
    runs, texts = [], []
    for max_lookahead in (0, None):
        each = msgspec.structs.replace(params, max_lookahead=max_lookahead, seed=0)
        before_steps = engine.stats.steps
        started_s = time.perf_counter()
        done = [complete_all(engine, [prompt], [each])[0] for prompt in prompts]
        elapsed_s = time.perf_counter() - started_s
        stats = EngineStats(steps=engine.stats.steps - before_steps)
        for completion in done:
            stats.output_tokens += len(completion.token_ids)
            stats.speculation.merge(completion.speculation)
        lookahead = "off" if max_lookahead == 0 else info.lookahead
        run_info = msgspec.structs.replace(info, lookahead=lookahead)
        runs.append(Run(run_info, stats, 1, len(prompts), 0, elapsed_s))
        texts.append([completion.text for completion in done])
        console.print(f"  lookahead {lookahead:<6} {runs[-1].tokens_per_s or 0:7,.0f} tokens/s")
    if params.greedy:
        same = "yes" if texts[0] == texts[1] else "no"
        console.print(f"  the same text: {same}")
    return runs
