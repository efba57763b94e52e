"""The number of threads of our kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_kernel_threads: int | None = None


def num_threads() -> int:
    """Return torch's number of threads, or its number before `torch_alone`."""
    return torch.get_num_threads() if _kernel_threads is None else _kernel_threads


@contextmanager
def torch_alone() -> Iterator[None]:
    """Give torch's own operations one thread, and our kernels as many as before.

    On the few rows of a step, several torch threads cost more than they save, and compete with ours
    for processors. A torch operation that is split among threads may also change bits, because the
    ends of its vectors move."""
    global _kernel_threads
    before, threads = _kernel_threads, torch.get_num_threads()
    _kernel_threads = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _kernel_threads = before
