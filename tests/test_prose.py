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
MOST_WORDS, MOST_WORDS_OF_DOCUMENTS = 30, 25
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Offences that a reader would not see as such: (file, text).
EXCEPTIONS = frozenset((("tests/test_prose.py", "told"),))


class Problem(NamedTuple):
    file: str
    line: int
    text: str


def files() -> list[Path]:
    chosen = [ROOT / name for name in PLAIN]
    inside = [path for place in chosen for path in place.rglob("*.py")]
    return sorted({*inside, *(place for place in chosen if place.suffix == ".py")})


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring."""
    for node in ast.walk(ast.parse(source)):
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
def prose_of(source: str) -> list[tuple[int, str]]:
    return [*docstrings(source), *comments(source)]


def problems(rule: str, path: Path) -> list[Problem]:
    file, source = path.relative_to(ROOT).as_posix(), path.read_text()
    prose = prose_of(source)
    offences: list[tuple[int, str]]
    if rule == "banned words":
        offences = [
            (line, m.group().lower()) for line, text in prose for m in BANNED.finditer(text)
        ]
    elif rule == "first words of docstrings":
        starts = [(line, text.split(maxsplit=1)[0]) for line, text in docstrings(source)]
        offences = [(line, word) for line, word in starts if word in FIRST_WORDS]
    elif rule == "long sentences":
        parts = [(line, part) for line, text in prose for part in sentences(text)]
        offences = [(line, part.strip()) for line, part in parts if len(part.split()) > MOST_WORDS]
    else:
        offences = list(names(source))
    return [Problem(file, *each) for each in offences if (file, each[1]) not in EXCEPTIONS]


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield names of variables and arguments that do not say what they hold, and names of functions
    and classes with banned words. A comprehension may call its element `each`."""
    tree = ast.parse(source)
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
DATA = frozenset(("cbatch/cli/demo_chat.py", "cbatch/engine/loading.py", "bench/data/questions.py"))
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "bench/README.md",
    "bench/results/README.md",
    "cbatch/demo/head/README.md",
    "docs",
    "tools/smollm2_head/README.md",
)


def messages(path: Path) -> list[Problem]:
    """Return the banned words in strings of a Python file, except docstrings, or in the text of a
    script or HTML page."""
    file, source = path.relative_to(ROOT).as_posix(), path.read_text()
    if path.suffix != ".py":
        lines = enumerate(source.splitlines(), 1)
        return [Problem(file, n, m[0]) for n, line in lines for m in FOR_USERS.finditer(line)]
    nodes = list(ast.walk(ast.parse(source)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
    return [
        Problem(file, node.lineno, match[0])
        for node in strings
        if isinstance(node.value, str) and " " in node.value
        for match in FOR_USERS.finditer(node.value)
    ]


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
    long = [part.strip(" -*\n") for part in parts if len(part.split()) > MOST_WORDS_OF_DOCUMENTS]
    return problems + [Problem(file, 0, part) for part in long]


def test_messages_are_plain() -> None:
    names = [path for top in PRODUCT for path in (ROOT / top).rglob("*")]
    chosen = [path for path in names if path.suffix in (".py", ".js", ".html")]
    remaining = [
        problem
        for path in sorted(chosen)
        if path.relative_to(ROOT).as_posix() not in DATA
        for problem in messages(path)
        if (problem.file, problem.text.lower()) not in EXCEPTIONS
    ]
    assert not remaining, "\n".join(f"{p.file}:{p.line}: {p.text}" for p in remaining)


def test_documents_are_plain() -> None:
    places = [ROOT / name for name in DOCUMENTS]
    chosen = [
        file for place in places for file in ([place] if place.suffix else place.glob("*.md"))
    ]
    remaining = [problem for path in sorted(chosen) for problem in document(path)]
    remaining = [
        problem for problem in remaining if (problem.file, problem.text.lower()) not in EXCEPTIONS
    ]
    assert not remaining, "\n".join(f"{p.file}: {p.text}" for p in remaining)


def test_offences_in_messages_and_documents_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    code, page = tmp_path / "code.py", tmp_path / "page.md"
    code.write_text('raise ValueError("nobody is there")\n')
    assert [problem.text for problem in messages(code)] == ["nobody"]
    page.write_text(f"It stands.\n\n- {'word ' * 31}\n\n| {'word ' * 31} |\n\n```\nbehind\n```\n")
    assert [problem.text[:6] for problem in document(page)] == ["stands", "word w"]


RULES = ("banned words", "first words of docstrings", "long sentences", "names")


@pytest.mark.parametrize("rule", RULES)
def test_prose_is_plain(rule: str) -> None:
    remaining = [problem for path in files() for problem in problems(rule, path)]
    assert not remaining, "\n".join(f"{p.file}:{p.line}: {p.text}" for p in remaining)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_finds_its_offence(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    offender = tmp_path / "offender.py"
    offender.write_text(f'"""Of rows that nobody asked for."""\n\n# {"word " * 31}\nheld = 1\n')
    assert len(problems(rule, offender)) == 1


def test_names_of_functions_have_no_banned_word() -> None:
    assert [name for _, name in names("def what_is_told(): ...\nclass Standing: ...")] == [
        "what_is_told"
    ]
