"""Comments, docstrings, names, messages and documents are plain English ("Names and prose" in
contributing.md)."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# Folders with Python files, which hold to the rules.
PLAIN = ("bench", "cbatch", "examples", "sim", "tests", "tools", "triton_kernels")

BANNED = re.compile(
    r"\b(nobody|somebody|whoever|whomever|told|foretold|foretell\w*|anew|alike|in vain|of late"
    r"|owe[sd]?|dear|so many|behind|beside|besides|stands?|stood)\b",
    re.IGNORECASE,
)
# Also banned in strings of the product and in documents, which users see.
FOR_USERS = re.compile(
    rf"{BANNED.pattern}|(?<!there )\b(is no (?!longer)|mend(?:s|ed)?\b)", re.IGNORECASE
)
FIRST_WORDS = ("Of", "What", "Whether", "Who", "Whom", "Whose", "And", "That", "Those")
NAMES = frozenset(("found", "told", "asked", "wanted", "held", "most", "gone", "ours", "theirs"))
MAX_WORDS, MAX_WORDS_OF_DOCUMENTS = 30, 25
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Problem(NamedTuple):
    file: str
    line: int
    text: str


def files() -> list[Path]:
    return sorted(path for name in PLAIN for path in (ROOT / name).rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *NAMED)) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment. Successive lines of comment are one; a comment
    after code is one by itself."""
    begun, last, words = 0, -1, [""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (noqa|type:|fmt:|mypy)", token.string):
            continue
        text, line = token.string.lstrip("#: "), token.start[0]
        after_code = bool(token.line[: token.start[1]].strip())
        if line == last + 1 and not after_code:
            words.append(text)
        else:
            yield begun, "\n".join(words)
            begun, words = line, [text]
        last = -1 if after_code else line
    yield begun, "\n".join(words)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Indented lines are formulas or examples; a list's items and
    the parts around a colon or a semicolon are sentences of their own."""
    plain = "\n".join("" if line.startswith("  ") else line for line in text.splitlines())
    yield from re.split(r"\n\s*\n|\n(?=[-*] )|[.!?;:](?=\s)", plain)


@functools.cache
def problems(path: Path) -> dict[str, list[Problem]]:
    """Return the problems of a file by rule."""
    file, source = path.relative_to(ROOT).as_posix(), path.read_text()
    tree = ast.parse(source)
    docs = list(docstrings(tree))
    prose = [*docs, *comments(source)]
    parts = [(line, part.strip()) for line, text in prose for part in sentences(text)]
    starts = [(line, text.split(maxsplit=1)[0]) for line, text in docs]
    offences = {
        "banned words": [
            (line, m[0].lower()) for line, text in prose for m in BANNED.finditer(text)
        ],
        "first words of docstrings": [each for each in starts if each[1] in FIRST_WORDS],
        "long sentences": [each for each in parts if len(each[1].split()) > MAX_WORDS],
        "names": names(tree),
        "messages": messages(tree) if file.startswith(PRODUCT) and file not in DATA else (),
    }
    return {rule: [Problem(file, *each) for each in places] for rule, places in offences.items()}


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield names of variables and arguments that do not say what they hold, and names of functions
    and classes with banned words. A comprehension may call its element `each`."""
    inner = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in NAMES or (node.id == "each" and id(node) not in inner):
                yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in NAMES | {"each"}:
            yield node.lineno, node.arg
        elif isinstance(node, NAMED) and BANNED.search(node.name.replace("_", " ")):
            yield node.lineno, node.name


PRODUCT = ("bench", "cbatch", "sim", "tools", "triton_kernels")
# Strings that are data: prompts, and texts on which heads are tried.
DATA = frozenset(("cbatch/cli/demo.py", "cbatch/engine/build.py", "bench/data/questions.py"))
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "bench/README.md",
    "bench/results/README.md",
    "cbatch/demo/head/README.md",
    "docs",
    "tools/smollm2_head/README.md",
)


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the banned words in strings, except docstrings."""
    nodes = list(ast.walk(tree))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docs and " " in str(node.value):
            yield from ((node.lineno, match[0]) for match in FOR_USERS.finditer(str(node.value)))


def document(path: Path) -> list[Problem]:
    """Return the banned words and long sentences of a document. Code is no prose, and neither are
    quotes, which list names. A cell of a table may be long."""
    file, prose = (
        path.relative_to(ROOT).as_posix(),
        re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M),
    )
    plain = re.sub(r"`[^`]*`", "code", re.sub(r"^\[\^\w+\]:", "\n\n", prose, flags=re.M))
    problems = [Problem(file, 0, match[0]) for match in FOR_USERS.finditer(plain)]
    lines = [line for line in plain.splitlines() if not line.startswith(("|", "#", ">", "    "))]
    parts = re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) |[.!?;:]\**(?=\s)", "\n".join(lines))
    long = [part.strip(" -*\n") for part in parts if len(part.split()) > MAX_WORDS_OF_DOCUMENTS]
    return problems + [Problem(file, 0, part) for part in long]


def test_documents_are_plain() -> None:
    places = [ROOT / name for name in DOCUMENTS]
    chosen = [
        file for place in places for file in ([place] if place.suffix else place.glob("*.md"))
    ]
    remaining = [problem for path in sorted(chosen) for problem in document(path)]
    assert not remaining, "\n".join(f"{p.file}: {p.text}" for p in remaining)


RULES = ("banned words", "first words of docstrings", "long sentences", "names", "messages")


@pytest.mark.parametrize("rule", RULES)
def test_prose_is_plain(rule: str) -> None:
    remaining = [problem for path in files() for problem in problems(path)[rule]]
    assert not remaining, "\n".join(f"{p.file}:{p.line}: {p.text}" for p in remaining)


def test_each_offence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    code, page = tmp_path / "cbatch.py", tmp_path / "page.md"
    code.write_text(f'"""Of rows that nobody needs."""\n\n# {"word " * 31}\nheld = f("not anew")\n')
    assert all(len(problems(code)[rule]) == 1 for rule in RULES)
    page.write_text(f"It stands.\n\n- {'word ' * 31}\n\n| {'word ' * 31} |\n\n```\nbehind\n```\n")
    assert [problem.text[:6] for problem in document(page)] == ["stands", "word w"]
