"""`cbatch advise`: the settings that would have served a recorded run best."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option, print_figures, require_place
from cbatch.core.request.request import LOOKUPS, MODEL
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.rerun.drafters import Fates, Rerun, rejects, rerun
from cbatch.rerun.models import DraftSizes, load_drafts
from sim.advise.evidence import Evidence
from sim.advise.plot import save_plots
from sim.advise.recording import FIGURES, Recording, read_run
from sim.advise.scenarios import RecordedWorld, Row, ScenarioSettings, largest_errors, search
from sim.cli.processes import counting_bar, num_processes, run_scenarios
from sim.report.report import parse_objectives

LOOKAHEADS = "off,fixed:4,adaptive"
_DRAFTERS = (MODEL, *LOOKUPS)
# Errors in trials from which they are noted, and by figure, up to which it is trusted.
NOTED, BOUNDS = 0.05, {"tokens_per_s": 0.05, "tpot_p95_s": 0.15, "ttft_p95_s": 0.15}
_COLUMNS: dict[str, tuple[str, float, str]] = {  # of the table: heading, factor, format
    "lookahead": ("lookahead", 1, ""),
    "drafter": ("drafter", 1, ""),
    "max_num_seqs": ("slots", 1, ","),
    "max_num_batched_tokens": ("budget", 1, ","),
    "itl_target_s": ("target ms", 1e3, ".3g"),
    "goodput_per_s": ("goodput/s", 1, ",.3f"),
    "tokens_per_s": ("tokens/s", 1, ",.1f"),
    "ratio": ("ratio", 1, ".3f"),
    "tpot_p95_s": ("TPOT p95 ms", 1e3, ",.2f"),
    "ttft_p95_s": ("TTFT p95 ms", 1e3, ",.1f"),
    "drafted_tokens": ("drafted", 1, ","),
    "accepted_tokens": ("accepted", 1, ","),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "advise",
        description="Find the settings that would have served a recorded run best. Drafters are "
        "rerun over the recorded texts, so that the outcome of every draft is known.",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="step log of cbatch serve --record")
    tried = parser.add_argument_group("values to try", "each a list with commas")
    sizes = "default: half, the same, double"
    names = f"{', '.join(_DRAFTERS)}, or a chain: suffix+ngram (default: all that can be loaded)"
    targets = "seconds; 0: none (default: none, the recorded p95 TPOT)"
    for option, name, kind, text in (
        ("--lookahead", "lookahead", str, f"default: {LOOKAHEADS}"),
        ("--drafter", "drafter", _drafter, names),
        ("--max-num-seqs", "max_num_seqs", int, sizes),
        ("--max-num-batched-tokens", "max_num_batched_tokens", int, sizes),
        ("--itl-target", "itl_target_s", float, targets),
    ):
        listed = partial(_values, kind)
        tried.add_argument(option, dest=name, type=listed, metavar="V1,V2", help=text)
    add = parser.add_argument
    add("--model", metavar="MODEL", help="the log's model, if it has moved")
    add("--draft", metavar="MODEL", help="draft model or head, by default the log's")
    add("--cost", type=Path, metavar="FILE", help="prices of cbatch calibrate, not of the log")
    slo = "rank by requests that meet these targets (default: tokens/s, no latency worse)"
    add("--slo", action="append", default=[], metavar="ttft=S,tpot=S", help=slo)
    add("--strict", action="store_true", help="exit with status 1 if a figure is not to be trusted")
    add("--processes", type=int, metavar="N", help="scenarios in parallel (default: all cores)")
    add("--plot", type=Path, metavar="FILE", help="draw a page of plots (PNG, PDF, SVG)")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for option, place in (("--plot", args.plot), ("--json", args.json)):
        require_place(option, place)
    recording, reruns, worlds, choices = prepare(args)
    own, k = ScenarioSettings.of(recording.engine.config), _largest_k(choices)
    measured = recording.figures(worlds[0].targets)

    def all_of(work: Callable[[Any], Row], cases: Sequence[Any]) -> list[Row]:
        processes = num_processes(args.processes, len(cases))
        return run_scenarios(work, cases, processes) if cases else []

    def trials(settings: ScenarioSettings) -> list[Row]:
        return all_of(partial(RecordedWorld.serve, settings=settings), worlds[1:])

    rows = search(own, choices, partial(all_of, worlds[0].serve), trials)
    errors = largest_errors([_recorded(rows, recording), *trials(own)], measured)
    errors |= {name: max(errors[name], e) for name, e in rows[0].get("errors", {}).items()}
    verdicts = {name: recording.compare(name, each.fates, k) for name, each in reruns.items()}
    _print(args.log.name, recording, rows, measured, errors, verdicts)
    if args.plot is not None:
        fates = {
            name: Fates(*map(np.concatenate, zip(*each.fates.values(), strict=True)))
            for name, each in reruns.items()
        }
        save_plots(args.plot, args.log.name, rows, [_label(row) for row in rows], fates)
    checks = {name: {"checked": n, "differing": bad} for name, (n, bad) in verdicts.items()}
    document = {"log": args.log.name, "requests": len(recording.texts), "recorded": measured}
    document |= {"simulated": _recorded(rows, recording), "best": rows[0], "fates": checks}
    document |= {"errors": errors, "doubtful": doubtful(errors), "scenarios": rows}
    print_figures(document, args.json)
    return 1 if args.strict and document["doubtful"] else 0


def prepare(
    args: argparse.Namespace,
) -> tuple[Recording, dict[str, Rerun], list[RecordedWorld], dict[str, list[Any]]]:
    """Return the recorded run, its drafters' reruns, the world of scenarios and those of trials,
    and the values to try of each setting. Raises `FieldError`."""
    with counting_bar() as bar:
        task = bar.add_task("steps read", total=None)
        recording = read_run(args.log, lambda steps: bar.update(task, completed=steps))
    targets = parse_objectives(tuple(part for each in args.slo for part in each.split(",")))
    choices = _choices(args, recording)
    reruns, model = _rerun(args, recording, choices)
    evidence = Evidence(recording, reruns, model, args.cost)
    worlds = evidence.worlds(choices["drafter"], targets)
    return recording, reruns, worlds, choices


def _values(kind: Callable[[str], Any], text: str) -> list[Any]:
    """Return the values of an option's list. A target of 0 is None."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list: write V1,V2") from error
    if kind in (int, float) and not min(values) >= (kind is int):
        raise argparse.ArgumentTypeError(f"{text!r}: use positive numbers")
    return [value or None for value in values]


def _drafter(text: str) -> str:
    if unknown := set(text.split("+")) - {*_DRAFTERS}:
        remedy = f"use {', '.join(_DRAFTERS)}"
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is unknown: {remedy}")
    return text


def _choices(args: argparse.Namespace, recording: Recording) -> dict[str, list[Any]]:
    """Return the values to try of each setting, the recorded one included."""
    recorded = ScenarioSettings.of(recording.engine.config)
    tpot_s = recording.figures()["tpot_p95_s"]
    slots, budget = recorded.max_num_seqs, recorded.max_num_batched_tokens
    choices: dict[str, list[Any]] = {
        "lookahead": LOOKAHEADS.split(","),
        "drafter": list(_DRAFTERS if args.draft or recording.engine.draft else LOOKUPS),
        "max_num_seqs": [max(slots // 2, 1), 2 * slots],
        "max_num_batched_tokens": [max(budget // 2, 1), 2 * budget],
        "itl_target_s": [None, *([float(f"{tpot_s:.2g}")] if tpot_s else [])],
    }
    choices |= {name: values for name in choices if (values := getattr(args, name))}
    for name, own in recorded._asdict().items():
        choices[name] += [own] if name != "drafter" or own else []
    policies = [lookahead_name(parse_lookahead(each)) for each in choices["lookahead"]]
    choices["lookahead"] = policies
    return {name: list(dict.fromkeys(values)) for name, values in choices.items()}


def _largest_k(choices: dict[str, list[Any]]) -> int:
    return max(parse_lookahead(each).k for each in choices["lookahead"])


def _rerun(
    args: argparse.Namespace, recording: Recording, choices: dict[str, list[Any]]
) -> tuple[dict[str, Rerun], DraftSizes | None]:
    names = dict.fromkeys(each for chain in choices["drafter"] for each in chain.split("+"))
    k, config, outputs = _largest_k(choices), recording.engine.config, recording.outputs
    core = load_drafts(recording.engine, args.model, args.draft) if MODEL in names else None
    reruns = {}
    with counting_bar() as bar:
        for name in names:
            task = bar.add_task(f"texts drafted by {name}", total=len(recording.texts))
            reruns[name] = rerun(outputs, config, name, k, core, partial(bar.advance, task))
    if core is None:
        return reruns, None
    sizes = DraftSizes.of(core)
    core.resources.close()
    return reruns, sizes


# -- output


def doubtful(errors: Mapping[str, float]) -> list[str]:
    """Return the figures that are not to be trusted."""
    return [name for name, bound in BOUNDS.items() if errors.get(name, 0.0) > bound]


def _recorded(rows: list[Row], recording: Recording) -> Row:
    settings = ScenarioSettings.of(recording.engine.config)
    return next(row for row in rows if settings._asdict().items() <= row.items())


def _print(
    name: str,
    recording: Recording,
    rows: list[Row],
    measured: Row,
    errors: Mapping[str, float],
    verdicts: Mapping[str, tuple[int, int]],
) -> None:
    console, recorded = TextConsole(), _recorded(rows, recording)
    for line in (*(f"warning: {each}" for each in recording.warnings), *_doubts(errors)):
        console.print(line, soft_wrap=True)
    tokens = sum(len(text.output) for text in recording.texts.values())
    table = Table(
        title=f"{name}: {len(recording.texts):,} requests, {tokens:,} output tokens, "
        f"{len(recording.samples):,} steps",
        title_justify="left",
        box=SIMPLE,
    )
    columns = {name: each for name, each in _COLUMNS.items() if name in recorded}
    for column, (heading, _, form) in columns.items():
        doubt = " (?)" * (column in doubtful(errors))
        table.add_column(heading + doubt, justify="right" if form else "left")
    for row in rows:
        style = "bold" if row is rows[0] else "cyan" if row is recorded else None
        table.add_row(*(_cell(row, column) for column in columns), style=style)
    table.add_section()
    last = {"lookahead": "measured", **measured}
    table.add_row(*(_cell(last, column) for column in columns))
    console.print(table)
    for line in _remarks(recording, verdicts):
        console.print(line, soft_wrap=True)
    best = "the recorded settings" if rows[0] is recorded else _label(rows[0])
    console.print(f"best: {best}: {_changes(rows[0], recorded)}, both simulated", soft_wrap=True)


def _cell(row: Row, column: str) -> str:
    """Return a figure, or the values of a setting that all have the same figures."""
    _, factor, form = _COLUMNS[column]
    values = [each.get(column, row.get(column)) for each in row.get("same", [row])]
    texts = [format(factor * value, form) if form else value for value in values if value]
    return ", ".join(dict.fromkeys(texts))


def _label(row: Row) -> str:
    cells = {name: _cell({name: row[name]}, name) for name in ScenarioSettings._fields}
    return ", ".join(f"{_COLUMNS[name][0]} {cell}" for name, cell in cells.items() if cell)


def _changes(row: Row, base: Row) -> str:
    pairs = [(_heading(name), row[name], base[name]) for name in FIGURES]
    return ", ".join(f"{name} {new / old - 1:+.1%}" for name, new, old in pairs if new and old)


def _heading(name: str) -> str:
    return _COLUMNS[name][0].removesuffix(" ms")


def _doubts(errors: Mapping[str, float]) -> Iterable[str]:
    """Say how far simulations of the recorded settings are from the record, if they are far."""
    if max(errors.values(), default=0.0) > NOTED:
        parts = ", ".join(f"{_heading(name)} {error:.0%}" for name, error in errors.items())
        figures = " and ".join(_heading(name) for name in doubtful(errors))
        verdict = f"do not trust {figures}" if figures else "the figures can be trusted"
        start = "warning: in" if figures else "in"
        yield f"{start} trials the recorded and the best settings differ by {parts}: {verdict}"


def _remarks(recording: Recording, verdicts: Mapping[str, tuple[int, int]]) -> Iterable[str]:
    for name, (checked, differing) in verdicts.items():
        if checked:
            verdict = "all have the recorded outcome"
            if differing:
                verdict = f"warning: {differing:,} have another one: is it the same model?"
            yield f"{checked:,} recorded rows drafted by {name} were rerun: {verdict}"
    if rejects(recording.outputs):
        yield (
            "drafts of some requests are verified by rejection sampling: other settings would give "
            "other texts of the same distribution"
        )
