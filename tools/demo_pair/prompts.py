"""Function heads (signature and docstring) as prompts, taken from a corpus."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from tools.demo_pair.data import Document

MAX_HEAD_CHARS = 900  # longer heads are skipped
MIN_BODY_LINES = 3  # functions with fewer lines after the docstring are skipped


def function_heads(document: Document) -> Iterator[str]:
    """Yield signature and docstring of each documented function, dedented, without its body.

    De-duplication can leave a file that no longer parses; such a file has no heads.
    """
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        docstring = node.body[0]
        has_body = len(node.body) > 1 and node.end_lineno is not None
        if not has_body or node.end_lineno - docstring.end_lineno < MIN_BODY_LINES:
            continue
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.end_lineno]))
        if len(head) <= MAX_HEAD_CHARS:
            yield head


def whole_functions(document: Document) -> Iterator[tuple[str, str]]:
    """Yield name and dedented source of each documented function that fits a prompt."""
    for head in function_heads(document):
        name = head.removeprefix("def ").split("(")[0]
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                lines = document.text.splitlines()[node.lineno - 1 : node.end_lineno]
                source = textwrap.dedent("\n".join(lines))
                if source.startswith(head) and len(source) <= MAX_HEAD_CHARS:
                    yield name, source


def choose_prompts(held_out: list[Document], per_document: int = 2) -> dict[str, list[str]]:
    """Return the contents of `prompts.json`: heads, and functions with the head of a renamed
    copy."""
    functions: list[str] = []
    edits: list[str] = []
    for document in held_out:
        heads = sorted(function_heads(document), key=len)
        middle = len(heads) // 2
        functions += heads[middle : middle + per_document]
        for name, source in list(whole_functions(document))[:1]:
            edits.append(edit_of(name, source))
    return {"functions": functions, "edits": edits}


def edit_of(name: str, source: str) -> str:
    """Return a function, followed by the head of a copy under another name."""
    signature = source.split(":\n")[0].replace(f"def {name}", f"def {name}_copy", 1)
    return f"{source}\n\n\n{signature}:"
