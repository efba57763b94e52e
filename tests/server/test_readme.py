"""What the README says about the server, as it is written there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.http_client import MODEL, Client

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
SERVING = README.split("## Serving")[1].split("\n## ")[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_its_curl_lines(demo_client: Client) -> None:
    (block,) = re.findall(r"```\n(curl.*?)```", SERVING, flags=re.DOTALL)
    commands = re.split(r"\n(?=curl)", block.strip())
    answers = []
    for command in commands:
        here = command.replace("localhost:8000", f"127.0.0.1:{demo_client.port}")
        done = subprocess.run(
            ["bash", "-c", f"{here} -sS --fail --noproxy '*'"], capture_output=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stderr)
        answers.append(done.stdout.decode())
    stream, chat, tokens, metrics = answers
    assert stream.endswith("data: [DONE]\n\n") and stream.count("data: ") > 5
    assert '"role":"assistant"' in chat and '"count":' in tokens
    assert "vllm:num_requests_running" in metrics


def test_its_openai_example(demo_client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", SERVING, flags=re.DOTALL)
    here = block.replace("localhost:8000", f"127.0.0.1:{demo_client.port}")
    names: dict[str, object] = {}
    exec(compile(here.replace("cbatch-demo", MODEL), "README.md", "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.strip()
