"""What a GPU's owner would run first reaches its end on a GPU that is not there, each command in
processes of its own. What is quick of it is in `interpreted/test_pretence.py`."""

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
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert found.returncode == 0, (found.stdout + found.stderr)[-5000:]
    return found.stdout


def test_generate() -> None:
    lines = done(*CLI, "generate", "--max-tokens", "4", "One prompt", "Another").splitlines()
    results = [json.loads(line) for line in lines[:2]]
    assert [result["error"] for result in results] == [None, None]
    assert all(result["choices"][0]["text"] for result in results)


def test_demo() -> None:
    """It asks for what a GPU does not serve, and says where it runs."""
    assert "the same text: yes" in done(*CLI, "demo", "--prompts", "1", "--max-tokens", "4")


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
                found = re.search(r"http://[\w.]+:\d+", line)
                if found is not None:
                    url = found[0]
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


def test_bench(tmp_path: Path) -> None:
    """Every cell runs but those of peers that are not here; samples are too small for a law."""
    printed = done(*JOB, "bench.gpu", "--out", str(tmp_path), "--minutes", "60")
    assert "missing: " in printed
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["about"]["world"] == "device" and found["about"]["left_out"] == []
    sections = ("correctness", "limits", "kernels", "engine", "sweep")
    rows = [row for name in sections for row in found[name]]
    assert len(rows) > 150
    law = [row for row in rows if "law" in str(row.get("case"))]
    assert {row["status"] for row in law} <= {"ok", "wrong: the sample could not tell"}
    assert len(law) == 6 and all(row["found"] <= row["allowed"] for row in law)
    others = [row for row in rows if row not in law]
    bad = [row for row in others if row["status"] != "ok"]
    assert all(row["status"].startswith("skipped: ") for row in bad), bad
    assert not any("time was up" in row["status"] for row in bad), bad
    assert {row.get("method") for row in found["kernels"] if row["status"] == "ok"} == {"graph"}
    assert (tmp_path / "tiles.json").exists()


def test_a_minute_of_bench_is_a_minute(tmp_path: Path) -> None:
    """Of the clock: whatever it does not come to is named."""
    done(*JOB, "bench.gpu", "--out", str(tmp_path), "--minutes", "1")
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["about"]["left_out"] == ["engine", "sweep"]
    states = [row["status"] for name in ("correctness", "kernels") for row in found[name]]
    assert any("time was up" in state for state in states)
