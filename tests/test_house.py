"""The layers: every import goes down, none goes in a circle, each package has a docstring."""

from __future__ import annotations

import ast
import graphlib
import re
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
        "llm process",
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
        "batch compiled kv_cache sampling",
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
    "bench/load": ("cli", "run", "client"),
    "triton_kernels": (
        "slots",
        "verification",
        "attention layers products sampling",
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
    # The step log is what a simulation replays. Options are declared, read and printed by `cli`.
    ("sim/", "cbatch/"): (
        "cbatch/core/",
        "cbatch/cli/console.py",
        "cbatch/cli/output.py",
        "cbatch/cli/settings.py",
        "cbatch/steplog/",
    ),
    # Advice reruns the drafters themselves, and prices steps as an engine does.
    ("sim/advise/", "cbatch/"): (
        "cbatch/core/",
        "cbatch/cli/console.py",
        "cbatch/cli/output.py",
        "cbatch/engine/",
        "cbatch/runtime/",
        "cbatch/steplog/",
    ),
    # The load tester needs neither the simulator's commands nor its replay.
    ("bench/load/", "sim/"): ("sim/workload/", "sim/report/"),
}


@pytest.mark.parametrize(("top", "other"), SEEN)
def test_a_part_imports_no_inside_of_another(top: str, other: str) -> None:
    inner = tuple(each for each, _ in SEEN if each != top and each.startswith(top))
    seen = {
        (file, target)
        for file, imports in imports_by_file().items()
        if file.startswith(top) and not file.startswith(inner)
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


def test_every_package_says_what_lives_there() -> None:
    for folder in {PurePosixPath(file).parent for file in imports_by_file()}:
        assert (ROOT / folder / "__init__.py").is_file(), folder
        assert ast.get_docstring(_parsed(f"{folder}/__init__.py")[1]), folder


def test_no_class_name_means_two_things() -> None:
    places: dict[str, list[str]] = {}
    for file in imports_by_file():
        for node in _parsed(file)[1].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file))
    assert len(places) > 200
    assert not {name: where for name, where in places.items() if len(where) > 1}


# --- the wings of the runtime ---------------------------------------------------------------------

MAX_FLOORS = 9
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
    files.pop("cbatch/engine/backends.py", None)
    assert len(files) > 4
    assert not [
        (file, seen)
        for file, imports in files.items()
        for seen in imports
        if seen.startswith(UNSEEN[importer])
    ]


def test_kernels_of_triton_are_for_the_gpu() -> None:
    """Shared are the noise, which has one definition for all devices, and checks of arguments."""
    shared = ("triton_kernels/noise/", "triton_kernels/build/check.py")
    kernels = {
        (file, seen)
        for file, imports in imports_by_file().items()
        if file.startswith("cbatch/") and not file.startswith("cbatch/runtime/gpu/")
        for seen in imports
        if seen.startswith("triton_kernels/")
    }
    assert kernels
    assert not {pair for pair in kernels if not pair[1].startswith(shared)}


def test_no_folder_has_many_floors() -> None:
    assert max(map(len, LAYERS.values())) <= MAX_FLOORS


# --- sizes ----------------------------------------------------------------------------------------

MAX_LINES, MAX_FUNCTION_LINES, MAX_IMPORTED = 400, 60, 15
# Functions and files beyond these limits, each with the most that it may have. No file is too long.
LONG_FUNCTIONS = {  # bodies of kernels: Triton has no closures, and calls cost registers
    "triton_kernels/attention/kernel.py:attention_kernel": 64,
    "triton_kernels/verification/residual.py:residual_kernel": 63,
}
# Places where an engine, a server, a simulation or a run is put together from its parts.
WIDE_FILES = {
    "bench/gpu/engine.py": 20,
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
    imported = {file: len(imports) for file, imports in imports_by_file().items()}
    for sizes, limit, exceptions in (
        (lines, MAX_LINES, {}),
        (functions, MAX_FUNCTION_LINES, LONG_FUNCTIONS),
        (imported, MAX_IMPORTED, WIDE_FILES),
    ):
        beyond = {name: size for name, size in sizes.items() if size > limit}
        assert {k: v for k, v in beyond.items() if v > exceptions.get(k, 0)} == {}


# --- imports that are not at the top of a file ----------------------------------------------------

# Modules that need not be installed: those of an extra or of some operating systems, and programs
# that benchmarks compare with. Any function may import them.
OPTIONAL = {
    "PIL",
    "matplotlib",
    "opentelemetry",
    "playwright",
    "pyarrow",
    "ray",
    "requests",
    "transformers",
    "vllm",
}
OPTIONAL |= {"fcntl", "resource", "uvloop"}
# Numbers of other modules that functions of a file may import. The reason is start-up: some
# processes need neither torch, the grammar library nor the hub's client. They are `--help`, the
# process that listens, `from cbatch import LLM`, and a parent of measuring processes.
LATE = {
    "cbatch/cli/main.py": 7,
    "cbatch/cli/serve.py": 5,
    "cbatch/engine/backends.py": 2,
    "cbatch/engine/info.py": 1,
    "cbatch/engine/loading.py": 1,
    "cbatch/engine/model_impl.py": 2,
    "cbatch/engine/prices/startup.py": 1,
    "cbatch/engine/ranks/group.py": 2,
    "cbatch/engine/ranks/worker.py": 2,
    "cbatch/grammars/compiling.py": 1,
    "cbatch/process/factory.py": 4,
    "cbatch/runtime/gpu/backend.py": 1,
    "cbatch/runtime/model/checkpoint.py": 1,
    "cbatch/runtime/model/gguf_file.py": 1,
    "cbatch/runtime/model/head_config.py": 1,
    "cbatch/text/chat.py": 1,
    "cbatch/text/tokenizer.py": 1,
}


def test_imports_inside_functions_have_a_reason() -> None:
    late = {file: len(_late_imports(_parsed(file)[1]) - OPTIONAL) for file in imports_by_file()}
    assert {file: n for file, n in late.items() if n > LATE.get(file, 0)} == {}


def _late_imports(tree: ast.Module) -> set[str]:
    """Return the modules that functions import; for a package outside this project its name."""
    nodes = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    project = tuple(f"{top}." for top in TOPS)
    return {name if name.startswith(project) else name.partition(".")[0] for name in names}


# Files that import a module by its name, since the name comes from outside.
IMPORTED_BY_NAME = {
    "cbatch/__init__.py",  # public names, imported on first use
    "cbatch/core/speculation/build.py",  # --lookahead module:Class
    "triton_kernels/build/ahead.py",  # kernels, whose names are sent to processes that compile
}


def test_no_module_is_imported_by_a_string() -> None:
    names = {"import_module", "__import__", "resolve_name"}
    importing = {
        file.relative_to(ROOT).as_posix()
        for top in TOPS
        for file in (ROOT / top).rglob("*.py")
        if names & set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    }
    assert importing == IMPORTED_BY_NAME
