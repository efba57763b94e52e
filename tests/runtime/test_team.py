"""CPUs of the threads that share a job."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from cbatch.runtime.compiled.build import library
from cbatch.runtime.cpu.greedy import greedy_tokens
from tests.runtime.marks import needs_compiler

_CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
pytestmark = [
    needs_compiler,
    pytest.mark.skipif(len(_CPUS) < 2, reason="needs two CPUs"),
]


def test_no_worker_shares_the_cpu_of_the_thread_that_runs_the_job() -> None:
    assert library() is not None
    logits = torch.randn(3, 1 << 20)  # one thread waits while the other computes the third row
    leader, done, after = list[int](), threading.Event(), list[set[int]]()

    def run_jobs() -> None:
        torch.set_num_threads(2)
        leader.append(threading.get_native_id())
        while not done.is_set():
            greedy_tokens(logits)
        after.append(os.sched_getaffinity(0))

    threads, thread = torch.get_num_threads(), threading.Thread(target=run_jobs)
    thread.start()
    try:
        bound, others = set[int](), list[set[int]]()
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            time.sleep(1e-4)
            if leader and len(bound := os.sched_getaffinity(leader[0])) == 1:
                others = [os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")]
                if bound == os.sched_getaffinity(leader[0]) and _CPUS - bound in others:
                    break
    finally:
        done.set()
        thread.join()
        torch.set_num_threads(threads)
    assert len(bound) == 1  # the leader, during a job
    assert _CPUS - bound in others  # a worker
    assert after == [_CPUS]
