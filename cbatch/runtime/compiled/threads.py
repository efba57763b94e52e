"""The number of threads of the compiled kernels, and of torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

MEASURED_S = 0.01  # measured time after which `SamplingThreads` decides
_SLOWER = 1.5  # times the usual time per row, after which the other number is tried
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0


_this_thread = threading.local()  # `kernels`: its kernels' threads if torch has a single one


def num_threads() -> int:
    """Return torch's number of threads; inside `single_torch_thread`, the number before it."""
    return getattr(_this_thread, "kernels", None) or torch.get_num_threads()


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Give torch's operations one thread. The kernels keep their number of threads.

    On the few rows of a step, several torch threads cost more than they save, and compete with the
    kernels for processors. Splitting a torch operation among threads may also change bits, because
    the ends of its vectors move."""
    before, threads = getattr(_this_thread, "kernels", None), torch.get_num_threads()
    _this_thread.kernels = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _this_thread.kernels = before


class SamplingThreads:
    """Gives sampling several torch threads or one, whichever has been faster. While other programs
    keep the processors busy, torch waits hundreds of times in a step for a thread without a
    processor. The other number is tried when sampling becomes slower, and after a pause, which
    doubles while that fails. The bits of sampling do not depend on the number."""

    def __init__(self) -> None:
        self.single = False
        self._wall_s, self._rows = 0.0, 0
        self._row_s = self._other_row_s = math.inf  # time per row now, and before the last switch
        self._trying, self._pause_s, self._since_s = False, _FIRST_PAUSE_S, 0.0

    @contextmanager
    def limited(self, rows: int = 0) -> Iterator[None]:
        """Run this context on the chosen number of threads, and measure its time if it has
        `rows`."""
        start_s = time.perf_counter()
        with single_torch_thread() if self.single else nullcontext():
            yield
        if rows:
            end_s = time.perf_counter()
            self._wall_s += end_s - start_s
            self._rows += rows
            if self._wall_s >= MEASURED_S:
                self.decide(self._wall_s / self._rows, end_s)
                self._wall_s, self._rows = 0.0, 0

    def decide(self, row_s: float, now_s: float) -> None:
        """Choose the number of threads, given the measured time per row."""
        since_s = now_s - self._since_s
        if self._trying:
            self._trying = False
            if row_s > self._other_row_s:
                self._row_s = self._other_row_s
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                self.single = not self.single
            else:
                self._row_s, self._pause_s = row_s, _FIRST_PAUSE_S
        elif since_s >= self._pause_s or (
            row_s > _SLOWER * self._row_s and since_s >= _FIRST_PAUSE_S
        ):
            self._other_row_s, self._since_s = row_s, now_s
            self.single, self._trying = not self.single, True
        else:
            self._row_s = min(self._row_s, row_s)


sampling_threads = SamplingThreads()
