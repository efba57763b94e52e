"""The public names are few, and they are those that the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import pytest

import cbatch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_all_is_what_the_readme_lists() -> None:
    (listed,) = re.findall(r"`cbatch` exports: (.*?)\.\n", README, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(cbatch.__all__)
    used = {n for line in re.findall(r"from cbatch import (.*)", README) for n in line.split(", ")}
    assert used <= set(cbatch.__all__)


def test_every_public_name_is_there() -> None:
    for name in cbatch.__all__:
        assert getattr(cbatch, name).__name__ == name
    assert set(cbatch.__all__) <= set(dir(cbatch))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cbatch.nonsense


def test_the_wheel_holds_no_training_and_is_light() -> None:
    """Files are compressed one by one, as a wheel does; a wheel leaves out a little more."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    include = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    files = [file for top in include for file in (ROOT / top.rstrip("*")).rglob("*")]
    packed = [file for file in files if file.is_file() and "__pycache__" not in file.parts]
    assert not [file for file in packed if "tools" in file.parts or "train" in file.name]
    assert 12e6 < sum(len(zlib.compress(file.read_bytes())) for file in packed) < 16e6


@pytest.mark.parametrize("top", ["cbatch", "sim", "triton_kernels"])
def test_data_files_ship_with_their_package(top: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = settings["tool"]["setuptools"]["package-data"]
    packed = {
        file
        for package, patterns in data.items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {file for file in (ROOT / top).rglob("*.*") if file.is_file()}
    code = {file for file in files if file.suffix == ".py" or "__pycache__" in file.parts}
    assert files - code - packed == set()


HELP = """from cbatch.cli.main import main
for words in (["--version"], ["--help"], ["serve", "--help"]):
    try: main(words)
    except SystemExit: pass"""
SERVER = """import cbatch.server.http.app, cbatch.server.http.run
from cbatch.cli.model_service import ModelParts
from cbatch.cli.serve_settings import ServeSettings
ModelParts(ServeSettings()).make_service()"""
ABSENT = {
    "import cbatch": "torch tokenizers numpy",
    "import cbatch.core.scheduler.scheduler": "torch tokenizers cbatch.engine cbatch.text",
    "import cbatch.text, cbatch.grammars": "torch llguidance cbatch.core.scheduler cbatch.engine",
    "import cbatch.engine.core": "torch cbatch.text cbatch.runtime",
    "import cbatch.engine.model_files": "torch cbatch.runtime.cpu",
    "import sim.replay.replay, sim.workload.traces.reader": "torch cbatch.engine cbatch.text "
    "matplotlib rich",
    "import cbatch.runtime.cpu.executor": "sim cbatch.engine cbatch.text",
    HELP: "torch rich litestar scipy sim bench importlib.metadata",
    SERVER: "torch triton transformers llguidance sympy",
}


@pytest.mark.parametrize("code", ABSENT)
def test_rooms_import_only_what_they_may(code: str) -> None:
    """Imports of torch would double the time to start a server, or to print help."""
    code += f"\nimport sys; print(*[m for m in {ABSENT[code].split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and done.stdout.splitlines()[-1] == "", done.stdout


def test_the_core_reads_no_clock_and_draws_nothing() -> None:
    for file in (ROOT / "cbatch" / "core").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        imports = re.findall(r"^\s*(?:import|from)\s+([\w.]+)", source, flags=re.MULTILINE)
        banned = {"torch", "time", "datetime", "random", "secrets", "uuid"}
        assert not banned & {name.split(".")[0] for name in imports}, file.name
        assert "np.random" not in source, file.name


def test_an_editable_install_puts_the_folder_on_the_path() -> None:
    """Otherwise a clone named `cbatch` is a namespace package for programs started in the folder
    above it. That package wins over the finder that setuptools installs."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tool["setuptools"]["package-dir"] == {"": "."}
    assert tool["setuptools"]["dynamic"]["version"] == {"attr": "cbatch.__version__"}
