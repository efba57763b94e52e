"""A clock that moves only when a test moves it."""

from __future__ import annotations


class VirtualClock:
    """A clock for everything that takes `clock: Callable[[], float]`; seconds since its start."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        if not duration_s >= 0:
            raise ValueError(f"duration_s: {duration_s!r} is not allowed; time moves forwards")
        self._now_s += duration_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; a time already past changes nothing."""
        self._now_s = max(self._now_s, time_s)
