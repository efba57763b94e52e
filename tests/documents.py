"""Code, commands, paths and links in README and docs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "README.md")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    """Return the code blocks of a language; "" means commands."""
    return [body for name, body in _FENCE.findall(read(path)) if name == language]


def prose(path: Path) -> str:
    """Return a document without code blocks."""
    return _FENCE.sub("", read(path))


def commands(path: Path) -> list[str]:
    """Return the lines of the command blocks; lines continued by a backslash are joined."""
    lines = "\n".join(blocks(path, "")).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]
