"""The first commands of a GPU's owner succeed on a simulated GPU, each in processes of its own.
Quick tests of this are in `interpreted/test_pretence.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bench.gpu.__main__ import SECTIONS
from tests.gpu_proofs.pretence.gpu import NAME

pytestmark = pytest.mark.gpu_proofs

ROOT = Path(__file__).parents[2]
JOB = (sys.executable, "-m", "tests.gpu_proofs.pretence.job")
CLI = (*JOB, "cbatch.cli.main")
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
LLM = """
from contextlib import ExitStack
from tests.gpu_proofs.pretence.job import settle
with ExitStack() as scope:
    settle(scope)
    from cbatch import LLM, SamplingParams
    from cbatch.demo import demo_paths
    llm = LLM(*demo_paths())
    print(llm.info.device, len(llm.generate(["A prompt"], SamplingParams(max_tokens=4))))
"""


def done(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert process.returncode == 0, (process.stdout + process.stderr)[-5000:]
    return process.stdout


def test_generate() -> None:
    lines = done(*CLI, "generate", "--max-tokens", "4", "One prompt", "Another").splitlines()
    results = [json.loads(line) for line in lines[:2]]
    assert [result["error"] for result in results] == [None, None]
    assert all(result["choices"][0]["text"] for result in results)


def test_demo() -> None:
    """It needs a feature that a GPU does not support, and says where it runs."""
    shown = done(*CLI, "demo", "--prompts", "1", "--max-tokens", "4")
    assert set(re.findall(r" (yes|no) │$", shown, re.MULTILINE)) == {"yes"}


def test_llm() -> None:
    assert done(sys.executable, "-c", LLM).split() == ["cuda", "1"]


def test_serve() -> None:
    """Its engine is a process of its own, on the same machine."""
    process = subprocess.Popen(
        [*CLI, "serve", "--port", "0"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, url = [], None
    assert process.stderr is not None
    with process, process.stderr:
        try:
            for line in process.stderr:
                said.append(line)
                address = re.search(r"http://[\w.]+:\d+", line)
                if address is not None:
                    url = address[0]
                    break
            assert url is not None, "".join(said)
            body = {"prompt": "A prompt", "max_tokens": 4, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            assert "on cuda" in "".join(said)
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()


def test_tests_of_kernels_on_a_device() -> None:
    """All tests that `--device cuda` selects run."""
    words = ("-q", "-p", "tests.gpu_proofs.pretence.plugin", "-p", "no:cacheprovider")
    folder = "tests/triton_kernels/interpreter"
    printed = done(sys.executable, "-m", "pytest", *words, "--device", "cuda", folder)
    assert int(re.findall(r"(\d+) passed", printed)[0]) > 100 and "skipped" not in printed


def test_bench(tmp_path: Path) -> None:
    """Every cell runs except those of missing peers."""
    printed = done(*JOB, "bench.gpu", "--out", str(tmp_path), "--minutes", "60")
    assert "steps of an engine" in printed and NAME in printed
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["rows"]
    assert results["about"]["world"] == "device" and len(rows) > 120
    sections = {row["section"] for row in rows}
    assert sections == {*SECTIONS} - {"vllm"}
    bad = [row for row in rows if row["status"] != "ok"]
    assert all(row["status"].startswith("skipped: ") for row in bad), bad
    assert (tmp_path / "tiles.json").exists()


def test_half_a_minute_of_bench_is_no_more(tmp_path: Path) -> None:
    """The clock ends it, and it names all cells that it did not run."""
    done(*JOB, "bench.gpu", "--out", str(tmp_path), "--minutes", "0.6")
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    states = {row["section"]: row["status"] for row in rows}
    assert states["sweep"] == "left out: not enough time"
    assert {row["section"] for row in rows} == {*SECTIONS} - {"vllm"}
