"""Common behaviour of all commands: help, errors about arguments, and output for programs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest

import cbatch as package
from cbatch.cli.main import BROKEN_PIPE, COMMANDS, GROUP, main
from tests.cli.conftest import Run

Command = Callable[..., Run]
ROOT = Path(__file__).parents[2]
ROWS = "".join(f"{number / 10},8,4\n" for number in range(40))
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + ROWS
CONSTANT = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cbatch {package.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {what}" in shown for name, what in COMMANDS.items())


@pytest.mark.parametrize(
    ("words", "usage", "meant"),
    [
        (("srve",), "cbatch", "serve"),
        (("serve", "--max-num-seqss", "4"), "cbatch serve", "--max-num-seqs"),
        (("generate", "x", "--temprature=1"), "cbatch generate", "--temperature"),
        (("sim", "capacity", "t.csv", "--slos", "ttft=1"), "cbatch sim capacity", "--slo"),
        (("trace", "shwo", "t.csv"), "cbatch trace", "show"),
        (("trace", "show", "t.csv", "--plott", "p"), "cbatch trace show", "--plot"),
        (("generate", "x", "--verification", "couple"), "cbatch generate", "coupled"),
    ],
)
def test_errors_suggest_the_option_and_show_the_commands_usage(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], usage: str, meant: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"usage: {usage} ") and f"\n{usage}: error: " in said, said
    assert said.rstrip().endswith(f"did you mean {meant}?"), said
    assert len(said.splitlines()) < 10, "the usage is too long"


def test_a_models_name_is_suggested(cbatch: Command) -> None:
    for command in (("serve",), ("calibrate", "--out", "c.json")):
        run = cbatch(*command, "smolm2")
        assert run.status == 2
        assert "smolm2: no such model; did you mean smollm2?" in run.err


TABLES: dict[str, tuple[Any, ...]] = {
    "generate": ("generate", "def f():", "--output", "OUT", "--max-tokens", 3),
    "sweep": ("sim", "TRACE", *CONSTANT, "--sweep", "max-num-seqs=1,2", "--processes", 1),
    "report compare": ("report", "compare", "REPORT", "REPORT"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_json(
    cbatch: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A terminal shows a table, and JSON only on request. In a pipe no cell is cut or wrapped."""
    places = {"TRACE": tmp_path / "trace.csv", "REPORT": tmp_path / "report.json"}
    places["OUT"] = tmp_path / "out.jsonl"
    places["TRACE"].write_text(TRACE, encoding="utf-8")
    assert cbatch("sim", places["TRACE"], *CONSTANT, "--json", places["REPORT"]).status == 0

    def run(*more: Any, columns: int = 80) -> Run:
        places["OUT"].unlink(missing_ok=True)
        monkeypatch.setenv("COLUMNS", str(columns))
        return cbatch(*(places.get(word, word) for word in TABLES[name]), *more)

    piped, wide = run(columns=20), run(columns=1000)
    assert piped.status == 0 and len(piped.lines) == 1, piped.err
    assert "…" not in piped.out and max(map(len, piped.out.splitlines()[:-1])) > 20
    assert len(piped.out.splitlines()) == len(wide.out.splitlines())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    seen = run()
    assert seen.status == 0 and len(seen.out.splitlines()) > 2
    assert not seen.lines, "no JSON after the table"
    assert run("--json", "-").lines[0].keys() == piped.lines[0].keys()
    written = tmp_path / "figures.json"
    assert not run("--json", written).lines
    assert json.loads(written.read_text(encoding="utf-8"))
    refused = run("--json", tmp_path)
    assert refused.status == 2 and refused.err.startswith("cbatch: --json: "), refused.err


# --- commands of other packages ------------------------------------------------------------------


def test_the_commands_of_other_packages_are_entry_points() -> None:
    """If the last line fails, install the checkout again (pip install -e .)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"][GROUP]
    assert {name.replace("-", " ") for name in declared} < COMMANDS.keys()
    assert all(where.startswith(("bench.", "sim.")) for where in declared.values())
    assert {point.name: point.value for point in entry_points(group=GROUP)} == declared


@pytest.mark.parametrize(
    ("command", "points"),
    [
        ("bench", ()),
        ("sim capacity", ("sim.moved:add_parser",)),
        ("bench", ("moved.cli:add_parser",)),
    ],
)
def test_a_stale_installation_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    points: tuple[str, ...],
) -> None:
    name = command.replace(" ", "-")
    stale = EntryPoints(EntryPoint(name, value, GROUP) for value in points)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **query: stale.select(**query))
    assert main([*command.split(), "--help"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"cbatch: {command}: is not registered"), said
    assert said.endswith("pip install -e .\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0


def test_a_missing_dependency_is_not_reported_as_a_stale_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sim.cli.simulation", None)
    monkeypatch.delitem(sys.modules, "sim.cli.replay_command", raising=False)
    with pytest.raises(ModuleNotFoundError, match="sim.cli.simulation"):
        main(["sim", "--help"])


# --- output whose reader leaves early ------------------------------------------------------------


CBATCH = "import sys; from cbatch.cli import main; sys.exit(main.main(sys.argv[1:]))"


def run_unread(code: str, *command: str) -> tuple[int, str]:
    """Return the exit status and stderr if the reader leaves before the first byte."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(timeout=60), errors


def test_commands_print_no_traceback_after_a_broken_pipe(tmp_path: Path) -> None:
    """The command prints a table by rich, then a line."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    assert run_unread(CBATCH, "sim", str(trace), "--gpu", "H100") == (BROKEN_PIPE, "")


# --- bad traces ----------------------------------------------------------------------------------


HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
GOOD = HEAD + "0.5,20,3\n0.75,30,4\n"
BAD: dict[str | None, str] = {  # text, place and problem
    None: ": file: cannot be read",
    HEAD: ": file: has no requests",
    GOOD.replace("\n", ",colour\n", 1): ", line 1: colour: is an unknown column",
    GOOD + "0.6,1,1\n": ", line 4: arrival: is 0.15 s before the row above",
}


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize(
    "command",
    [("trace", "show"), ("sim", *CONSTANT), ("sim", "capacity", *CONSTANT, "--slo", "ttft=1")],
)
def test_errors_about_bad_traces_name_the_place(
    cbatch: Command, tmp_path: Path, text: str | None, command: tuple[Any, ...]
) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    run = cbatch(*command, path)
    assert run.status == 2 and f"{path}{BAD[text]}" in run.err, run.err
    assert not run.lines, "and no report"
