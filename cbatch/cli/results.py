"""The output file of `cbatch generate`: a line for each prompt, written when it is done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from cbatch.cli.jobs import Job
from cbatch.core.request.errors import FieldError
from cbatch.text.outputs import Choice, Completion, Speculation, TokenLogprob


def result_line(job: Job, completion: Completion) -> dict[str, Any]:
    """What is written for a prompt. With `seed` and `params` it can be generated again."""
    line: dict[str, Any] = {"index": job.index}
    if job.name is not None:
        line["id"] = job.name
    line |= {"prompt": job.prompt, "params": job.params_json(), "seed": completion.seed}
    line["choices"] = [_choice(c) for c in completion.choices]
    line["error"] = completion.error
    return line


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason.value,
        "error": choice.error,
        "speculation": _speculation(choice.speculation),
        **{
            name: [_logprob(each) for each in asked_for]
            for name, asked_for in (
                ("logprobs", choice.logprobs),
                ("prompt_logprobs", choice.prompt_logprobs),
            )
            if asked_for is not None
        },
    }


def _logprob(found: TokenLogprob | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "token_id": found.token_id,
        "logprob": found.logprob,
        "top": [{"token_id": i, "logprob": value} for i, value in found.top],
    }


def _speculation(speculation: Speculation) -> dict[str, Any]:
    return {
        "steps": speculation.steps,
        "drafted_tokens": speculation.drafted_tokens,
        "accepted_tokens": speculation.accepted_tokens,
        "mean_accepted_tokens": speculation.mean_accepted_tokens,
    }


class ResultFile:
    """Appends whole lines, so that whatever ends the program leaves at most one broken line, the
    last. Used as a context manager; `None` as path writes to `stdout`."""

    def __init__(self, path: Path | None, stdout: TextIO) -> None:
        self._path = path
        self._stdout = stdout
        self._file: TextIO | None = None

    def __enter__(self) -> ResultFile:
        if self._path is not None:
            self._file = self._path.open("a", encoding="utf-8", newline="\n")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        out = self._file or self._stdout
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
        out.flush()


def prepare_output(path: Path, jobs: Sequence[Job], *, resume: bool) -> set[int]:
    """Indices of the jobs that the file answers already; cuts a broken last line off it.

    Raises `FieldError` if the file exists and `resume` is False, or if it answers other prompts.
    """
    if not path.exists():
        return set()
    if not resume:
        if path.stat().st_size == 0:
            return set()
        raise FieldError(
            "--output", f"{path} exists", "use --resume to continue it, or another name"
        )
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    done = _answered(path, content[:whole].split(b"\n")[:-1], jobs)
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return done


def _answered(path: Path, lines: list[bytes], jobs: Sequence[Job]) -> set[int]:
    done: set[int] = set()
    for number, raw in enumerate(lines, start=1):
        try:
            line = json.loads(raw)
            index, prompt, params = line["index"], line["prompt"], line["params"]
            job = jobs[index]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FieldError(
                "--resume", f"line {number} of {path} is no result of this input", "mend or move it"
            ) from error
        if index in done or (prompt, params) != (job.prompt, job.params_json()):
            raise FieldError(
                "--resume",
                f"line {number} of {path} answers another prompt or other sampling parameters",
                "resume with the same input and options, or write to another file",
            )
        done.add(index)
    return done
