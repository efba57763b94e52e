"""A prompt whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cbatch.choices import Prompt


class PendingPrompt(NamedTuple):
    """To be made once a place in the queue is reserved for it. `num_bytes` is about the most tokens
    that it can have; `make` gives their ids, may be called in any thread, and raises
    `FieldError`."""

    num_bytes: int
    make: Callable[[], tuple[int, ...]]


AnyPrompt = Prompt | PendingPrompt


def most_tokens(prompt: AnyPrompt) -> int:
    """What is reserved for it until they are counted."""
    if isinstance(prompt, PendingPrompt):
        return prompt.num_bytes
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
