"""The output file of `cbatch generate` with concurrent runs, other programs and a full disk: no
result is lost or written twice."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli import jobs
from cbatch.cli.jobs import Job, ResultFile, ResultStream, open_results
from cbatch.cli.main import main
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from tests.cli.conftest import Run

Command = Callable[..., Run]
JOBS = [Job(index, f"prompt {index}", SamplingParams()) for index in range(6)]


def line_of(job: Job, text: str = "x" * 200, error: str | None = None) -> dict[str, Any]:
    choices = [] if error else [{"text": text}]
    line = {"index": job.index, "prompt": job.prompt, "params": job.params_json()}
    return line | {"choices": choices, "error": error}


def indices(path: Path) -> list[int]:
    """Return the indices of the lines. Each line must be complete."""
    content = path.read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line)["index"] for line in content.splitlines()]


@contextlib.contextmanager
def disk_of(size_bytes: int) -> Iterator[None]:
    """Limit the size of files, like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_complete_lines_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with contextlib.closing(ResultFile(path, JOBS, resume=False)) as results:
        results.write(line_of(JOBS[0]))
        size = path.stat().st_size
        with disk_of(size + 50), pytest.raises(FieldError) as caught:  # part of a line fits
            results.write(line_of(JOBS[1]))
    assert "--output: " in str(caught.value) and os.strerror(errno.EFBIG) in str(caught.value)
    assert "--resume" in caught.value.remedy
    assert indices(path) == [0]
    with contextlib.closing(ResultFile(path, JOBS, resume=True)) as results:
        assert results.done == {0}
        for job in JOBS[1:]:
            results.write(line_of(job))
    assert indices(path) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("device", ["output", "stdout"])
def test_a_full_device_is_reported_in_a_line(
    cbatch: Command, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device == "output":
        run = cbatch("generate", "def f():", "--output", "/dev/full")
        assert (run.status, run.err) == (2, "cbatch: [Errno 28] No space left on device\n")
        return
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["generate", "def f():"]) == 2


def test_results_are_written_to_pipes_and_devices_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with open_results(pipe, JOBS, resume=False) as results:
        assert isinstance(results, ResultStream) and not results.done
        results.write(line_of(JOBS[0]))
    reader.join()
    assert json.loads(read[0])["index"] == 0
    for path in (Path(os.devnull), None):
        with (
            pytest.raises(FieldError, match="--resume: needs a file"),
            open_results(path, JOBS, resume=True),
        ):
            pass


def test_two_runs_do_not_write_to_one_file(cbatch: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for more in ((), ("--resume",)):
        with contextlib.closing(ResultFile(path, JOBS, resume=True)) as results:
            if not results.done:
                results.write(line_of(JOBS[0]))
            before = path.read_bytes()
            run = cbatch("generate", "def f():", "--output", path, *more)
            assert run.status == 2 and f"--output: another run writes to {path}" in run.err
            assert path.read_bytes() == before
    assert "exists" in cbatch("generate", "def f():", "--output", path).err, "still locked"


def test_a_file_that_another_run_has_replaced_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced between opening and locking, so that the opened file is no longer in the
    folder."""
    path = tmp_path / "out.jsonl"
    with contextlib.closing(ResultFile(path, JOBS, resume=False)) as results:
        results.write(line_of(JOBS[0]))
    lock = jobs.lock_file

    def late(file: Any) -> bool:
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.replace(path)
        return lock(file)

    monkeypatch.setattr(jobs, "lock_file", late)
    with pytest.raises(FieldError, match="another run writes to"):
        ResultFile(path, JOBS, resume=True)
    assert indices(path) == [0]


def replaced(path: Path) -> None:
    """Replace a file by a file of the same size, like an editor."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 40), Path.unlink, replaced])
def test_a_file_that_another_program_changes_is_not_written_further(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "out.jsonl"
    with contextlib.closing(ResultFile(path, JOBS, resume=False)) as results:
        results.write(line_of(JOBS[0]))
        change(path)
        left = path.read_bytes() if path.exists() else None
        with pytest.raises(FieldError, match="--output: another program changed or removed"):
            results.write(line_of(JOBS[1]))
    assert (path.read_bytes() if path.exists() else None) == left


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n", "line 3 of .* is not a result of this input"),
        (
            '{"index": 99, "prompt": "", "params": {}, "error": null}\n',
            "line 3 of .* is not a result",
        ),
        ("[" * 100_000 + "\n", "line 3 of .* is not a result"),
        (json.dumps(line_of(JOBS[1])) + "\n", "line 3 of .* answers prompt 1 for a second time"),
        (
            json.dumps(line_of(JOBS[2]) | {"prompt": "other"}) + "\n",
            "line 3 of .* is the result of another prompt",
        ),
    ],
)
def test_a_file_that_was_changed_between_runs_is_rejected_unchanged(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "out.jsonl"
    with contextlib.closing(ResultFile(path, JOBS, resume=False)) as results:
        results.write(line_of(JOBS[0], error="the executor failed"))
        results.write(line_of(JOBS[1]))
    with path.open("a") as file:
        file.write(text)
    before = path.read_bytes()
    with pytest.raises(FieldError, match=f"--resume: {words}"):
        ResultFile(path, JOBS, resume=True)
    assert path.read_bytes() == before
