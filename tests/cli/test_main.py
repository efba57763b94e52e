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
from bench.report import print_report
from cbatch.cli.main import COMMANDS, GROUP, main
from cbatch.engine.engine import Engine
from tests.cli.conftest import Run

Command = Callable[..., Run]
ROOT = Path(__file__).parents[2]
ROWS = "".join(f"{number / 10},8,4\n" for number in range(40))
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + ROWS
CONSTANT = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("serve", "--help")])
def test_help_does_not_import_torch(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from cbatch.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'rich', 'litestar', 'scipy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n"), done.stdout


def test_the_server_process_never_imports_torch() -> None:
    """An import of torch in both processes would double the start-up time."""
    code = (
        "import sys; from cbatch.cli.model_service import ModelParts\n"
        "from cbatch.cli.serve_settings import ServeSettings\n"
        "import cbatch.server.http.app, cbatch.server.http.run\n"
        "ModelParts(ServeSettings()).make_service()\n"
        "print(sorted({'torch', 'triton', 'transformers', 'llguidance'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


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
        (("generat",), "cbatch", "generate"),
        (("serve", "--max-num-seqss", "4"), "cbatch serve", "--max-num-seqs"),
        (("generate", "x", "--temprature=1"), "cbatch generate", "--temperature"),
        (("bench", "http://x", "--concurency", "4"), "cbatch bench", "--concurrency"),
        (("sim", "t.csv", "--replicaz", "2"), "cbatch sim", "--replicas"),
        (("sim", "capacity", "t.csv", "--slos", "ttft=1"), "cbatch sim capacity", "--slo"),
        (("trace", "shwo", "t.csv"), "cbatch trace", "show"),
        (("trace", "show", "t.csv", "--plott", "p"), "cbatch trace show", "--plot"),
        (("generate", "x", "--verification", "blok"), "cbatch generate", "block"),
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


def test_nothing_is_suggested_without_a_similar_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--zzzzzz"])
    assert capsys.readouterr().err.rstrip().endswith("unrecognized arguments: --zzzzzz")


def test_a_models_name_is_suggested(cbatch: Command) -> None:
    for command in (("serve",), ("calibrate", "--out", "c.json")):
        run = cbatch(*command, "smolm2")
        assert run.status == 2
        assert "smolm2: no such model; did you mean smollm2?" in run.err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


TABLES: dict[str, tuple[Any, ...]] = {
    "generate": ("generate", "def f():", "--output", "OUT", "--max-tokens", 3),
    "sim": ("sim", "TRACE", *CONSTANT),
    "sweep": ("sim", "TRACE", *CONSTANT, "--sweep", "max-num-seqs=1,2", "--processes", 1),
    "capacity": (
        "sim",
        "capacity",
        "TRACE",
        *CONSTANT,
        "--slo",
        "ttft=1",
        "--rate-scales",
        "1:1.5",
    ),
    "trace show": ("trace", "show", "TRACE"),
    "report compare": ("report", "compare", "REPORT", "REPORT"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_terminal_shows_a_table_and_json_only_on_request(
    cbatch: Command,
    engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
    name: str,
) -> None:
    report = tmp_path / "report.json"
    assert cbatch("sim", trace, *CONSTANT, "--json", report).status == 0
    places = {"TRACE": trace, "REPORT": report}

    def run(*more: Any) -> Run:
        out = tmp_path / "out.jsonl"
        out.unlink(missing_ok=True)
        words = (places.get(word, out if word == "OUT" else word) for word in TABLES[name])
        return cbatch(*words, *more)

    piped = run()
    assert piped.status == 0 and len(piped.lines) == 1, piped.err
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


@pytest.mark.parametrize("name", [*TABLES, "bench"])
def test_a_table_in_a_pipe_is_not_cut(
    cbatch: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
    name: str,
) -> None:
    """No cell is shortened or wrapped, whatever the number of columns."""
    report = tmp_path / "report.json"
    assert cbatch("sim", trace, *CONSTANT, "--json", report).status == 0
    places = {"TRACE": trace, "REPORT": report, "OUT": tmp_path / "out.jsonl"}

    def shown(columns: int) -> str:
        places["OUT"].unlink(missing_ok=True)
        monkeypatch.setenv("COLUMNS", str(columns))
        if name == "bench":
            print_report("wide", [{f"tokens of system {i}": 1_462_066 * 10**i for i in range(20)}])
            return capsys.readouterr().out
        return cbatch(*(places.get(word, word) for word in TABLES[name])).out

    narrow, wide = shown(20), shown(1000)
    assert "…" not in narrow and max(map(len, narrow.splitlines()[:-1])) > 20
    assert len(narrow.splitlines()) == len(wide.splitlines())


# --- commands of other packages -------------------------------------------------------------------


def test_the_commands_of_other_packages_are_entry_points() -> None:
    """If the last line fails, install the checkout again (pip install -e .)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"][GROUP]
    assert {name.replace("-", " ") for name in declared} < COMMANDS.keys()
    assert all(where.startswith(("bench.", "sim.")) for where in declared.values())
    assert {point.name: point.value for point in entry_points(group=GROUP)} == declared


@pytest.mark.parametrize("command", ["sim", "sim capacity", "trace", "bench", "report"])
@pytest.mark.parametrize("points", [(), ("sim.moved:add_parser",), ("moved.cli:add_parser",)])
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


@pytest.mark.parametrize("words", [("--help",), ("serve", "--help"), ("--version",)])
def test_help_imports_no_command_of_another_package(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from cbatch.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'sim', 'bench', 'importlib.metadata'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
