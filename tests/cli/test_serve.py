"""`cbatch serve` as an operator runs it: the demo pair, a request, a stop signal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

from tests.cli.conftest import Run

ROOT = Path(__file__).parent.parent.parent


def test_it_serves_the_demo_pair_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", "--port", "0", "--max-slots", "2"]
    with subprocess.Popen(
        [*command, "--lookahead", "off", "--num-blocks", "64"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        told = ""
        while (where := re.search(r"http://127\.0\.0\.1:(\d+)", told)) is None:
            line = process.stderr.readline()
            assert line, f"it ended: {told}"
            told += line
        assert "row_invariant" in told and "KV: 64 blocks" in told
        body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{where[1]}/v1/completions"
        with urlopen(Request(url, body), timeout=120) as response:
            answer = json.loads(response.read())
        assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


def test_what_cannot_be_served_is_said_in_a_line(
    cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    run = cbatch("serve", tmp_path / "nothing")
    assert run.status == 2 and str(tmp_path / "nothing") in run.err
    run = cbatch("serve", "--grace", "1", "--timeout", "-1")
    assert run.status == 2 and "timeout_s: -1.0 is not allowed" in run.err
