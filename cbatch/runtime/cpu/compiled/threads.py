"""How many threads our kernels compute with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ours: int | None = None


def num_threads() -> int:
    """As many as torch has, or had before it was left with one."""
    return torch.get_num_threads() if _ours is None else _ours


@contextmanager
def torch_alone() -> Iterator[None]:
    """Torch's own operations have one thread, ours as many as before. On the few rows of a step its
    threads would cost more than they do, and wait for processors on which ours wait for work; and
    where it cuts an operation in two, vectors end elsewhere, and so do bits."""
    global _ours
    before, threads = _ours, torch.get_num_threads()
    _ours = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _ours = before
