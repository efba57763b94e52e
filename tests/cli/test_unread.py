"""Output whose reader leaves early, as in `cbatch ... | head`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cbatch.cli.main import BROKEN_PIPE

ROOT = Path(__file__).parent.parent.parent
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "0.5,8,4\n" * 40
CBATCH = "import sys; from cbatch.cli import main; sys.exit(main.main(sys.argv[1:]))"


def run_unread(code: str, *command: str) -> tuple[int, str]:
    """Return the exit status and stderr if the reader leaves before the first byte."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(timeout=60), errors


@pytest.mark.parametrize(
    "command",
    [
        ("sim", "TRACE", "--gpu", "H100"),  # a table by rich, then a line
        ("trace", "convert", "TRACE", "OUT"),  # a single line, at the very end
    ],
)
def test_commands_print_no_traceback_after_a_broken_pipe(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    paths = {"TRACE": str(trace), "OUT": str(tmp_path / "out.jsonl")}
    words = [paths.get(word, word) for word in command]
    assert run_unread(CBATCH, *words) == (BROKEN_PIPE, "")
