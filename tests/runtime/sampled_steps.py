"""A program that starts twice as many busy programs as there are processors. It prints how many
times longer a sampled step takes with two threads than with one, in several turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.demo import demo_paths

SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    pass
"""
ROWS, MIN_STEPS, TURN_S = 17, 2, 1.0


def main() -> None:
    import torch

    engine, _ = load_engine(
        *demo_paths(), EngineOptions(threads=2, max_num_seqs=ROWS, lookahead="fixed:2")
    )
    for i in range(ROWS):
        engine.add(f"def f{i}(x):", SamplingParams(max_tokens=900, ignore_eos=True))

    def step_s(threads: int) -> float:
        torch.set_num_threads(threads)
        start_s, steps = time.perf_counter(), 0
        while steps < MIN_STEPS or time.perf_counter() < start_s + TURN_S:
            engine.step()
            steps += 1
        return (time.perf_counter() - start_s) / steps

    step_s(1)
    spin = [sys.executable, "-c", SPIN]
    busy = [subprocess.Popen(spin) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        print(json.dumps([step_s(2) / step_s(1) for _ in range(3)]))
    finally:
        for program in busy:
            program.kill()
            program.wait()


if __name__ == "__main__":
    main()
