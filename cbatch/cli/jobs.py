"""Prompts of `cbatch generate`: from arguments, a text file, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.from_json import sampling_from_json, sampling_to_json
from cbatch.core.request.request import SamplingParams
from cbatch.core.request.unsupported import without_neutral_fields

LINE_FIELDS = ("prompt", "id", "priority")  # besides the sampling fields


class Job(msgspec.Struct, frozen=True):
    """One prompt of the input. `index` counts prompts from 0; `error` says why it cannot run."""

    index: int
    prompt: str | list[int]
    params: SamplingParams
    name: str | None = None
    priority: int = 0
    error: str | None = None

    def params_json(self) -> dict[str, Any]:
        return sampling_to_json(self.params)


def jobs_of_prompts(prompts: Iterable[str], defaults: SamplingParams) -> list[Job]:
    return [Job(index, prompt, defaults) for index, prompt in enumerate(prompts)]


def read_jobs(path: Path, defaults: SamplingParams) -> list[Job]:
    """`.jsonl`: an object a line, with `prompt` (text or token ids), optional `id`, `priority` and
    sampling fields. Any other file: a prompt a line. Empty lines are skipped. A line at fault
    becomes a job with an `error`; raises `FieldError` where the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(
            "--input", f"{path} cannot be read ({error})", "name a UTF-8 file"
        ) from error
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix not in (".jsonl", ".ndjson"):
        return jobs_of_prompts((line.rstrip("\r") for _, line in lines), defaults)
    return list(_json_jobs(lines, defaults))


def _json_jobs(lines: list[tuple[int, str]], defaults: SamplingParams) -> Iterator[Job]:
    for index, (number, line) in enumerate(lines):
        try:
            yield _json_job(index, line, defaults)
        except FieldError as error:
            yield Job(index, "", defaults, error=f"line {number}: {error}")


def _json_job(index: int, line: str, defaults: SamplingParams) -> Job:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FieldError("line", f"is not JSON ({error})", "write one object a line") from error
    if not isinstance(record, dict):
        raise FieldError("line", "is not a JSON object", 'write {"prompt": "..."}')
    rest = {name: value for name, value in record.items() if name not in LINE_FIELDS}
    return Job(
        index=index,
        prompt=_convert(record, "prompt", str | list[int]),
        params=sampling_from_json(without_neutral_fields(rest), defaults),
        name=_convert(record, "id", str | None, None),
        priority=_convert(record, "priority", int, 0),
    )


def _convert(record: dict[str, Any], field: str, kind: Any, *default: Any) -> Any:
    if field not in record and default:
        return default[0]
    if field not in record:
        raise FieldError(field, "is missing", "give a text or a list of token ids")
    try:
        return msgspec.convert(record[field], kind)
    except msgspec.ValidationError as error:
        raise FieldError(field, f"{record[field]!r} is not allowed", str(error)) from error
