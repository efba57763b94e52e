"""Names in README and docs exist, commands are accepted, and code runs."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from cbatch.cli.main import TWO_WORDS, main, make_parser
from sim.workload.traces import formats
from tests.documents import DOCUMENTS, README, ROOT, blocks, commands, prose, read

MAX_README_LINES = 115
MAX_PICTURE_BYTES = 150_000
TOPS = "bench|cbatch|deploy|docs|examples|sim|tests|tools|triton_kernels"
PATH = re.compile(rf"(?<![\w./:-])((?:{TOPS})(?:/[\w-]+)*/[\w.-]*\w)(?![\w*])")
SAID_TO_BE_IN = re.compile(r"`(\w[\w.]*)(=?)`,?\s(?:in|\(|of)\s?`([\w/]+\.py)`")
MEMBER = re.compile(r"`(_?[A-Z]\w*)\.(\w+)(?:\([^`]*\))?`")
CLASS = re.compile(r"`(_?[A-Z][a-z]+[A-Z]\w*)(?:\([^`]*\))?`")
MODULE = re.compile(rf"(?<![\w./-])((?:{TOPS})(?:\.[A-Za-z_]\w*)+)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TYPES = {"PolicyName"}  # they are no classes
by_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


@by_document
def test_paths_exist(path: Path) -> None:
    named = PATH.findall(read(path))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@by_document
def test_names_are_defined_in_the_files_that_are_named_with_them(path: Path) -> None:
    for name, argument, file in SAID_TO_BE_IN.findall(read(path)):
        owner, _, member = name.rpartition(".")
        if argument:
            assert f"{name}=" in read(ROOT / file), (name, file)
        elif owner:
            assert owner in classes(ROOT / file) and member in members(owner), (name, file)
        else:
            assert name in defined(ROOT / file), (name, file)


@by_document
def test_classes_exist_and_have_the_members_that_are_named(path: Path) -> None:
    text = read(path)
    assert set(CLASS.findall(text)) <= all_classes().keys() | TYPES
    named = MEMBER.findall(text)
    assert not [f"{name}.{member}" for name, member in named if member not in members(name)]


@by_document
def test_modules_exist(path: Path) -> None:
    named = {name for name in MODULE.findall(read(path)) if not re.search(r"\.(py|md)$", name)}
    missing = sorted(name for name in named if not resolves(name))
    assert not missing
    for name in re.findall(r"python -m ([\w.]+)", read(path)):
        place = ROOT / name.replace(".", "/")
        assert (place / "__main__.py").is_file() or place.with_suffix(".py").is_file(), name


@by_document
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@by_document
def test_footnotes_are_there(path: Path) -> None:
    text = read(path)
    defined_notes = set(re.findall(r"^\[\^(\w+)\]:", text, flags=re.MULTILINE))
    assert defined_notes == set(re.findall(r"\[\^(\w+)\](?!:)", text))


@by_document
def test_commands_are_understood(path: Path) -> None:
    for line in commands(path):
        words = shlex.split(line, comments=True)
        if words[:1] != ["cbatch"]:
            continue
        words = words[1:]
        if " ".join(words[:2]) in TWO_WORDS:
            words[:2] = [" ".join(words[:2])]
        try:
            parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"not understood: {line}")


@by_document
def test_flags_exist(path: Path) -> None:
    """A flag is one of `cbatch`, or of a benchmark."""
    foreign = {"--benchmark-enable", "--enable-mixed-chunk", "--save-detailed", "--tool"}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", read(path)))
    assert not named - known_flags() - foreign


@by_document
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", read(path), flags=re.MULTILINE)) <= targets


def test_the_readme_is_short_and_leads_to_every_document_and_picture() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(read(README))}
    assert set((ROOT / "docs").glob("*.md")) <= linked
    assert len(read(README).splitlines()) <= MAX_README_LINES
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert len(pictures) >= 2
    shown = {Path(link).name for path in DOCUMENTS for link in LINK.findall(read(path))}
    for picture in pictures:
        assert picture.name in shown and picture.stat().st_size < MAX_PICTURE_BYTES


def test_the_simulation_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for line in commands(README) if line.startswith(("cbatch trace", "cbatch sim"))]
    assert len(lines) == 2
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
    assert "goodput" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (path, number)
        for path in DOCUMENTS
        for number, block in enumerate(blocks(path, "python"))
        if "OpenAI" not in block  # those need a server, and are tested with one
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
def test_code_runs(
    path: Path, number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "FORMATS", formats.FORMATS)  # one of them adds to it
    code = compile(blocks(path, "python")[number], str(path), "exec")
    exec(code, {"__name__": "document"})
    assert capsys.readouterr().out.strip()


# -- resolution of names

parser = cache(make_parser)


@cache
def known_flags() -> set[str]:
    tops = ("bench", "tools", "triton_kernels")
    files = (file for top in tops for file in (ROOT / top).rglob("*.py"))
    return flags(parser()) | set(re.findall(r'"(--[a-z-]+)"', "".join(map(read, files))))


def resolves(name: str) -> bool:
    """Return True if it is a package, a module, or a name that a module defines or re-exports."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        rest = parts[length:]
        if place.is_dir():
            return not rest or rest[0] in defined(place / "__init__.py")
        if place.with_suffix(".py").is_file():
            return not rest or rest[0] in defined(place.with_suffix(".py"))
    return False


def flags(commands: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and its commands."""
    options = set(commands._option_string_actions)
    for action in commands._actions:
        if isinstance(action, argparse._SubParsersAction):
            options = options.union(*map(flags, action.choices.values()))
    return options


@cache
def classes(file: Path) -> dict[str, ast.ClassDef]:
    nodes = ast.walk(ast.parse(read(file)))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@cache
def all_classes() -> dict[str, ast.ClassDef]:
    tops = ("cbatch", "sim", "bench", "tools", "triton_kernels")
    files = [file for top in tops for file in (ROOT / top).rglob("*.py")]
    return {name: node for file in files for name, node in classes(file).items()}


@cache
def members(name: str) -> frozenset[str]:
    """Return the members of a class, inherited ones too."""
    if name not in all_classes():
        return frozenset()
    node = all_classes()[name]
    stored = [part for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Store)]
    names = {getattr(part, "id", None) or getattr(part, "attr", "") for part in stored}
    names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    names |= {part.name for part in node.body if isinstance(part, ast.AsyncFunctionDef)}
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return frozenset(names).union(*map(members, bases))


@cache
def defined(file: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.parse(read(file)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def anchors(path: Path) -> set[str]:
    """Return anchors as GitHub makes them from headings."""
    heads = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
