"""Where `cbatch generate` writes results, each when it is done, and how it continues a file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cbatch.cli.jobs import Job
from cbatch.core.request.errors import FieldError


class ResultStream:
    """Results on standard output, or for a pipe or device."""

    done: frozenset[int] = frozenset()
    num_failed = 0

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, line: dict[str, Any]) -> None:
        self._out.write(_encoded(line))
        self._out.flush()


class ResultFile:
    """Results in a file that no other run writes to until it is closed. Whatever ends the program,
    a full disk included, leaves whole lines, and at most one broken line as the last.

    `done` are the indices of the jobs that the file answers already. Answers that were errors of
    the engine are not among them but dropped, `num_failed` of them: their jobs are to run again."""

    def __init__(self, path: Path, jobs: Sequence[Job], *, resume: bool) -> None:
        """Raises `FieldError` if the file cannot be written, another run writes to it, or it has
        results but `resume` is False, or results of other jobs."""
        self.done: set[int] = set()
        self.num_failed = 0
        self._path = path
        self._file = self._open()
        try:
            if os.fstat(self._file.fileno()).st_size:
                if not resume:
                    remedy = "use --resume to continue it, or another name"
                    raise FieldError("--output", f"{path} exists", remedy)
                self._continue(jobs)
            self._size = os.fstat(self._file.fileno()).st_size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Raises `FieldError` if the file is not as this run left it, or cannot take the line."""
        if os.fstat(self._file.fileno()).st_size != self._size or not self._is(self._file):
            problem = f"another program changed or removed {self._path} during this run"
            raise FieldError("--output", problem, "put it right, then continue with --resume")
        rest = memoryview(_encoded(line))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise self._unwritable(error, "continue with --resume") from error
        self._size = self._file.tell()

    def _open(self) -> IO[bytes]:
        """The file, locked until it is closed."""
        try:
            file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error, "or name another file") from error
        # One that was replaced since it was opened belongs to the run that did it.
        if _lock(file) and self._is(file):
            return file
        file.close()
        remedy = "wait until it has ended, or name another file"
        raise FieldError("--output", f"another run writes to {self._path}", remedy)

    def _is(self, file: IO[bytes]) -> bool:
        """Whether an open file is the one in the folder."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _continue(self, jobs: Sequence[Job]) -> None:
        """Find what is answered; drop a broken last line, and errors that may not come again."""
        content = self._path.read_bytes()
        content = content[: content.rfind(b"\n") + 1]
        kept = []
        for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
            index, failed = self._read(f"line {number} of {self._path}", raw, jobs)
            if failed:
                self.num_failed += 1
            else:
                self.done.add(index)
                kept.append(raw + b"\n")
        try:
            if self.num_failed:
                self._replace(b"".join(kept))
            else:
                self._file.truncate(len(content))
        except OSError as error:
            raise self._unwritable(error, "continue with --resume") from error

    def _read(self, place: str, raw: bytes, jobs: Sequence[Job]) -> tuple[int, bool]:
        """The index of the job that a line answers, and whether it is to run again."""
        try:
            line = json.loads(raw)
            index, error = line["index"], line["error"]
            job = jobs[range(len(jobs)).index(index)]
            same = (line["prompt"], line["params"]) == (job.prompt, job.params_json())
        except (ValueError, KeyError, TypeError, RecursionError) as wrong:
            problem = f"{place} is no result of this input"
            raise FieldError("--resume", problem, "mend or move it") from wrong
        if not same:
            problem = f"{place} answers another prompt or other sampling parameters"
            remedy = "resume with the same input and options, or write to another file"
            raise FieldError("--resume", problem, remedy)
        if index in self.done:
            problem = f"{place} answers prompt {index} for a second time"
            raise FieldError("--resume", problem, "remove one of them")
        return index, error is not None and job.error is None

    def _replace(self, content: bytes) -> None:
        """Put a file with this content in the place of this one: one of them is always whole."""
        target = self._path.resolve()
        part = target.with_name(f"{target.name}.part")
        try:
            with part.open("wb") as new:
                new.write(content)
                new.flush()
                os.fsync(new.fileno())
            shutil.copymode(target, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        self._file.close()
        self._file = self._open()

    def _unwritable(self, error: OSError, remedy: str) -> FieldError:
        problem = f"{self._path} cannot be written ({error.strerror})"
        return FieldError("--output", problem, f"make room or grant access, then {remedy}")


@contextlib.contextmanager
def open_results(
    path: Path | None, jobs: Sequence[Job], *, resume: bool
) -> Iterator[ResultFile | ResultStream]:
    """Continue or create a file; write to a pipe, a device, or standard output (None) as it is.
    Raises `FieldError`."""
    is_stream = path is None or path.is_fifo() or path.is_char_device()
    if resume and is_stream:
        raise FieldError("--resume", "needs a file to continue", "name it with --output")
    if path is None:
        yield ResultStream(sys.stdout.buffer)
    elif is_stream:
        with path.open("wb", buffering=0) as device:
            yield ResultStream(device)
    else:
        with contextlib.closing(ResultFile(path, jobs, resume=resume)) as file:
            yield file


def _encoded(line: dict[str, Any]) -> bytes:
    text = json.dumps(line, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it


def _lock(file: IO[bytes]) -> bool:
    """False where another process holds it. Without effect where there are no such locks."""
    with contextlib.suppress(ImportError, OSError):  # of the system, of the file system
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
