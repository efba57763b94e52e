"""An option of several commands has one name, one help text and one syntax."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.cli.workload import Workload
from bench.load.run.options import LoadOptions, OfferedLoad
from cbatch.cli.main import make_parser
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import fields_of, read_settings
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from sim.cli.scenario import ENGINE_DEFAULTS, Scenario
from sim.cli.simulation import build
from sim.workload.distributions import parse_arrivals, parse_lengths
from sim.workload.options import warn
from sim.workload.traces.reader import Trace, write_requests
from sim.workload.traces.request import TraceRequest
from tests.cli.conftest import Run

Command = Callable[..., Run]
COMMANDS = ("serve", "generate", "sim", "bench")
SMALL = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)
# Flags with the same name but different meaning: a server's model is not a simulated model.
OTHERS = {
    "--model": "weights, the name of a shape, or the name that a server gives its model",
    "--seed": "of what the command itself draws",
    "--draft": "weights, or the name of a shape",
    "--requests": "of a trace, or of each run",
    "--concurrency": "one number of clients, or several",
    "--rate": "one rate, or several",
    "--processes": "of scenarios, or of the client",
    "--records": "of requests, or of calls",
    "--page": "of plots, or of runs",
    "--json": "the whole report, or the figures",
    "--timeout": "of a server's calls by default, or of a client's",
    "--host": "an address, or a file of processors",
    "--output": "a file, or a length",
    "--api-key": "of clients that a server takes, or of the client",
    "--sweep": "over values, or over loads",
    "--trace": "the other name of a positional argument",
}
# The default engine of a simulation is on an H100, and values of a cost model or log come first:
# the struct has None.
OWN_DEFAULTS = {*ENGINE_DEFAULTS, "lookahead"}


def actions(command: str) -> dict[str, argparse.Action]:
    """Return the actions by option string, hidden options included."""
    (commands,) = (
        action
        for action in make_parser(command)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options: dict[str, argparse.Action] = commands.choices[command]._option_string_actions
    return options


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(COMMANDS, 2)))
def test_the_same_option_has_one_name_and_one_help_text(one: str, other: str) -> None:
    first, second = actions(one), actions(other)
    for flag in (first.keys() & second.keys()) - OTHERS.keys() - {"-h", "--help"}:
        a, b = first[flag], second[flag]
        if argparse.SUPPRESS in (a.help, b.help):  # the form of a switch that help does not show
            assert a.dest == b.dest
            continue
        assert (a.help or "").partition(" (default")[0] == (b.help or "").partition(" (default")[0]
        assert (a.metavar, a.choices, a.dest) == (b.metavar, b.choices, b.dest), flag
        shown = [set(each.option_strings) for each in (a, b)]
        assert shown[0] == shown[1] or a.nargs == 0, f"{flag}: other names in addition"


@pytest.mark.parametrize("kind", [Scenario, LoadOptions, SamplingParams])
def test_the_same_option_has_one_default(kind: Any) -> None:
    """Defaults are compared as help shows them: `Scenario` has None where other settings decide,
    and its help states the value."""
    known = fields_of(ServeSettings) | fields_of(SamplingParams)
    for name, setting in fields_of(kind).items():
        same = known.get(name)
        if same is None or f"--{name}" in OTHERS or setting.field in OWN_DEFAULTS:
            continue
        if kind is LoadOptions and name == "temperature":
            continue  # a load is greedy by default, as `cbatch generate` is
        if setting.default is not None and setting.default != "yes, except with --prompts":
            assert setting.default == same.default, name


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("serve", "--draft-model", "--draft"),
        ("generate", "--draft-model", "--draft"),
        ("calibrate", "--draft-model", "--draft"),
        ("sim", "--draft-model", "--draft"),
        ("serve", "--tp", "--tensor-parallel-size"),
        ("serve", "--tensor-parallel", "--tensor-parallel-size"),
        ("sim", "--tp", "--tensor-parallel-size"),
        ("sim", "--step-budget", "--max-num-batched-tokens"),
    ],
)
def test_an_option_has_one_name_that_help_shows(command: str, old: str, new: str) -> None:
    options = actions(command)
    assert options[old].dest == options[new].dest
    assert options[old].help == argparse.SUPPRESS != options[new].help


def test_a_model_may_be_named_either_way(cbatch: Command, capsys: Any) -> None:
    for words in (("serve", "DIR"), ("serve", "--model", "DIR")):
        args = make_parser("serve").parse_args(words)
        assert read_settings(ServeSettings, args).values.model == "DIR"
    for words in (("serve", "A", "--model", "B"), ("serve", "--model", "B", "A")):
        with pytest.raises(SystemExit):
            make_parser("serve").parse_args(words)
        assert "is given twice" in capsys.readouterr().err


def test_help_shows_no_default_where_there_is_none() -> None:
    for command in ("serve", "generate", "sim", "bench"):
        for flag, action in actions(command).items():
            assert "NODEFAULT" not in (action.help or ""), flag


@pytest.mark.parametrize("flag", ["--tp", "--tensor-parallel", "--tensor-parallel-size"])
def test_an_error_names_the_option_as_it_was_given(cbatch: Command, flag: str) -> None:
    run = cbatch("serve", flag, 0)
    assert run.status == 2 and f"cbatch: {flag}: 0 is not allowed" in run.err, run.err
    run = cbatch("generate", "x", flag, "many")
    assert run.status == 2 and f"cbatch: {flag}: 'many' is not allowed" in run.err, run.err


def test_a_switch_can_be_turned_off_and_on() -> None:
    for flags, shared in (
        ((), True),
        (("--no-enable-prefix-caching",), False),
        (("--enable-prefix-caching",), True),
        (("--no-prefix-cache", "--enable-prefix-caching"), True),
    ):
        for command, kind in (("serve", ServeSettings), ("sim", Scenario)):
            words = (command, "trace") if command == "sim" else (command,)
            values: Any = read_settings(kind, make_parser(command).parse_args([*words, *flags]))
            options = values.values if command == "sim" else values.values.engine
            assert (options.enable_prefix_caching is not False) == shared
    switched = read_settings(
        ServeSettings,
        make_parser("serve").parse_args(["serve", "--no-open-metrics"]),
        {"CBATCH_OPEN_METRICS": "on", "CBATCH_RAY": "true"},
    )
    assert (switched.values.open_metrics, switched.values.ray) == (False, True)


# -- distributions


@pytest.mark.parametrize(
    ("comma", "colon"),
    [
        ("lognormal:50,0.5", "lognormal:50:0.5"),
        ("lognormal:50,0.5,90", "lognormal:50:0.5:90"),
        ("uniform:3,30", "uniform:3:30"),
        ("zipf:1.2,2,50", "zipf:1.2:2:50"),
        ("fixed:7", "7"),
    ],
)
def test_lengths_have_one_grammar_in_all_commands(
    cbatch: Command, tmp_path: Path, comma: str, colon: str
) -> None:
    drawn, written = [], []
    for text in (comma, colon):
        drawn.append(parse_lengths("--x", text)(np.random.default_rng(3), 40).tolist())
        words = ("URL", "--output-tokens", text, "--prompt-tokens", text, "--turns", text)
        options = read_settings(LoadOptions, make_parser("bench").parse_args(["bench", *words]))
        made = Workload(options.values).requests(OfferedLoad(concurrency=2), seed=3)
        out = tmp_path / "out.jsonl"
        lengths = ("--prompt", text, "--output", text, "--rate", 5, "--requests", 9)
        assert cbatch("trace", "generate", out, *lengths).status == 0
        written.append((made, list(Trace(out))))
    assert drawn[0] == drawn[1] and written[0] == written[1]


@pytest.mark.parametrize(
    ("process", "spellings"),
    [
        ("poisson", ("poisson:5",)),
        ("constant", ("constant:5",)),
        ("gamma:2", ("gamma:5,2", "gamma:5:2")),
        ("onoff:3,9", ("onoff:5,3,9", "onoff:5:3:9")),
        ("onoff:3:9", ("diurnal:5,0.5,60",)),
    ],
)
def test_arrivals_have_one_grammar_with_a_rate_and_without(
    cbatch: Command, tmp_path: Path, process: str, spellings: tuple[str, ...]
) -> None:
    def first(*arguments: Any) -> list[float]:
        times_s = parse_arrivals("--arrivals", *arguments)(np.random.default_rng(4))
        return list(itertools.islice(times_s, 20))

    def written(*more: Any) -> list[TraceRequest]:
        out = tmp_path / "out.jsonl"
        fixed = ("--prompt", 9, "--output", 2, "--requests", 20)
        run = cbatch("trace", "generate", out, *fixed, *more)
        assert run.status == 0, run.err
        return list(Trace(out))

    same = not spellings[0].startswith("diurnal")
    for text in spellings:
        assert (first(text) == first(process, 5.0)) == same
        made = written("--rate", 5, "--arrivals", process)
        assert (written("--arrivals", text) == made) == same
    words = ["bench", "URL", "--rate", "5", "--arrivals", process, "--requests", "20"]
    options = read_settings(LoadOptions, make_parser("bench").parse_args(words))
    times_s = [r.arrival_s for r in Workload(options.values).requests(OfferedLoad(rate_per_s=5), 0)]
    assert times_s == [request.arrival_s for request in made]


def test_a_rate_that_is_missing_or_given_twice_is_rejected(cbatch: Command, tmp_path: Path) -> None:
    fixed = (tmp_path / "out.jsonl", "--prompt", 9, "--output", 2, "--requests", 20)
    for more, words in (
        ((), "--rate: is missing"),
        (("--arrivals", "poisson"), "--arrivals: 'poisson' is not known; write one of"),
        (("--rate", 5, "--arrivals", "poisson:5"), "--arrivals: 'poisson:5' is not known"),
        (("--rate", -5), "--arrivals: 'poisson': rate_per_s -5.0 is not allowed"),
    ):
        run = cbatch("trace", "generate", *fixed, *more)
        assert run.status == 2 and words in run.err, run.err


# -- rates


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of four requests a second."""
    path = tmp_path / "trace.jsonl"
    requests = (TraceRequest(arrival_s=i / 4, prompt_tokens=9, output_tokens=2) for i in range(41))
    write_requests(path, requests)
    return path


def arrivals(cbatch: Command, trace: Path, *more: Any) -> tuple[float, Run]:
    """Return the time of the last arrival in seconds, and the run."""
    records = trace.parent / "records.jsonl"
    run = cbatch("sim", trace, *SMALL, "--records", records, *more)
    assert run.status == 0, run.err
    lines = records.read_text().splitlines()
    return max(float(line.partition('"arrival_s":')[2].partition(",")[0]) for line in lines), run


def test_a_rate_is_in_requests_a_second(cbatch: Command, trace: Path) -> None:
    for more, last_s, scale in (
        ((), 10, None),
        (("--rate-scale", 2), 5, 2),
        (("--rate", 8), 5, 2),
        (("--rate", 2), 20, 0.5),
        (("--rate", 8, "--requests", 21), 2.5, 2),
    ):
        warn.cache_clear()
        reached_s, run = arrivals(cbatch, trace, *more)
        assert reached_s == pytest.approx(last_s), more
        assert run.lines[-1]["settings"]["rate_scale"] == scale
        said = "is in requests per second; the trace has 4. To give a multiple of"
        assert (said in run.err) == ("--rate" in more), run.err


def test_a_trace_is_scaled_to_a_rate(cbatch: Command, trace: Path) -> None:
    for more, last_s in ((("--rate", 8), 5), (("--rate-scale", 0.5), 20), (("--output", 2), 10)):
        out = trace.parent / "out.jsonl"
        assert cbatch("trace", "scale", trace, out, *more).status == 0
        assert list(Trace(out))[-1].arrival_s == pytest.approx(last_s)
    both = cbatch("trace", "scale", trace, out, "--rate", 8, "--rate-scale", 2)
    assert both.status == 2 and "rate_scale: would be ignored" in both.err.replace("-", "_")


def test_capacity_is_searched_in_multiples_of_the_traces_rate(cbatch: Command, trace: Path) -> None:
    lines = [
        cbatch("sim", "capacity", trace, *SMALL, "--slo", "ttft=9", flag, "1:4").lines
        for flag in ("--rate-scales", "--rates")
    ]
    assert lines[0] == lines[1]
    for flag in ("--rate-scales", "--rates"):
        run = cbatch("sim", "capacity", trace, *SMALL, "--slo", "ttft=9", flag, "4:1")
        assert run.status == 2 and f"cbatch: {flag}: 4.0:1.0 is not a range" in run.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--rate", 3, "--rate-scale", 2), "--rate-scale: would be ignored"),
        (("--rate-scale", 2, "--concurrency", 2), "--rate-scale: would be ignored"),
        (("--rate", "nan"), "--rate: nan is not allowed"),
        (("--rate", 0), "--rate: 0.0 is not allowed"),
        (("--rate-scale", 0), "--rate-scale: 0.0 is not allowed"),
        (("--rate", 3, "--requests", 1), "--rate: the trace has no rate of its own"),
    ],
)
def test_bad_rates_are_rejected(
    cbatch: Command, trace: Path, more: tuple[Any, ...], words: str
) -> None:
    run = cbatch("sim", trace, *SMALL, *more)
    assert run.status == 2 and words in run.err, run.err


def test_a_scenario_in_python_has_the_same_rates(trace: Path) -> None:
    sizes: dict[str, Any] = {"num_blocks": 200, "max_model_len": 500, "step_seconds": 0.01}
    one = build(Scenario(trace=str(trace), rate=8.0, **sizes))
    other = build(Scenario(trace=str(trace), rate_scale=2.0, **sizes))
    assert one.run().duration_s == other.run().duration_s
    with pytest.raises(FieldError, match="rate_scale: would be ignored"):
        build(Scenario(trace=str(trace), rate=8.0, rate_scale=2.0, **sizes))
