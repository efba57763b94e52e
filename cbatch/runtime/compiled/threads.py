"""The number of threads of the compiled kernels, and of torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

MEASURED_S = 0.01  # measured time after which `SamplingThreads` decides
_RUNNING = 0.75  # share of that time in which the thread runs, unless the processors are busy
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
    """Gives sampling one torch thread while other programs keep the processors busy: torch waits
    for all its threads, also for one without a processor, hundreds of times in a step. The share of
    time in which the calling thread runs shows this. Several threads are tried again after a pause,
    which doubles while that fails. The bits of sampling do not depend on their number."""

    def __init__(self) -> None:
        self.single, self._pause_s, self._since_s = False, _FIRST_PAUSE_S, 0.0
        self._wall_s = self._running_s = 0.0

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Measure what runs in this context, on one torch thread if the processors are busy."""
        start_s, running_s = time.perf_counter(), time.thread_time()
        with single_torch_thread() if self.single else nullcontext():
            yield
        end_s = time.perf_counter()
        self._wall_s += end_s - start_s
        self._running_s += time.thread_time() - running_s
        if self._wall_s >= MEASURED_S:
            self.decide(self._running_s / self._wall_s, end_s)
            self._wall_s = self._running_s = 0.0

    def decide(self, running: float, now_s: float) -> None:
        """Choose the number of threads, given the share of time in which this thread ran."""
        since_s = now_s - self._since_s  # since the number of threads changed
        if not self.single and running < _RUNNING:
            failed_s = 2 * self._pause_s if since_s < self._pause_s else _FIRST_PAUSE_S
            self._pause_s = min(failed_s, _MAX_PAUSE_S)
            self.single, self._since_s = True, now_s
        elif self.single and running >= _RUNNING and since_s >= self._pause_s:
            self.single, self._since_s = False, now_s


sampling_threads = SamplingThreads()
