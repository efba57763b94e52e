"""The layers: every import goes down, and none goes in a circle. Ruff checks docstrings of packages
and imports inside functions."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
# By folder, the layers from the top to the bottom. A part (a package or a file) may import parts on
# a line below its own; parts of one line import no part of each other.
LAYERS = {
    ".": ("bench tools", "sim", "cbatch", "triton_kernels"),
    "cbatch": (
        "cli",
        "server",
        "llm process rerun",
        "engine",
        "grammars kv_events",
        "runtime steplog text",
        "core demo system workers",
    ),
    "cbatch/core": ("scheduler", "speculation", "prices", "request"),
    "cbatch/runtime": (
        "cpu gpu",
        "backend drafting transformers_backend",
        "input_batch layers",
        "batch kv_cache sampling",
        "compiled",
        "state_memory",
        "model rank_group",
    ),
    "cbatch/server": ("http", "serving", "protocol"),
    "sim": (
        "advise",
        "cli",
        "executor",
        "replay",
        "cost",
        "workload",
        "report",
    ),
    "bench/load": ("cli", "check", "run", "client"),
    "triton_kernels": (
        "slots",
        "verification",
        "attention products recurrence sampling",
        "layers",
        "noise",
        "build",
    ),
}
TOPS = " ".join(LAYERS["."]).split()


@cache
def imports_by_file() -> dict[str, frozenset[str]]:
    """Return the files of each file's imports, without tests and without the `__init__` files of
    packages, which only re-export names."""
    files = {
        path.relative_to(ROOT).as_posix()
        for top in TOPS
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


@cache
def _parsed(file: str) -> tuple[str, ast.Module]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, ast.parse(text)


def _imports(file: str, named: dict[str, str]) -> set[str]:
    modules = set()
    for node in ast.walk(_parsed(file)[1]):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {part if part in named else node.module for part in parts}
    return modules & named.keys()


def _part(file: str, folder: str) -> str | None:
    """Return the child of `folder` that `file` is in."""
    path = PurePosixPath(file)
    inside = path.is_relative_to(folder)
    return path.relative_to(folder).parts[0].removesuffix(".py") if inside else None


def _between(folder: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the parts that a part imports, with a pair of files for each."""
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
    # The step log is what a simulation replays, and `rerun` knows the drafts at each of its tokens.
    # Options are declared, read and printed by `cli`.
    ("sim/", "cbatch/"): (
        "cbatch/core/",
        "cbatch/cli/console.py",
        "cbatch/cli/output.py",
        "cbatch/cli/settings.py",
        "cbatch/rerun/",
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
    """There is no circle of files, nor of the parts of any folder. Raises `CycleError`, which names
    it."""
    graphlib.TopologicalSorter(imports_by_file()).prepare()
    files = imports_by_file()
    folders = {parent.as_posix() for file in files for parent in PurePosixPath(file).parents}
    assert len(folders) > 30
    for folder in folders:
        graphlib.TopologicalSorter(_between(folder)).prepare()


def test_nothing_lies_loose_at_the_root_of_the_package() -> None:
    assert {path.name for path in (ROOT / "cbatch").glob("*.py")} == {"__init__.py", "llm.py"}


def test_no_class_name_means_two_things() -> None:
    places: dict[str, list[str]] = {}
    for file in imports_by_file():
        for node in _parsed(file)[1].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file))
    assert len(places) > 200
    assert not {name: where for name, where in places.items() if len(where) > 1}


# --- the wings of the runtime ---------------------------------------------------------------------

WINGS = ("cbatch/runtime/cpu/", "cbatch/runtime/gpu/")
# Imports that files with a prefix do not make. A third device would be one more wing.
UNSEEN = {
    "cbatch/runtime/cpu/": ("cbatch/runtime/gpu/",),
    "cbatch/runtime/gpu/": ("cbatch/runtime/cpu/",),
    "cbatch/runtime/drafting/": WINGS,
    "cbatch/runtime/sampling/": WINGS,
    "cbatch/engine/": WINGS,
}


@pytest.mark.parametrize("importer", UNSEEN)
def test_a_wing_is_not_seen_by_others(importer: str) -> None:
    """Only the choice of the device knows the wings."""
    files = {f: i for f, i in imports_by_file().items() if f.startswith(importer)}
    files.pop("cbatch/engine/model_files.py", None)
    assert len(files) > 4
    assert not [
        (file, seen)
        for file, imports in files.items()
        for seen in imports
        if seen.startswith(UNSEEN[importer])
    ]


def test_kernels_of_triton_are_for_the_gpu() -> None:
    """Shared are only checks of arguments."""
    shared = ("triton_kernels/build/check.py",)
    kernels = {
        (file, seen)
        for file, imports in imports_by_file().items()
        if file.startswith("cbatch/") and not file.startswith("cbatch/runtime/gpu/")
        for seen in imports
        if seen.startswith("triton_kernels/")
    }
    assert kernels
    assert not {pair for pair in kernels if not pair[1].startswith(shared)}


# --- sizes ----------------------------------------------------------------------------------------

MAX_LINES, MAX_FUNCTION_LINES, MAX_IMPORTED = 400, 60, 15
# Composition roots, where an engine, a server, a simulation or a run is put together.
ROOTS = {
    "bench/gpu/engine.py",
    "bench/load/cli/command.py",
    "bench/simulator/compare.py",
    "cbatch/cli/chat.py",
    "cbatch/engine/build.py",
    "cbatch/runtime/gpu/device_steps.py",
    "cbatch/runtime/gpu/executor.py",
    "cbatch/runtime/gpu/loaded.py",
    "cbatch/server/http/app.py",
    "cbatch/cli/serve.py",
    "sim/cli/simulation.py",
}


def test_files_and_functions_are_short_and_import_few_of_ours() -> None:
    lines, functions = {}, {}
    for file in imports_by_file():
        text, tree = _parsed(file)
        lines[file] = text.count("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                name, size = f"{file}:{node.name}", node.end_lineno - node.lineno + 1
                functions[name] = max(size, functions.get(name, 0))
    imported = {f: len(imports) for f, imports in imports_by_file().items() if f not in ROOTS}
    for sizes, limit in (
        (lines, MAX_LINES),
        (functions, MAX_FUNCTION_LINES),
        (imported, MAX_IMPORTED),
    ):
        assert {name: size for name, size in sizes.items() if size > limit} == {}
