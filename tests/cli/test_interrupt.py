"""A separate process is stopped by real signals during its work, then resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

ROOT = Path(__file__).parent.parent.parent
NUM_PROMPTS = 30

# `cbatch` with an engine without a model. Its steps are slow, and later steps are so long that a
# test that waits for the first lines can stop the process in time.
SLOW_CBATCH = """
import signal, sys, time
from cbatch.cli import generate
from cbatch.cli.main import main
from tests.checking.executor import SimExecutor
from tests.cli.conftest import INFO
from tests.toy_engine import make_engine

run = SimExecutor.run
steps = iter([0.02] * 12)
def slow(executor, plan):
    time.sleep(next(steps, 2))
    return run(executor, plan)

SimExecutor.run = slow
sizes = {"num_blocks": 512, "max_model_len": 600, "block_size": 8}
generate.load_engine = lambda model, draft, options: (make_engine(max_num_seqs=3, **sizes), INFO)
# Whoever runs the tests in the background may have handed down that it be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


@pytest.mark.parametrize("stop_with", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_is_resumed(
    stop_with: signal.Signals, cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    prompts = [{"prompt": f"def f{i}(", "max_tokens": 8, "seed": i} for i in range(NUM_PROMPTS)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    command = ["generate", "--input", str(source), "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_CBATCH, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        while len(lines_of(output)) < 4:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        process.send_signal(stop_with)
        errors, _ = process.communicate(timeout=120)
    if stop_with is signal.SIGINT:
        assert process.returncode == 130 and "--resume" in errors
    before = lines_of(output)
    assert 4 <= len(before) < NUM_PROMPTS, "it was not stopped during its work"
    assert cbatch(*command, "--resume").status == 0
    after = lines_of(output)
    assert after[: len(before)] == before
    assert sorted(line["index"] for line in after) == list(range(NUM_PROMPTS))
    undisturbed = tmp_path / "whole.jsonl"
    cbatch("generate", "--input", source, "--output", undisturbed)

    def tokens(lines: list[dict[str, Any]]) -> dict[int, list[int]]:
        return {line["index"]: line["choices"][0]["token_ids"] for line in lines}

    assert tokens(after) == tokens(lines_of(undisturbed))
