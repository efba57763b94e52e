"""A few launches of attention whose results are combined inside the kernel, for compute-sanitizer:

compute-sanitizer --tool memcheck python -m bench.gpu.combine
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from bench.gpu.cells import Cell, Row
from bench.gpu.limits import HEADS, workload
from bench.gpu.steps import Pool, make_step, pages_of, tuning_of
from bench.gpu.verdict import UNMEASURED, check, relative_error
from bench.gpu.world import Bench

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_ERROR_EXIT = 9
_MOST_S = 60.0
_WORKLOAD = "q3s5000_2q1s2100_q20s700"


def cells(bench: Bench) -> Iterator[Cell]:
    for tool in TOOLS:
        yield check(bench, "attention", f"compute-sanitizer {tool}", sanitize, tool)


def sanitizer() -> str | None:
    """Where it is, if it is installed."""
    folders = "/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=folders)


def sanitize(bench: Bench, tool: str) -> Row:
    """Run this module under `tool`. What it cannot do is said, not counted as passed."""
    if not bench.full:
        return UNMEASURED
    program = sanitizer()
    if program is None:
        return {"status": "skipped: compute-sanitizer is not installed"}
    command = [program, "--tool", tool, "--error-exitcode", str(_ERROR_EXIT), sys.executable]
    most_s = min(_MOST_S, bench.left_s())
    try:
        done = subprocess.run(
            [*command, "-m", "bench.gpu.combine"],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # every array on its own
            capture_output=True,
            text=True,
            timeout=most_s,
        )
    except subprocess.TimeoutExpired:
        return {"status": f"skipped: not done within {most_s:.0f} s"}
    return judge(done.returncode, done.stdout + done.stderr)


def judge(exit_code: int, text: str) -> Row:
    """The verdict of the tool: `ERROR SUMMARY: 0 errors`, and of the program itself."""
    said = [line.strip("= ") for line in text.splitlines() if line.strip("= ")]
    summary = next((line for line in said if re.search("(ERROR|RACECHECK) SUMMARY", line)), None)
    if exit_code == 0 and summary is not None:
        return {"what": summary, "status": "ok"}
    if exit_code == _ERROR_EXIT:
        return {"what": summary or " | ".join(said[:3])[:300], "status": "wrong"}
    return {"status": f"skipped: exit {exit_code}: {' | '.join(said[-2:])[:200]}"}


def main() -> int:
    device = torch.device("cuda")
    shape, queries = HEADS["llama-8b"], workload(_WORKLOAD)
    pool = Pool.make(pages_of(queries, 16), 16, shape, torch.bfloat16, device)
    step = make_step(queries, shape, pool, torch.bfloat16)
    tuning = tuning_of(shape, 16, device)
    work = step.work(tuning)
    for _ in range(3):
        found = step.run(work, tuning.num_programs)
    torch.cuda.synchronize()
    error = relative_error(found, step.reference())
    print(f"relative error {error:.2e}")
    return 0 if error < 1e-2 else _ERROR_EXIT


if __name__ == "__main__":
    sys.exit(main())
