"""The number of threads of the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_kernel_threads: int | None = None


def num_threads() -> int:
    """Return torch's number of threads; inside `single_torch_thread`, the number before it."""
    return torch.get_num_threads() if _kernel_threads is None else _kernel_threads


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Give torch's operations one thread. The kernels keep their number of threads.

    On the few rows of a step, several torch threads cost more than they save, and compete with the
    kernels for processors. Splitting a torch operation among threads may also change bits, because
    the ends of its vectors move."""
    global _kernel_threads
    before, threads = _kernel_threads, torch.get_num_threads()
    _kernel_threads = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _kernel_threads = before
