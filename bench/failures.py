"""Systems that fail in a benchmark of several. It measures and reports the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """Systems that failed: `words` has the error of each by its name."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.words

    @contextmanager
    def caught(self, name: str) -> Iterator[None]:
        """Catch an error of the system `name`, and print it at once."""
        try:
            yield
        except Exception as error:
            self.words[name] = str(error).strip() or type(error).__name__
            print(f"{name} failed: {self.words[name]}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Exit with status 1 if a system failed. Call this after the report."""
        if self.words:
            raise SystemExit(f"failed, and left out from there on: {', '.join(self.words)}")
