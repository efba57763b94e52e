"""`cbatch demo`: show the shipped model pair completing Python functions, then a chat with SmolLM2
if it is installed."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option
from cbatch.cli.settings import add_flags, read_settings
from cbatch.cli.summary import BatchRun, print_results, print_summary
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.demo import demo_paths, demo_prompts
from cbatch.engine.build import load_engine
from cbatch.engine.engine import Engine, EngineStats
from cbatch.engine.info import EngineInfo
from cbatch.engine.model_files import chat_template_of, find_model
from cbatch.engine.options import EngineOptions
from cbatch.llm import Batch, complete_all
from cbatch.system.terminal import escaped, shown
from cbatch.text.outputs import Completion, Output, Speculation

STEPS_PER_S = 12.0  # slow enough to watch; throughput figures exclude the pauses
STOPS = ("\ndef ", "\nclass ", "\n@", "\nif __name__", "\n# ")  # a function ends before these
# On a CPU text does not depend on lookahead if our kernels can be compiled.
_ENGINE = {"max_num_seqs": 12, "dtype": "float32", "device": "cpu", "seed": 0}
_SAMPLING = {"max_tokens": 120, "temperature": 0.0}
FREQUENCY_PENALTY, CHAT_PENALTY = 0.4, 0.3  # without them such small models repeat themselves
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
    console = TextConsole(soft_wrap=True)
    options = read_settings(EngineOptions, args, defaults=_ENGINE).values
    engine, info = load_engine(*demo_paths(), options)
    console.print("\n".join(info.lines()))
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
        console.rule(titles[prompt], align="left", style="dim")
        console.print(Text(prompt.rstrip("\n"), style="dim"))
        text = shown(done[prompt].text.strip("\n"), console.file)
        _print_marked(console, Syntax("", "python", background_color="default").highlight(text))
    # The runs below add to the engine's statistics.
    watched = _run_of(info, engine.stats, at_once, done.values(), elapsed_s)
    with console.status("measuring what speculation gains"):
        runs = [watched, *_compare_speculation(engine, info, console, prompts, params)]
    print_summary(watched, console)
    print_results(runs + chat(options, sampling, console, pace_s), args.json)
    return 0


def _title(prompt: str) -> str:
    names = re.findall(r"(?:def|class)\s+(\w+)", prompt)
    return names[-1] if names else prompt.strip()[:18]


def _print_marked(console: Console, text: Text) -> None:
    for line in text.split("\n", allow_blank=True):
        console.print(Text("│ ", style="green") + line)


def _run_of(
    info: EngineInfo,
    stats: EngineStats,
    at_once: int,
    done: Iterable[Completion],
    elapsed_s: float,
) -> BatchRun:
    errors = [completion.error is not None for completion in done]
    return BatchRun(info, stats, at_once, len(errors), sum(errors), elapsed_s)


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
            _timed(engine, info, groups, replace(params, max_lookahead=k, seed=0), at_once)
            for k in (0, None)
        )
        runs += [off, on]
        rates = [run.tokens_per_s or 0.0 for run in (off, on)]
        gains.append(rates[1] / rates[0] if rates[0] else 1.0)
        same = "yes" if texts_off == texts_on else "no"
        table.add_row(str(at_once), *(f"{r:,.0f}" for r in rates), f"{gains[-1]:.2f}x", same)
    console.print(table)
    if info.lookahead != "off" and gains[0] < MIN_GAIN:
        console.print(NO_GAIN.format(slots))
    return runs


def _timed(
    engine: Engine, info: EngineInfo, groups: list[list[str]], params: SamplingParams, at_once: int
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
    return _run_of(info, stats, at_once, done, elapsed_s), [each.text for each in done]


# ---- the chat ---------------------------------------------------------------------------------

CHAT_MODEL = "smollm2"  # name of the packaged model, for `find_model`
QUESTIONS = (
    "Why is the sky blue?",
    "How do plants make food?",
    "Give me three tips for sleeping well.",
    "Tell me about the moon.",
)
FOLLOW_UP = "Can you explain that to a child?"
CHAT_DRAFTER = ("ngram",)  # needs no draft model, which SmolLM2 lacks


def chat(
    options: EngineOptions, params: SamplingParams, console: Console, pace_s: float
) -> list[BatchRun]:
    """Run all conversations as one batch, two turns each, and print them.

    The second turn finds the first in the prefix cache. A step that is shown takes at least
    `pace_s` seconds. Returns a list with the run. If the model is not installed, prints the
    reason and returns an empty list."""
    console.print()
    console.rule(f"a chat with {CHAT_MODEL}", align="left")
    try:
        model = find_model(CHAT_MODEL)
    except FieldError as error:
        console.print(f"left out: {error}")
        return []
    drafter = tuple(name for name in options.drafter or () if name != MODEL) or CHAT_DRAFTER
    options = replace(options, drafter=drafter, dtype="auto", max_model_len=1024)
    engine, info = load_engine(model, None, options)
    console.print("\n".join(info.lines()))
    template = chat_template_of(model)
    assert template is not None
    params = replace(params, frequency_penalty=CHAT_PENALTY)
    conversations = {each: [{"role": "user", "content": each}] for each in QUESTIONS}
    completions, elapsed_s = list[Completion](), 0.0
    for turn in range(2):
        batch: Batch[str] = Batch(engine)
        for question, messages in conversations.items():
            if turn:
                messages.append({"role": "user", "content": FOLLOW_UP})
            batch.add(question, template.render(messages), params)
        titles = {question: question for question in QUESTIONS}
        done, spent_s = watch(engine, batch, titles, console, len(titles), pace_s)
        elapsed_s += spent_s
        completions += done.values()
        for question, completion in done.items():
            conversations[question].append({"role": "assistant", "content": completion.text})
    for question, (_, *messages) in conversations.items():
        console.rule(question, align="left", style="dim")
        for message in messages:
            text = Text(shown(message["content"].strip(), console.file))
            if message["role"] == "user":
                console.print(text, style="dim")
            else:
                _print_marked(console, text)
    at_once = min(options.max_num_seqs, len(conversations))
    run = _run_of(info, engine.stats, at_once, completions, elapsed_s)
    print_summary(run, console)
    stats = engine.scheduler.stats
    share = stats.prefix_hit_tokens / stats.prompt_tokens
    console.print(f"{share:.0%} of the prompt tokens were found in the prefix cache")
    return [run]


# ---- the display: one line of the terminal per sequence ---------------------------------------

# Colours of the column k, indexed by k; the last colour is for larger k too.
K_COLOURS = ("dim", "cyan", "cyan", "green", "green", "bright_green", "bright_green")


@dataclass
class _Lane:
    title: str
    text: str = ""
    k: int = 0  # of the last step, as `accepted`
    accepted: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    done: bool = False

    def cells(self, text_width: int) -> tuple[Text, Text, Text, Text]:
        share = self.speculation.acceptance
        # One dot per draft token of the last step, filled if it was accepted.
        dots = "●" * self.accepted + "○" * (self.k - self.accepted)
        k = Text(f"{self.k} {dots}", style=K_COLOURS[min(self.k, len(K_COLOURS) - 1)])
        tail = escaped(self.text.replace("\n", "⏎").replace("    ", "⇥"))[-text_width:]
        style = "dim" if self.done else ""
        return (
            Text(self.title, style=style or "yellow"),
            Text("done", style="dim") if self.done else k,
            Text("-" if share is None else f"{share:.0%}", style=style),
            Text(tail, style=style),
        )


class Lanes:
    """Table of at most `num_lanes` sequences. A finished sequence keeps its lane until a new
    sequence needs it. `titles` are keyed by request id."""

    def __init__(self, num_lanes: int, titles: Mapping[str, str]) -> None:
        self._titles, self._num_lanes = titles, num_lanes
        self._lanes: dict[str, _Lane] = {}  # by request id
        self._rows: list[str] = []  # request ids, in order of the table

    def update(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            lane = self._lanes.get(output.request_id)
            if lane is None:
                lane = self._enter(output.request_id)
            else:
                lane.k, lane.accepted = output.num_drafted, output.num_accepted
                lane.speculation.observe(output.num_drafted, output.num_accepted)
            lane.text += output.text
            lane.done = output.finished is not None

    def _enter(self, request_id: str) -> _Lane:
        ended = [row for row, name in enumerate(self._rows) if self._lanes[name].done]
        if ended and len(self._rows) == self._num_lanes:
            self._rows[ended[0]] = request_id
        else:
            self._rows.append(request_id)
        return self._lanes.setdefault(request_id, _Lane(self._titles[request_id]))

    def render(self, engine: Engine, elapsed_s: float, width: int) -> Group:
        table = Table(expand=True, box=None, padding=(0, 1), header_style="bold")
        table.add_column("", width=2, justify="right", style="dim")
        table.add_column("", width=18, no_wrap=True)
        table.add_column("k", width=8, no_wrap=True)
        table.add_column("accepted", width=8, justify="right")
        table.add_column("text", ratio=1, no_wrap=True)
        for number, name in enumerate(self._rows):
            table.add_row(str(number), *self._lanes[name].cells(max(width - 48, 20)))
        stats = engine.stats
        mean = stats.speculation.mean_accepted_tokens
        words = [
            f"step {stats.steps:,}",
            f"{stats.output_tokens:,} tokens",
            f"{engine.scheduler.num_running} running",
            f"{engine.scheduler.num_waiting} waiting",
            f"{stats.output_tokens / elapsed_s:,.0f} tokens/s" if elapsed_s > 0 else "",
            f"{mean:.2f} tokens a step and sequence" if mean else "",
        ]
        return Group(Text("  ·  ".join(w for w in words if w), style="bold"), table)


def watch(
    engine: Engine,
    batch: Batch[str],
    titles: Mapping[str, str],
    console: Console,
    num_lanes: int,
    pace_s: float,
) -> tuple[dict[str, Completion], float]:
    """Step the engine until `batch` is done, and draw its lanes if `console` is a terminal.

    Returns the completions by key, and the seconds spent in steps. A step that is drawn takes at
    least `pace_s` seconds. `titles` have the batch's keys."""
    names = {request_id: titles[key] for request_id, (key, *_) in batch.waiting.items()}
    lanes = Lanes(num_lanes, names)
    done: dict[str, Completion] = {}
    live = Live(console=console, refresh_per_second=20) if console.is_terminal else None
    elapsed_s = 0.0
    with live or contextlib.nullcontext():
        while batch.waiting:
            started_s = time.perf_counter()
            outputs = engine.step()
            step_s = time.perf_counter() - started_s
            elapsed_s += step_s
            done |= batch.take(outputs)
            if live is not None:
                lanes.update(outputs)
                live.update(lanes.render(engine, elapsed_s, console.width))
                time.sleep(max(pace_s - step_s, 0.0))
    return done, elapsed_s
