"""Examples of README and docs for the server work as written."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.documents import README, ROOT, blocks, commands
from tests.server.http_client import MODEL, Client

SERVING = ROOT / "docs" / "serving.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_its_curl_lines(demo_client: Client) -> None:
    answers = []
    for command in [*commands(SERVING), *commands(README)]:
        if not command.startswith("curl"):
            continue
        here = command.replace("localhost:8000", f"127.0.0.1:{demo_client.port}")
        done = subprocess.run(
            ["bash", "-c", f"{here} -sS --fail --noproxy '*'"], capture_output=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stderr)
        answers.append(done.stdout.decode())
    stream, chat, response, message, tokens, metrics, again = answers
    for streamed in (stream, again):
        assert streamed.endswith("data: [DONE]\n\n") and streamed.count("data: ") > 5
    assert '"role":"assistant"' in chat and '"count":' in tokens
    assert '"object":"response"' in response and '"type":"message"' in message
    assert "vllm:num_requests_running" in metrics


@pytest.mark.parametrize("number", [0, 1])
def test_its_openai_examples(
    demo_client: Client, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    examples = [code for code in blocks(SERVING, "python") if "OpenAI" in code]
    assert len(examples) == 2
    block = examples[number]
    here = block.replace("localhost:8000", f"127.0.0.1:{demo_client.port}")
    names: dict[str, object] = {}
    exec(compile(here.replace("cbatch-demo", MODEL), "serving.md", "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.strip()
