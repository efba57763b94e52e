"""Input of `cbatch generate`: prompts from arguments, a text file, or a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cbatch.core.request.errors import FieldError, short
from cbatch.core.request.from_json import sampling_from_json, sampling_to_json
from cbatch.core.request.request import SamplingParams
from cbatch.core.request.typed import require_text
from cbatch.engine.unsupported import without_neutral_fields
from cbatch.text.output_processor import seed_at

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
