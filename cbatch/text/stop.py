"""Stop strings, matched on text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is completed first; its result does not depend on how the text
    is cut into pieces. Text that may yet become a stop string is held back.

    Of several stop strings completed by the same character the longest counts, so that nothing of
    it is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginnings = frozenset(s[:n] for s in self._stops for n in range(1, len(s)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._last_characters = frozenset(b[-1] for b in self._beginnings)
        self._held = ""

    def completes(self, text: str) -> bool:
        """Whether `text` would complete a stop string, if it came next."""
        buffer = self._held + text if self._held else text
        return any(stop in buffer for stop in self._stops)

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """(text to show, whether a stop string was completed). With `may_stop` False a stop string
        completed here is text like any other (`min_tokens`), but one begun here still counts
        later."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        start = self._match(buffer) if may_stop else None
        if start is not None:
            self._held = ""
            return buffer[:start], True
        cut = len(buffer) - self._partial(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _match(self, buffer: str) -> int | None:
        found = [(at + len(s), at) for s in self._stops if (at := buffer.find(s)) >= 0]
        return min(found)[1] if found else None

    def _partial(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        if not buffer or buffer[-1] not in self._last_characters:
            return 0
        for length in range(min(self._longest, len(buffer)), 0, -1):
            if buffer[-length:] in self._beginnings:
                return length
        return 0
