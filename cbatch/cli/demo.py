"""`cbatch demo`: show the shipped model pair completing Python functions, then a chat with SmolLM2
if it is installed."""

from __future__ import annotations

import argparse
import copy
import re
import time

from msgspec.structs import replace
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from cbatch.cli.console import TextConsole
from cbatch.cli.demo_chat import chat
from cbatch.cli.lanes import watch
from cbatch.cli.output import add_json_option
from cbatch.cli.settings import add_flags, read_settings
from cbatch.cli.summary import BatchRun, print_results, print_summary
from cbatch.core.request.request import SamplingParams
from cbatch.demo import demo_paths, demo_prompts
from cbatch.engine.build import load_engine
from cbatch.engine.engine import Engine, EngineStats
from cbatch.engine.info import EngineInfo
from cbatch.engine.options import EngineOptions
from cbatch.llm import Batch, complete_all
from cbatch.system.terminal import shown
from cbatch.text.outputs import Completion

STEPS_PER_S = 12.0  # slow enough to watch; throughput figures exclude the pauses
STOPS = ("\ndef ", "\nclass ", "\n@", "\nif __name__", "\n# ")  # a function ends before these
_ENGINE = {"max_num_seqs": 12, "dtype": "float32", "numerics": "invariant", "seed": 0}
_SAMPLING = {"max_tokens": 120, "temperature": 0.0}
FREQUENCY_PENALTY = 0.4  # without a penalty this small model repeats itself
RACE_PROMPTS = 6  # number of prompts in the measurement with one sequence at a time
MIN_GAIN = 1.02  # minimum speed-up by speculation, below which `NO_GAIN` is printed
NO_GAIN = (
    "with {} at once speculation gains nothing here: verifying a draft costs as much as it saves"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        description="The shipped pair of models completes Python functions, with many sequences in "
        "every step, each with its own draft length. Then smollm2, if it is installed, answers "
        "questions with drafts from lookups.",
    )
    engine = ("lookahead", "drafter", "max_num_seqs", "dtype", "numerics")
    add_flags(parser, EngineOptions, only=engine, defaults=_ENGINE)
    add_flags(parser, SamplingParams, only=("max_tokens", "temperature"), defaults=_SAMPLING)
    parser.add_argument("--prompts", type=int, default=24, help="number of prompts")
    parser.add_argument(
        "--steps-per-s",
        type=float,
        default=STEPS_PER_S,
        help="speed of the display; 0: as fast as possible",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console = TextConsole()
    target, draft = demo_paths()
    options = read_settings(EngineOptions, args, defaults=_ENGINE).values
    engine, info = load_engine(target, draft, options)
    for line in info.lines():
        console.print(line, soft_wrap=True)
    prompts = demo_prompts()[: args.prompts]
    sampling = read_settings(SamplingParams, args, defaults=_SAMPLING).values
    params = replace(sampling, frequency_penalty=FREQUENCY_PENALTY, stop=STOPS)
    batch: Batch[str] = Batch(engine)
    for prompt in prompts:
        batch.add(prompt, prompt, params)
    at_once = min(options.max_num_seqs, len(prompts))
    console.print(f"completing {len(prompts)} functions, {at_once} at a time")
    pace_s = 1 / args.steps_per_s if console.is_terminal and args.steps_per_s > 0 else 0.0
    titles = {prompt: _title(prompt) for prompt in prompts}
    done, elapsed_s = watch(engine, batch, titles, console, options.max_num_seqs, pace_s)
    for prompt in prompts:
        _print_function(console, prompt, done[prompt])
    watched = BatchRun(
        info=info,
        stats=copy.deepcopy(engine.stats),  # a copy: the runs below add to the engine's
        batch=at_once,
        num_requests=len(prompts),
        num_errors=sum(c.error is not None for c in done.values()),
        elapsed_s=elapsed_s,
    )
    with console.status("measuring what speculation gains"):
        runs = [watched, *_compare_speculation(engine, info, console, prompts, params)]
    print_summary(watched, console)
    print_results(runs + chat(options, sampling, console, pace_s), args.json)
    return 0


def _title(prompt: str) -> str:
    names = re.findall(r"(?:def|class)\s+(\w+)", prompt)
    return names[-1] if names else prompt.strip()[:18]


def _print_function(console: Console, prompt: str, completion: Completion) -> None:
    """Print the prompt, then the model's text marked by a bar in the margin."""
    console.rule(_title(prompt), align="left", style="dim")
    console.print(Text(prompt.rstrip("\n"), style="dim"), soft_wrap=True)
    text = shown(completion.text.strip("\n"), console.file)
    code = Syntax("", "python", background_color="default").highlight(text)
    for line in code.split("\n"):
        console.print(Text("│ ", style="green") + line, soft_wrap=True)


def _compare_speculation(
    engine: Engine, info: EngineInfo, console: Console, prompts: list[str], params: SamplingParams
) -> list[BatchRun]:
    """Measure and print the speed-up by speculation, for a full batch and for single sequences.

    Both are run without and with lookahead, and without pauses. `run` has put all prompts into
    the prefix cache, so only decoding is timed. Returns the four runs."""
    slots = min(engine.scheduler.config.max_num_seqs, len(prompts))
    table = Table(title="What speculation gains, in tokens/s", title_justify="left")
    for name in ("at once", "lookahead off", f"lookahead {info.lookahead}", "gain", "same text"):
        table.add_column(name, justify="right")
    runs: list[BatchRun] = []
    gains: list[float] = []
    for at_once, groups in ((slots, [prompts]), (1, [[each] for each in prompts[:RACE_PROMPTS]])):
        (off, texts_off), (on, texts_on) = (
            _timed(engine, info, groups, replace(params, max_lookahead=k, seed=0))
            for k in (0, None)
        )
        runs += [replace(run, batch=at_once) for run in (off, on)]
        rates = [run.tokens_per_s or 0.0 for run in (off, on)]
        gains.append(rates[1] / rates[0] if rates[0] else 1.0)
        same = "yes" if texts_off == texts_on else "no"
        table.add_row(str(at_once), *(f"{r:,.0f}" for r in rates), f"{gains[-1]:.2f}x", same)
    console.print(table)
    if info.lookahead != "off" and gains[0] < MIN_GAIN:
        console.print(NO_GAIN.format(slots), soft_wrap=True)
    return runs


def _timed(
    engine: Engine, info: EngineInfo, groups: list[list[str]], params: SamplingParams
) -> tuple[BatchRun, list[str]]:
    """Complete the groups of prompts one after another. Returns the run and the texts in order."""
    stats, before_steps = EngineStats(), engine.stats.steps
    started_s = time.perf_counter()
    done = [each for group in groups for each in complete_all(engine, group, [params] * len(group))]
    elapsed_s = time.perf_counter() - started_s
    stats.steps = engine.stats.steps - before_steps
    for completion in done:
        stats.output_tokens += len(completion.token_ids)
        stats.speculation.merge(completion.speculation)
    if params.max_lookahead == 0:
        info = replace(info, lookahead="off")
    return BatchRun(info, stats, 1, len(done), 0, elapsed_s), [each.text for each in done]
