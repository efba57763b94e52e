"""Input and output of `cbatch generate`. Result lines are appended one by one, so a run can be
resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from cbatch.core.request.errors import FieldError, short
from cbatch.core.request.from_json import sampling_from_json, sampling_to_json
from cbatch.core.request.request import SamplingParams
from cbatch.core.request.typed import require_text
from cbatch.engine.unsupported import without_neutral_fields
from cbatch.system.terminal import shown
from cbatch.text.output_processor import seed_at
from cbatch.text.outputs import Choice, Completion, TokenLogprob

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
LINE_FIELDS = ("prompt", "id", "priority")  # all other fields of a line are sampling parameters
MAX_ERROR_CHARS = 1000  # an error quotes names of unknown fields, of any length


class Job(msgspec.Struct, frozen=True):
    """One prompt of the input: `index` counts prompts from 0, `line` counts lines of the file
    from 1. A job with an `error` does not run; the error is its result."""

    index: int
    prompt: str | list[int]
    params: SamplingParams
    name: str | None = None
    priority: int = 0
    error: str | None = None
    line: int | None = None

    def params_json(self) -> dict[str, Any]:
        return sampling_to_json(self.params)

    def seeded_params(self, engine_seed: int | None) -> SamplingParams:
        """Return `params`; without a seed of their own, with one derived from `engine_seed` and
        `index`, so that a resumed run generates the same tokens as an uninterrupted run."""
        if engine_seed is None or self.params.seed is not None:
            return self.params
        return msgspec.structs.replace(self.params, seed=seed_at(engine_seed, self.index))


def jobs_of_prompts(prompts: Iterable[str], defaults: SamplingParams) -> list[Job]:
    return [Job(index, prompt, defaults) for index, prompt in enumerate(prompts)]


def read_jobs(path: Path, defaults: SamplingParams) -> list[Job]:
    """Read a prompt from each line of a file; empty lines and byte order marks are skipped.

    A line of a `.jsonl` or `.ndjson` file is an object: `prompt` (text or token ids), optional
    `id`, `priority` and sampling parameters, which override `defaults`. In any other file a line
    is a prompt. An invalid line becomes a job with an `error`. Raises `FieldError` if the file
    cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FieldError("--input", f"{path} cannot be read ({error})", "name a file") from error
    job_of = _json_job if path.suffix in (".jsonl", ".ndjson") else _text_job
    lines = [(i, line) for i, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    jobs = []
    for index, (number, line) in enumerate(lines):
        try:
            job = job_of(index, line.decode("utf-8-sig"), defaults)
        except UnicodeDecodeError as error:
            problem = f"line: is not UTF-8 ({error.reason} at byte {error.start})"
            job = Job(index, "", defaults, error=problem)
        except RecursionError:
            job = Job(index, "", defaults, error="line: is nested too deeply")
        except FieldError as error:
            job = Job(index, "", defaults, error=str(error)[:MAX_ERROR_CHARS])
        jobs.append(msgspec.structs.replace(job, line=number))
    return jobs


def _text_job(index: int, line: str, defaults: SamplingParams) -> Job:
    return Job(index, line.rstrip("\r"), defaults)


def _json_job(index: int, line: str, defaults: SamplingParams) -> Job:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FieldError("line", f"is not JSON ({error})", "write one object per line") from error
    if not isinstance(record, dict):
        raise FieldError("line", "is not a JSON object", 'write {"prompt": "..."}')
    sampling = {name: value for name, value in record.items() if name not in LINE_FIELDS}
    job = Job(
        index=index,
        prompt=_convert(record, "prompt", str | list[int]),
        params=sampling_from_json(without_neutral_fields(sampling), defaults),
        name=_convert(record, "id", str | None, None),
        priority=_convert(record, "priority", Int32, 0),
    )
    require_text("id", job.name)
    return job


def _convert(record: dict[str, Any], field: str, kind: Any, *default: Any) -> Any:
    if field not in record and default:
        return default[0]
    if field not in record:
        raise FieldError(field, "is missing", "give a text or a list of token ids")
    try:
        return msgspec.convert(record[field], kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise FieldError(field, f"{short(record[field])} is not allowed", str(error)) from error


class ResultStream:
    """Writer of results to standard output, a pipe or a device; such output cannot be resumed."""

    done: frozenset[int] = frozenset()
    num_failed = 0

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, line: dict[str, Any]) -> None:
        text = _encoded(line)
        self._out.write(shown(text.decode(), self._out).encode())
        self._out.flush()


class ResultFile:
    """Writer of results to a file, which is locked against other runs until it is closed. After a
    crash or on a full disk, only the last line can be incomplete.

    On resume, `done` has the indices of the jobs with a result in the file. Results that are errors
    of the engine are removed from the file and counted in `num_failed`; their jobs run again."""

    def __init__(self, path: Path, jobs: Sequence[Job], *, resume: bool) -> None:
        """Raises `FieldError` if the file cannot be written, another run writes to it, it has
        results and `resume` is False, or its results are not of these `jobs`."""
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
        """Append a result. Raises `FieldError` if another program changed or removed the file, or
        if the line cannot be written."""
        if os.fstat(self._file.fileno()).st_size != self._size or not self._is_current(self._file):
            problem = f"another program changed or removed {self._path} during this run"
            raise FieldError("--output", problem, "restore it, then continue with --resume")
        unwritten = memoryview(_encoded(line))
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise self._unwritable(error, "continue with --resume") from error
        self._size = self._file.tell()

    def _open(self) -> IO[bytes]:
        try:
            file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error, "or name another file") from error
        # If another run replaced the file after it was opened, the lock is on the old file.
        if lock_file(file) and self._is_current(file):
            return file
        file.close()
        remedy = "wait until it has ended, or name another file"
        raise FieldError("--output", f"another run writes to {self._path}", remedy)

    def _is_current(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _continue(self, jobs: Sequence[Job]) -> None:
        """Set `done` and `num_failed` from the file. Remove an incomplete last line, and
        results that `_read` says to run again."""
        content = self._path.read_bytes()
        content = content[: content.rfind(b"\n") + 1]
        kept_lines = []
        for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
            index, failed = self._read(f"line {number} of {self._path}", raw, jobs)
            if failed:
                self.num_failed += 1
            else:
                self.done.add(index)
                kept_lines.append(raw + b"\n")
        try:
            if self.num_failed:
                self._replace(b"".join(kept_lines))
            else:
                self._file.truncate(len(content))
        except OSError as error:
            raise self._unwritable(error, "continue with --resume") from error

    def _read(self, place: str, raw: bytes, jobs: Sequence[Job]) -> tuple[int, bool]:
        """Return the index of the line's job, and whether that job runs again, because the
        engine failed and the job is valid. `place` names the line in errors."""
        try:
            line = json.loads(raw)
            index, error = line["index"], line["error"]
            job = jobs[range(len(jobs)).index(index)]
            same = (line["prompt"], line["params"]) == (job.prompt, job.params_json())
        except (ValueError, KeyError, TypeError, RecursionError) as invalid:
            problem = f"{place} is not a result of this input"
            raise FieldError("--resume", problem, "repair or move it") from invalid
        if not same:
            problem = f"{place} is the result of another prompt or of other sampling parameters"
            remedy = "resume with the same input and options, or write to another file"
            raise FieldError("--resume", problem, remedy)
        if index in self.done:
            problem = f"{place} answers prompt {index} for a second time"
            raise FieldError("--resume", problem, "remove one of them")
        return index, error is not None and job.error is None

    def _replace(self, content: bytes) -> None:
        """Atomically replace the file by a file with this content, and lock the new file."""
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
    """Open the output: a file to create or resume, a pipe or device, or standard output (None).
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
    return text.encode(errors="backslashreplace")  # escapes half a surrogate pair as JSON does


def lock_file(file: IO[bytes]) -> bool:
    """Lock the file. Returns False if another process has locked it, and True if the system or the
    file system has no file locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def result_line(job: Job, completion: Completion) -> dict[str, Any]:
    """Return the JSON object of a prompt's result. Its `prompt`, `params` and `seed` are enough to
    generate the same text again."""
    line: dict[str, Any] = {"index": job.index}
    if job.name is not None:
        line["id"] = job.name
    line |= {"prompt": job.prompt, "params": job.params_json(), "seed": completion.seed}
    line["choices"] = [_choice(c) for c in completion.choices]
    place = "" if job.line is None else f"line {job.line}: "
    line["error"] = None if completion.error is None else place + completion.error
    return line


def _choice(choice: Choice) -> dict[str, Any]:
    speculation = choice.speculation
    names = "steps", "drafted_tokens", "accepted_tokens", "mean_accepted_tokens"
    line = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason.value,
        "error": choice.error,
        "speculation": {name: getattr(speculation, name) for name in names},
    }
    for name in ("logprobs", "prompt_logprobs"):
        if (logprobs := getattr(choice, name)) is not None:
            line[name] = [None if each is None else _logprob(each) for each in logprobs]
    return line


def _logprob(logprob: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": i, "logprob": value} for i, value in logprob.top]
    return {"token_id": logprob.token_id, "logprob": logprob.logprob, "top": top}
