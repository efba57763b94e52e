"""Count how often tests look at what the product keeps private: few do, and fewer over time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("bench", "cbatch", "sim", "tools", "triton_kernels")
MOST = 35  # such reads: lower it when one goes, never raise it
# Of named tuples, ctypes (the file of a library), torch and Triton.
FOREIGN = {"_asdict", "_fields", "_make", "_name", "_replace", "_schema", "_update_hash"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names() -> set[str]:
    """Return the names of functions, classes, variables and attributes of the product that begin
    with one underscore."""
    names: set[str] = set()
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return set(filter(is_private, names)) - FOREIGN


def reads(source: str, private: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private of the product that a test reads, imports or replaces.
    A test's own classes may read theirs by `self`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name, lineno=line) if name in private:
                yield line, name
            case ast.ImportFrom(module=str(module), names=names, lineno=line):
                if module.split(".")[0] in PRODUCT:
                    yield from ((line, each.name) for each in names if each.name in private)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=args, lineno=line):
                for arg in args[:2]:
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                        name = arg.value.rpartition(".")[2]
                        if name in private:
                            yield line, name


def test_few_tests_look_at_what_is_private() -> None:
    private = private_names()
    assert len(private) > 1000
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in reads(path.read_text(encoding="utf-8"), private)
    ]
    assert len(places) <= MOST, "\n".join(places)


def test_every_way_to_look_is_counted() -> None:
    looks = """pool._index, make()._index[0].x
from cbatch.core import _index
patch.setattr('cbatch.core._index', None)"""
    others = "self._index, cls._index, index\nfrom tests.helpers import _index"
    assert [name for _, name in reads(looks, {"_index"})] == ["_index"] * 4
    assert not list(reads(others, {"_index"}))
