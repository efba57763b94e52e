"""The layers: every import goes down, nothing goes in a circle, each package says what it is."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
# Of each folder, from the top layer to the bottom. A part (a package or a file) may import what is
# on a line below its own; parts of one line know nothing of each other.
LAYERS = {
    ".": ("bench tools", "sim", "cbatch", "triton_kernels"),
    "cbatch": (
        "cli",
        "server",
        "llm process",
        "engine",
        "grammars kv_events",
        "runtime steplog text",
        "core demo system workers",
    ),
    "cbatch/core": ("scheduler", "speculation", "prices", "request"),
    "cbatch/runtime": (
        "cpu gpu",
        "drafting transformers_backend",
        "input_batch layers",
        "batch compiled kv_cache sampling",
        "model rank_group",
    ),
    "cbatch/server": ("http", "serving", "protocol"),
    "sim": (
        "cli",
        "executor",
        "replay",
        "cost",
        "workload",
        "report",
    ),
    "bench/load": ("cli", "run", "client"),
    "tools": ("heads", "demo_pair"),
    "triton_kernels": (
        "slots",
        "verification",
        "attention layers products sampling",
        "noise",
        "build",
    ),
}


@cache
def imports_by_file() -> dict[str, frozenset[str]]:
    """The files of each file's imports, without tests and without the faces of packages, which
    only hand names on."""
    files = {
        path.relative_to(ROOT).as_posix()
        for top in " ".join(LAYERS["."]).split()
        for path in (ROOT / top).rglob("*.py")
        if not path.name.startswith("test_")
    }
    named = {_module(file): file for file in files}
    return {
        file: frozenset(
            named[name]
            for name in _imports(file, named)
            if named.get(name, file) != file and not named[name].endswith("__init__.py")
        )
        for file in files
        if not file.endswith("__init__.py")
    }


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(file: str, named: dict[str, str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in named else node.module for part in parts}
    return found & named.keys()


def _part(file: str, folder: str) -> str | None:
    """The child of `folder` that `file` is in."""
    path = PurePosixPath(file)
    inside = path.is_relative_to(folder)
    return path.relative_to(folder).parts[0].removesuffix(".py") if inside else None


def _between(folder: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Parts that a part imports, with a pair of files for each."""
    parts: dict[str, dict[str, tuple[str, str]]] = {}
    for file, imports in imports_by_file().items():
        part = _part(file, folder)
        if part is None:
            continue
        below = parts.setdefault(part, {})
        for other in imports:
            target = _part(other, folder)
            if target is not None and target != part:
                below[target] = (file, other)
    return parts


@pytest.mark.parametrize("folder", LAYERS)
def test_arrows_point_down(folder: str) -> None:
    layer = {part: i for i, line in enumerate(LAYERS[folder]) for part in line.split()}
    parts = _between(folder)
    assert parts.keys() <= layer.keys(), "a part without a layer: put it into LAYERS"
    up = [
        f"{file} imports {other}"
        for part, below in parts.items()
        for target, (file, other) in below.items()
        if layer[target] <= layer[part]
    ]
    assert not up


# Imports that a part may make of another one, by prefix. Any other import between the two fails.
SEEN = {
    # The step log is what a simulation replays. Options are declared, read and printed by `cli`.
    ("sim/", "cbatch/"): (
        "cbatch/core/",
        "cbatch/cli/output.py",
        "cbatch/cli/settings.py",
        "cbatch/engine/options.py",
        "cbatch/steplog/",
    ),
    # The load tester needs neither the simulator's commands nor its replay.
    ("bench/load/", "sim/"): ("sim/workload/", "sim/report/"),
}


@pytest.mark.parametrize(("top", "other"), SEEN)
def test_a_part_imports_no_inside_of_another(top: str, other: str) -> None:
    seen = {
        (file, target)
        for file, imports in imports_by_file().items()
        if file.startswith(top)
        for target in imports
        if target.startswith(other)
    }
    assert len(seen) > 20
    assert not {pair for pair in seen if not pair[1].startswith(SEEN[top, other])}


def test_nothing_goes_in_a_circle() -> None:
    """Neither files, nor the parts of any folder. Raises `CycleError`, which names it."""
    graphlib.TopologicalSorter(imports_by_file()).prepare()
    files = imports_by_file()
    folders = {parent.as_posix() for file in files for parent in PurePosixPath(file).parents}
    assert len(folders) > 30
    for folder in folders:
        graphlib.TopologicalSorter(_between(folder)).prepare()


def test_nothing_lies_loose_at_the_root_of_the_package() -> None:
    assert {path.name for path in (ROOT / "cbatch").glob("*.py")} == {"__init__.py", "llm.py"}


def test_every_package_says_what_lives_there() -> None:
    folders = {(ROOT / file).parent for file in imports_by_file()}
    for folder in folders:
        face = folder / "__init__.py"
        assert face.is_file(), folder
        assert ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))), face


def test_no_class_name_means_two_things() -> None:
    places: dict[str, list[str]] = {}
    for file in imports_by_file():
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file))
    assert len(places) > 200
    assert not {name: where for name, where in places.items() if len(where) > 1}
