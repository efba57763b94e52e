"""Consoles of commands: tables and lines of text, for a terminal or a pipe."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.rule import Rule

from cbatch.system.terminal import shown

_PIPE_WIDTH = 10_000  # no table is cut; rich assumes 80 columns
_RULE_WIDTH = 80


class TextConsole(Console):
    """Console that prints strings as they are, without markup, and that shows control characters
    on a terminal. In a pipe or a file, tables have their full width."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False
        )
        if not self.file.isatty():
            self.width = _PIPE_WIDTH

    def print(self, *objects: Any, **options: Any) -> None:
        texts = (shown(each, self.file) if isinstance(each, str) else each for each in objects)
        super().print(*texts, **options)

    def rule(self, title: Any = "", **options: Any) -> None:
        self.print(Rule(title, **options), width=min(self.width, _RULE_WIDTH))
