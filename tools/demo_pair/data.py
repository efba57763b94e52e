"""The training text: the running interpreter's standard library, de-duplicated and split.

Every file is cut into chunks (top-level functions, methods, the text between them). Held-out
modules are read first. A training chunk is dropped if it nearly copies a held-out chunk or an
earlier training chunk.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_MODULES = (
    "colorsys", "contextlib", "copy", "csv", "fnmatch", "graphlib", "heapq", "json", "netrc",
    "queue", "sched", "shlex", "statistics", "textwrap", "wave",
)  # fmt: skip

# Tables, generated files and outdated code: they cost tokens and teach no present-day Python.
SKIPPED_PARTS = frozenset({
    "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3",
    "idle_test", "tests", "config", "ensurepip", "_sysconfigdata", "bad_coding", "encoded_modules",
})  # fmt: skip
SHINGLE_LINES = 3  # lines per run that is compared
MIN_SHINGLES = 3  # chunks with fewer distinct line runs are always kept
DUPLICATE_SHARE = 0.7  # chunks are dropped if this share of their line runs was seen before
MAX_FILE_BYTES = 400_000  # larger files are skipped
MAX_DIGIT_SHARE = 0.12  # files with a larger share of digits are skipped


@dataclass(frozen=True)
class Document:
    """One source file after de-duplication; `module` is dotted, `is_test` is True below `test`."""

    module: str
    text: str
    is_test: bool


@dataclass(frozen=True)
class Corpus:
    train: list[Document]
    held_out: list[Document]
    raw_bytes: int
    dropped_bytes: int


class NearDuplicates:
    """A memory of runs of three normalised lines, which finds chunks that were mostly seen
    before."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def keep(self, chunk: str) -> bool:
        """Remember the chunk. Return False if at least 70 % of its line runs were seen before.

        Chunks under five non-blank lines are always kept, since short code is often similar.
        """
        lines = [line for raw in chunk.splitlines() if (line := normalise(raw))]
        shingles = {
            hash(tuple(lines[i : i + SHINGLE_LINES])) for i in range(len(lines) - SHINGLE_LINES + 1)
        }
        known = len(shingles & self._seen)
        self._seen |= shingles
        return len(shingles) < MIN_SHINGLES or known < DUPLICATE_SHARE * len(shingles)


def normalise(line: str) -> str:
    """Return a line without its comment and spacing, so that reformatted copies still match."""
    return re.sub(r"\s+", "", re.sub(r"#.*", "", line))


def split_chunks(source: str) -> list[str]:
    """Cut a module at its top-level and class-level definitions; the parts join to the source.

    Raises SyntaxError for text that is not Python.
    """
    starts = {0}
    tree = ast.parse(source)
    bodies = [tree.body] + [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            starts.add(first - 1)
    lines = source.splitlines(keepends=True)
    bounds = [*sorted(starts), len(lines)]
    return ["".join(lines[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def strip_duplicates(source: str, seen: NearDuplicates) -> str:
    """Return the source without the chunks that `seen` already contains."""
    return "".join(chunk for chunk in split_chunks(source) if seen.keep(chunk))


def is_held_out(module: str) -> bool:
    """Return True if a module, or the module that a test is for, is held out."""
    parts = module.split(".")
    return parts[0] in HELD_OUT_MODULES or any(
        part.removeprefix("test_") in HELD_OUT_MODULES for part in parts if "test" in parts[0]
    )


def read_source(path: Path) -> str | None:
    """Return the file's text without trailing spaces, or None if it is not useful for training."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        with tokenize.open(path) as file:
            source = file.read()
        ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None
    digits = sum(c.isdigit() for c in source)
    if digits > MAX_DIGIT_SHARE * max(len(source), 1):
        return None
    text = "\n".join(line.rstrip() for line in source.expandtabs(8).splitlines()).strip("\n")
    return text + "\n"


def find_files(root: Path) -> Iterator[Path]:
    """Yield Python files below `root` in a fixed order, without the skipped folders."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not any(part.startswith(skip) for part in parts for skip in SKIPPED_PARTS):
            yield path


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def load_corpus(root: Path | None = None) -> Corpus:
    """Read, hold out and de-duplicate the standard library (or any folder of modules)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    modules = [(module_name(path, root), path) for path in find_files(root)]
    # Held-out modules first, then the library, then its tests: the first copy is kept.
    modules.sort(key=lambda item: (not is_held_out(item[0]), item[0].startswith("test"), item[0]))
    seen = NearDuplicates()
    train: list[Document] = []
    held_out: list[Document] = []
    raw_bytes = kept_bytes = 0
    for module, path in modules:
        source = read_source(path)
        if source is None:
            continue
        is_test = module.split(".")[0] == "test"
        if is_test and is_held_out(module):
            continue
        text = strip_duplicates(source, seen)
        raw_bytes += len(source.encode())
        kept_bytes += len(text.encode())
        if text.strip():
            target = held_out if is_held_out(module) else train
            target.append(Document(module, text, is_test))
    return Corpus(train, held_out, raw_bytes, raw_bytes - kept_bytes)


def total_bytes(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)
